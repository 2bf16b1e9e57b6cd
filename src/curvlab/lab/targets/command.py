"""`python -m experiments run`: one target in this process, or several side by side in processes of their own."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

from omegaconf import DictConfig

from curvlab.lab.runs import configuration, over_ranks
from curvlab.lab.targets.help import expected_seconds, print_target_help, recorded_seconds, until_reader_leaves
from curvlab.lab.targets.target import ROOT, Target, named_targets

PLAN = "plan=true"
LOGS = Path("outputs") / "logs"
_HEARTBEAT_SECONDS = 20.0
_POLL_SECONDS = 0.2
_TAIL_LINES = 15
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
_LIBRARIES = (
    "pandas",
    "sklearn.datasets",
    "torch._dynamo",  # which the first optimizer imports
    "curvlab.influence",
    "curvlab.optim",
    "curvlab.sampling",
    "curvlab.lab.targets.execution",
)
_TRACKER = ("wandb", "wandb.sdk.launch.inputs.internal")  # and what its first run imports


# ------------------------------------------------------------------------------------ one
def main(target: Target) -> None:
    """Compute, judge and draw `target` as the command line says, in one thread unless OMP_NUM_THREADS is set."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        print_target_help(target)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads were no faster alone, and much slower in company
    if PLAN in sys.argv[1:]:  # no key of the config: nothing that is computed depends on it
        sys.argv.remove(PLAN)
        configuration.main(_entry(target), lambda cfg: _print_plan(target, cfg))
        return
    configuration.main(_entry(target), lambda cfg: _run(target, cfg))


def _print_plan(target: Target, cfg: DictConfig) -> None:
    from curvlab.lab.targets.plan import plan

    with until_reader_leaves():  # `| head` say
        for line in plan(target, cfg):
            print(line, flush=True)


def load_config(target: Target, overrides: Sequence[str] = ()) -> DictConfig:
    """Return the config that the command line of `target` would give, for tests and notebooks."""
    return configuration.load_config(_entry(target), overrides)


def _entry(target: Target) -> configuration.Entry:
    return configuration.Entry(target.key, ROOT / "conf", target.make_name)


def _run(target: Target, cfg: DictConfig) -> None:
    cfg = over_ranks.quiet(cfg)
    if cfg.progress:  # before the seconds that torch takes to load
        words = " ".join([str(cfg.preset), *configuration.Command.of(cfg).label])
        print(f"{target.make_name}: {target.title} ({words})", file=sys.stderr, flush=True)
    from curvlab.lab.targets.execution import run_target

    with over_ranks.together():
        run_target(target, cfg)


# ------------------------------------------------------------------------------------ several
def run(arguments: Sequence[str]) -> int:
    """Run the targets named first, with the overrides that follow; return the exit status.

    One target runs in this process, with Hydra's whole command line. Several run as many side by side as there
    are cores (environment variable CURVLAB_JOBS), the longest first, those that reuse another's units after it.
    """
    if "MAKELEVEL" in os.environ:  # SIGTERM to make ends the recipe's shell, which hands nothing on
        _end_with_parent()
    names = [a for a in arguments if "=" not in a and not a.startswith(("-", "~"))]  # ~key deletes, as in Hydra
    targets = named_targets(names)
    if not targets:
        print("error: name a target: run lissa-fig1 preset=smoke. `make help` lists them all.", file=sys.stderr)
        return 2
    overrides = [argument for argument in arguments if argument not in names]
    if problem := configuration.too_little_memory():
        print(f"error: {problem}", file=sys.stderr)
        return 1
    if len(targets) == 1:
        sys.argv[1:] = overrides
        main(targets[0])
        return 0
    if over_ranks.launched():
        if over_ranks.is_first():
            print("error: several processes work on one target: name a single one", file=sys.stderr)
        return 2
    if PLAN in overrides:  # one after another, on the terminal: nothing is computed
        for target in targets:
            sys.argv[1:] = overrides
            main(target)
            print()
        return 0
    return run_side_by_side(targets, overrides)


def run_side_by_side(
    targets: Sequence[Target], overrides: Sequence[str], own: Mapping[str, Sequence[str]] | None = None
) -> int:
    """Run targets in processes of their own, also a single one; return 1 when one failed.

    Args:
        targets: to run.
        overrides: of all of them.
        own: further ones, by a target's key.
    """
    return _Schedule(targets, overrides, own).run()


class _Stopped(BaseException):
    """SIGTERM, as from a queue whose time is up."""


@dataclass
class _Running:
    target: Target
    process: BaseProcess
    log: Path
    start: float = field(default_factory=time.monotonic)

    def last_line(self) -> str:
        """Return what the target said last, without its name."""
        lines = _lines(self.log)
        return lines[-1].removeprefix(f"{self.target.make_name}: ").strip() if lines else "starting"


