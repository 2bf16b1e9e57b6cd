"""Runs the worker: one process for all models, since what it imports takes longer than most of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

# Imported, although it runs in another process: what it measures is then known to depend on its code
# (`make stale`).
from experiments.benchmarks.models import worker


class Apart:
    """A process that measures; it starts with the first task and ends with the `with` block."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def measure(self, task: dict[str, Any]) -> dict[str, Any]:
        """Return what `worker.measure` returns for a task; a RuntimeError where it fails."""
        process = self._started(task["num_threads"])
        stdin, stdout = process.stdin, process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("the measuring process has no pipes")
        stdin.write(json.dumps(task) + "\n")
        stdin.flush()
        # What libraries print on stdout (a loading bar, advice) is no answer.
        found: dict[str, Any] = next((json.loads(line) for line in stdout if line.startswith("{")), {})
        if "error" in found or not found:
            raise RuntimeError(f"measuring failed: {found.get('error', 'its process ended')}")
        return found

    def _started(self, num_threads: int) -> subprocess.Popen[str]:
        if self._process is None:
            environment = os.environ | {
                "OMP_NUM_THREADS": str(num_threads),
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            }
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", worker.__name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
            )
        return self._process
