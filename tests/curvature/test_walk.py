"""A product is a short walk through the package: counted, so that it stays one."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

import curvlab
from curvlab.curvature import DataOperator, GaussNewtonOperator, HessianOperator

PACKAGE = str(Path(curvlab.__file__).parent)


def calls_inside(operator: DataOperator, vector: torch.Tensor) -> list[str]:
    """Return the file of each Python call inside the package that one product makes."""
    files: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            files.append(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        operator @ vector
    finally:
        sys.setprofile(before)
    return files


@pytest.mark.parametrize(
    ("kind", "most_calls"), [(GaussNewtonOperator, 75), (HessianOperator, 64)], ids=["Gauss-Newton", "Hessian"]
)
def test_a_product_over_one_batch_makes_few_calls(
    kind: type[DataOperator], most_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # no terminal, nor notebook: nobody would see a bar
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 3))
    operator = kind(model, nn.CrossEntropyLoss(), (torch.randn(32, 10), torch.arange(32) % 3))
    vector = torch.randn(operator.shape[0])
    operator @ vector  # what is found once
    files = calls_inside(operator, vector)
    assert 30 < len(files) <= most_calls
    assert len(set(files)) <= 10
