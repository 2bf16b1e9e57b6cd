"""Two and four processes under torchrun, against one: the checks stand in launched_checks.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import torchrun


@pytest.mark.parametrize("num_processes", [2, 4])
def test_processes_compute_what_one_does_and_a_failing_one_ends_all(num_processes: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    ended = torchrun(num_processes, "launched_checks.py", str(tmp_path))
    assert "all checks passed" in ended.text, ended.text
    # The last rank fails while the others wait for it: they end with its message, long before they time out.
    assert ended.status != 0
    failure = f"rank {num_processes - 1} of {num_processes}: ValueError: the last rank has had enough"
    assert f"{failure}; all ranks end." in ended.text
    seconds = float(ended.text.partition("failing at ")[2].partition("\n")[0])
    assert ended.ended_at - seconds < 20, f"ended {ended.ended_at - seconds:.0f} s after a rank had failed"
