"""What a batch is, what is refused, and classes of every integer type."""

import pytest
import torch
from curvature_cases import problem
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from curvlab.curvature import FisherOperator, GaussNewtonOperator, HessianOperator

OPERATORS = [GaussNewtonOperator, HessianOperator, lambda *args: FisherOperator(*args, kind="empirical")]
FORMS = {
    "pair": lambda x, y: (x, y),
    "dataset": TensorDataset,
    "batches": lambda x, y: list(zip(x.split([1, 4]), y.split([1, 4]), strict=True)),
    "loader": lambda x, y: DataLoader(TensorDataset(x, y), batch_size=2),
}


WRONG_KIND = {
    "nothing": lambda x, y: None,
    "tensor": lambda x, y: x,
    "one tensor": lambda x, y: TensorDataset(x),
    "examples": lambda x, y: [(x_n, int(y_n)) for x_n, y_n in zip(x, y, strict=True)],
    "three tensors": lambda x, y: TensorDataset(x, x, y),
    "arrays": lambda x, y: (x.numpy(), y.numpy()),
    "mapping": lambda x, y: {"inputs": x, "targets": y},
    "examples with tensor labels": lambda x, y: list(zip(x, y, strict=True)),
}


@pytest.mark.parametrize("kind", WRONG_KIND)
def test_data_of_another_kind_is_refused_with_what_to_pass(kind: str) -> None:
    case = problem("linear", "ce")
    with pytest.raises((TypeError, ValueError), match=r"pair.*\(inputs, targets\)"):
        GaussNewtonOperator(case.model, case.loss, WRONG_KIND[kind](case.inputs, case.targets)) @ torch.zeros(
            15
        ).double()


@pytest.mark.parametrize("loss", ["ce", "mse"])
def test_inputs_and_targets_of_different_lengths_are_refused(loss: str) -> None:
    case = problem("linear", loss)
    with pytest.raises(ValueError, match=r"5.*4"):
        GaussNewtonOperator(case.model, case.loss, (case.inputs, case.targets[:4])) @ torch.zeros(15).double()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_classes_of_every_integer_type(dtype: torch.dtype, form: str, operator) -> None:
    case = problem("mlp_tanh", "ce")
    op = operator(
        case.model, nn.CrossEntropyLoss(ignore_index=-200), FORMS[form](case.inputs, case.targets.to(dtype))
    )
    assert_close(op.to_dense(), operator(*case).to_dense())
    samples = [o.sample(3, torch.Generator().manual_seed(0)).to_dense() for o in (op, operator(*case))]
    assert_close(*samples)  # -200 is 56 in 8 bits
