import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oasiskv.core.errors import ConfigError
from oasiskv.core.service_config import read_services
from oasiskv.operator import settings
from oasiskv.operator.api import Network, ServiceSpec
from oasiskv.operator.kinds import read
from oasiskv.operator.testing import SPEC
from oasiskv.services.staging.__main__ import read_config

PEERS = settings.Peers(prefill="chat-prefill.llm.svc", staging="chat-staging.llm.svc")
texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]))
scalars = texts | st.integers(-(2**63), 2**63 - 1) | st.booleans() | st.floats(allow_nan=False, allow_infinity=False)
arguments = st.dictionaries(
    st.from_regex(r"[a-z_]{1,12}", fullmatch=True),
    st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(texts.filter(bool), inner), max_leaves=6),
)


def spec(**changes: Any) -> ServiceSpec:
    return read(ServiceSpec, {**SPEC, **changes}, "spec")


@given(arguments)
def test_any_argument_arrives_as_it_was_written(values: dict[str, Any]) -> None:
    assert tomllib.loads(settings.toml({"engine": {"arguments": values}})) == {"engine": {"arguments": values}}


def test_a_null_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"spec.engine.arguments: expected values, got null"):
        settings.decode_config(spec(engine={"arguments": {"compilation_config": {"mode": None}}}), PEERS, "r7")


def test_equal_settings_are_equal_texts_whatever_their_order() -> None:
    assert settings.toml({"b": {"y": 1, "x": 2}, "a": {}}) == settings.toml({"a": {}, "b": {"x": 2, "y": 1}})


def test_the_services_read_what_the_spec_says() -> None:
    made = spec(prefill={"maxRequests": 7, "drain": {"timeoutSeconds": 9}}, decode={"localPromptTokens": 11})
    prefill = read_services(settings.prefill_config(made, PEERS, "r7")).prefill
    decode = read_services(settings.decode_config(made, PEERS, "r7")).decode
    assert prefill is not None
    assert decode is not None
    assert (prefill.staging, prefill.max_requests, prefill.drain_s) == ("chat-staging.llm.svc:7411", 7, 9)
    assert decode.prefills == ("chat-prefill.llm.svc:7412",)
    assert (decode.staging, decode.local_prompt_tokens) == (prefill.staging, 11)
    assert decode.engine == prefill.engine
    assert decode.engine.lookahead.host_pool_bytes == 64 * 2**30
    assert decode.fingerprint == prefill.fingerprint


@pytest.mark.parametrize(("fabric", "transport", "is_strict"), [("TCP", "tcp", False), ("Stream", "auto", True)])
def test_staging_reads_what_the_spec_says(fabric: Any, transport: str, is_strict: bool) -> None:
    config = read_config(settings.staging_config(spec(), Network(fabric=fabric), PEERS))
    staging = config.staging
    assert (staging.transport, staging.is_strict, staging.hands_memory_over) == (transport, is_strict, False)
    assert staging.leases.num_blocks * staging.fingerprint.block_bytes <= 256 * 2**30
    assert config.staging.disk is not None
    assert config.staging.disk.max_bytes < 2**40
    peers = read_services(settings.prefill_config(spec(), PEERS, "r7")).prefill
    assert peers is not None
    assert peers.fingerprint == staging.fingerprint


def test_a_directory_is_told_where_this_staging_pod_is_found() -> None:
    staging = {**SPEC["staging"], "directory": "redis://redis.llm.svc:6379/0"}
    config = read_config(settings.staging_config(spec(staging=staging), Network(fabric="TCP"), PEERS)).staging
    assert config.directory is not None
    assert config.directory.url == "redis://redis.llm.svc:6379/0"
    assert config.directory.address == "chat-staging.llm.svc:7411"


def test_without_prefill_pods_decode_looks_for_none() -> None:
    decode = read_services(settings.decode_config(spec(prefill={"replicas": 0}), PEERS, "r7")).decode
    assert decode is not None
    assert (decode.prefills, decode.staging) == ((), "")


def test_an_argument_that_the_services_set_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"arguments\.block_size: expected it to be left to the service"):
        settings.decode_config(spec(engine={"arguments": {"block_size": 32}}), PEERS, "r7")


def test_pods_say_which_revision_they_are_of_on_a_port_that_probes_reach() -> None:
    prefill = read_services(settings.prefill_config(spec(), PEERS, "r7")).prefill
    decode = read_services(settings.decode_config(spec(), PEERS, "r8")).decode
    assert prefill is not None
    assert decode is not None
    assert (prefill.revision, decode.revision) == ("r7", "r8")
    assert prefill.metrics_address == decode.metrics_address == f"0.0.0.0:{settings.METRICS_PORT}"


@pytest.mark.parametrize("memory", ["1", "2Mi"])
def test_a_pool_that_holds_no_block_is_refused_as_staging_would(memory: str) -> None:
    # 36 layers of 8 heads, 16 tokens of 128 values each, K and V, two bytes a value.
    block_bytes = 36 * 8 * 16 * 128 * 2 * 2
    with pytest.raises(ConfigError, match=f"spec.staging.memory: expected room for a block of {block_bytes} bytes"):
        settings.staging_config(spec(staging={"memory": memory}), Network(fabric="TCP"), PEERS)
    assert read_config(settings.staging_config(spec(staging={"memory": "5Mi"}), Network(fabric="TCP"), PEERS))
