"""Compute, judge, draw: each reads what the one before wrote, so that the last two can be had alone."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from curvlab.lab import tables
from curvlab.lab.claims import ClaimResult, load_claim_sheet, load_claims, save_claims
from curvlab.lab.claims.claims import VERDICTS
from curvlab.lab.names import name_tasks
from curvlab.lab.reporting.findings import picture_title
from curvlab.lab.reporting.plots import headline, write_png
from curvlab.lab.runs.over_ranks import is_first
from curvlab.lab.runs.record import RECORD, read_commit, read_record, sign, without_paths, write_record
from curvlab.lab.runs.run import Run, start
from curvlab.lab.targets.comparison import ROUNDING, compared, fallen, other_tables
from curvlab.lab.targets.settings import settings_beside_the_paper
from curvlab.lab.targets.stale import stale_parts
from curvlab.lab.targets.target import Target, published, result_folders


@dataclass(frozen=True)
class Computed(Mapping[str, pd.DataFrame]):
    """What a target's `compute` left in its result folder: all that judging and drawing may read.

    A mapping of tables by name: `computed["summary"]` is summary.csv.

    Attributes:
        folder: where the tables lie, and what images go with them.
        config: the resolved config, as run.json has it.
        given: tables that count instead of those of their names in the folder.
    """

    folder: Path
    config: dict[str, Any]
    given: Mapping[str, pd.DataFrame] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> Computed:
        """Read a result folder; a ValueError says what is missing."""
        return cls(folder, read_record(folder).get("config", {}))

    def __getitem__(self, name: str) -> pd.DataFrame:
        try:
            return self.given[name] if name in self.given else tables.read_table(self.folder, name)
        except FileNotFoundError:
            raise KeyError(f"{self.folder.as_posix()} has no {name}.csv, only: {', '.join(self)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*tables.names(self.folder), *self.given}))

    def __len__(self) -> int:
        return len(list(iter(self)))


def run_target(target: Target, cfg: DictConfig) -> Path:
    """Run a target as its config says; return the result folder."""
    with start(cfg, key=target.key, title=target.title) as run:
        computed = target.load("compute")(run, cfg)
        if not is_first():
            return run.folder
        with run.alone_in_folder():  # of two processes at once, each finishes what it began
            is_there = (run.folder / RECORD).is_file()
            changes = changes_of_published(target, run.folder, computed, cfg) if is_there else []
            if is_there and not changes and not cfg.force:
                run.status.say("equal to the published result: kept (force=true writes it anew)")
            else:
                if changes:
                    more = f"; and {len(changes) - 1} more" if len(changes) > 1 else ""
                    run.status.say(f"another result than the published one: {changes[0]}{more}")
                for name, table in computed.items():
                    run.save_table(table, name, digits=target.digits.get(name, 6))
                run.save_record(settings_beside_the_paper(target, cfg, computed))
                _name_stale_units(target, run)
            run.status.say("judging and drawing")
            judge_target(target, run.folder)
            draw_target(target, run.folder)
            run.hand_to_tracker(numbers_of(run.folder), curves_of(target, Computed.of(run.folder)))
    shown = run.folder.relative_to(Path.cwd()) if run.folder.is_relative_to(Path.cwd()) else run.folder
    print(f"{run.target} ({cfg.preset}): {shown}")
    return run.folder


def changes_of_published(
    target: Target, folder: Path, computed: Mapping[str, pd.DataFrame], cfg: DictConfig
) -> list[str]:
    """Return a line for each table's column, and the title or settings, that a result folder has otherwise.

    Numbers that are not equal may be so but for rounding, see `comparison`: then what the claims say decides. A
    benchmark is always another: what it measures is time.
    """
    if target.paper_key == "benchmarks":
        return ["it measures time"]
    before, record = Computed.of(folder), read_record(folder)
    written = {
        name: tables.as_written(table, name, digits=target.digits.get(name, 6)) for name, table in computed.items()
    }
    old, new = ({name: of[name] for name in compared(target, of)} for of in (before, written))
    if lines := list(other_tables(old, new)):
        lines = list(other_tables(old, new, rtol=ROUNDING))
        # Of other tables the old config may not be what judges them.
        lines = lines or [*fallen(target, load_claims(folder), judged(target, replace(before, given=written)))]
    now = {"title": target.title, "settings": _settings(target, cfg, before)}
    return lines + [f"other {name}" for name, value in now.items() if record[name] != value]


def _settings(target: Target, cfg: DictConfig, computed: Mapping[str, pd.DataFrame]) -> Any:
    """Return the settings beside the paper's as run.json has them."""
    return json.loads(json.dumps(without_paths(settings_beside_the_paper(target, cfg, computed))))


def _name_stale_units(target: Target, run: Run) -> None:
    """Say which reused units come from an earlier commit whose code has changed since."""
    record = read_record(run.folder)
    now = record["assembled"]["commit"]
    earlier = [unit for unit in record["units"] if unit["commit"] != now]
    if earlier and stale_parts(target, record | {"units": earlier}):
        names = ", ".join(sorted({unit["name"] for unit in earlier}))
        run.status.say(
            f"units of {names} were stored by an earlier commit, and code has changed since (see `make stale`): "
            "compute them again with force=true."
        )


