"""A cap that follows the host link, inside real engines."""

from pathlib import Path
from typing import Any

import pytest

from oasiskv.cli.main import main
from oasiskv.core.cap import read_log
from oasiskv.engine.testing import EngineProcess, random_requests, write_tiny_model

pytestmark = pytest.mark.timeout(300)

SETTINGS = {"budget_blocks": 8, "min_cap": 1, "cap": "auto", "debug_verify": True, "debug_poison": True}


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = write_tiny_model(tmp_path_factory.mktemp("cap") / "model", num_kv_heads=1, num_heads=2)
    options = {"model": str(model), "skip_tokenizer_init": True, "max_model_len": 1024, "block_size": 16}
    drafter = {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    return options | {"speculative_config": drafter}


def test_an_auto_cap_changes_and_its_log_gives_the_same_caps_and_the_same_tokens_again(
    backend: EngineProcess, engine: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = random_requests([500, 333, 600, 450], 60)
    requests[2]["at"] = 12
    first = backend.run(engine, requests, settings=SETTINGS | {"cap_log": str(tmp_path / "first")})
    (log,) = (tmp_path / "first").iterdir()
    again = backend.run(
        engine, requests, settings=SETTINGS | {"debug_cap_replay": str(log), "cap_log": str(tmp_path / "again")}
    )
    # The next engine ends the one before, and its log with it.
    backend.run(engine, requests[:1], settings={"budget_blocks": 64})
    caps = [cap for _, cap in read_log(log.read_text().splitlines()).steps]
    assert len(set(caps)) > 1
    assert main(["cap", "replay", str(log)]) == 0
    print(capsys.readouterr().out)
    assert first.counts["cap_changes"] == again.counts["cap_changes"] > 0
    assert again.tokens == first.tokens
    for name in ("predicted", "hit", "fetched", "deferred", "wasted", "evicted", "sparse_rows"):
        assert again.counts[name] == first.counts[name]
    (copy,) = (tmp_path / "again").iterdir()
    assert [cap for _, cap in read_log(copy.read_text().splitlines()).steps] == caps