class _Schedule:
    def __init__(
        self, targets: Sequence[Target], overrides: Sequence[str], own: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        self.overrides = {target.key: [*overrides, *(own or {}).get(target.key, ())] for target in targets}
        self.preset = preset = configuration.preset_of(overrides)
        self.waiting = sorted(targets, key=lambda target: -(recorded_seconds(target, preset) or 0.0))
        self.num_targets = len(targets)
        self.running: list[_Running] = []
        self.done: list[Target] = []
        self.failed: list[_Running] = []
        self.num_jobs = max(1, int(os.environ.get("CURVLAB_JOBS") or os.cpu_count() or 1))

    def run(self) -> int:
        start = time.monotonic()
        expected = expected_seconds(self.waiting, self.preset) / 60 / min(self.num_jobs, self.num_targets)
        about = f"; at most {expected:.1f} min, as published and where nothing is stored" if expected else ""
        jobs = f"{self.num_targets} targets ({self.preset}), {self.num_jobs} side by side"
        print(f"{jobs}{about}; loading torch", flush=True)
        is_default = not any(line.startswith("tracker=") for lines in self.overrides.values() for line in lines)
        load_libraries(tracked=is_default)
        spoken = time.monotonic()
        stopped: list[int] = []  # not raised in the handler: what is raised while a fork begins is dropped
        before = signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
        try:
            while self.waiting or self.running:
                if stopped:
                    raise _Stopped
                changed = self._collect() | self._start()
                if changed or time.monotonic() - spoken > _HEARTBEAT_SECONDS:
                    self._speak()
                    spoken = time.monotonic()
                time.sleep(_POLL_SECONDS)
        except (KeyboardInterrupt, _Stopped) as error:
            for job in self.running:
                job.process.terminate()
            print("interrupted; finished units are kept, the same command resumes.", file=sys.stderr)
            return 130 if isinstance(error, KeyboardInterrupt) else 143
        finally:
            signal.signal(signal.SIGTERM, before)
        return self._finish(time.monotonic() - start)

    def _start(self) -> bool:
        started = False
        while len(self.running) < self.num_jobs and (target := self._next()) is not None:
            self.waiting.remove(target)
            log = LOGS / f"{target.make_name}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_bytes(b"")
            process = multiprocessing.get_context("fork").Process(
                target=_child, args=(target, self.overrides[target.key], log), name=target.make_name
            )
            process.start()
            self.running.append(_Running(target, process, log))
            started = True
        return started

    def _next(self) -> Target | None:
        """Return the first waiting target none of whose predecessors is still to finish."""
        unfinished = {target.key for target in self.waiting} | {job.target.key for job in self.running}
        return next((target for target in self.waiting if not unfinished & set(target.after)), None)

    def _collect(self) -> bool:
        ended = [job for job in self.running if not job.process.is_alive()]
        for job in ended:
            self.running.remove(job)
            job.process.join()
            if job.process.exitcode == 0:
                self.done.append(job.target)
                verb = "done"
            else:
                self.failed.append(job)
                verb = f"FAILED (status {job.process.exitcode}; {job.log.as_posix()})"
            print(f"  {job.target.make_name}: {verb} after {time.monotonic() - job.start:.0f} s", flush=True)
        return bool(ended)

    def _speak(self) -> None:
        finished = len(self.done) + len(self.failed)
        now = "; ".join(f"{job.target.make_name}: {job.last_line()}" for job in self.running)
        left = f", {len(self.waiting)} waiting" if self.waiting else ""
        print(f"[{finished} of {self.num_targets} done{left}] {now or 'all done'}", flush=True)

    def _finish(self, seconds: float) -> int:
        print(f"{len(self.done)} of {self.num_targets} targets in {seconds / 60:.1f} min")
        for job in self.failed:
            print(f"\n{job.target.make_name} failed; the end of {job.log.as_posix()}:", file=sys.stderr)
            print("\n".join(f"  {line}" for line in _lines(job.log)[-_TAIL_LINES:]), file=sys.stderr)
        return 1 if self.failed else 0


def load_libraries(*, tracked: bool) -> None:
    """Import, once before forking, what nearly every target needs: seconds less for each of them."""
    for name in _LIBRARIES:
        importlib.import_module(name)
    for name in _TRACKER if tracked else ():
        with contextlib.suppress(ImportError):  # the run itself says what is missing
            importlib.import_module(name)
    importlib.import_module("curvlab.curvature.linearise").load_forward_mode()
    importlib.import_module("torch").set_num_threads(1)  # a pool of threads would not survive the fork


def _child(target: Target, overrides: Sequence[str], log: Path) -> None:
    """Run one target with everything that it prints in its log."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _end_with_parent()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    sys.argv = [str(ROOT / "experiments" / "__main__.py"), *overrides]
    main(target)


def _end_with_parent() -> None:
    """Be told SIGTERM where the parent is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _lines(log: Path) -> list[str]:
    try:
        return [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    except OSError:
        return []
