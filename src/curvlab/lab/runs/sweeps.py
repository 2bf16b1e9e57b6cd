"""A sweep's jobs (Hydra's multirun): one that fails does not stop the others, and is named at the end.

A job leaves a note while it runs, which goes when it is done: what is left at the end has failed, or was killed.
So this holds for jobs of this process, of others and of other machines (`hydra/launcher=`). Of a queue's jobs that
are killed or cancelled from outside, without a word, the note says in which state the queue left them. Where the
process that holds the sweep is killed itself, nobody says anything at the end. So every job has its result folder
from the sweep's beginning, and `gather` names those that are not finished.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

SWEEP_VARIABLE = "CURVLAB_SWEEP"  # of a job's environment: its sweep's id
_NOTES = Path("outputs") / "sweeps"


def is_sweep(overrides: Iterable[str], multirun: bool) -> bool:
    """Return whether a command line is several runs: with -m, or `sweep=NAME`, a file of conf/sweep/."""
    return multirun or any(re.match(r"\+{0,2}sweep=(?!null$)", override) for override in overrides)


def sweep_id(target: str, overrides: Sequence[str]) -> str:
    """Return the id of a sweep: the same line, typed again, goes on with the same one."""
    return f"sweep-{hashlib.sha256(' '.join([target, *overrides]).encode()).hexdigest()[:8]}"


def attempt(
    sweep: str, job_id: str, name: str, job: Callable[[], Any], say: Callable[[Exception], str | None]
) -> Any:
    """Run one job; an error is printed and kept for the end instead of raised, and then None is returned.

    Args:
        sweep: its id.
        job_id: of the job, Hydra's: where it is in a queue, the queue's.
        name: of the job: its overrides.
        job: what to run.
        say: the line for an error that needs no traceback; None for others.
    """
    note = _NOTES / sweep / f"{job_id}.txt"
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(f"{name}: killed before it was done", encoding="utf-8")
    try:
        result = job()
    except Exception as error:
        if (line := say(error)) is None:
            traceback.print_exc()
            line = f"{type(error).__name__}: {error}"
        print(f"error: {line}", file=sys.stderr, flush=True)
        note.write_text(f"{name}: {line.splitlines()[0]}", encoding="utf-8")
        return None
    note.unlink()
    return result


@contextmanager
def told(sweep: str, folder: Callable[[Sequence[str]], Path]) -> Iterator[None]:
    """Name at the end the jobs that failed or were killed, and exit with 1; nothing where `sweep` is empty.

    `folder` is a job's result folder by its overrides.
    """
    notes = _NOTES / (sweep or "none")
    shutil.rmtree(notes, ignore_errors=True)
    try:
        with _killed_jobs_noted(notes), _folders_made(folder):
            yield
    finally:
        lines = sorted(note.read_text(encoding="utf-8") for note in notes.glob("*.txt"))
        if lines:
            print("\n  ".join([f"{len(lines)} of the sweep's jobs failed:", *lines]), file=sys.stderr, flush=True)
    if lines:
        sys.exit(1)


@contextmanager
def _folders_made(folder: Callable[[Sequence[str]], Path]) -> Iterator[None]:
    """Let Hydra make the folders of all jobs once it knows them, before the first begins."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    split = BasicSweeper.split_arguments

    def split_and_made(*arguments: Any) -> list[list[list[str]]]:
        batches = split(*arguments)
        with suppress(OSError):  # each job says in a line what cannot be written
            for job in chain(*batches):
                folder(job).mkdir(parents=True, exist_ok=True)
        return batches

    with patch.object(BasicSweeper, "split_arguments", staticmethod(split_and_made)):
        yield


@contextmanager
def _killed_jobs_noted(notes: Path) -> Iterator[None]:
    """Let submitit's launcher wait for all jobs: it raises at the first that was killed, and leaves the others."""
    if not any("submitit" in argument for argument in sys.argv):
        yield
        return
    from hydra.core.utils import JobReturn, JobStatus
    from submitit.core.core import Job
    from submitit.core.utils import UncompletedJobError

    results = Job.results

    def results_or_note(job: Job[Any]) -> list[Any]:
        try:
            return results(job)
        except UncompletedJobError:
            note = notes / f"{job.job_id}.txt"
            name = note.read_text(encoding="utf-8").partition(": killed")[0] if note.exists() else "not begun"
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(f"{name}: job {job.job_id} is {job.state}, see {job.paths.stderr}", encoding="utf-8")
            return [JobReturn(status=JobStatus.COMPLETED)]

    with patch.object(Job, "results", results_or_note):
        yield
