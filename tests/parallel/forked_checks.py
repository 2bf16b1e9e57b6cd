"""Run by test_launched.py in a process of its own: each check in forks of it, one for each rank.

All that is imported is imported once. A check is a function of the ranks, and of a folder, that raises where what
several processes compute is not what one computes; all ranks run it. Each has a process group of its own, so that
one that fails leaves the others as they are. One line of JSON tells how each ended.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from curvlab.curvature.linearise import load_forward_mode
from curvlab.parallel import Ranks, joined
from tests.parallel import data_parallel_checks, sharded_checks
from tests.parallel.problems import language_model

Check = Callable[[Ranks, Path], None]

CHECKS: dict[str, dict[str, Check]] = {
    "2": {
        "products": data_parallel_checks.check_products,
        "solvers": data_parallel_checks.check_solvers,
        "influence": data_parallel_checks.check_influence,
        "chains": data_parallel_checks.check_chains,
        "refusals": data_parallel_checks.check_refusals,
        "importance": data_parallel_checks.check_importance,
        "estimated importance": data_parallel_checks.check_estimated_importance,
        "rows": data_parallel_checks.check_rows,
        "Kronecker factors": data_parallel_checks.check_ekfac,
        "refusals of examples": data_parallel_checks.check_refusals_of_examples,
        "sharded products": sharded_checks.check_products,
        "sharded, float32 inside": sharded_checks.check_float32_inside,
        "sharded solvers": sharded_checks.check_solvers,
        "sharded influence": sharded_checks.check_influence,
        "sharded refusals": sharded_checks.check_refusals,
        "sharded memory": sharded_checks.check_memory,
        "a rank is killed": data_parallel_checks.check_killed,
    },
    "4": {
        "products": data_parallel_checks.check_products,
        "influence": data_parallel_checks.check_influence,
        "chains": data_parallel_checks.check_chains,
        "sharded": sharded_checks.check_small,
        "the solve goes on, and a rank fails": data_parallel_checks.check_goes_on_and_fails,
    },
}  # in this order: what two ranks began four go on with


def run(size: int, check: Check, folder: Path) -> dict[str, object]:
    """Run a check on so many forks, and return their exit statuses, what they printed, and seconds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sys.stdout.flush()
    began, printed, children = time.time(), folder / "printed", []
    printed.write_text("")
    for rank in range(size):
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)  # makes a fork's pool anew; two threads at once may fail at that
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            output = os.open(printed, os.O_WRONLY | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            with joined(timeout_seconds=60) as ranks:
                check(ranks, folder)
            sys.stdout.flush()
            os._exit(0)
        children.append(child)
    statuses, cpu = [], 0.0
    for child in children:  # the others of one that failed end when they next exchange numbers
        _, status, used = os.wait4(child, 0)
        statuses.append(os.waitstatus_to_exitcode(status))
        cpu += used.ru_utime + used.ru_stime
    return {"statuses": statuses, "text": printed.read_text(), "seconds": time.time() - began, "cpu": cpu}


def main(folder: str) -> None:
    language_model("llama")  # imports what builds it
    load_forward_mode()
    gc.collect()
    gc.freeze()  # what was imported stays shared
    signal.alarm(800)
    for size, checks in CHECKS.items():
        for name, check in checks.items():
            print(json.dumps({"ranks": size, "name": name, **run(int(size), check, Path(folder))}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
