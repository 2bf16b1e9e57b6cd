"""The examples in docstrings and in docs/library.md run, and lower the loss."""

from __future__ import annotations

import doctest
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from curvlab import optim
from curvlab.optim import exact_ngd, fisher_newton, ginger, ngd, qng, uniform_direction

LIBRARY = Path(__file__).parents[2] / "docs" / "library.md"


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


@pytest.mark.parametrize("module", [exact_ngd, fisher_newton, ginger, ngd, qng, uniform_direction])
def test_examples_of_optimizers_print_what_they_say(module: ModuleType) -> None:
    torch.manual_seed(0)
    failed, attempted = doctest.testmod(module)
    assert attempted > 3
    assert failed == 0


def test_the_ginger_of_the_library_page_trains() -> None:
    # At lr=0.1 and damping 1e-2 without normalize=True, as the page had it, the loss went to 30.
    text = LIBRARY.read_text()
    start = text.index("optimizer = Ginger(")
    made, step = text[start : text.index("\n```", start)].split("\n", 1)
    inputs, targets = (torch.tensor(part[:1000]) for part in load_digits(return_X_y=True))
    inputs = inputs.float() / 16
    torch.manual_seed(0)
    names: dict[str, Any] = {
        "model": nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)),
        "loss": nn.CrossEntropyLoss(),
        "generator": torch.Generator().manual_seed(0),
        "Ginger": optim.Ginger,
        "sampled_label_loss": optim.sampled_label_loss,
    }
    exec(made, names)  # noqa: S102
    for _ in range(20):
        for batch in torch.randperm(1000).split(500):
            exec(step, names | {"inputs": inputs[batch], "targets": targets[batch]})  # noqa: S102
    assert float(names["loss"](names["model"](inputs), targets)) < 0.4
