"""Start a script of these tests on several processes, as a user does, and read what they printed."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ended:
    """How a launch ended: exit status, all that was printed, and when (seconds of `time.time`)."""

    status: int
    text: str
    ended_at: float


def torchrun(num_processes: int, script: str, *arguments: str, timeout: float = 800.0) -> Ended:
    """Run tests/parallel/<script> under torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    return run([*launcher, *_script(script), *arguments], timeout=timeout)


def alone(script: str, *arguments: str, timeout: float = 800.0) -> Ended:
    """Run tests/parallel/<script> in a process of its own, which may fork others."""
    return run([sys.executable, *_script(script), *arguments], timeout=timeout)


def _script(name: str) -> list[str]:
    return [str(ROOT / "tests" / "parallel" / name)]


def run(command: list[str], *, timeout: float) -> Ended:
    """Run a command that finds the library and these tests, with one thread."""
    paths = [str(ROOT / "src"), str(ROOT), *(str(ROOT / "tests" / part) for part in ("parallel", "curvature"))]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    ended = subprocess.run(
        command,
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Ended(ended.returncode, ended.stdout + ended.stderr, time.time())


def forked(num_processes: int, work: Callable[..., None], *arguments: str) -> None:
    """Run work(*arguments) in forks of this process, which see the variables that torchrun would set."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    gc.collect()
    gc.freeze()  # what was imported stays shared
    children = []
    for rank in range(num_processes):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_processes)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            status = 1
            try:
                work(*arguments)
                status = 0
            finally:
                sys.stdout.flush()
                os._exit(status)
        children.append(child)
    while children:
        ended, status = os.wait()
        children.remove(ended)
        if status:
            for other in children:
                os.kill(other, signal.SIGKILL)
            raise SystemExit(f"one of {num_processes} processes failed")
