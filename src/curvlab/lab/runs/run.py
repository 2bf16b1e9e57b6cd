"""One run of a target: its folder, its randomness, its stored units, its record."""

from __future__ import annotations

import functools
import io
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from filelock import FileLock
from omegaconf import DictConfig
from PIL import Image
from tqdm.auto import tqdm

from curvlab.files import remove_stale, write_atomically
from curvlab.lab import tables
from curvlab.lab.runs.configuration import Command
from curvlab.lab.runs.overrides import ConfigurationError
from curvlab.lab.runs.record import (
    RECORD,
    device_name,
    function_name,
    grouped,
    machine_of,
    publishable_config,
    read_commit,
    recorded_units,
    source_hash,
    versions,
    without_paths,
    write_record,
)
from curvlab.lab.runs.store import digest, named_results, plain, store_of
from curvlab.lab.runs.tracking import Tracker, start_tracker

_SECONDS_BETWEEN_STORED_UNITS = 2.0  # of lines about them
_MAX_TAG = 64  # of W&B


@contextmanager
def start(cfg: DictConfig, *, key: str, title: str) -> Iterator[Run]:
    """Open a run; after an error close the tracker and pass the error on.

    Args:
        cfg: from `runs.main` or `runs.load_config`.
        key: the target's key, "<paper>/<item>", e.g. "lissa/fig1".
        title: one line for the report.
    """
    run = Run(cfg, key=key, title=title)
    try:
        _ = run.device  # fails here rather than in Run(), so that the tracker is told
        yield run
    except BaseException as error:
        run.tracker.finish(without_paths(f"{type(error).__name__}: {error}"))
        if isinstance(error, KeyboardInterrupt):
            print(
                f"{run.target}: interrupted; finished units are kept, the same command resumes.", file=sys.stderr
            )
        raise
    run.tracker.finish()


