"""`make verify`: compute results again into a temporary folder, and say what differs from the committed ones.

Compared are all tables and the verdicts of all claims, as `comparison` says. And every result of the targets, of
all presets, is judged again from its tables: its claims.json must come out as it is.

Of a large preset the cheapest part of each target is computed again: all of it where that took three minutes, else
one task, and one seed (`cheapest_part`). Every row that says what it is of must then be among the committed rows,
and no verdict is compared. `verify lissa-tab1 preset=laptop task=mlp_mnist` chooses a part, `whole=true` takes
all.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from curvlab.lab import tables
from curvlab.lab.claims.claim_sheet import load_claims, plain_result
from curvlab.lab.runs.configuration import preset_of
from curvlab.lab.runs.record import read_record
from curvlab.lab.targets.command import load_config, run_side_by_side
from curvlab.lab.targets.comparison import RTOL, compared, differences
from curvlab.lab.targets.help import recorded_seconds
from curvlab.lab.targets.settings import plain_task_settings
from curvlab.lab.targets.stale import stale_parts
from curvlab.lab.targets.target import ROOT, Found, Target, named_targets, published

CHEAP_SECONDS = 180.0  # up to which a result of a large preset is computed again as a whole


def verify(arguments: Sequence[str], results: Path = ROOT / "results") -> int:
    """Print one line for each difference; return 1 when there is one, or when a target failed.

    Args:
        arguments: names of targets or of groups, all figures when there are none; overrides; and `seconds=120`
            for those alone whose code has changed since they were published, the cheapest first, as many as took
            120 s in all; `rtol=0.1` for another tolerance, as another processor rounds otherwise; `whole=true`.
        results: the committed ones.
    """
    names = [argument for argument in arguments if "=" not in argument]
    limits = [float(argument.partition("=")[2]) for argument in arguments if argument.startswith("seconds=")]
    rtol = next((float(word.partition("=")[2]) for word in arguments if word.startswith("rtol=")), RTOL)
    own = ("seconds=", "rtol=", "whole=")
    overrides = [word for word in arguments if word not in names and not word.startswith(own)]
    in_parts = "whole=true" not in arguments and all(word.startswith("preset=") for word in overrides)
    preset = preset_of(overrides)
    chosen = {target.key for target in named_targets(names or ["figures", "bench"])}
    count = 0
    for target, folder in published(results):
        if target.key in chosen:
            for line in judged_otherwise(target, folder):
                print(f"{target.make_name} ({folder.name}): {line}")
                count += 1
    committed = [(target, results / target.key / preset) for target in named_targets(names or ["figures"])]
    committed = [(target, folder) for target, folder in committed if (folder / "run.json").is_file()]
    if limits:
        committed = _cheapest_stale(committed, preset, min(limits))
    parts: dict[str, Part] = {}
    if in_parts and preset not in ("smoke", "embedded"):
        parts = _parts(committed, preset)
        committed = [(target, folder) for target, folder in committed if target.key in parts]
    if not committed:
        print(f"nothing to compute: no {preset} result {'of changed code ' if limits else ''}among these targets")
        return 1 if count else 0
    lines, status = _computed_again(committed, overrides, parts, rtol)
    count += lines
    print(f"{len(committed)} targets ({preset}): {count or 'no'} difference{'' if count == 1 else 's'}")
    return 1 if count or status else 0


def _computed_again(
    committed: Found, overrides: Sequence[str], parts: Mapping[str, Part], rtol: float
) -> tuple[int, int]:
    """Print what differs; return how many lines, and the exit status of the runs."""
    count = 0
    with tempfile.TemporaryDirectory() as temporary:
        folders = [f"results.root={temporary}/results", f"store.root={temporary}/store", "tracker=none"]
        own = {key: part.overrides for key, part in parts.items()}
        status = run_side_by_side([target for target, _ in committed], [*overrides, *folders], own)
        for target, folder in committed:
            by = parts[target.key].columns if target.key in parts else ("task",)
            for again in (Path(temporary) / "results" / target.key).glob("*"):  # none when it failed
                for line in differences(target, folder, again, rtol=rtol, by=by):
                    print(f"{target.make_name}: {line}")
                    count += 1
    return count, status


def _parts(committed: Found, preset: str) -> dict[str, Part]:
    """Return the cheapest part of each target; print them, and why some have none."""
    parts: dict[str, Part] = {}
    for target, folder in committed:
        part = cheapest_part(target, preset, folder)
        if isinstance(part, str):
            print(f"{target.make_name}: left out, {part}")
        else:
            parts[target.key] = part
            print(f"{target.make_name}: {' '.join(part.overrides) or 'all of it'}")
    return parts


def judged_otherwise(target: Target, folder: Path) -> Iterator[str]:
    """Yield a line for each claim of a result folder that its tables, judged again, give another entry."""
    from curvlab.lab.targets.execution import Computed, judged

    results = (load_claims(folder), judged(target, Computed.of(folder)))
    old, new = ({result.claim.id: plain_result(result) for result in of} for of in results)
    for claim in sorted(old.keys() | new.keys()):
        before, after = old.get(claim, {}), new.get(claim, {})
        if changed := [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]:
            yield f"judged again, claim {claim} has another {', '.join(sorted(changed))}: `make judge` writes it"


@dataclass(frozen=True)
class Part:
    """A part of a target that can be found again in its tables.

    Args:
        overrides: that compute it alone; none for all of it.
        columns: that a table needs, so that its rows say whether they are of it.
    """

    overrides: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()


def cheapest_part(target: Target, preset: str, folder: Path) -> Part | str:
    """Return the cheapest part of a published result that can be computed alone, or why there is none.

    The seconds of a result are those of its units in run.json; they are of kinds of units, not of tasks, so that
    tasks are compared by their networks' operations.
    """
    if sum(float(unit["seconds"]) for unit in read_record(folder)["units"]) <= CHEAP_SECONDS:
        return Part()
    cfg = load_config(target, [f"preset={preset}"])
    tasks = plain_task_settings(cfg)
    overrides: dict[str, str] = {}
    if len(tasks) > 1:
        overrides["task"] = min(tasks, key=lambda name: work(tasks[name]))
    for key, column in (("seeds", "seed"), ("model_seeds", "model_seed")):
        if len(cfg.get(key) or ()) > 1:
            overrides[column] = f"[{cfg[key][0]}]"
    columns = {name: list(tables.read_table(folder, name, nrows=0)) for name in tables.names(folder)}
    told = [set(columns[name]) for name in compared(target, columns)]
    for chosen in (tuple(overrides), ("task",), ("seed",), ("model_seed",)):
        if chosen and set(chosen) <= set(overrides) and any(set(chosen) <= own for own in told):
            keys = {"seed": "seeds", "model_seed": "model_seeds"}
            return Part(tuple(f"{keys.get(name, name)}={overrides[name]}" for name in chosen), chosen)
    return "no table of it says which task or seed its rows are of; `whole=true` computes all of it"


def work(settings: Mapping[str, Any]) -> float:
    """Return the operations of a task's network on its training set, to compare tasks with; nothing is read.

    Where that cannot be counted it is infinite.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from curvlab.lab.models.unread import network, published_images, shapes

    try:
        with torch.device("meta"), FlopCounterMode(display=False) as counted:
            one = torch.zeros(1, *shapes(settings)[0], dtype=torch.long if "tokenizer" in settings else None)
            network(settings)(one)
    except Exception:  # whatever a loader finds missing
        return math.inf
    # A data set that states no size is all of the published images, or small.
    num_train = settings["data"].get("num_train") or (60_000 if published_images(settings["data"]) else 1_000)
    return counted.get_total_flops() * float(num_train)


def _cheapest_stale(committed: Found, preset: str, seconds: float) -> Found:
    chosen: Found = []
    for target, folder in sorted(committed, key=lambda found: recorded_seconds(found[0], preset) or 0.0):
        if stale_parts(target, read_record(folder)):
            seconds -= recorded_seconds(target, preset) or 0.0
            if seconds < 0:
                break
            chosen.append((target, folder))
    return chosen
