"""Products compiled by torch.compile: those of the eager ones, for the shapes that were asked for."""

from __future__ import annotations

import shutil

import pytest
import torch
from curvature_cases import MODELS, ModelCase, language_problem, problem
from torch import Tensor, nn
from torch.testing import assert_close

from curvlab.curvature import FisherOperator, GaussNewtonOperator, HessianOperator
from curvlab.curvature.compiled_product import CompiledProduct


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace as torch.compile does, and run the trace as it is: no compiler, no minutes."""
    monkeypatch.setattr(CompiledProduct, "backend", "eager")


def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the number of examples of each batch that is multiplied by compiled code."""
    seen: list[int] = []
    add = CompiledProduct.add

    def counting(self, inputs, targets, vector, sums):
        seen.append(len(targets))
        return add(self, inputs, targets, vector, sums)

    monkeypatch.setattr(CompiledProduct, "add", counting)
    return seen


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize("operator", [GaussNewtonOperator, HessianOperator])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_products_of_every_model(operator, model: ModelCase, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = calls(monkeypatch)
    eager, compiled = (operator(*problem(model, "ce"), compile=switch) for switch in (False, True))
    vectors = eager.randn(2, torch.Generator().manual_seed(0))
    assert_close(compiled @ vectors, eager @ vectors, rtol=1e-10, atol=1e-12)
    assert len(seen) == 2
    with torch.no_grad():
        for parameter in compiled.function.live_parameters:
            parameter.mul_(0.9)  # theta is read anew at each product
    moved = operator(*problem(model, "ce")) @ vectors
    assert not torch.equal(compiled @ vectors, moved)


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize("loss", ["mse", "bce"])
@pytest.mark.parametrize("kind", ["exact", "monte_carlo", "empirical"])
def test_fishers(kind: str, loss: str) -> None:
    eager, compiled = (
        FisherOperator(
            *problem("mlp_tanh", loss), kind=kind, generator=torch.Generator().manual_seed(1), compile=switch
        )
        for switch in (False, True)
    )
    vector = eager.randn(1, torch.Generator().manual_seed(0))
    assert_close(compiled @ vector, eager @ vector, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("traced_only")
def test_language_models() -> None:
    eager, compiled = (GaussNewtonOperator(*language_problem("mean"), compile=switch) for switch in (False, True))
    vectors = eager.randn(2, torch.Generator().manual_seed(0))
    assert_close(compiled @ vectors, eager @ vectors, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("traced_only")
def test_hugging_face_models() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=7, n_embd=8, n_layer=1, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=1
    )
    model = transformers.GPT2LMHeadModel(config).double().eval()
    tokens = torch.randint(7, (3, 4), generator=torch.Generator().manual_seed(0))
    data = ({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, tokens)
    eager, compiled = (
        GaussNewtonOperator(model, nn.CrossEntropyLoss(), data, compile=switch) for switch in (False, True)
    )
    vector = eager.randn(1, torch.Generator().manual_seed(0))
    assert_close(compiled @ vector, eager @ vector, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("traced_only")
def test_the_last_odd_batch_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = calls(monkeypatch)
    case = problem("mlp_tanh", "ce")
    num_examples = len(case.targets)
    op = GaussNewtonOperator(*case, batch_size=num_examples - 1, compile=True)
    vector = op.randn(1, torch.Generator().manual_seed(0))
    assert_close(op @ vector, GaussNewtonOperator(*case) @ vector, rtol=1e-10, atol=1e-12)
    assert seen == [num_examples - 1]


@pytest.mark.usefixtures("traced_only")
def test_samples_of_few_sizes_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = calls(monkeypatch)
    case = problem("mlp_tanh", "ce")
    eager, compiled = (GaussNewtonOperator(*case, compile=switch) for switch in (False, True))
    vector = eager.randn(1, torch.Generator().manual_seed(0))
    for size in range(1, 4 + CompiledProduct.max_shapes):
        generators = [torch.Generator().manual_seed(size) for _ in range(2)]
        samples = [op.sample(size, g) @ vector for op, g in zip((eager, compiled), generators, strict=True)]
        assert_close(samples[1], samples[0], rtol=1e-10, atol=1e-12)
    assert seen == list(range(1, 1 + CompiledProduct.max_shapes))


@pytest.mark.usefixtures("traced_only")
def test_every_operator_compiles_for_itself() -> None:
    for _ in range(9):  # more often than torch.compile compiles one function
        op = GaussNewtonOperator(*problem("linear", "mse"), compile=True)
        op @ torch.zeros(op.shape[0], dtype=torch.float64)


@pytest.mark.usefixtures("traced_only")
def test_wrong_targets_and_outputs_are_reported() -> None:
    case = problem("linear", "ce")
    op = GaussNewtonOperator(case.model, case.loss, (case.inputs, case.targets + 100), compile=True)
    with pytest.raises(ValueError, match="class indices run from"):
        op @ torch.zeros(op.shape[0], dtype=torch.float64)
    op = GaussNewtonOperator(case.model, case.loss, (case.inputs, case.targets.double()), compile=True)
    with pytest.raises(ValueError, match="needs integer class indices"):
        op @ torch.zeros(op.shape[0], dtype=torch.float64)
    op = GaussNewtonOperator(case.model, case.loss, (case.inputs * torch.nan, case.targets), compile=True)
    with pytest.raises(ValueError, match="outputs contain NaN"):
        op @ torch.zeros(op.shape[0], dtype=torch.float64)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2).double()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) if inputs.sum() > 0 else -self.layer(inputs)


@pytest.mark.usefixtures("traced_only")
def test_what_cannot_be_traced_is_reported_with_the_way_out() -> None:
    data = (torch.ones(4, 3), torch.zeros(4, dtype=torch.long))
    op = GaussNewtonOperator(Branching(), nn.CrossEntropyLoss(), data, compile=True)
    with pytest.raises(RuntimeError, match=r"(?s)torch.compile failed.*compile=False"):
        op @ torch.zeros(op.shape[0], dtype=torch.float64)


def test_a_missing_compiler_is_reported_with_the_way_out() -> None:
    inductor = pytest.importorskip("torch._inductor.config")
    data = (torch.ones(5, 11), torch.zeros(5, dtype=torch.long))  # shapes that no other test compiles and caches
    op = GaussNewtonOperator(nn.Linear(11, 7), nn.CrossEntropyLoss(), data, compile=True)
    with (
        inductor.patch({"cpp.cxx": (None, "no-such-compiler")}),
        pytest.raises(RuntimeError, match=r"(?s)compiler.*compile=False"),
    ):
        op @ torch.zeros(op.shape[0])


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_code() -> None:
    eager, compiled = (GaussNewtonOperator(*problem("linear", "ce"), compile=switch) for switch in (False, True))
    vector = eager.randn(1, torch.Generator().manual_seed(0))
    assert_close(compiled @ vector, eager @ vector, rtol=1e-10, atol=1e-12)


def test_finite_differences_are_not_compiled() -> None:
    with pytest.raises(ValueError, match="compile=False"):
        GaussNewtonOperator(*problem("linear", "ce"), jvp="finite_difference", compile=True)
