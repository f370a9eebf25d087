"""Whether the pods with a GPU have room, and if not, the first thing that they lack, in numbers."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from oasiskv.operator.api import Network, Placement, Resources
from oasiskv.operator.api_status import PlacementStatus
from oasiskv.operator.facts import Node, Taint
from oasiskv.operator.kinds import quantity

PRODUCT = "nvidia.com/gpu.product"
UNBEARABLE = ("NoSchedule", "NoExecute")


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What was found."""

    status: PlacementStatus
    blocker: str = ""
    """`what: expected X, got Y`; empty where every pod has room."""
    reason: str = "Fits"
    """In one word."""

    note: str = ""
    """What there is to say although all pods have room; empty if nothing."""


def requests(resources: Resources, placement: Placement, network: Network) -> dict[str, str]:
    """Return what a container with a GPU asks for, by resource."""
    made = {"cpu": resources.cpu, "memory": resources.memory}
    if placement.claim is not None:
        return made
    made[placement.gpu_resource] = "1"
    if network.rdma is not None:
        made[network.rdma.resource] = str(network.rdma.count)
    return made


class Hosts:
    """The nodes that suit pods with a GPU; looked for once, since a cluster may have thousands.

    The scheduler decides where pods go; this only tells why they would wait.

    Args:
        nodes: All nodes.
        placement: What nodes must be.
        network: What nodes must offer beside GPUs.
    """

    def __init__(self, nodes: Sequence[Node], placement: Placement, network: Network) -> None:
        self._placement, self._network = placement, network
        self._nodes, self._reason, self._blocker = list(nodes), "", ""
        for reason, what, suits in _filters(placement, network):
            before, self._nodes = self._nodes, [node for node in self._nodes if suits(node)]
            if not self._nodes:
                self._reason, self._blocker = reason, f"{what}, got 0 of {len(before)} nodes"
                break

    def room(self, wanted: Iterable[tuple[int, Resources]]) -> Room:
        """Look for room for pods, the most demanding first.

        Args:
            wanted: Number of pods and what each of them gets.
        """
        groups = [
            (number, {name: quantity(text) for name, text in self._requests(resources).items()})
            for number, resources in wanted
        ]
        num_pods = sum(number for number, _ in groups)
        if self._blocker and num_pods:
            return Room(status=PlacementStatus(wanted_pods=num_pods), reason=self._reason, blocker=self._blocker)
        num_fitting, lacking = _pack(self._nodes, groups)
        num_nodes = len(self._nodes)
        status = PlacementStatus(matching_nodes=num_nodes, wanted_pods=num_pods, fitting_pods=num_fitting)
        if num_fitting == num_pods:
            note = "devices of classes are not counted" if self._placement.claim is not None else ""
            return Room(status=status, note=note)
        blocker = f"{lacking}: expected room for {num_pods} pods, got {num_fitting} on {num_nodes} matching nodes"
        return Room(status=status, reason="NotEnoughRoom", blocker=blocker)

    def _requests(self, resources: Resources) -> dict[str, str]:
        return requests(resources, self._placement, self._network)


def bears(placement: Placement, taint: Taint) -> bool:
    """Return whether pods bear a taint."""
    return taint.effect not in UNBEARABLE or any(
        toleration.key == taint.key
        and toleration.value in (None, taint.value)
        and toleration.effect in (None, taint.effect)
        for toleration in placement.tolerations
    )


def _filters(placement: Placement, network: Network) -> Iterator[tuple[str, str, Callable[[Node], bool]]]:
    yield "NoNodeIsReady", "nodes: expected one that is ready", lambda node: node.is_ready
    for key, value in sorted(placement.node_selector.items()):
        yield (
            "NoNodeMatches",
            f"{key}: expected {value} on a node",
            partial(_has_label, key, value),
        )
    if products := placement.gpu_products:
        yield (
            "NoNodeMatches",
            f"{PRODUCT}: expected {' or '.join(products)} on a node",
            lambda node: node.labels.get(PRODUCT) in products,
        )
    yield (
        "NodesAreTainted",
        "tolerations: expected them to bear a node's taints",
        lambda node: all(bears(placement, taint) for taint in node.taints),
    )
    if placement.claim is not None:
        return
    offers = [placement.gpu_resource] + ([network.rdma.resource] if network.rdma else [])
    for name in offers:
        yield (
            "NoNodeOffers",
            f"{name}: expected a node that offers it",
            partial(_offers, name),
        )


def _has_label(key: str, value: str, node: Node) -> bool:
    return node.labels.get(key) == value


def _offers(name: str, node: Node) -> bool:
    return bool(node.allocatable.get(name))


def _pack(nodes: Sequence[Node], groups: Sequence[tuple[int, Mapping[str, Fraction]]]) -> tuple[int, str]:
    """Return how many pods fit, first fit, and what most nodes lack for the first that does not."""
    names = {name for _, pod in groups for name in pod}
    free: list[dict[str, Fraction]] = []  # of the nodes that were looked at: first fit seldom looks at all
    num_fitting, lacking = 0, ""
    for number, pod in sorted(groups, key=lambda group: sorted(group[1].items()), reverse=True):
        left = number
        for place, node in enumerate(nodes):
            if place == len(free):
                free.append(
                    {name: node.allocatable.get(name, Fraction()) - node.used.get(name, Fraction()) for name in names}
                )
            room = free[place]
            here = min(left, *(max(0, int(room[name] // amount)) for name, amount in pod.items()))
            for name, amount in pod.items():
                room[name] -= here * amount
            left -= here
            if not left:
                break
        num_fitting += number - left
        if left and not lacking:
            lacking = max(sorted(pod), key=lambda name: sum(room[name] < pod[name] for room in free))
    return num_fitting, lacking
