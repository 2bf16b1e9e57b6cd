"""The last layer token by token: same products as from whole logits, and never that many logits at once."""

from __future__ import annotations

import pytest
import torch
from curvature_cases import TiedLanguageModel, language_problem, randomised
from curvature_memory import Memory
from curvature_oracles import dense_empirical_fisher, dense_gauss_newton
from torch import Tensor, nn
from torch.testing import assert_close

from curvlab.curvature import FisherOperator, GaussNewtonOperator, language


class WithHead(TiedLanguageModel):
    """Says which layer is its last, as Hugging Face's models do."""

    def get_output_embeddings(self) -> nn.Linear:
        return self.output


class Capped(WithHead):
    def forward(self, tokens: Tensor) -> Tensor:
        return 2 * torch.tanh(super().forward(tokens) / 2)


class Untied(WithHead):
    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(4, 6, bias=False)


class TokensFirst(WithHead):
    """Hidden states in the layout (T, N, D), as recurrent networks have them."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(torch.tanh(self.hidden(self.embedding(tokens.T))).transpose(0, 1))


def problem(build=WithHead, *, seed: int = 0):
    case = language_problem("mean")
    model = randomised(build(), torch.Generator().manual_seed(seed))
    return model, case.loss, case.inputs, case.targets


@pytest.mark.parametrize("logits_per_chunk", [1, 13, 2**22], ids=["one token", "two tokens", "all at once"])
@pytest.mark.parametrize("build", [WithHead, Untied, TokensFirst])
def test_products_match_dense_for_every_size_of_chunk(build, logits_per_chunk: int, monkeypatch) -> None:
    monkeypatch.setattr(language, "LOGITS_PER_CHUNK", logits_per_chunk)
    model, loss, inputs, targets = problem(build)
    assert (targets == loss.ignore_index).any()  # else ignored tokens would not be tested
    op = GaussNewtonOperator(model, loss, (inputs, targets))
    assert op.function.has_linear_head(inputs)
    assert_close(op.to_dense(), dense_gauss_newton(model, loss, inputs, targets), rtol=1e-10, atol=1e-13)
    fisher = FisherOperator(model, loss, (inputs, targets), kind="empirical")
    assert_close(fisher.to_dense(), dense_empirical_fisher(model, loss, inputs, targets), rtol=1e-10, atol=1e-13)
    v = op.randn(1, torch.Generator().manual_seed(1))[:, 0]
    finite = GaussNewtonOperator(model, loss, (inputs, targets), jvp="finite_difference") @ v
    assert_close(finite, op @ v, rtol=1e-6, atol=1e-7)
    assert_close(
        finite * 0, GaussNewtonOperator(model, loss, (inputs, targets), jvp="finite_difference") @ (0 * v)
    )


@pytest.mark.parametrize("frozen", ["embedding", "hidden", "output.bias", "all but the bias"])
def test_frozen_parameters(frozen: str) -> None:
    model, loss, inputs, targets = problem()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "output.bias" if frozen == "all but the bias" else frozen not in name)
    op = GaussNewtonOperator(model, loss, (inputs, targets))
    assert_close(op.to_dense(), dense_gauss_newton(model, loss, inputs, targets), rtol=1e-10, atol=1e-13)


def test_capped_logits_are_noticed_and_taken_as_a_whole() -> None:
    model, loss, inputs, targets = problem(Capped)
    op = GaussNewtonOperator(model, loss, (inputs, targets))
    assert not op.function.has_linear_head(inputs)
    assert_close(op.to_dense(), dense_gauss_newton(model, loss, inputs, targets), rtol=1e-10, atol=1e-13)


def test_the_model_is_left_as_it_was() -> None:
    model, loss, inputs, targets = problem()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    GaussNewtonOperator(model, loss, (inputs, targets)).to_dense()
    assert model(inputs).shape == (*inputs.shape, 6)  # no hook is left
    assert model.output.weight is model.embedding.weight
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None


class Wide(nn.Module):
    """A vocabulary that dwarfs the rest, as in language models: 4,096 logits from 4 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4096, 4)
        self.output = nn.Linear(4, 4096, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.embedding(tokens).tanh())

    def get_output_embeddings(self) -> nn.Linear:
        return self.output


@pytest.mark.parametrize("jvp", ["forward", "finite_difference"])
def test_whole_logits_are_never_held(jvp, monkeypatch) -> None:
    """The peak is that of a few P and a few chunks, as language says; from whole logits it is some N·T·V."""
    monkeypatch.setattr(language, "LOGITS_PER_CHUNK", 8 * 4096)
    model = Wide()
    tokens = torch.randint(4096, (16, 32), generator=torch.Generator().manual_seed(0))
    op = GaussNewtonOperator(model, nn.CrossEntropyLoss(), (tokens, tokens), jvp=jvp, fd_step=0.1)
    v = op.randn(1, torch.Generator().manual_seed(1))[:, 0]
    chunk, logits, parameters = 4 * 8 * 4096, 4 * 16 * 32 * 4096, 4 * op.shape[0]  # bytes
    with Memory() as chunked:
        product = op @ v
    assert chunked.largest == op.shape[0] == 8 * 4096
    assert chunked.peak < 6 * chunk + 8 * parameters
    whole = GaussNewtonOperator(model, nn.CrossEntropyLoss(), (tokens, tokens), jvp=jvp, fd_step=0.1)
    whole.function._has_head = False
    with Memory() as at_once:
        assert_close(whole @ v, product, rtol=1e-4, atol=1e-9)
    assert at_once.peak > 4 * logits > 10 * chunked.peak


def test_errors_name_what_is_wrong() -> None:
    model, loss, inputs, targets = problem()
    wrong = GaussNewtonOperator(model, loss, (inputs, targets.clamp(min=0) + 6))
    zero = torch.zeros(wrong.shape[0], dtype=torch.float64)
    with pytest.raises(ValueError, match="but the model has 6 outputs"):
        wrong @ zero
    with torch.no_grad():
        model.output.bias[2] = torch.nan
    with pytest.raises(ValueError, match="outputs contain NaN"):
        GaussNewtonOperator(model, loss, (inputs, targets)) @ zero
    with torch.no_grad():
        model.hidden.bias[2] = torch.inf
        model.hidden.weight[2] = torch.nan
    with pytest.raises(ValueError, match="outputs contain NaN"):
        GaussNewtonOperator(model, loss, (inputs, targets)) @ zero
