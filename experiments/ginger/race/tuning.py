"""Each racer's learning rate, and damping, by the validation loss: the same number of gradients for all.

Successive halving. Every round spends the same share of the budget, divided equally among the settings that are
left; from round to round their number falls by one factor, down to `FINALISTS` in the last. So a racer with a
learning rate alone has longer trainings of more seeds, one that also tunes its damping shorter ones. No training
is longer than the final runs: what is left over goes into further seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from omegaconf import DictConfig

from curvlab.lab import Run
from experiments.ginger.race.racers import Racer
from experiments.ginger.race.task import RaceTask
from experiments.ginger.race.training import trained

FINALISTS = 2
Trial: TypeAlias = Callable[[Mapping[str, Any], int, str], float]


@dataclass(frozen=True)
class Tuned:
    """What the budget bought.

    Attributes:
        chosen: the settings of the lowest validation loss in the last round: lr and those of `Racer.candidates`.
        rows: one for each round and setting, see `halved`.
    """

    chosen: dict[str, Any]
    rows: list[dict[str, Any]]


def tune(run: Run, task: RaceTask, racer: Racer, settings: DictConfig) -> Tuned:
    """Choose a racer's settings on images, see `halved`; a training counts with the lowest loss of its epochs."""

    def trial(optimizer: Mapping[str, Any], num_steps: int, seed: str) -> float:
        size = task.batch_size * racer.batch_factor
        result = trained(run, task, optimizer, num_steps=num_steps, batch_size=size, seed=seed, with_test=False)
        return lowest(result["validation_loss"][1:]) if not result["diverged"] else math.inf

    return halved(racer, settings, trial, longest=final_steps(task, racer, settings))


def halved(racer: Racer, settings: DictConfig, trial: Trial, *, longest: int) -> Tuned:
    """Choose a racer's settings by successive halving.

    Rows have round (from 1), racer, candidate, lr, the candidate's own settings, seeds, steps (of each), gradients
    (of all), validation_loss (mean over seeds; infinite where one diverged), chosen.

    Args:
        racer: whose.
        settings: nodes `lrs`, `tuned_rank` and `tuning`: `num_gradients`, `num_rounds`.
        trial: (settings of the optimizer, number of steps, seed) -> validation loss, infinite where it diverged.
        longest: steps of the final run.
    """
    alive = [{**candidate, "lr": lr} for candidate in racer.candidates for lr in settings.lrs]
    sizes = round_sizes(len(alive), settings.tuning.num_rounds)
    rank = None if racer.ranks == (None,) else settings.tuned_rank
    rows: list[dict[str, Any]] = []
    for number, size in enumerate(sizes, start=1):
        share = settings.tuning.num_gradients / len(sizes) / size / racer.gradients_per_step
        seeds, steps = seeds_and_steps(share, longest)
        found = []
        for tuned in alive[:size]:
            optimizer = racer.with_rank(rank, **tuned)
            # No start of a final run: those have numbers.
            losses = [trial(optimizer, steps, f"tuning {seed}") for seed in range(seeds)]
            row = {
                "racer": racer.name,
                "round": number,
                "candidate": {name: value for name, value in tuned.items() if name != "lr"},
                **tuned,
                "seeds": seeds,
                "steps": steps,
                "gradients": seeds * steps * racer.gradients_per_step,
                "validation_loss": sum(losses) / seeds,
            }
            found.append(row)
        found.sort(key=_by_loss)
        alive = [_tuned(row) for row in found]
        rows += found
    for row in rows:
        row["chosen"] = row["round"] == len(sizes) and _tuned(row) == alive[0]
    return Tuned(alive[0], rows)


def final_steps(task: RaceTask, racer: Racer, settings: DictConfig) -> int:
    """Return the number of steps of a racer's final run."""
    return settings.num_epochs * racer.epoch_factor * task.steps_per_epoch(task.batch_size * racer.batch_factor)


def round_sizes(count: int, num_rounds: int) -> list[int]:
    """Return how many settings each round has: from all of them to `FINALISTS` by one factor.

    round_sizes(40, 3) == [40, 9, 2]; round_sizes(8, 3) == [8, 4, 2].
    """
    last = min(FINALISTS, count)
    if num_rounds == 1:
        return [count]
    return [round(count * (last / count) ** (index / (num_rounds - 1))) for index in range(num_rounds)]


def seeds_and_steps(share: float, longest: int) -> tuple[int, int]:
    """Return how many trainings of how many steps a share of the budget (in steps) is spent on."""
    seeds = max(1, math.ceil(share / longest))
    return seeds, max(1, int(share / seeds))


def at_edge(lr: float, lrs: Sequence[float]) -> bool:
    """Return whether a learning rate is the smallest or largest of those tried: a better one may lie beyond."""
    return len(lrs) > 1 and lr in (min(lrs), max(lrs))


def lowest(values: Sequence[float]) -> float:
    """Return the smallest number of the values, infinite without any."""
    return min((value for value in values if math.isfinite(value)), default=math.inf)


def _by_loss(row: Mapping[str, Any]) -> tuple[float, float]:
    return row["validation_loss"], row["lr"]  # where all diverged, the smallest rate


def _tuned(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row["candidate"], "lr": row["lr"]}
