"""One run of a target: its folder, its randomness, its stored units, its record."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from omegaconf import DictConfig
from tqdm.auto import tqdm

from curvlab.atomic_file import remove_stale, write_atomically
from curvlab.runs.canonical import digest, plain
from curvlab.runs.command import Command
from curvlab.runs.provenance import Cost, provenance, publishable_config, read_commit, torch_device
from curvlab.runs.store import Store, named_results
from curvlab.runs.tracking import RunIdentity, Tracker, start_tracker

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 110
_FLOAT_FORMAT = "%.6g"
_RECORD = "run.json"


@contextmanager
def start(cfg: DictConfig, *, paper: str, item: str, title: str) -> Iterator[Run]:
    """Open a run; at the end write run.json, or after an error only close the tracker and pass the error on.

    Args:
        cfg: from `runs.main` or `runs.load_config`.
        paper: the paper's key, e.g. "lissa".
        item: the table or figure, e.g. "fig1".
        title: one line for the report.
    """
    run = Run(cfg, paper=paper, item=item, title=title)
    try:
        yield run
        run.complete()
    except BaseException as error:
        run.tracker.finish(exit_code=1)
        if isinstance(error, KeyboardInterrupt):
            print(
                f"{run.target}: interrupted; finished units are kept, the same command resumes.", file=sys.stderr
            )
        raise
    run.tracker.finish()
    print(f"{run.target} ({cfg.preset}): {_relative(run.folder)}")


class Run:
    """What an experiment needs beside the library; made by `start`.

    Attributes:
        folder: <results.root>/<paper>/<item>/<preset>; "<preset>+<overrides>" when an override changes the
            numbers, so that a variation never overwrites the published result.
        device: torch device of `device=`.
        store: resumable store; `unit` is the way to use it.
        tracker: W&B run, or none.
    """

    def __init__(self, cfg: DictConfig, *, paper: str, item: str, title: str) -> None:
        self._start = time.perf_counter()
        self.cfg = cfg
        self.target = f"{paper}-{item}"
        self.title = title
        self.device = torch_device(cfg.device)
        name = Command.of(cfg).folder_name(cfg.preset)
        self.folder = Path(cfg.results.root) / paper / item / name
        self.store = Store(cfg.store.root, force=cfg.force)
        self._commit = read_commit(cfg.results.root)
        self._num_matvecs = 0
        self._data: dict[str, str] = {}
        self._notes: dict[str, Any] = {}
        self._tables: dict[str, pd.DataFrame] = {}
        self._figures: dict[str, Path] = {}
        identity = RunIdentity(
            name=f"{self.target} {name}",
            group=paper,
            job_type=self.target,
            tags=(cfg.preset, self._commit.short),
            config=publishable_config(cfg),
        )
        self.tracker: Tracker = start_tracker(cfg.tracker, identity)

    def generator(self, *names: str | int) -> torch.Generator:
        """Return a CPU generator that depends on `cfg.seed` and `names` only.

        Different names give independent streams; neither the order of calls nor a resumed run changes one.
        """
        seed = int(digest([self.cfg.seed, *names], where="names")[:15], 16)
        return torch.Generator().manual_seed(seed)

    def unit(self, name: str, config: Mapping[str, Any], compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return a unit of work from the store, or compute and store it.

        Args:
            name: kind of unit, shared by targets that do the same work, e.g. "lissa/scores".
            config: all that the result depends on. `cfg.seed` is added unless there is a `seed`.
            compute: returns tensors, numbers, strings and lists by name. Products counted with `add_matvecs`
                inside are counted again when the unit is found in the store.
        """

        def counted() -> dict[str, Any]:
            before = self._num_matvecs
            payload = named_results(compute(), name)
            added, self._num_matvecs = self._num_matvecs - before, before
            return {"payload": payload, "num_matvecs": added}

        entry = self.store.get_or_compute(name, {"seed": self.cfg.seed, **plain(config)}, counted)
        self.add_matvecs(entry["num_matvecs"])
        return entry["payload"]

    def progress(self, iterable: Iterable[Any] | int, description: str) -> tqdm:
        """Return a progress bar on stderr, over an iterable or, for `update`, up to a total.

        Silent with progress=false, and when stderr is no terminal.
        """
        total, items = (iterable, None) if isinstance(iterable, int) else (None, iterable)
        silent = not (self.cfg.progress and sys.stderr.isatty())
        return tqdm(items, desc=description, total=total, disable=silent, file=sys.stderr, leave=False)

    def add_matvecs(self, count: int) -> None:
        """Add matrix-vector products to the record."""
        self._num_matvecs += int(count)

    def record_data(self, name: str, checksum: str) -> None:
        """Add a data set and its checksum to the record."""
        self._data[name] = checksum

    def note(self, **entries: Any) -> None:
        """Add entries of the experiment's own to run.json, e.g. scale={...}, reduced=[...], seeds=[...]."""
        self._notes.update(plain(entries, where="note"))

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Send numbers to the tracker."""
        self.tracker.log(metrics, step)

    def save_table(self, table: pd.DataFrame, name: str = "table.csv") -> Path:
        """Write a CSV without index, floats to six digits: the same numbers give the same bytes.

        Timings do not belong here, they are in run.json.
        """
        text = table.map(_six_digits).to_csv(index=False, float_format=_FLOAT_FORMAT, lineterminator="\n")
        self._tables[Path(name).stem] = table
        return self._write(name, text.encode())

    def save_figure(self, figure: Figure, name: str = "figure.png") -> Path:
        """Write a PNG of 110 dpi without date and version: the same figure gives the same bytes."""
        if not name.endswith(".png"):
            raise ValueError(f"figures are saved as PNG, got {name!r}; name it {Path(name).stem}.png.")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})
        path = self._write(name, buffer.getvalue())
        self._figures[path.stem] = path
        return path

    def save_text(self, text: str, name: str) -> Path:
        """Write a text file."""
        return self._write(name, text.encode())

    def save_json(self, content: Any, name: str) -> Path:
        """Write numbers, strings, lists and mappings as indented JSON."""
        return self._write(name, (json.dumps(plain(content, where=name), indent=2) + "\n").encode())

    def complete(self) -> None:
        """Write run.json, last of all files, and hand the results to the tracker; `start` calls it."""
        cost = Cost(
            wall_seconds=time.perf_counter() - self._start,
            unit_seconds=self.store.unit_seconds,
            num_matvecs=self._num_matvecs,
            store_hits=self.store.hits,
            store_misses=self.store.misses,
        )
        record = provenance(
            self.cfg,
            target=self.target,
            title=self.title,
            commit=self._commit,
            cost=cost,
            data=self._data,
            notes=self._notes,
        )
        write_atomically(self.folder / _RECORD, (json.dumps(record, indent=2) + "\n").encode())
        for name, table in self._tables.items():
            self.tracker.log_table(name, table)
        for name, path in self._figures.items():
            self.tracker.log_figure(name, path)
        self.tracker.log_folder(f"{self.target}-{self.folder.name}", self.folder)

    def _write(self, name: str, content: bytes) -> Path:
        if not name or Path(name).name != name or name == _RECORD:
            raise ValueError(f"cannot save {name!r}: use a plain file name of the result folder, not {_RECORD}.")
        path = self.folder / name
        # run.json says that the folder is complete and which run made it: from here on it would be wrong.
        (self.folder / _RECORD).unlink(missing_ok=True)
        remove_stale(self.folder)
        write_atomically(path, content)
        return path


def _six_digits(value: Any) -> Any:
    """Format floats in columns of mixed type, which pandas' float_format leaves alone."""
    return float(_FLOAT_FORMAT % value) if isinstance(value, float) else value


def _relative(path: Path) -> str:
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
