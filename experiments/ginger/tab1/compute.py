"""Table 1, compute: tune every racer, run it at its ranks with all seeds, and tabulate."""

from __future__ import annotations

from typing import Any

import pandas as pd
from omegaconf import DictConfig

from curvlab.lab import Run, task_settings
from experiments.ginger.printed import table_1
from experiments.ginger.race.cost import cost_of_a_step
from experiments.ginger.race.final import final_run, summarised
from experiments.ginger.race.optimizers import why_unavailable
from experiments.ginger.race.racers import load_racers
from experiments.ginger.race.task import load_race_task
from experiments.ginger.race.tuning import Tuned, at_edge, tune

CONSTANT = ("label", "kind", "lr", "at_edge", "damping", "clip", "flops", "memory", "gradients")  # of all seeds


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, one row for each final run; `summary`, over seeds; `tuning`; `curves`; `absent`; `paper`.

    Args:
        run: seeds, store, device.
        cfg: `tasks`, and for all of them or for one: `seeds`, `num_epochs`, what `load_race_task`, `load_racers`
            and `tune` take.
    """
    tables: dict[str, list[pd.DataFrame]] = {"table": [], "tuning": [], "curves": [], "absent": []}
    for name, settings in task_settings(cfg).items():
        for kind, frames in _race(run, name, settings).items():
            tables[kind] += frames
    found = {kind: pd.concat(frames, ignore_index=True) for kind, frames in tables.items() if frames}
    found.setdefault("absent", pd.DataFrame(columns=["task", "racer", "label", "reason"]))
    run.note(seeds=list(cfg.seeds))
    summary = summarised(found["table"], by=("task", "racer", "rank"), constant=CONSTANT)
    return {"table": found.pop("table"), "summary": summary, **found, "paper": table_1()}


def _race(run: Run, name: str, settings: DictConfig) -> dict[str, list[pd.DataFrame]]:
    task, racers = load_race_task(run, name, settings), load_racers(settings)
    absent = {racer.name: reason for racer in racers.values() if (reason := why_unavailable(racer.settings))}
    tuned: dict[str, Tuned] = {
        racer.name: tune(run, task, racer, settings)
        for racer in racers.values()
        if racer.tuned_as == racer.name and racer.name not in absent
    }
    rows: list[dict[str, Any]] = []
    curves: list[pd.DataFrame] = []
    for racer in racers.values():
        if racer.name in absent:
            continue
        chosen = tuned[racer.tuned_as].chosen
        for rank in racer.ranks:
            place = {"task": task.label, "racer": racer.name, "rank": rank}
            optimizer = racer.with_rank(rank, **chosen)
            given = {"label": racer.label, "kind": racer.kind, "lr": chosen["lr"]}
            given["at_edge"] = at_edge(chosen["lr"], settings.lrs)
            given |= {name: optimizer.get(name) for name in ("damping", "clip")}
            cost = cost_of_a_step(run, task, racer, optimizer)
            for seed in settings.seeds:
                row, curve = final_run(run, task, racer, optimizer, settings, seed=seed)
                rows.append(place | given | row | cost)
                curves.append(curve.assign(**place))
    tries = [pd.DataFrame(result.rows).drop(columns="candidate") for result in tuned.values()]
    return {
        "table": [pd.DataFrame(rows)],
        "tuning": [frame.assign(task=task.label) for frame in tries],
        "curves": curves,
        "absent": [
            pd.DataFrame([{"task": task.label, "racer": racer, "label": racers[racer].label, "reason": reason}])
            for racer, reason in absent.items()
        ],
    }
