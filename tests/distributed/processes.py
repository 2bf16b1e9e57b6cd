"""Start a script of these tests on several processes, as a user does, and read what they printed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ended:
    """How a launch ended: exit status, all that was printed, and when (seconds of `time.time`)."""

    status: int
    text: str
    ended_at: float


def torchrun(num_processes: int, script: str, *arguments: str, timeout: float = 420.0) -> Ended:
    """Run tests/distributed/<script> under torchrun, one thread in each process."""
    paths = [str(ROOT / "src"), str(ROOT), *(str(ROOT / "tests" / part) for part in ("distributed", "curvature"))]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ended = subprocess.run(
        [*launcher, f"--nproc-per-node={num_processes}", str(ROOT / "tests" / "distributed" / script), *arguments],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Ended(ended.returncode, ended.stdout + ended.stderr, time.time())
