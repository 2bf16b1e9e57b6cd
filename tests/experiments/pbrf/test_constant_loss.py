"""The best constant outputs, against those that L-BFGS finds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from experiments.pbrf.constant_loss import constant_loss

GENERATOR = torch.Generator().manual_seed(0)
CLASSES = torch.randint(3, (40,), generator=GENERATOR)
TOKENS = torch.where(
    torch.rand(8, 5, generator=GENERATOR) < 0.2, -100, torch.randint(3, (8, 5), generator=GENERATOR)
)
PIXELS = torch.rand(40, 6, generator=GENERATOR, dtype=torch.float64)


@pytest.mark.parametrize(
    ("loss", "targets", "outputs"),
    [
        (nn.CrossEntropyLoss(), CLASSES, 3),
        (nn.CrossEntropyLoss(), TOKENS, 3),
        (nn.BCEWithLogitsLoss(), PIXELS, 6),
        (nn.BCEWithLogitsLoss(), (PIXELS[:, :1] > 0.3).double(), 1),
        (nn.MSELoss(), 3 * PIXELS[:, :2], 2),
    ],
)
def test_no_constant_does_better(loss: nn.Module, targets: Tensor, outputs: int) -> None:
    constant = torch.zeros(outputs, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([constant], max_iter=200, line_search_fn="strong_wolfe", tolerance_grad=1e-10)

    def closure() -> Tensor:
        optimizer.zero_grad()
        flat = targets.flatten() if isinstance(loss, nn.CrossEntropyLoss) else targets
        value = loss(constant.expand(len(flat), outputs), flat)
        value.backward()
        return value

    optimizer.step(closure)
    assert constant_loss(loss, targets) == pytest.approx(float(closure()), rel=1e-8)


def test_an_unknown_loss_is_refused() -> None:
    with pytest.raises(TypeError, match="not known for L1Loss"):
        constant_loss(nn.L1Loss(), PIXELS)
