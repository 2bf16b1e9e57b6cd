"""`make help`: every target, from its declaration, with the time that its published results took."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from curvlab.lab.targets.target import PRESETS, ROOT, Target, all_targets, named_targets, paper_titles

MINUTES = ROOT / "results" / "minutes.json"  # wall time of `make figures` and `make test`, as `time` printed it
_UNITS = ("name", "commit", "count", "seconds")
_SECONDS_TO_DRAW = 4.0  # and to start, to judge and to write, of one target


def print_help(names: Sequence[str] = ()) -> int:
    """Print the list, or what there is about the targets that are named."""
    for target in named_targets(names):
        print_target_help(target)
    if names:
        return 0
    targets = all_targets().values()
    for key, about in paper_titles().items():
        own = [target for target in targets if target.paper_key == key]
        if not own:
            continue
        print(f"\n{about}")
        for target in own:
            times = ", ".join(f"{preset} {text}" for preset in PRESETS if (text := measured_time(target, preset)))
            print(f"  {target.make_name:<24} {target.title}{f' ({times})' if times else ''}")
    times = json.loads(MINUTES.read_text(encoding="utf-8"))
    whole = f"{times['minutes']['figures']['real']:.0f} minutes, measured on {times['cores']} cores"
    print("\nTimes are CPU time of one thread as measured; targets share units of work, which are computed once:")
    print(f"`make figures` took {whole} that nothing else used.")
    return 0


def print_target_help(target: Target) -> None:
    """Print what a target computes, its presets with their measured times, and its keys with what they mean."""
    print(f"{target.description}\n")
    print("Presets (preset=NAME):")
    for preset in ("smoke", *PRESETS):
        about = [line for line in _config_text(target, preset).splitlines() if line.startswith("# ")]
        text = " ".join(line.removeprefix("# ") for line in about if not line.startswith("# @"))
        time = measured_time(target, preset)
        text = text or ("(seconds) what the tests run" if preset == "smoke" else "")
        print(f"  {preset:<9} {f'({time}) ' if time else ''}{text}".rstrip())
    keys = _config_text(target, "").split("\n\n", 1)[-1].rstrip()
    print(f"\nKeys (KEY=VALUE; those of the preset come on top, `--cfg job` shows all):\n\n{keys}\n")
    print(
        "For every task, or with task=NAME for one: data=NAME, model=NAME, data.KEY=, model.KEY=, training.KEY=."
    )
    print("plan=true prints parameters, products, peak memory, a time, and what is stored; it computes nothing.")
    print("-m sweeps over values separated by commas; --hydra-help is about Hydra's own options.")


def _config_text(target: Target, preset: str) -> str:
    """Return the config of a preset, or of all; "" where a preset changes nothing."""
    path = ROOT / "conf" / (f"{target.key}/{preset}.yaml" if preset else f"{target.key}.yaml")
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def measured_time(target: Target, preset: str) -> str:
    """Return the CPU time of the published result's units, e.g. "48 s"; "" where there is none."""
    seconds = recorded_seconds(target, preset)
    if seconds is None:
        return ""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def expected_seconds(targets: Iterable[Target], preset: str) -> float:
    """Return the CPU seconds of targets as published, at most: most units that several of them use count once.

    run.json has kinds of units, not single ones: a kind of the same seconds and commit is the same units. Where
    another target uses a part of a kind, this part counts twice; and a busy machine takes more CPU time.
    """
    records = [record for target in targets if (record := published_record(target, preset))]
    kinds = {tuple(unit[key] for key in _UNITS) for record in records for unit in record["units"]}
    return _SECONDS_TO_DRAW * len(records) + sum(float(kind[-1]) for kind in kinds)


def recorded_seconds(target: Target, preset: str) -> float | None:
    """Return the same in seconds: CPU time of its units, not the wall time, in which a busy machine waits."""
    return published_record(target, preset).get("unit_seconds")


def published_record(target: Target, preset: str) -> dict[str, Any]:
    """Return run.json of a published result; empty where there is none, or a damaged one."""
    try:
        content = (ROOT / "results" / target.key / preset / "run.json").read_text(encoding="utf-8")
        return dict(json.loads(content))
    except (OSError, ValueError, TypeError):
        return {}


@contextmanager
def until_reader_leaves() -> Iterator[None]:
    """End quietly what is printed inside when the reader of standard output has gone."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # What is still in the buffer would raise once more when the interpreter closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
