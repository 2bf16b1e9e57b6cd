"""Who takes part in the race: each racer's settings, what of them is tuned, and at which ranks it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from experiments.ginger.race.optimizers import gradients_per_step


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
