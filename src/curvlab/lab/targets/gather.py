"""The variations of a target, put together: tables below each other, claims over seeds, and a picture."""

from __future__ import annotations

import re
import shlex
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from curvlab.lab.targets.target import named_targets

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

SWEEP = "sweep"  # the folder beside a preset's own tables: committed with them, and no variation itself
SEEDS = ("seed", "seeds", "model_seeds")  # overrides by which repetitions of one setting differ
CLAIMS, PICTURE = "claims", "figure.png"
_MOST_PANELS = 12


def gather(names: Sequence[str], root: str | Path = "results") -> int:
    """Write tables, claims and a picture, <preset>/sweep/, of targets' finished variations <preset>+<overrides>.

    Each row of <table>.csv says which variation it is from, at which commit, and with which overrides; where a
    table has a column of an override's name already, it is "override NAME". Variations that differ by their seed
    alone are repetitions: claims.csv has the mean of each claim's value over them, its t interval and the verdict
    that follows; a single one keeps its own. Print the folders and what holds; return the exit status.

    Args:
        names: of targets or of groups of them; as the sweep had them preset=PRESET, of which alone variations are
            gathered, and results.root=FOLDER. Other overrides are refused, since the folders say what was swept.
        root: of the results.
    """
    typed = dict(name.lstrip("+").partition("=")[::2] for name in names if "=" in name)
    names = [name for name in names if "=" not in name and name not in ("-m", "--multirun")]
    kept = [f"{key}={value}" for key, value in typed.items() if key in ("preset", "results.root")]
    only, root = typed.pop("preset", ""), typed.pop("results.root", root)
    if typed:
        given, plain = " ".join(f"{key}={value}" for key, value in typed.items()), " ".join(names) or "TARGET"
        print(
            f"error: gather takes preset= and results.root=, not {given}: it puts together whatever was swept. "
            f"Write: gather {' '.join([plain, *kept])}",
            file=sys.stderr,
        )
        return 2
    if not names:
        print("name the target whose variations are gathered: gather rank1-prop", file=sys.stderr)
        return 1
    found = 0
    for target in named_targets(names):
        folders: dict[str, list[Path]] = {}
        for folder in sorted((Path(root) / target.key).glob("*+*")):
            preset = folder.name.partition("+")[0]
            if only not in ("", preset):
                continue
            if (folder / "run.json").is_file():
                folders.setdefault(preset, []).append(folder)
            else:
                print(f"{folder.as_posix()}: left out, its run has not finished (no run.json)", file=sys.stderr)
        for preset, variations in folders.items():
            gathered = Path(root) / target.key / preset / SWEEP
            verdicts = _write(gathered, variations, f"{target.title} (preset {preset})")
            told = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
            if "not asked here" in verdicts:
                told += f" (why: {CLAIMS}.csv)"
            print(f"{gathered.as_posix()}: {len(variations)} variations{f'; claims: {told}' if told else ''}")
            found += 1
    if not found:
        of = f" at preset {only}" if only else ""
        print(f"no finished variation of {', '.join(names)}{of} under {Path(root).as_posix()}", file=sys.stderr)
    return 0 if found else 1


def _write(gathered: Path, variations: Sequence[Path], title: str) -> Counter[str]:
    import pandas as pd  # after the names: they need no package

    from curvlab.files import write_atomically
    from curvlab.lab import tables
    from curvlab.lab.names import name_tasks
    from curvlab.lab.reporting.plots import write_png
    from curvlab.lab.runs.record import read_record

    parts: dict[str, list[pd.DataFrame]] = {}
    settings: dict[Path, dict[str, str]] = {}
    for folder in variations:
        record = read_record(folder)
        settings[folder] = _overrides(record)
        about = {"variation": folder.name, "commit": str(record["assembled"]["commit"])[:8]} | settings[folder]
        for name in tables.names(folder):
            table = tables.read_table(folder, name, dtype=str, keep_default_na=False)  # digits stay as they are
            for place, (key, value) in enumerate(about.items()):
                table.insert(place, f"override {key}" if key in table else key, value)
            parts.setdefault(name, []).append(table)
    claims = pd.DataFrame(_judged_over_seeds(settings))
    if len(claims):
        parts[CLAIMS] = [claims]
    for name, own in parts.items():
        file, content = tables.packed(pd.concat(own).to_csv(index=False, lineterminator="\n"), name)
        write_atomically(gathered / file, content)
    if len(claims) and claims.value.notna().any():
        picture = drawn(claims[claims.value.notna()], title)
        name_tasks(picture)
        write_png(picture, gathered / PICTURE)
    return Counter(claims.verdict if len(claims) else [])