def numbers_of(folder: Path) -> dict[str, float]:
    """Return what a tracker is told of a result: its claims, how many have each verdict, and what it cost."""
    record, results = read_record(folder), load_claims(folder)
    numbers = {f"verdicts/{verdict}": float(sum(r.verdict == verdict for r in results)) for verdict in VERDICTS}
    for result in results:  # nan of those out of reach, so that every preset has the same keys
        ends = (result.interval.low, result.interval.high) if result.interval else (math.nan, math.nan)
        measured = (math.nan if result.value is None else result.value, *ends)
        for name, number in zip(("value", "low", "high"), measured, strict=True):
            numbers[f"claim/{result.claim.id}/{name}"] = number
    return numbers | {
        "cost/cpu_seconds": float(record["unit_seconds"]),
        "cost/products": float(record["num_matvecs"]),
        "cost/peak_mib": record["peak_memory_bytes"] / 2**20,
    }


def curves_of(target: Target, computed: Computed) -> Iterator[pd.DataFrame]:
    """Yield the curves that a target declares, one table for each declaration.

    Its index, named `x/<X>`, is the place; its columns are `curve/<task>/<Y>`, and `curve/<task>/<Y>/<of>` for
    each value of the columns of `by`; each entry is the mean of the rows that have all these.
    """
    for table, ys, x, by in target.curves_parsed():
        rows = computed[table] if "task" in computed[table] else computed[table].assign(task="all")
        parts = []
        for y in ys:
            means = rows.pivot_table(index=x, columns=["task", *by], values=y)
            names = [column if isinstance(column, tuple) else (column,) for column in means]
            means.columns = pd.Index(["/".join(["curve", task, y, *_joined(of)]) for task, *of in names])
            parts.append(means)
        yield pd.concat(parts, axis="columns").rename_axis(index=f"x/{x}")


def _joined(of: Sequence[object]) -> list[str]:
    # W&B takes a star for a pattern, and refuses it within a name.
    return [" ".join(map(str, of)).replace("*", "⋆")] if of else []


def judge_target(target: Target, folder: Path) -> None:
    """Write claims.json from the tables of a result folder; where it changes, run.json says by which commit.

    What comes out as it was keeps the commit that signed it, unless that had changes and the tree now has none.
    The settings in run.json are told again, too: what the paper has beside ours is the target's to say.
    """
    computed = Computed.of(folder)
    results = judged(target, computed)
    record = read_record(folder)
    settings = _settings(target, OmegaConf.create(computed.config), computed) if computed.config else None
    if settings is not None and settings != record.get("settings"):
        write_record(folder, record | {"settings": settings})
    _sign_if_changed(folder, "judged", ["claims.json"], lambda: save_claims(folder, results, target.claims_file))


def judged(target: Target, computed: Computed) -> list[ClaimResult]:
    """Return the verdicts of all claims: by their `value` in the sheet, and what `judge` says of the rest."""
    if target.claims_file is None:
        return []
    sheet = load_claim_sheet(target.claims_file)
    results = sheet.judge_values(computed)
    if any("value" not in entry for entry in sheet.entries.values()):
        rest = target.load("judge")(computed, sheet)
        results = sheet.in_order([*results, *rest]) if results else rest
    sheet.check_all_judged(results)
    return sheet.asked(results, str(computed.config.get("preset", "")))


def draw_target(target: Target, folder: Path) -> None:
    """Draw the figures of a result folder from its tables; where one changes, run.json says by which commit."""
    figures = target.load("draw")(Computed.of(folder))
    for figure in figures.values():
        name_tasks(figure)
    finding = picture_title(target.key, load_claims(folder)) if (folder / "claims.json").is_file() else ""
    if finding and "figure.png" in figures:
        headline(figures["figure.png"], finding)

    drawn = {path.name for path in folder.glob("figure*.png")}

    def write() -> None:
        for name, figure in figures.items():
            write_png(figure, folder / name)
        for name in drawn - figures.keys():
            (folder / name).unlink()

    _sign_if_changed(folder, "drawn", sorted(drawn | figures.keys()), write)


def _sign_if_changed(folder: Path, act: str, names: Sequence[str], write: Callable[[], object]) -> None:
    def content() -> list[bytes | None]:
        return [(folder / name).read_bytes() if (folder / name).is_file() else None for name in names]

    before, record = content(), read_record(folder)
    write_record(folder, record | {act: None})  # a kill while writing leaves it unsigned, which the report names
    write()
    signed, now = record.get(act), read_commit()
    renewed = now.clean is True and (signed or {}).get("clean") is False
    if content() == before and signed and not renewed:
        write_record(folder, record)
    else:
        sign(folder, act, now)


def _again(act: Callable[[Target, Path], None], name: str, names: Sequence[str]) -> int:
    """Judge or draw results of targets, or all published ones, from their tables; return the exit status."""
    status = 0
    for target, folder in result_folders(names) if names else published():
        try:
            act(target, folder)
        # Damaged, or its target has changed since.
        except (ValueError, KeyError, AttributeError, OSError) as error:
            print(f"{folder.as_posix()}: cannot {name} it: {error}", file=sys.stderr)
            status = 1
        else:
            print(folder.as_posix())
    return status


judge_again = partial(_again, judge_target, "judge")
draw_again = partial(_again, draw_target, "draw")
