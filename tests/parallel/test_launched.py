"""Several processes against one, and how they end: each check of forked_checks.py is a test here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ON_TWO = [
    "products", "solvers", "influence", "chains", "refusals", "importance", "estimated importance", "rows",
    "Kronecker factors", "refusals of examples", "sharded products", "sharded, float32 inside", "sharded solvers",
    "sharded influence", "sharded refusals", "sharded memory",
]  # fmt: skip
ON_FOUR = ["products", "influence", "chains", "sharded"]
KILLED, GOES_ON = "a rank is killed", "the solve goes on, and a rank fails"


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], dict[str, Any]]:
    """How each check ended, by number of ranks and name: one process is started, which forks the others."""
    pytest.importorskip("transformers")
    paths = [ROOT / "src", ROOT, ROOT / "tests" / "parallel", ROOT / "tests" / "curvature"]
    found = subprocess.run(
        [
            sys.executable,
            str(ROOT / "tests" / "parallel" / "forked_checks.py"),
            str(tmp_path_factory.mktemp("ranks")),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, paths))},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    lines = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]
    return {(int(line["ranks"]), line["name"]): line for line in lines}


def test_every_check_is_a_test(ended: dict[tuple[int, str], dict[str, Any]]) -> None:
    known = [(2, name) for name in [*ON_TWO, KILLED]] + [(4, name) for name in [*ON_FOUR, GOES_ON]]
    assert sorted(ended) == sorted(known)


# Half a minute of CPU time for all; a machine that has more to do takes its time.
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("ranks", "name"), [*((2, name) for name in ON_TWO), *((4, name) for name in ON_FOUR)])
def test_several_processes_compute_what_one_does(ended, ranks: int, name: str) -> None:
    result = ended[ranks, name]
    assert result["statuses"] == [0] * ranks, result["text"]


def test_processes_end_with_one_that_is_killed_and_others_go_on(ended) -> None:
    # Killed in the middle of a solve, while the other waits for it: both end, far sooner than the 60 s after which
    # waiting itself would fail.
    killed = ended[2, KILLED]
    assert killed["statuses"][1] == -9, killed["text"]
    assert killed["statuses"][0] == 1, killed["text"]
    assert "the solve went on" not in killed["text"]
    assert killed["seconds"] < 30

    # Four go on with the solve that two had begun. Then one raises an error: all end, and name it.
    fails = ended[4, GOES_ON]
    assert "the solve went on" in fails["text"], fails["text"]
    assert fails["statuses"] == [1] * 4
    assert "rank 3 of 4: ValueError: the last rank has had enough; all ranks end." in fails["text"]
    assert "rank 0 ends because of rank 3 of 4: ValueError: the last rank has had enough" in fails["text"]
    assert fails["seconds"] < 30
