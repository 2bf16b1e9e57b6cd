"""Python commands in forks of one process that has imported what nearly all of them import.

Each is a process of its own, with arguments, environment, folder, exit status and output of its own, which can be
killed; it starts in a tenth of a second instead of four. Nothing of curvlab.lab and experiments is imported before
the fork, and another checkout's library is imported anew. Run as a script, this file is the process that forks.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib.util
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import IO, Any, NoReturn

IMPORTED = (  # not wandb, whose folder of temporary files would go with the first fork
    "torch._dynamo", "torchvision", "pandas", "sklearn.datasets", "matplotlib.pyplot", "hydra", "transformers",
    "curvlab.influence", "curvlab.optim", "curvlab.sampling", "curvlab.parallel",
)  # fmt: skip


def leave_out_what_is_imported() -> None:
    """Leave what was imported out of garbage collection: every full one would walk through all of it again.

    The others come less often than Python's own, after 700 objects: they took a twelfth of the time of all tests.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000)


class Warm:
    """Starts commands; keeps what they print in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.num_started = folder, 0
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def start(self, *arguments: str | Path, cwd: Path, env: Mapping[str, str] = os.environ) -> Command:
        """Start `python ARGUMENTS`: -m MODULE ..., -c CODE ... or SCRIPT ..."""
        self.num_started += 1
        printed = self.folder / str(self.num_started)
        number = self.ask([*map(str, arguments)], str(cwd), dict(env), str(printed))
        return Command(self, number, printed)

    def run(
        self, *arguments: str | Path, cwd: Path, env: Mapping[str, str] = os.environ
    ) -> subprocess.CompletedProcess[str]:
        return self.start(*arguments, cwd=cwd, env=env).wait()

    def ask(self, *request: Any) -> int:
        try:
            self.process.stdin.write(f"{json.dumps(request)}\n")
            self.process.stdin.flush()
            return int(self.process.stdout.readline())
        except BaseException:  # a test that took too long: the answer is not to be read by the next
            self.process.kill()
            raise


@dataclass
class Command:
    """A command that was started, as process `number`."""

    warm: Warm
    number: int
    printed: Path

    def wait(self) -> subprocess.CompletedProcess[str]:
        status = self.warm.ask(self.number)
        stdout, stderr = (self.printed.with_suffix(f".{name}").read_text() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess([], status, stdout, stderr)


# ------------------------------------------------------------------------------ the process that forks
def serve(requests: Iterable[str], replies: IO[str], places: Sequence[str]) -> None:
    for request in map(json.loads, requests):
        if len(request) == 1:
            reply = os.waitstatus_to_exitcode(os.waitpid(*request, 0)[1])
        elif (reply := os.fork()) == 0:
            end(partial(become, *request, places))
        print(reply, file=replies, flush=True)


def end(work: Callable[[], None]) -> NoReturn:
    """Do this work, and end as Python does, but for taking apart all that was imported: half a second of CPU."""
    status: Any = None
    try:
        work()
    except SystemExit as exit:
        status = exit.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    try:
        threading._shutdown()  # waits for threads
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            stream.flush()
    finally:
        os._exit(status or 0)


def become(
    arguments: Sequence[str], cwd: str, environment: Mapping[str, str], printed: str, places: Sequence[str]
) -> None:
    """Be the process that a shell would have started."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: none outlives the tests
    sys.modules["torch"].set_num_threads(1)  # makes a fork's pool anew; two threads at once may fail at that
    for number, path in enumerate((os.devnull, f"{printed}.stdout", f"{printed}.stderr")):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    option, name, *rest = arguments if arguments[0] in ("-m", "-c") else ("", *arguments)
    own = [cwd if option else str(Path(name).parent), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    sys.path[:] = [*filter(None, own), *places]
    if PathFinder.find_spec("curvlab").origin != sys.modules["curvlab"].__file__:  # another checkout's
        for module in [module for module in sys.modules if module.partition(".")[0] == "curvlab"]:
            del sys.modules[module]
    sys.argv = ["-c" if option == "-c" else name, *rest]
    if option == "-m":
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif option == "-c":
        exec(name, {"__name__": "__main__"})  # noqa: S102 - what python -c does
    else:
        runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    gc.disable()  # a fifth of the time of all imports
    own = [str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    for module in IMPORTED:
        if importlib.util.find_spec(module.partition(".")[0]):
            importlib.import_module(module)
    importlib.import_module("curvlab.curvature.linearise").load_forward_mode()
    importlib.import_module("torch").set_num_threads(1)  # a pool of threads would not survive the fork
    leave_out_what_is_imported()  # and stays shared
    streams = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    serve(*streams, [place for place in sys.path if place not in own])
