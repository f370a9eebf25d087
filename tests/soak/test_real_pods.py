"""SmolLM2 as real pods of an OasisKVService: what one process answers is what the cluster answers."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from oasiskv.engine.testing import EngineProcess
from oasiskv.operator.testing_cluster import ALL, ControlPlane
from oasiskv.operator.testing_kubelet import FakeKubelet
from oasiskv.operator.testing_operator import OperatorProcess, condition, wait_for
from oasiskv.operator.testing_pods import infer, small_service, volume

TEXT = Path(__file__).parents[2].joinpath("examples", "texts", "ruth-1samuel.txt").read_text()
PROMPTS = [f"{TEXT[:2400]}\n\nWho was Naomi's husband? His name was", f"{TEXT[2000:4400]}\n\nAfter that, Ruth"]
NUM_TOKENS = 24
SETTINGS = {"budget_blocks": 16, "switch": "early"}
ARGUMENTS = {"max_model_len": 2048, "max_num_seqs": 4, "enforce_eager": True, "kv_cache_memory_bytes": 2**28}
KV = {"hash": "smollm2", "dtype": "float32", "numLayers": 30, "numKvHeads": 3, "headDim": 64}

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ControlPlane]:
    folder = os.environ.get("KUBEBUILDER_ASSETS", "")
    if not folder or not all(os.access(Path(folder, name), os.X_OK) for name in ALL):
        pytest.skip(f"KUBEBUILDER_ASSETS: expected a folder with {', '.join(ALL)}, got {folder!r}")
    made = ControlPlane(tmp_path, Path(folder))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
def kubelet(plane: ControlPlane, tmp_path: Path) -> Iterator[FakeKubelet]:
    made = FakeKubelet(plane, "cpu-0", tmp_path)
    try:
        made.start()
        yield made
    finally:
        print(made.printed())  # shown where a test failed
        made.stop()


def test_smollm2_answers_through_the_cluster_as_one_process_does(
    plane: ControlPlane, kubelet: FakeKubelet, smollm2: Path, backend: EngineProcess, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    requests = [{"prompt": tokenizer(text).input_ids, "params": {"max_tokens": NUM_TOKENS}} for text in PROMPTS]
    one = {"model": str(smollm2), "skip_tokenizer_init": True, "block_size": 16, "dtype": "float32", **ARGUMENTS}
    expected = [tokenizer.decode(ids) for ids in backend.run(one, requests, settings=SETTINGS).tokens]
    backend.close()

    lookahead = {"budgetBlocks": 16, "switch": "early", "hostPoolBytes": "512Mi"}
    role = {"resources": {"cpu": "1", "memory": "4Gi", "sharedMemory": "64Mi"}}
    service = small_service(
        "real",
        {"uri": f"pvc://models/{smollm2.name}", "name": "smollm2", **KV},
        {"lookahead": lookahead, "arguments": ARGUMENTS},
        prefill=role,
        decode=role,
        staging={"memory": "256Mi", "cpu": "1", "drainSeconds": 30},
    )
    plane.check("create", "namespace", "real")
    operator = OperatorProcess(
        tmp_path / "operator.log", plane.kubeconfig, "--read-nodes", environment={"POD_NAMESPACE": "default"}
    )
    try:
        plane.put([*volume("real", smollm2.parent), service])
        wait_for(lambda: condition(plane, "real", "chat", "Ready").get("status") == "True", "the service", 1800)
        url = kubelet.where("real", "chat-predictor", 80)
        answers = [infer(url, "smollm2", text, NUM_TOKENS, 900)["text"] for text in PROMPTS]
        print(answers)
        assert answers == expected
        assert kubelet.errors == []
    finally:
        assert operator.stop() == 0
