"""Two and four processes under torchrun, against one: the checks stand in launched_checks.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import Ended, torchrun


def seconds_to_the_end(ended: Ended) -> float:
    """Return how long after a rank had failed the last of them ended."""
    return ended.ended_at - float(ended.text.partition("failing at ")[2].partition("\n")[0])


# Under a minute and a half of CPU time; a machine that has more to do takes its time.
@pytest.mark.timeout(900)
def test_several_processes_compute_what_one_does_and_end_together(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    # Of two, one is killed in the middle of a solve, while the other waits for it: both end, far sooner than the
    # 60 s after which waiting itself would fail.
    ended = torchrun(2, "launched_checks.py", str(tmp_path), "killed")
    assert "all checks passed" in ended.text, ended.text
    assert ended.status != 0
    assert "the solve went on" not in ended.text
    assert "Signal 9 (SIGKILL)" in ended.text
    assert seconds_to_the_end(ended) < 20

    # Four go on with the solve that two had begun. Then one raises an error: all end with its message.
    ended = torchrun(4, "launched_checks.py", str(tmp_path), "fails")
    assert "all checks passed" in ended.text, ended.text
    assert "the solve went on" in ended.text, ended.text
    assert ended.status != 0
    assert "rank 3 of 4: ValueError: the last rank has had enough; all ranks end." in ended.text
    assert seconds_to_the_end(ended) < 20
