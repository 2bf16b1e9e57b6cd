"""What a result folder <results>/<paper>/<item>/<preset>/ holds, read so that damage is named, not fatal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from curvlab.lab import tables
from curvlab.lab.reporting.claims import ClaimResult
from curvlab.lab.reporting.claims_file import load_claims, rerun_command
from curvlab.lab.reporting.run_record import RunRecord, parse_record, read_record

PAPERS = ("lissa", "pbrf", "ginger", "ngd", "rank1")
PRESETS = ("embedded", "laptop", "paper")
_MARKS = ("claims.json", "run.json", "table.csv", "table.csv.gz")  # any of these makes a folder a result


@dataclass(frozen=True)
class ResultFolder:
    """One target at one preset, as found on disk.

    Args:
        path: the folder.
        label: "results/<paper>/<item>/<preset>", what a page may show: no path of the machine.
        claims: of claims.json; empty when it is damaged.
        record: of run.json; empty when it is damaged. Any key may be missing.
        table: of summary.csv, or else of table.csv; None when it is damaged.
        table_name: the file that `table` was read from.
        figures: figure.png and figure_*.png, in that order.
        problems: a sentence for every file that is missing or damaged.
    """

    path: Path
    label: str
    claims: tuple[ClaimResult, ...]
    record: RunRecord = field(repr=False)
    table: pd.DataFrame | None = field(repr=False)
    table_name: str
    figures: tuple[Path, ...]
    problems: tuple[str, ...]

    @property
    def paper(self) -> str:
        """The paper's key."""
        return self.path.parts[-3]

    @property
    def item(self) -> str:
        """The table or figure, e.g. "fig1"."""
        return self.path.parts[-2]

    @property
    def preset(self) -> str:
        """The preset."""
        return self.path.parts[-1]

    @property
    def key(self) -> str:
        """The target's key, "lissa/fig1"."""
        return f"{self.paper}/{self.item}"

    @property
    def anchor(self) -> str:
        """The folder's place on its paper's page, "lissa-fig1-laptop"."""
        return f"{self.paper}-{self.item}-{self.preset}"

    @property
    def target(self) -> str:
        """The make target: as recorded, or else from the folder's name."""
        return self.record.text("target") or f"{self.paper}-{self.item}"

    @property
    def command(self) -> str:
        """The command that makes the folder: as recorded, or else the make line."""
        return self.record.text("command") or rerun_command(self.path)


def read_results(results: str | Path) -> list[ResultFolder]:
    """Return every result folder under `results`, in the order of the report.

    Left out: `smoke`, which shows nothing but that the code runs, and a user's variations, whose folder
    names carry the overrides after a "+".
    """
    results = Path(results).resolve()
    if not results.is_dir():
        raise FileNotFoundError(f"no folder {results.name!r} here; make a target first, e.g. `make lissa-fig1`.")
    return [_read(folder, results) for folder in sorted(_candidates(results), key=_order)]


def _candidates(results: Path) -> Iterator[Path]:
    for folder in results.glob("*/*/*"):
        hidden = any(part.startswith((".", "_")) for part in folder.relative_to(results).parts)
        left_out = hidden or folder.name == "smoke" or "+" in folder.name
        if not left_out and any((folder / name).is_file() for name in _MARKS):
            yield folder


def _order(folder: Path) -> tuple[Any, ...]:
    paper, item, preset = folder.parts[-3:]
    name, number = re.fullmatch(r"(.*?)(\d*)", item).groups()  # type: ignore[union-attr]  # always matches
    return (
        PAPERS.index(paper) if paper in PAPERS else len(PAPERS),
        paper,
        ("tab", "fig").index(name) if name in ("tab", "fig") else 2,
        name,
        int(number or 0),
        PRESETS.index(preset) if preset in PRESETS else len(PRESETS),
        preset,
    )


def _read(folder: Path, results: Path) -> ResultFolder:
    label = f"{results.name}/{folder.relative_to(results).as_posix()}"
    problems: list[str] = []
    try:
        claims = load_claims(folder)
    except ValueError as error:
        claims = []
        problems.append(str(error).replace(folder.as_posix(), label))
    record = parse_record({})
    try:
        record = read_record(folder / "run.json")
    except (OSError, ValueError) as error:
        problems.append(_problem("run.json", error, folder, label))
    problems += [f"{label}/run.json is damaged: {problem}." for problem in record.problems]
    if record.content.get("assembled") and "commits not recorded" not in record.units:
        undone = [step for step in ("judged", "drawn") if step not in record.content]
        problems += [f"{label} was not {step}: run `{rerun_command(folder)}` again." for step in undone]
    shown = "summary" if tables.table_path(folder, "summary").is_file() else "table"
    table_name = tables.table_path(folder, shown).name
    table = None
    try:
        table = tables.read_table(folder, shown)
    except (OSError, ValueError) as error:  # pandas' parser errors are ValueErrors
        problems.append(_problem(table_name, error, folder, label))
    figures = [*folder.glob("figure.png"), *sorted(folder.glob("figure_*.png"))]
    return ResultFolder(folder, label, tuple(claims), record, table, table_name, tuple(figures), tuple(problems))


def _problem(name: str, error: Exception, folder: Path, label: str) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{label}/{name} is missing: run `{rerun_command(folder)}` again."
    return f"{label}/{name} is damaged ({type(error).__name__}): run `{rerun_command(folder)}` again."
