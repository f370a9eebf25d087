from dataclasses import replace
from fractions import Fraction

import pytest

from oasiskv.operator.api import DeviceClaim, Network, Placement, Rdma, Resources, Toleration
from oasiskv.operator.facts import Node, Taint
from oasiskv.operator.placement import Hosts, requests
from oasiskv.operator.testing import node

RDMA = Network(fabric="RDMA", rdma=Rdma(resource="rdma/roce_gdr"))
TAINT = Taint(key="nvidia.com/gpu", value="present", effect="NoSchedule")
PODS = [(2, Resources()), (6, Resources())]


def test_devices_of_a_claim_are_neither_asked_for_by_name_nor_counted() -> None:
    placement = Placement(claim=DeviceClaim(rdma_class="roce"))
    assert requests(Resources(), placement, RDMA).keys() == {"cpu", "memory"}
    room = Hosts([node(allocatable={"cpu": Fraction(192), "memory": Fraction(2**41)})], placement, RDMA).room(PODS)
    assert (room.blocker, room.note) == ("", "devices of classes are not counted")
    assert Hosts([node(labels={})], placement, RDMA).room(PODS).blocker.startswith("nvidia.com/gpu.product")


def test_pods_that_all_have_room_are_no_blocker() -> None:
    room = Hosts([node()], Placement(), RDMA).room(PODS)
    assert (room.blocker, room.status.matching_nodes, room.status.fitting_pods) == ("", 1, 8)


@pytest.mark.parametrize(
    ("nodes", "placement", "blocker"),
    [
        ([], Placement(), "nodes: expected one that is ready, got 0 of 0 nodes"),
        ([node(is_ready=False)], Placement(), "nodes: expected one that is ready, got 0 of 1 nodes"),
        ([node()], Placement(node_selector={"pool": "a"}), "pool: expected a on a node, got 0 of 1 nodes"),
        (
            [node(), node("h100-2", is_ready=False)],
            Placement(gpu_products=("A", "B")),
            "nvidia.com/gpu.product: expected A or B on a node, got 0 of 1 nodes",
        ),
        ([node(taints=(TAINT,))], Placement(), "tolerations: expected them to bear a node's taints, got 0 of 1 nodes"),
        (
            [node(allocatable={"cpu": Fraction(192), "memory": Fraction(2**41), "nvidia.com/gpu": Fraction(8)})],
            Placement(),
            "rdma/roce_gdr: expected a node that offers it, got 0 of 1 nodes",
        ),
        (
            [node(used={"nvidia.com/gpu": Fraction(3)})],
            Placement(),
            "nvidia.com/gpu: expected room for 8 pods, got 5 on 1 matching nodes",
        ),
        (
            [node(used={"memory": Fraction(2**41 - 2**37)})],
            Placement(),
            "memory: expected room for 8 pods, got 1 on 1 matching nodes",
        ),
    ],
)
def test_the_first_blocker_is_named_in_numbers(nodes: list[Node], placement: Placement, blocker: str) -> None:
    assert Hosts(nodes, placement, RDMA).room(PODS).blocker == blocker


@pytest.mark.parametrize(
    ("toleration", "is_borne"),
    [
        (Toleration(key="nvidia.com/gpu"), True),
        (Toleration(key="nvidia.com/gpu", value="present", effect="NoSchedule"), True),
        (Toleration(key="nvidia.com/gpu", value="absent"), False),
        (Toleration(key="nvidia.com/gpu", effect="NoExecute"), False),
        (Toleration(key="other"), False),
    ],
)
def test_a_taint_is_borne_by_a_toleration_of_its_key_value_and_effect(toleration: Toleration, is_borne: bool) -> None:
    room = Hosts([node(taints=(TAINT,))], Placement(tolerations=(toleration,)), RDMA).room(PODS)
    assert (room.blocker == "") is is_borne


def test_a_taint_that_only_prefers_keeps_nobody_away() -> None:
    taint = replace(TAINT, effect="PreferNoSchedule")
    assert Hosts([node(taints=(taint,))], Placement(), RDMA).room(PODS).blocker == ""


def test_a_node_that_is_overcommitted_has_no_room_and_takes_none_from_others() -> None:
    full = node(used={"nvidia.com/gpu": Fraction(20)})
    assert Hosts([full, node("h100-2")], Placement(), RDMA).room(PODS).status.fitting_pods == 8


def test_no_pods_fit_anywhere() -> None:
    assert Hosts([], Placement(), RDMA).room([(0, Resources())]).blocker == ""
