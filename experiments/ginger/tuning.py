"""Who takes part in a race, and how each racer's learning rate, and damping, are chosen: by the validation loss.

Successive halving, with the same number of gradients for all racers. Every round spends the same share of the
budget, divided equally among the settings that are left; from round to round their number falls by one factor,
down to `FINALISTS` in the last. No training is longer than the final runs: what is left over goes into seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from omegaconf import DictConfig, OmegaConf

from experiments.ginger.optimizers import gradients_per_step

FINALISTS = 2
Trial: TypeAlias = Callable[[Mapping[str, Any], int, str], float]


@dataclass(frozen=True)
class Racer:
    """One optimizer with its grid.

    Attributes:
        name: in the config.
        label: in tables and figures.
        kind: "paper" (a row of Table 1), "wider" (an optimizer the paper lacks) or "ablation".
        settings: of the optimizer, see `make_optimizer`, less what is tuned and the rank.
        candidates: settings that are tuned beside the learning rate, one mapping for each choice; [{}]: none.
        ranks: of the final runs; [None] where the optimizer has no rank.
        tuned_as: the racer whose tuned settings it takes; its own name: it is tuned itself.
        batch_factor: its batches are so many times larger.
        epoch_factor: it sees the data so many times more often.
    """

    name: str
    label: str
    kind: str
    settings: dict[str, Any]
    candidates: tuple[dict[str, Any], ...]
    ranks: tuple[int | None, ...]
    tuned_as: str
    batch_factor: int
    epoch_factor: int

    def with_rank(self, rank: int | None, **tuned: Any) -> dict[str, Any]:
        """Return settings as `make_optimizer` takes them."""
        return self.settings | ({} if rank is None else {"rank": rank}) | tuned

    @property
    def gradients_per_step(self) -> int:
        """Gradients of a batch of the common size that a step takes."""
        return gradients_per_step(self.settings) * self.batch_factor


def load_racers(settings: DictConfig) -> dict[str, Racer]:
    """Return the racers of a task by name; one that is null takes no part.

    Args:
        settings: nodes `racers` and `ranks`. A racer has `label`, `kind`, `settings`, and where they are not as
            usual `candidates`, `ranks` (of its own), `tuned_as`, `batch_factor`, `epoch_factor`.
    """
    nodes: dict[str, Mapping[str, Any] | None] = OmegaConf.to_container(settings.racers, resolve=True)  # type: ignore[assignment]  # a mapping
    racers = {}
    for name, node in nodes.items():
        if node is None:
            continue
        has_rank = node["settings"]["optimizer"] in ("ginger", "qng")
        racers[name] = Racer(
            name=name,
            label=node["label"],
            kind=node["kind"],
            settings=dict(node["settings"]),
            candidates=tuple(node.get("candidates") or [{}]),
            ranks=tuple(node.get("ranks") or settings.ranks) if has_rank else (None,),
            tuned_as=node.get("tuned_as") or name,
            batch_factor=node.get("batch_factor") or 1,
            epoch_factor=node.get("epoch_factor") or 1,
        )
    lost = {racer.tuned_as for racer in racers.values()} - set(racers)
    if lost:
        raise ValueError(
            f"racers take the tuned settings of {', '.join(sorted(lost))}, which take no part: add them"
        )
    return racers


@dataclass(frozen=True)
class Tuned:
    """What the budget bought.

    Attributes:
        chosen: the settings of the lowest validation loss in the last round: lr and those of `Racer.candidates`.
        rows: one for each round and setting, see `halved`.
    """

    chosen: dict[str, Any]
    rows: list[dict[str, Any]]


def halved(
    racer: Racer, settings: DictConfig, trial: Trial, *, longest: int, lrs: Sequence[float] | None = None
) -> Tuned:
    """Choose a racer's settings by successive halving.

    Rows have round (from 1), racer, candidate, lr, the candidate's own settings, seeds, steps (of each), gradients
    (of all), validation_loss (mean over seeds; infinite where one diverged), chosen.

    Args:
        racer: whose.
        settings: nodes `lrs`, `tuned_rank` and `tuning`: `num_gradients`, `num_rounds`.
        trial: (settings of the optimizer, number of steps, seed) -> validation loss, infinite where it diverged.
        longest: steps of the final run.
        lrs: in place of the settings' own.
    """
    alive = [{**candidate, "lr": lr} for candidate in racer.candidates for lr in lrs or settings.lrs]
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
