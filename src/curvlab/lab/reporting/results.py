"""What a result folder <results>/<paper>/<item>/<preset>/ holds, read so that damage is named, not fatal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from curvlab.lab import tables
from curvlab.lab.claims.claim_sheet import load_claims, rerun_command
from curvlab.lab.claims.claims import NOT_ASKED, OUT_OF_REACH, VERDICTS, ClaimResult
from curvlab.lab.runs.record import UNKNOWN, read_record
from curvlab.lab.targets.target import PRESETS, report_order

# Any of these makes a folder a result.
_MARKS = ("claims.json", "run.json", *(f"table{suffix}" for suffix in tables.SUFFIXES))
_WRONG = (ValueError, KeyError, TypeError, AttributeError)  # what reading a damaged file raises


@dataclass(frozen=True)
class ResultFolder:
    """One target at one preset, as found on disk.

    Args:
        path: the folder.
        claims: of claims.json; empty when it is damaged.
        record: of run.json; empty when it is damaged. Any key may be missing.
        computed_by: the commits that computed its units, in words.
        problems: a sentence for every file that is missing or damaged.
    """

    path: Path
    claims: tuple[ClaimResult, ...]
    record: Mapping[str, Any] = field(repr=False)
    computed_by: str
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
    def command(self) -> str:
        """The command that makes the folder: as recorded, or else the make line."""
        return str(self.record.get("command") or rerun_command(self.path))

    @property
    def target(self) -> str:
        """The make target: as recorded, or else from the folder's name."""
        return str(self.record.get("target") or f"{self.paper}-{self.item}")

    @property
    def pictures(self) -> list[str]:
        """The names of figure.png and figure_*.png, in that order."""
        return [path.name for path in (*self.path.glob("figure.png"), *sorted(self.path.glob("figure_*.png")))]

    @property
    def tables(self) -> list[str]:
        """The names of its CSV files, the main one first."""
        found = [tables.table_path(self.path, name).name for name in tables.names(self.path)]
        return sorted(found, key=lambda name: (not name.startswith("table."), name))


def read_results(results: str | Path) -> list[ResultFolder]:
    """Return every result folder under `results`, in the order of the report.

    Left out: `smoke`, which shows nothing but that the code runs, and a user's variations, whose folder
    names carry the overrides after a "+".
    """
    results = Path(results).resolve()
    if not results.is_dir():
        raise FileNotFoundError(f"no folder {results.name!r} here; make a target first, e.g. `make lissa-fig1`.")
    return [_read(folder, results) for folder in sorted(_candidates(results), key=_order)]


def count_verdicts(results: Iterable[ClaimResult]) -> dict[str, int]:
    """Return how many claims have each verdict, in their fixed order; none with 0."""
    counts = Counter(result.verdict for result in results)
    return {verdict: counts[verdict] for verdict in VERDICTS if counts[verdict]}


def largest_judged(folders: Iterable[ResultFolder]) -> list[ResultFolder]:
    """Return of each target the largest preset that decided some claim, or else the largest there is."""
    best: dict[str, ResultFolder] = {}
    for folder in folders:  # presets grow
        if folder.key not in best or _decides(folder) or not _decides(best[folder.key]):
            best[folder.key] = folder
    return list(best.values())


def _decides(folder: ResultFolder) -> bool:
    return any(claim.verdict not in (OUT_OF_REACH, NOT_ASKED) for claim in folder.claims)


def _candidates(results: Path) -> Iterator[Path]:
    for folder in results.glob("*/*/*"):
        hidden = any(part.startswith((".", "_")) for part in folder.relative_to(results).parts)
        left_out = hidden or folder.name == "smoke" or "+" in folder.name
        if not left_out and any((folder / name).is_file() for name in _MARKS):
            yield folder


def _order(folder: Path) -> tuple[Any, ...]:
    paper, item, preset = folder.parts[-3:]
    place = PRESETS.index(preset) if preset in PRESETS else len(PRESETS)
    return (*report_order(f"{paper}/{item}"), place, preset)


def _read(folder: Path, results: Path) -> ResultFolder:
    label = f"{results.name}/{folder.relative_to(results).as_posix()}"  # no path of the machine
    problems: list[str] = []
    claims: list[ClaimResult] = []
    record: dict[str, Any] = {}
    computed_by = "an unknown commit"
    try:
        claims = load_claims(folder)
    except ValueError as error:
        problems.append(str(error).replace(folder.as_posix(), label))
    try:
        record = read_record(folder)
        computed_by = _computed_by(record)
        _ = [str(setting["name"]) for setting in record.get("settings") or ()]  # what a page shows
    except _WRONG as error:
        record = {}
        missing = "is missing" if not (folder / "run.json").is_file() else f"is damaged ({type(error).__name__})"
        problems.append(f"{label}/run.json {missing}: run `{rerun_command(folder)}` again.")
    undone = [step for step in ("judged", "drawn") if record and not record.get(step)]
    problems += [f"{label} was not {step}: run `{rerun_command(folder)}` again." for step in undone]
    if not tables.names(folder):
        problems.append(f"{label} has no table: run `{rerun_command(folder)}` again.")
    return ResultFolder(folder, tuple(claims), record, computed_by, tuple(problems))


def _computed_by(record: Mapping[str, Any]) -> str:
    """Return e.g. "41 units from 3f2a1b9c, 3 from a0b1c2d3 with changes"; without units who made the tables."""
    counts: Counter[str] = Counter()
    for unit in record["units"]:
        counts[_commit(unit)] += int(unit["count"])
    order = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    first = [f"{count} unit{'' if count == 1 else 's'} from {commit}" for commit, count in order[:1]]
    return ", ".join(first + [f"{count} from {commit}" for commit, count in order[1:]]) or _commit(
        record["assembled"]
    )


def _commit(entry: Mapping[str, Any]) -> str:
    """Return "3f2a1b9c", "3f2a1b9c with changes", or "3f2a1b9c, changes unknown"."""
    if entry["commit"] == UNKNOWN:  # what runs write without git
        return "an unknown commit"
    remarks: dict[Any, str] = {True: "", False: " with changes"}
    return f"{entry['commit'][:8]}{remarks.get(entry.get('clean'), ', changes unknown')}"
