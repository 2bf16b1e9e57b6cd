from __future__ import annotations

import pandas as pd
import pytest
from omegaconf import OmegaConf

from curvlab.lab.target import Target
from curvlab.lab.target.settings import MISSING, ours, settings_beside_the_paper

CFG = OmegaConf.create(
    {
        "num_points": 25,
        "pbrf": {"epsilon": 1e-8},
        "branches": {"sgd": {"lr": 0.1}, "ngd": {"lr": 0.2}},
        "tasks": {"mlp_a": {"model": {"width": 3}}, "mlp_b": {"num_points": 5, "model": {"width": 3}}},
    }
)
TABLE = pd.DataFrame(
    {"task": ["mlp-a", "mlp-a", "mlp-b"], "num_steps": [150, 150, 200], "damping": [0.5, 0.5, 0.5]}
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pbrf.epsilon", 1e-8),
        ("num_points", {"mlp-a": 25, "mlp-b": 5}),
        ("model.width", 3),
        ("branches.*.lr", {"sgd": 0.1, "ngd": 0.2}),
        ("tasks", ["mlp-a", "mlp-b"]),
        ("summary.csv:num_steps", {"mlp-a": 150, "mlp-b": 200}),
        ("summary.csv:damping", 0.5),
        ("pbrf.epsilom", MISSING),
    ],
)
def test_ours_is_read_from_the_config_and_the_tables(name: str, value: object) -> None:
    assert ours([name], CFG, {"summary": TABLE}) == {name: value}


def test_a_table_without_tasks_gives_its_distinct_values() -> None:
    table = pd.DataFrame({"n": [1, 2, 1]})
    assert ours(["table.csv:n"], OmegaConf.create({}), {"table": table}) == {"table.csv:n": [1, 2]}


def test_what_was_changed_on_the_command_line_is_what_stands_beside_the_paper() -> None:
    target = Target("experiments.toy.fig1", title="toy", paper={"pbrf.epsilon": 1e-8})
    cfg = OmegaConf.merge(CFG, {"pbrf": {"epsilon": 0.5}})
    assert settings_beside_the_paper(target, cfg, {}) == [  # type: ignore[arg-type]  # a mapping
        {"name": "tasks", "ours": ["mlp-a", "mlp-b"], "paper": ""},
        {"name": "pbrf.epsilon", "ours": 0.5, "paper": 1e-8},
    ]
