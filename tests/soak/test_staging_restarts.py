"""The staging service killed again and again while it writes to disk."""

from pathlib import Path

import pytest

from oasiskv.services.testing import kill_while_writing


@pytest.mark.timeout(3600)
def test_a_hundred_kills_while_blocks_are_written_tear_none(tmp_path: Path) -> None:
    found = kill_while_writing(tmp_path, num_rounds=100, seed=2)
    print(f"blocks found after each start: {found}")
    assert len(found) == 100
    assert max(found) >= 22, "the disk was full at some start"