class Run:
    """What an experiment needs beside the library; made by `start`.

    Attributes:
        folder: <results.root>/<paper>/<item>/<preset>; "<preset>+<overrides>" when an override changes the
            numbers, so that a variation never overwrites the published result.
        device: torch device of `device=`.
        store: resumable store; `unit` is the way to use it.
        status: lines on the terminal: what the run is doing.
        tracker: W&B run, or none.
    """

    def __init__(self, cfg: DictConfig, *, key: str, title: str) -> None:
        self._start = time.perf_counter()
        self.cfg = cfg
        self.key = key
        command = Command.of(cfg)
        self.target = command.make_target or key.replace("/", "-")
        self.title = title
        paper, item = key.split("/")
        name = command.folder_name(cfg.preset)
        self.folder = Path(cfg.results.root) / paper / item / name
        self.store = store_of(cfg)
        self.status = Status(self.target, silent=not cfg.progress, num_expected=recorded_units(self.folder))
        self._commit = read_commit(cfg.results.root)
        self._num_matvecs = 0  # outside of units
        self._units: dict[str, dict[str, Any]] = {}  # those used so far, by their keys
        self._inner_seconds = 0.0  # that units computed inside the one at work took
        self._depth = 0
        self._data: dict[str, str] = {}
        self._notes: dict[str, Any] = {}
        self._images: dict[str, bytes] = {}
        self._has_written = False
        tags = (str(cfg.preset), self._commit.short, *command.label, command.sweep)
        self.tracker: Tracker = start_tracker(
            cfg.tracker,
            name=f"{self.target} {name}",
            group=paper,
            job_type=self.target,
            tags=[tag[:_MAX_TAG] for tag in tags if tag],
            config=publishable_config(cfg),
        )

    def generator(self, *names: str | int) -> torch.Generator:
        """Return a CPU generator that depends on `cfg.seed` and `names` only.

        Different names give independent streams; neither the order of calls nor a resumed run changes one.
        """
        seed = int(digest([self.cfg.seed, *names], where="names")[:15], 16)
        return torch.Generator().manual_seed(seed)

    def unit(
        self,
        name: str,
        config: Mapping[str, Any],
        compute: Callable[..., dict[str, Any]],
        *,
        version: int,
        about: str = "",
        resumes: bool = False,
    ) -> dict[str, Any]:
        """Return a unit of work from the store, or compute and store it together with its origin.

        Args:
            name: kind of unit, shared by targets that do the same work, e.g. "lissa/scores".
            config: all that the result depends on. `cfg.seed` is added unless there is a `seed`.
            compute: returns tensors, numbers, strings and lists by name. Products counted with `add_matvecs`
                inside are counted again when the unit is found in the store.
            version: of the meaning of `config` and of the code: raise it when a change must not reuse what was
                stored before. Changes that nobody thought of are found by `make verify`.
            about: what it does, for the terminal: "training mlp-digits, seed 2"; the name unless given.
            resumes: `compute` is called with a folder for its checkpoints, its own while it runs. What a killed
                process left there is found by the next one, unless any code, the packages' versions or the device
                have changed since.
        """
        config = {"seed": self.cfg.seed, **plain(config)}
        key = {"version": version, "config": config}
        misses = self.store.misses

        def counted() -> dict[str, Any]:
            made_by = {"versions": versions(), "device": device_name(self.device)}
            folder = [self.store.unfinished(name, key, made_by=made_by | {"source": source_hash()})] * resumes
            resumed = resumes and folder[0].exists()
            self._announce(about or name, resumed=resumed)
            outside = self._num_matvecs, self._units, self._inner_seconds
            self._num_matvecs, self._units, self._inner_seconds = 0, {}, 0.0
            began = time.process_time()
            self._depth += 1
            try:
                payload = named_results(compute(*folder), name)
                own = {
                    "name": name,
                    "version": version,
                    "function": function_name(compute),
                    "commit": self._commit.commit,
                    "clean": self._commit.clean,
                    **made_by,
                    **({"resumed": True} if resumed else {}),  # what a killed process spent is not known
                    "seconds": time.process_time() - began - self._inner_seconds,
                    "num_matvecs": self._num_matvecs,
                }
                return {"payload": payload, "units": self._units | {digest([name, key], where="unit"): own}}
            finally:
                self._depth -= 1
                self._num_matvecs, self._units, self._inner_seconds = outside
                self._inner_seconds += time.process_time() - began

        entry = self.store.get_or_compute(name, key, counted)
        if self.store.misses == misses:
            self._announce(about or name, stored=True)
        self._units |= entry["units"]  # each once, however often it is asked for
        return entry["payload"]

    def _announce(self, work: str, *, stored: bool = False, resumed: bool = False) -> None:
        if self._depth == 0 and self.status.unit(work, stored=stored, resumed=resumed):
            self.tracker.log(self._progress())

    def _progress(self) -> dict[str, float]:
        return {"progress/units": self.status.num_units, "progress/seconds": time.perf_counter() - self._start}

    def progress(self, iterable: Iterable[Any] | int, description: str) -> tqdm:
        """Return a progress bar on stderr, over an iterable or, for `update`, up to a total.

        Silent with progress=false, and when stderr is no terminal.
        """
        total, items = (iterable, None) if isinstance(iterable, int) else (None, iterable)
        silent = not (self.cfg.progress and sys.stderr.isatty())
        return tqdm(items, desc=description, total=total, disable=silent, file=sys.stderr, leave=False)

    def bar(self, description: str) -> bool | str:
        """Return what the library takes as `progress`: the bar's name, or False with progress=false."""
        return description if self.cfg.progress else False

    def add_matvecs(self, count: int) -> None:
        """Add matrix-vector products to the record."""
        self._num_matvecs += int(count)

    def record_data(self, name: str, checksum: str) -> None:
        """Add a data set and its checksum to the record, and say that it was loaded."""
        if name not in self._data:
            self.status.say(f"data: {name}")
        self._data[name] = checksum

    def note(self, **entries: Any) -> None:
        """Add entries of the experiment's own to run.json, e.g. reduced=[...], seeds=[...]."""
        self._notes.update(plain(entries, where="note"))

    def take_over(self, record: Mapping[str, Any]) -> None:
        """Count the units and the data of a published result, of which rows are kept, as this run's."""
        self._units |= {f"published {place}": dict(unit) for place, unit in enumerate(record["units"])}
        self._num_matvecs += record["num_matvecs"]
        self.status.num_units += record["num_units"]
        self._data |= record["data"]

    def save_table(self, table: pd.DataFrame, name: str = "table", *, digits: int = 6) -> Path:
        """Write <name>.csv, packed where it is large (`tables.encoded`), floats to so many significant digits.

        Timings do not belong here, they are in run.json.
        """
        file, content = tables.encoded(table, name, digits=digits)
        return self._write(file, content)

    def save_image(self, image: np.ndarray, name: str) -> None:
        """Keep a PNG of the pixels, (H, W) or (H, W, 3) of uint8, which `save_record` writes beside the tables."""
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, format="png")
        self._images[name] = buffer.getvalue()

    def save_record(self, settings: Sequence[Mapping[str, Any]] = ()) -> None:
        """Write the images, then run.json: from here on the tables are complete, fit to be judged and drawn.

        Args:
            settings: entries of name, ours and paper, for the report.
        """
        for name, content in self._images.items():
            self._write(name, content)
        command, units, preset = Command.of(self.cfg), self._units.values(), str(self.cfg.preset)
        record = {
            "target": self.target,
            "key": self.key,
            "title": self.title,
            "preset": preset,
            "command": command.make_line(preset),
            "python_command": command.python_line(preset),
            "units": grouped(units),
            "assembled": {"commit": self._commit.commit, "clean": self._commit.clean},
            **machine_of(self.device),
            "seeds": [self.cfg.seed],
            "settings": list(settings),
            "data": dict(self._data),
            "wall_seconds": round(time.perf_counter() - self._start, 3),
            "unit_seconds": round(sum(unit["seconds"] for unit in units), 3),
            "num_matvecs": self._num_matvecs + sum(unit["num_matvecs"] for unit in units),
            "num_units": self.status.num_units,
            "store": {"hits": self.store.hits, "misses": self.store.misses},
            "config": publishable_config(self.cfg),
        }
        write_record(self.folder, without_paths(record | self._notes))

    @contextmanager
    def alone_in_folder(self) -> Iterator[None]:
        """Keep other processes that share the store from writing into the same result folder meanwhile."""
        name = digest(str(self.folder.resolve()), where="folder")[:16]
        lock = Path(self.store.root) / ".folders" / f"{name}.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock):
            yield

    @functools.cached_property
    def device(self) -> torch.device:
        """See the class."""
        return torch_device(self.cfg.device)

    def hand_to_tracker(self, numbers: Mapping[str, float], curves: Iterable[pd.DataFrame] = ()) -> None:
        """Send curves over their index, numbers, tables, figures and the whole folder to the tracker."""
        for each in curves:
            self.tracker.log_curves(str(each.index.name), each)
        self.tracker.log({**numbers, **self._progress()})
        for name in tables.names(self.folder):
            self.tracker.log_table(name, tables.read_table(self.folder, name))
        for path in sorted(self.folder.glob("figure*.png")):
            self.tracker.log_figure(path.stem, path)
        self.tracker.log_folder(f"{self.target}-{self.folder.name}", self.folder)

    def _write(self, name: str, content: bytes) -> Path:
        if name.startswith(".") or Path(name).name != name or name == RECORD:
            raise ValueError(f"cannot save {name!r}: use a plain file name of the result folder, not {RECORD}.")
        path = self.folder / name
        if not self._has_written:  # from here on the record, verdicts and figures of an earlier run would be wrong
            for old in (self.folder / RECORD, *self.folder.glob("*.*")):  # first the record: it says "complete"
                if old.suffix in (".json", ".csv", ".bz2", ".xz", ".gz", ".png"):
                    old.unlink(missing_ok=True)
            remove_stale(self.folder)
            self._has_written = True
        write_atomically(path, content)
        return path


