"""Several processes against one, and how they end."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import Ended, alone, torchrun


def seconds_to_the_end(ended: Ended) -> float:
    """Return how long after a rank had failed the last of them ended."""
    return ended.ended_at - float(ended.text.partition("failing at ")[2].partition("\n")[0])


# A minute of CPU time each, at most; a machine that has more to do takes its time.
@pytest.mark.timeout(900)
def test_two_and_four_processes_compute_what_one_does(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    ended = alone("launched_checks.py", str(tmp_path))
    assert "2 ranks: all checks passed" in ended.text, ended.text
    assert "4 ranks: all checks passed" in ended.text, ended.text
    assert ended.status == 0, ended.text


@pytest.mark.timeout(900)
def test_processes_of_torchrun_end_together_and_others_go_on(tmp_path: Path) -> None:
    # Of two, one is killed in the middle of a solve, while the other waits for it: both end, far sooner than the
    # 60 s after which waiting itself would fail.
    ended = torchrun(2, "ending_checks.py", str(tmp_path), "killed")
    assert ended.status != 0
    assert "the solve went on" not in ended.text
    assert "Signal 9 (SIGKILL)" in ended.text, ended.text
    assert seconds_to_the_end(ended) < 20

    # Four go on with the solve that two had begun. Then one raises an error: all end with its message.
    ended = torchrun(4, "ending_checks.py", str(tmp_path), "fails")
    assert "the solve went on" in ended.text, ended.text
    assert ended.status != 0
    assert "rank 3 of 4: ValueError: the last rank has had enough; all ranks end." in ended.text
    assert seconds_to_the_end(ended) < 20
