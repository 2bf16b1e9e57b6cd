"""Who takes part in a race, and how each racer's learning rate, and damping, are chosen: by the validation loss.

Every candidate of every racer trains for the same number of steps, an epoch or more, from the same starts: a racer
with more settings to choose among costs more to tune (tuning.csv says how much), and is not handicapped by it. A
candidate counts only if its loss is below that of a prediction that knows nothing of the example.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from omegaconf import DictConfig, OmegaConf

from experiments.ginger.optimizers import gradients_per_step

Trial: TypeAlias = Callable[[Mapping[str, Any], str], float]


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
    """What tuning found.

    Attributes:
        chosen: the settings of the lowest validation loss: lr and those of `Racer.candidates`.
        at_edge: whether its rate is the smallest or largest of those tried: a better one may lie beyond.
        rows: one for each candidate, see `tune`.
    """

    chosen: dict[str, Any]
    at_edge: bool
    rows: list[dict[str, Any]]


def tune(
    racer: Racer,
    settings: DictConfig,
    trial: Trial,
    *,
    num_steps: int,
    constant: float,
    untried_lrs: Collection[float] = (),
) -> Tuned:
    """Choose a racer's settings.

    Rates are `lrs`; where a candidate has a damping and no clip lr/γ is one of `rates_over_damping`, since that is
    the step outside the rows of U. Rows have racer, lr, the candidate's own settings, seeds, steps (of each),
    gradients (of all), validation_loss (mean over seeds; infinite where one diverged), counts (whether the loss is
    below `constant`), chosen. Where none counts the lowest loss is chosen, or the smallest rate.

    Args:
        racer: whose.
        settings: `lrs`, `rates_over_damping`, `tuned_rank`, and of `tuning` the number of seeds, `num_seeds`.
        trial: (settings of the optimizer, seed) -> validation loss, infinite where it diverged.
        num_steps: of each trial.
        constant: loss of a prediction that is the same for all examples.
        untried_lrs: those of `lrs` that are left out.
    """
    rank = None if racer.ranks == (None,) else settings.tuned_rank
    found: list[tuple[dict[str, Any], bool]] = []
    for candidate in racer.candidates:
        unclipped = candidate.get("damping") is not None and candidate.get("clip") is None
        rates = (
            [candidate["damping"] * ratio for ratio in settings.rates_over_damping]
            if unclipped
            else [lr for lr in settings.lrs if lr not in untried_lrs]
        )
        for lr in rates:
            optimizer = racer.with_rank(rank, **candidate, lr=lr)
            # No start of a final run: those have numbers.
            losses = [trial(optimizer, f"tuning {seed}") for seed in range(settings.tuning.num_seeds)]
            row = {"racer": racer.name, **candidate, "lr": lr, "seeds": len(losses), "steps": num_steps}
            row["gradients"] = len(losses) * num_steps * racer.gradients_per_step
            row["validation_loss"] = sum(losses) / len(losses)
            row["counts"] = row["validation_loss"] < constant
            found.append((row, len(rates) > 1 and lr in (min(rates), max(rates))))
    best, at_edge = min(found, key=lambda pair: (pair[0]["validation_loss"], pair[0]["lr"]))
    rows = [row | {"chosen": row is best} for row, _ in found]
    names = ("lr", *(name for candidate in racer.candidates for name in candidate))
    return Tuned({name: best[name] for name in dict.fromkeys(names) if name in best}, at_edge, rows)


def lowest(values: list[float]) -> float:
    """Return the smallest number of the values, infinite without any."""
    return min((value for value in values if math.isfinite(value)), default=math.inf)
