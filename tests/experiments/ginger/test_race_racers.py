"""The racers of the race: what the config says of each, and which of them is best."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from omegaconf import OmegaConf

from curvlab.lab import all_targets, load_config, task_settings
from curvlab.optim import PUBLISHED_GINGER
from experiments.ginger.race.paired import best_of, of_racer
from experiments.ginger.race.racers import load_racers

GINGER = {"optimizer": "ginger", "labels": "sampled", "scope": "global", "momentum": 0.9, "decay": 0.99}


def test_racers_are_read_from_the_config() -> None:
    settings = OmegaConf.create(
        {
            "ranks": [1, 4],
            "racers": {
                "adam": {"label": "Adam", "kind": "paper", "settings": {"optimizer": "adam"}},
                "ginger": {"label": "G", "kind": "paper", "settings": GINGER, "candidates": [{"damping": 1.0}]},
                "tensor": {"label": "T", "kind": "ablation", "settings": GINGER, "ranks": [4]},
                "twice": {"label": "2", "kind": "ablation", "settings": {"optimizer": "adam"}, "tuned_as": "adam"},
                "gone": None,
            },
        }
    )
    racers = load_racers(settings)
    assert {name: one.ranks for name, one in racers.items()} == {
        "adam": (None,),
        "ginger": (1, 4),
        "tensor": (4,),
        "twice": (None,),
    }
    assert racers["ginger"].with_rank(4, lr=0.1, damping=1.0) == {**GINGER, "rank": 4, "lr": 0.1, "damping": 1.0}
    assert racers["ginger"].gradients_per_step == 2
    settings.racers.adam = None
    with pytest.raises(ValueError, match="racers take the tuned settings of adam, which take no part"):
        load_racers(settings)


@pytest.mark.parametrize("preset", ["smoke", "embedded", "laptop", "paper"])
def test_the_config_has_the_published_settings(preset: str) -> None:
    cfg = load_config(all_targets()["ginger/tab1"], [f"preset={preset}"])
    for settings in task_settings(cfg).values():
        racers = load_racers(settings)
        published = racers["ginger_published"].settings
        assert {name: published[name] for name in PUBLISHED_GINGER} == PUBLISHED_GINGER
        control = racers["without_curvature"].settings
        assert control == {**published, "labels": "none"}


def test_best_racer_and_rank_by_validation() -> None:
    table = pd.DataFrame(
        [
            {"racer": racer, "rank": rank, "seed": seed, "accuracy": value, "loss": 1 - value}
            for racer, rank, value in [("qng", 1, 0.7), ("qng", 4, 0.8), ("adam", np.nan, 0.75)]
            for seed in range(2)
        ]
    )
    assert best_of(table, ["qng", "adam"]) == ("qng", 4)
    assert best_of(table, ["qng", "adam"], chosen_by="loss") == ("qng", 4)
    assert best_of(table, ["adam"]) == ("adam", None)
    assert of_racer(table, "qng", "accuracy").tolist() == pytest.approx([0.75, 0.75])
    assert of_racer(table, "qng", "accuracy", 1).tolist() == [0.7, 0.7]
    assert of_racer(table, "muon", "accuracy").empty