def torch_device(name: str) -> torch.device:
    """Return the device of `device=NAME`; `auto` is a GPU when there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)  # overrides are checked before
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(f"device={name}, but torch sees no GPU here; use device=cpu or device=auto.")
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False  # torch's default: convolutions, alone, with ten bits of mantissa
    return device


class Status:
    """Prints "<target>: <work>" lines.

    Args:
        target: what they begin with.
        silent: print nothing.
        num_expected: units of work that an earlier run of the same target had; None when there was none.
    """

    def __init__(self, target: str, *, silent: bool = False, num_expected: int | None = None) -> None:
        self.target = target
        self.silent = silent
        self.num_expected = num_expected
        self.num_units = 0
        self._last_time = 0.0

    def say(self, work: str) -> None:
        """Print one line."""
        if not self.silent:
            tqdm.write(f"{self.target}: {work}", file=sys.stderr)  # keeps a progress bar whole
            sys.stderr.flush()
        self._last_time = time.monotonic()

    def unit(self, work: str, *, stored: bool = False, resumed: bool = False) -> bool:
        """Count a unit of work, and say so; of those found in the store, every two seconds. Return whether."""
        self.num_units += 1
        if stored and time.monotonic() - self._last_time < _SECONDS_BETWEEN_STORED_UNITS:
            return False
        expected = f" of about {self.num_expected}" if self.num_expected else ""
        state = ", stored" if stored else ", resumed" if resumed else ""
        self.say(f"{work} (unit {self.num_units}{expected}{state})")
        return True


def unit(
    name: str, *, version: int, about: str = "", resumes: bool = False
) -> Callable[[Callable[..., dict[str, Any]]], Callable[..., dict[str, Any]]]:
    """Make a function a unit of work: stored under its keyword arguments, and found by any run that has the same.

        @unit("rank1/descent", version=1, about="descent from {start}")
        def descent(run, objective, /, *, start, delta):
            return {"norms": ...}

        descent(run, objective, start=0.9, delta=0.1)["norms"]

    The keyword arguments are all that the result depends on (plain values: numbers, strings, lists, mappings,
    configs); `run.cfg.seed` is added unless there is a `seed`. The positional ones are what it is computed with,
    and must follow from the key: a model, its data. In the place of the run there may be a task, or what has
    a `run` and a `key`: that key is a part of the unit's.

    Args:
        name: kind of unit, shared by targets that do the same work.
        version: of the meaning of the key and of the code: raise it when a change must not reuse what was stored.
        about: for the terminal, with `{key}`s of the keyword arguments; the name unless given.
        resumes: the function gets `checkpoint`, a folder of its own, while it is computed, as `Run.unit` says.
    """

    def decorate(compute: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        @functools.wraps(compute)
        def stored(of: Any, *given: Any, **key: Any) -> dict[str, Any]:
            run = getattr(of, "run", of)
            key = key if run is of else of.key | key

            def computed(*folder: Any) -> dict[str, Any]:
                extra: Mapping[str, Any] = {"checkpoint": folder[0]} if folder else {}
                return compute(of, *given, **key, **extra)

            functools.update_wrapper(computed, compute)
            text = about.format(**key) if about else name
            return run.unit(name, key, computed, version=version, about=text, resumes=resumes)

        return stored

    return decorate
