"""bench-curvature's profile: its parts are those of a product."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch
from omegaconf import OmegaConf
from torch.testing import assert_close

from experiments.benchmarks.curvature.parts import FORWARD, GRADIENT, LOOP, VMAP, computations
from experiments.benchmarks.curvature.products import build_case

CONVOLUTIONAL = OmegaConf.create(
    {
        "model": {"_target_": "curvlab.lab.models.ConvNet", "channels": [3, 4]},
        "input_shape": [1, 8, 8],
        "num_outputs": 3,
        "batch_size": 4,
        "tokens": False,
    }
)


def test_vectors_in_turns_and_through_one_forward_give_the_same_product() -> None:
    parts = computations(build_case(CONVOLUTIONAL, torch.Generator().manual_seed(0), torch.device("cpu")), 3)
    assert_close(parts[LOOP](), parts[VMAP](), rtol=1e-4, atol=1e-6)


def test_profile_has_every_part_over_the_floor(run_smoke: Callable[..., Path]) -> None:
    table = pd.read_csv(run_smoke("benchmarks/curvature") / "profile.csv").set_index("part")
    assert len(table) == 7
    floor = table.milliseconds[FORWARD] + table.milliseconds[GRADIENT]
    assert_close(table.to_base[LOOP], table.milliseconds[LOOP] / floor, rtol=1e-4, atol=0.0)
    assert table.convolutions[FORWARD] == 0  # an MLP has none
