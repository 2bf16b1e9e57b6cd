"""lissa-fig4 end to end at smoke scale; the traces against dense matrices."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from curvlab.lab.claims import load_claims
from curvlab.lab.tables import read_table
from experiments.lissa.fig4 import sampling_gap, slopes, token_gap


class UnitRun:
    """Computes every unit."""

    def unit(self, name: str, key: dict, compute, **_: object) -> dict:
        return compute()

    def generator(self, *names: object) -> torch.Generator:
        return torch.Generator().manual_seed(sum(str(names).encode()))

    def add_matvecs(self, count: int) -> None:
        pass

    def progress(self, iterable, description: str):
        return iterable


def small_task(*, length: int | None) -> SimpleNamespace:
    torch.manual_seed(0)
    shape = (12,) if length is None else (12, length)
    model = nn.Linear(4, 3).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(2 * torch.randn_like(parameter))
    inputs = 2 * torch.randn(*shape, 4, dtype=torch.float64)
    if length is not None:
        inputs = inputs + 3 * torch.randn(12, 1, 4, dtype=torch.float64)  # tokens of a sequence are alike
    train = (inputs, torch.randint(3, shape))
    return SimpleNamespace(
        label="linear",
        generator=UnitRun().generator,
        is_language=length is not None,
        key={"model": "linear"},
        model=model.eval(),
        loss=nn.CrossEntropyLoss(),
        train=train,
        num_train=12,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def matrices(task: SimpleNamespace) -> Tensor:
    """Gauss-Newton matrix of every single prediction, (N, P, P) or (N, T, P, P), from its definition."""
    inputs = task.train[0]
    probabilities = task.model(inputs).softmax(-1).detach()
    middle = torch.diag_embed(probabilities) - probabilities[..., :, None] * probabilities[..., None, :]
    eye = torch.eye(3, dtype=torch.float64)
    weight = torch.einsum("ab,...c->...abc", eye, inputs).flatten(-2)  # logits by the weight, (..., 3, 12)
    jacobian = torch.cat([weight, eye.expand(*inputs.shape[:-1], 3, 3)], dim=-1)
    return jacobian.mT @ middle @ jacobian


def gap(of_one: Tensor, batch_size: int) -> float:
    """tr(E G̃² - G²)/P for batches with replacement from (N, P, P)."""
    mean = of_one.mean(0)
    return float((of_one @ of_one).mean(0).trace() - (mean @ mean).trace()) / batch_size / len(mean)


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("length", [None, 6])
def test_gap_is_that_of_dense_matrices(length: int | None, batch_size: int) -> None:
    task = small_task(length=length)
    of_one = matrices(task) if length is None else matrices(task).mean(1)
    found = sampling_gap(UnitRun(), task, batch_size=batch_size, num_realizations=600)
    assert abs(found["value"] - gap(of_one, batch_size)) < 4 * found["stderr"]
    assert found["stderr"] < 0.15 * found["value"]


def test_independent_tokens_vary_less_than_tokens_of_a_sequence() -> None:
    task = small_task(length=6)
    found = token_gap(UnitRun(), task, token_batch=3, num_realizations=600)
    single = gap(matrices(task).flatten(0, 1), 3)
    assert abs(found["value"] - single) < 4 * found["stderr"]
    assert gap(matrices(task).mean(1), 1) * 6 > 1.5 * 3 * single  # at equal numbers of tokens


def test_results_are_complete(smoke_result) -> None:
    folder: Path = smoke_result("lissa/fig4")
    table = read_table(folder, "table")
    counts = {"mlp-8-digits-200": 3, "opt-1-16-documentation-120": 4}
    assert table.groupby("task", sort=False).size().to_dict() == counts
    assert table[table.task == "opt-1-16-documentation-120"].batch_size.tolist() == [128, 256, 512, 2]  # tokens
    assert {result.claim.id for result in load_claims(folder)} >= {
        "slope",
        "trace-mlp-8-digits-200",
        "directions-mlp-8-digits-200",
        "incoherence-opt-1-16-documentation-120",
    }


def made_up(slope: float, constant: float) -> pd.DataFrame:
    sizes = np.array([4.0, 16, 64, 256])
    left = constant * 10 * sizes**slope
    return pd.DataFrame(
        {
            "task": "a", "sampling": "examples", "batch_size": sizes, "unit": "images", "left": left,
            "left_stderr": 0.02 * left, "right": 10 / sizes, "right_stderr": 0.1 / sizes,
        }
    )  # fmt: skip


def measured(largest: float, most: float) -> pd.DataFrame:
    row = {"task": "a", "train_loss": 0.1, "leading": largest, "random": 1.0, "example": 1.0, "assumed": 2.0}
    row |= {"largest": largest, "at_least": largest, "at_most": most}
    return pd.DataFrame([row])


def test_slopes_are_least_squares() -> None:
    fitted = slopes(made_up(-1.0, 1.5)).iloc[0]
    assert fitted.slope == pytest.approx(-1, abs=1e-9)
    assert fitted.constant == pytest.approx(1.5)
    logs = np.log([4.0, 16, 64, 256])
    assert fitted.slope_stderr == pytest.approx(0.02 / math.sqrt(((logs - logs.mean()) ** 2).sum()))


@pytest.mark.parametrize(
    ("slope", "constant", "largest", "most", "expected"),
    [
        (-1.0, 1.5, 1.2, 1.9, ["reproduced"] * 3),
        (-1.0, 1.5, 1.2, 9.0, ["reproduced", "reproduced", "undecided"]),  # a lower bound shows nothing
        (-1.0, 1.5, 1.2, math.inf, ["reproduced", "reproduced", "undecided"]),
        (-0.7, 0.9, 6.0, math.inf, ["not reproduced", "direction only", "not reproduced"]),
        (-0.1, 9.0, 2.0, 3.0, ["not reproduced", "not reproduced", "direction only"]),
    ],
)
def test_verdicts(
    computed_of, judged, slope: float, constant: float, largest: float, most: float, expected: list[str]
) -> None:
    results = judged(
        "lissa/fig4", computed_of({"table": made_up(slope, constant), "constants": measured(largest, most)})
    )
    assert [result.verdict for result in results] == [*expected, "out of reach"]  # no language model
    assert ("a misses it by" in results[0].explanation) == (slope > -0.9)
