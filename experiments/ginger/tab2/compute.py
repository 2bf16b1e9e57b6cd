"""Table 2, compute: pretrain, tune every racer, fine-tune at all ranks and seeds, measure the cost, tabulate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd
from omegaconf import DictConfig

from curvlab.lab import Run, t_interval, task_settings
from experiments.ginger.printed import table_2
from experiments.ginger.race.racers import Racer, load_racers
from experiments.ginger.race.tuning import Tuned, halved
from experiments.ginger.tab2.rouge import KINDS
from experiments.ginger.tab2.task import SummaryTask, load_summary_task
from experiments.ginger.tab2.training import FineTuning, cost_of_a_step, fine_tuned

PLACE = ("task", "weights", "racer", "label", "rank")
CONSTANT = ("lr", "damping", "clip", "flops", "memory")
MEASURES = (*KINDS, "rouge", "train_perplexity", "lowest_batch_perplexity", "test_loss")


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, one row for each fine-tuning; `summary`, over seeds; `tuning`; `examples`; `paper`.

    `table`: ROUGE in percent, `rouge` the mean of the three kinds; `train_perplexity` after the last step, on
    training pairs; `lowest_batch_perplexity`, of a step's batch; `test_loss` (nats a token); `flops`, `memory`
    (bytes) of a step.

    Args:
        run: seeds, store, device.
        cfg: `tasks`, and for all of them or for one: `seeds`, `weights` (full, lora), `num_epochs`, `num_steps`
            (null: whole epochs), `racers`, `ranks`, `tuned_rank`, `lrs`, `tuning`, and what `load_summary_task`
            takes.
    """
    rows: list[dict[str, Any]] = []
    tries: list[pd.DataFrame] = []
    examples: list[dict[str, Any]] = []
    for name, settings in task_settings(cfg).items():
        task = load_summary_task(run, name, settings)
        steps = int(settings.num_steps or settings.num_epochs * task.steps_per_epoch())
        for weights in settings.weights:
            racers = load_racers(settings)
            tuned = {
                racer.name: _tuned(run, task, weights, racer, settings, longest=steps)
                for racer in racers.values()
                if racer.tuned_as == racer.name
            }
            for racer in racers.values():
                place = {"task": task.label, "weights": weights, "racer": racer.name, "label": racer.label}
                if racer.name in tuned:
                    tries.append(pd.DataFrame(tuned[racer.name].rows).drop(columns="candidate").assign(**place))
                for rank in racer.ranks:
                    optimizer = racer.with_rank(rank, **tuned[racer.tuned_as].chosen)
                    own = {**place, "rank": rank} | {key: optimizer.get(key) for key in CONSTANT[:3]}
                    cost = cost_of_a_step(run, task, FineTuning(weights, optimizer, 1, "cost"))
                    for seed in settings.seeds:
                        found = fine_tuned(run, task, FineTuning(weights, optimizer, steps, seed), with_test=True)
                        rows.append(own | {"seed": seed} | _row(task, found) | {"steps": steps} | cost)
                        examples += [own | {"seed": seed} | pair for pair in _written(task, found)]
    run.note(seeds=list(cfg.seeds))
    table = pd.DataFrame(rows)
    return {
        "table": table,
        "summary": summary_table(table),
        "tuning": pd.concat(tries, ignore_index=True),
        "examples": pd.DataFrame(examples),
        "paper": table_2(),
    }


def summary_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each variant: seeds, how many diverged, means and 95 % t intervals over the others."""
    rows = []
    for place, own in table.groupby(list(PLACE), sort=False, dropna=False):
        row = dict(zip(PLACE, place, strict=True)) | {"seeds": len(own), "diverged": int(own.diverged.sum())}
        row |= {name: own[name].iloc[0] for name in CONSTANT}
        for measure in MEASURES:
            values = own[~own.diverged][measure].to_numpy()
            interval = t_interval(values) if len(values) else None
            row[measure] = values.mean() if interval else math.nan
            row[f"{measure}_low"] = interval.low if interval else math.nan
            row[f"{measure}_high"] = interval.high if interval else math.nan
        rows.append(row)
    return pd.DataFrame(rows)


def _tuned(
    run: Run, task: SummaryTask, weights: str, racer: Racer, settings: DictConfig, *, longest: int
) -> Tuned:
    def trial(optimizer: Mapping[str, Any], num_steps: int, seed: str) -> float:
        own = FineTuning(weights, optimizer, num_steps, seed)
        return float(fine_tuned(run, task, own, with_test=False)["validation_loss"])

    return halved(racer, settings, trial, longest=longest)


def _row(task: SummaryTask, found: Mapping[str, Any]) -> dict[str, Any]:
    losses = found["step_losses"]
    return {
        "diverged": found["diverged"],
        **{kind: found[kind] for kind in KINDS},
        "rouge": sum(found[kind] for kind in KINDS) / len(KINDS),
        "train_perplexity": math.exp(found["train_loss"]),
        "lowest_batch_perplexity": math.exp(losses.min()) if len(losses) else math.nan,
        "test_loss": found["test_loss"],
        "train_pairs": len(task.splits.train[1]),
        "test_pairs": len(task.splits.test[1]),
    }


def _written(task: SummaryTask, found: Mapping[str, Any]) -> list[dict[str, str]]:
    references = task.splits.test_summaries
    return [{"reference": references[index], "summary": text} for index, text in enumerate(found["examples"])]
