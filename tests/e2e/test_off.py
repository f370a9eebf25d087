"""Installed but not configured, the plugin leaves vLLM alone."""

from pathlib import Path

import pytest

from oasiskv.engine.testing import EngineProcess, random_requests, write_tiny_model

pytestmark = pytest.mark.timeout(300)

HARMLESS = {
    "oasiskv",
    "oasiskv.engine",
    "oasiskv.engine.vllm",
    "oasiskv.engine.vllm.manager",
    "oasiskv.engine.vllm.names",
    "oasiskv.engine.vllm.plugin",
    "oasiskv.engine.vllm.settings",
}
"""What the entry point imports: names to register, no attention, no worker, no thread."""
OF_TESTS = {"oasiskv.engine.vllm.sampling"}
"""What the tests' own process imports where an earlier test had it reject a stock engine's drafts."""


def test_without_the_connector_nothing_of_the_backend_is_in_the_worker(stock: EngineProcess, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    engine = {"model": str(model), "skip_tokenizer_init": True, "max_model_len": 512, "block_size": 32}
    reply = stock.run(engine, random_requests([77, 200], 16))
    assert reply.facts["attention"] == ["CPUAttentionBackendImpl"]
    assert reply.facts["worker"] == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert reply.facts["kv_cache_manager"] == "FullAttentionManager"
    loaded = {module for module in reply.facts["oasiskv_modules"] if not module.startswith("oasiskv.kernels")}
    assert loaded - HARMLESS - OF_TESTS <= {module for module in loaded if module.startswith("oasiskv.core")}
    assert reply.counts == {}
