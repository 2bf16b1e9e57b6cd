"""Products in two passes: the same matrices, from the memory of a gradient step."""

from __future__ import annotations

import pytest
import torch
from curvature_cases import Problem, TiedLanguageModel, language_problem, problem, randomised
from curvature_memory import Memory
from curvature_oracles import dense_empirical_fisher, dense_gauss_newton
from torch import Tensor, nn
from torch.testing import assert_close

from curvlab.curvature import FisherOperator, GaussNewtonOperator, language


class WithHead(TiedLanguageModel):
    """Says which layer is its last, as Hugging Face's models do."""

    def get_output_embeddings(self) -> nn.Linear:
        return self.output


class Untied(WithHead):
    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(4, 6, bias=False)


class Blocks(nn.Module):
    """Attention and a wide layer, four times: what a backward needs adds up, what forward mode needs does not."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(8, 2, dim_feedforward=32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(block, 4, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean(1))


def test_matches_dense(each_problem: Problem) -> None:
    dense = dense_gauss_newton(each_problem.model, each_problem.loss, each_problem.inputs, each_problem.targets)
    op = GaussNewtonOperator(*each_problem, low_memory=True, batch_size=3)
    assert_close(op.to_dense(), dense, rtol=1e-10, atol=1e-10 * dense.abs().max().item())


@pytest.mark.parametrize("logits_per_chunk", [1, 13, 2**22], ids=["one token", "two tokens", "all at once"])
@pytest.mark.parametrize("build", [WithHead, Untied])
def test_language_models_match_dense_for_every_size_of_chunk(build, logits_per_chunk: int, monkeypatch) -> None:
    monkeypatch.setattr(language, "FEWER_LOGITS", logits_per_chunk)
    case = language_problem("mean")
    model = randomised(build(), torch.Generator().manual_seed(0))
    op = GaussNewtonOperator(model, case.loss, (case.inputs, case.targets), low_memory=True)
    assert op.function.has_linear_head(case.inputs)
    dense = dense_gauss_newton(model, case.loss, case.inputs, case.targets)
    assert_close(op.to_dense(), dense, rtol=1e-10, atol=1e-13)


def test_fisher_matrices_match_dense() -> None:
    case = problem("attention_fused", "ce")
    op = FisherOperator(*case, kind="empirical", low_memory=True)
    dense = dense_empirical_fisher(case.model, case.loss, case.inputs, case.targets)
    assert_close(op.to_dense(), dense, rtol=1e-10, atol=1e-12)


def test_memory_is_that_of_a_gradient_step() -> None:
    """Activations dwarf the parameters here. The bound is the aim, 1.2; one pass holds 1.5 times and more."""
    model = Blocks().eval()
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(32, 24, 8, generator=generator), torch.randint(3, (32,), generator=generator)
    peaks = {}
    with Memory() as memory:
        nn.CrossEntropyLoss()(model(inputs), targets).backward()
    peaks["gradient"] = memory.peak
    for low_memory in (True, False):
        op = GaussNewtonOperator(model, nn.CrossEntropyLoss(), (inputs, targets), low_memory=low_memory)
        v = op.randn(1, torch.Generator().manual_seed(1))[:, 0]
        with Memory() as memory:
            op @ v
        peaks[low_memory] = memory.peak
    assert peaks["gradient"] > 20 * 4 * op.shape[0]
    assert peaks[True] <= 1.2 * peaks["gradient"] < 1.5 * peaks["gradient"] <= peaks[False]


def test_it_is_a_way_of_forward_mode() -> None:
    with pytest.raises(ValueError, match="low_memory is a way of jvp='forward'"):
        GaussNewtonOperator(*problem("linear", "ce"), jvp="finite_difference", low_memory=True)
