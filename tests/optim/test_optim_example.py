"""The example in the package's docstring runs, and lowers the loss."""

from __future__ import annotations

import textwrap
from typing import Any

import torch

from curvlab import optim


def test_the_example_trains() -> None:
    text = optim.__doc__ or ""
    example = textwrap.dedent(text.split("::\n", 1)[1].split("\n`ExactNGD`")[0])
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(example, names)  # noqa: S102
    model, loss, inputs, targets = (names[name] for name in ("model", "loss", "inputs", "targets"))
    torch.manual_seed(0)
    start = torch.nn.Linear(20, 10)
    assert float(loss(model(inputs), targets)) < 0.9 * float(loss(start(inputs), targets))