def _judged_over_seeds(settings: dict[Path, dict[str, str]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each claim of each setting: value and interval over its repetitions, and the verdict."""
    from curvlab.lab.claims.claim_sheet import FILE_NAME, load_claims
    from curvlab.lab.claims.claims import ClaimResult, judge, out_of_reach
    from curvlab.lab.claims.intervals import t_interval

    groups: dict[str, dict[str, list[ClaimResult]]] = {}
    for folder, overrides in settings.items():
        setting = " ".join(f"{key}={value}" for key, value in overrides.items() if key not in SEEDS)
        own = groups.setdefault(setting, {})
        for each in load_claims(folder) if (folder / FILE_NAME).is_file() else []:
            own.setdefault(each.claim.id, []).append(each)
    for setting, claims in groups.items():
        for name, results in claims.items():
            values = [each.value for each in results if each.value is not None]
            result = results[0]
            if len(values) > 1:
                mean, why = sum(values) / len(values), "Over the repetitions of a sweep."
                result = judge(result.claim, mean, t_interval(values), if_not_reproduced=why)
            elif not values:
                result = out_of_reach(result.claim, result.explanation)
            yield {
                "setting": setting,
                "claim": name,
                "statement": result.claim.statement,
                "verdict": result.verdict,
                "explanation": result.explanation,
                "value": result.value,
                "low": result.interval and result.interval.low,
                "high": result.interval and result.interval.high,
                "interval": result.interval and result.interval.kind,
                "runs": len(results),
                "at_least": result.claim.criterion.at_least,
                "at_most": result.claim.criterion.at_most,
            }


def drawn(claims: pd.DataFrame, title: str) -> Figure:
    """Return one panel a claim: mean and interval of each setting, and dashed the bounds of the criterion."""
    from curvlab.lab import panels
    from curvlab.lab.reporting.plots import figure, headline

    claims = claims.assign(setting=[as_read(setting) for setting in claims.setting])
    names = list(dict.fromkeys(claims.claim))
    shown, across = names[:_MOST_PANELS], min(2, len(names))
    size = (8.0 / across, 1.5 + 0.2 * claims.setting.nunique())
    drawing, grid = figure(-(-len(shown) // across), across, panel_size=size)
    for axes, name in zip(grid.flat, shown, strict=False):
        own = claims[claims.claim == name]
        label = "value of the claim, interval"
        panels.forest(axes, own, name="setting", value="value", low="low", high="high", label=label)
        for bound in own[["at_least", "at_most"]].iloc[0].dropna():
            panels.rule(axes, x=bound, color="black", label="bound that the claim needs")
        statement = textwrap.shorten(str(own.statement.iloc[0]), 150, placeholder=" …")
        axes.set_title(textwrap.fill(statement, 50), fontsize=8.5, loc="left")
    for axes in list(grid.flat)[len(shown) :]:
        axes.axis("off")
    most = int(claims.runs.max())
    note = f"each row a setting{f', mean over up to {most} seeds' if most > 1 else ''}"
    if len(names) > len(shown):
        note += f"; {len(shown)} of {len(names)} claims, all in {CLAIMS}.csv"
    panels.legend(drawing, title=note)
    headline(drawing, title)
    return drawing


def as_read(setting: str) -> str:
    """Return a setting for readers: "lissa.num_steps=5 lr=0.1" is "num steps 5, lr 0.1"."""
    pairs = [pair.partition("=") for pair in re.split(r" (?=[\w.@/~+-]+=)", setting) if pair]
    last = [key.rpartition(".")[2] for key, _, _ in pairs]
    keys = [end if last.count(end) == 1 else key for end, (key, _, _) in zip(last, pairs, strict=True)]
    read = (f"{re.sub('[_.]', ' ', key)} {value}" for key, (_, _, value) in zip(keys, pairs, strict=True))
    return ", ".join(read) or "as the preset"


def _overrides(record: dict[str, Any]) -> dict[str, str]:
    """Return the overrides that make the variation, by their keys, as they were typed."""
    words = shlex.split(record["python_command"])  # of which those after `python -m experiments run TARGET`
    pairs = [word.lstrip("+").partition("=")[::2] for word in words if "=" in word]
    return {key: value for key, value in pairs if key != "preset"}
