from fractions import Fraction

import pytest

from oasiskv.core.errors import ConfigError
from oasiskv.operator.api import ServiceSpec
from oasiskv.operator.kinds import differing, quantity, read, write
from oasiskv.operator.testing import SPEC


@pytest.mark.parametrize(
    ("text", "value"), [("500m", Fraction(1, 2)), ("16", 16), ("1.5Gi", 3 * 2**29), ("2Ti", 2**41), ("3k", 3000)]
)
def test_a_quantity_means_what_kubernetes_says(text: str, value: Fraction | int) -> None:
    assert quantity(text) == value


@pytest.mark.parametrize("text", ["", "Gi", "1GiB", "-1", "1e3", "1 Gi", "1K"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a number such as"):
        quantity(text)


def test_what_is_read_is_written_and_read_again_alike() -> None:
    spec = read(ServiceSpec, SPEC, "spec")
    again = write(spec)
    again["engine"]["lookahead"] = SPEC["engine"]["lookahead"]  # a quantity there was read as a number
    assert read(ServiceSpec, again, "spec") == spec


def test_only_what_differs_from_defaults_stands_for_a_spec() -> None:
    spec = read(ServiceSpec, {"image": "a:1", "model": SPEC["model"], "decode": {"maxRequests": 1024}}, "spec")
    assert differing(spec) == {"image": "a:1", "model": SPEC["model"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": "engine"}, "spec.image: expected something like oasiskv/engine:0.4.0, got 'engine'"),
        ({"decode": {"replica": 2}}, "spec.decode.replica: expected one of replicas,"),
        ({"decode": {"replicas": 0}}, "spec.decode.replicas: expected 1 to 1024, got 0"),
        ({"decode": {"replicas": True}}, "spec.decode.replicas: expected a whole number, got True"),
        ({"decode": []}, r"spec.decode: expected an object, got \[\]"),
        ({"image": "engine:1\n"}, "spec.image: expected something like"),
        ({"pullSecrets": ["\u00e9"]}, "spec.pullSecrets.0.: expected something like"),
        ({"image": "\u00e9:1"}, "spec.image: expected something like"),
        ({"image": "engine:\u00e9"}, "spec.image: expected something like"),
        ({"suspend": "yes"}, "spec.suspend: expected true or false, got 'yes'"),
        ({"pullSecrets": "a"}, "spec.pullSecrets: expected a list, got 'a'"),
        ({"pullSecrets": ["a", 1]}, r"spec.pullSecrets\[1\]: expected a text, got 1"),
        ({"network": {"fabric": "Wire"}}, "spec.network.fabric: expected one of RDMA, TCP, Stream, got 'Wire'"),
        ({"network": {"fabric": "RDMA"}}, "spec.network: rdma: expected it with fabric RDMA, and only then"),
        ({"staging": {"memory": "1GiB"}}, "spec.staging.memory: expected a quantity such as"),
        ({"placement": {"nodeSelector": {"pool": 1}}}, "spec.placement.nodeSelector.pool: expected a text, got 1"),
        ({"engine": {"lookahead": {"budget": 1}}}, "spec.engine.lookahead.budget: expected one of budgetBlocks,"),
        ({"engine": {"lookahead": {"debugVerify": True}}}, "spec.engine.lookahead.debugVerify: expected one of"),
        ({"engine": {"lookahead": {"minCap": 0}}}, "spec.engine.lookahead.minCap: expected an integer of at least 1"),
        ({"engine": {"lookahead": {"hostPoolBytes": "1GiB"}}}, "hostPoolBytes: expected a quantity such as"),
    ],
)
def test_what_cannot_be_is_refused_with_its_path(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(ServiceSpec, {**SPEC, **change}, "spec")


def test_a_required_field_that_is_absent_or_null_is_named() -> None:
    for spec in ({"model": SPEC["model"]}, {**SPEC, "image": None}):
        with pytest.raises(ConfigError, match=r"^spec.image: expected a value, got none$"):
            read(ServiceSpec, spec, "spec")


def test_a_number_of_yaml_is_a_quantity_too() -> None:
    assert read(ServiceSpec, {**SPEC, "staging": {"cpu": 4}}, "spec").staging.cpu == "4"
