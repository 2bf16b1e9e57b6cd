"""Causal language models: the last layer token by token, never that many logits at once; Hugging Face's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from curvlab.curvature import FisherOperator, GaussNewtonOperator, HessianOperator, language
from tests.curvature.curvature_cases import TiedLanguageModel, language_problem, randomised
from tests.curvature.curvature_oracles import (
    Memory,
    dense_empirical_fisher,
    dense_gauss_newton,
    gradient,
    outputs,
    whole_loss,
)


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


@pytest.mark.parametrize(
    ("build", "logits_per_chunk"),  # one token, two tokens, all at once
    [(WithHead, 13), (WithHead, 2**22), (Untied, 13), (Untied, 2**22), (TokensFirst, 1), (TokensFirst, 13)],
)
def test_products_match_dense_for_every_size_of_chunk(build, logits_per_chunk: int, monkeypatch) -> None:
    monkeypatch.setattr(language, "LOGITS_PER_CHUNK", logits_per_chunk)
    monkeypatch.setattr(language, "FEWER_LOGITS", logits_per_chunk)
    model, loss, inputs, targets = problem(build)
    assert (targets == loss.ignore_index).any()  # else ignored tokens would not be tested
    dense = dense_gauss_newton(model, loss, inputs, targets)
    for low_memory in (True, False):
        op = GaussNewtonOperator(model, loss, (inputs, targets), low_memory=low_memory)
        assert op.function.has_linear_head(inputs)
        vectors = op.randn(9, torch.Generator().manual_seed(1))
        for free in ("cpu", "nowhere"):  # backwards in turns, and eight together, as on a GPU
            monkeypatch.setattr(language, "LAUNCHES_ARE_FREE", free)
            assert_close(op @ vectors, dense @ vectors, rtol=1e-10, atol=1e-13)
    fisher = FisherOperator(model, loss, (inputs, targets), kind="empirical")
    dense = dense_empirical_fisher(model, loss, inputs, targets)
    assert_close(fisher @ vectors, dense @ vectors, rtol=1e-10, atol=1e-13)
    v = vectors[:, 0]
    finite = GaussNewtonOperator(model, loss, (inputs, targets), jvp="finite_difference") @ v
    assert_close(finite, op @ v, rtol=1e-6, atol=1e-7)
    assert_close(
        finite * 0, GaussNewtonOperator(model, loss, (inputs, targets), jvp="finite_difference") @ (0 * v)
    )


@pytest.mark.parametrize("frozen", ["embedding", "hidden", "output.bias", "all but the bias"])
def test_frozen_parameters(frozen: str, monkeypatch) -> None:
    model, loss, inputs, targets = problem()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "output.bias" if frozen == "all but the bias" else frozen not in name)
    op = GaussNewtonOperator(model, loss, (inputs, targets))
    for free in ("cpu", "nowhere"):
        monkeypatch.setattr(language, "LAUNCHES_ARE_FREE", free)
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


def opt(transformers):
    config = transformers.OPTConfig(
        vocab_size=7, hidden_size=8, num_hidden_layers=1, ffn_dim=12, num_attention_heads=2,
        max_position_embeddings=16, word_embed_proj_dim=8, pad_token_id=1, attn_implementation="eager",
    )  # fmt: skip
    return transformers.OPTForCausalLM(config)


def gpt2(transformers):
    config = transformers.GPT2Config(
        vocab_size=7, n_embd=8, n_layer=1, n_head=2, n_positions=16, attn_implementation="eager"
    )
    return transformers.GPT2LMHeadModel(config)


def llama(transformers):
    config = transformers.LlamaConfig(
        vocab_size=7, hidden_size=8, num_hidden_layers=1, intermediate_size=12, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def mistral(transformers):
    config = transformers.MistralConfig(
        vocab_size=7, hidden_size=8, num_hidden_layers=1, intermediate_size=12, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, sliding_window=4, attn_implementation="eager",
    )  # fmt: skip
    return transformers.MistralForCausalLM(config)


def causal_data() -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, 7, (3, 4), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 3:], mask[2, 2:] = 0, 0  # padded on the right
    targets = torch.cat([ids[:, 1:], torch.full((3, 1), -100)], dim=1)
    targets[1, 2:], targets[2, 1:] = -100, -100
    return {"input_ids": ids, "attention_mask": mask}, targets


@pytest.mark.parametrize(
    # OPT, Llama and Mistral compute attention weights (the latter two their norms too) in fp32 in every precision.
    ("build", "attention", "tolerance"),
    [
        (gpt2, "eager", 1e-10),
        (gpt2, "sdpa", 1e-10),
        (opt, "eager", 1e-5),
        (opt, "sdpa", 1e-10),
        (llama, "eager", 1e-5),
        (mistral, "eager", 1e-5),
    ],
)
def test_hugging_face_language_models_match_dense(build, attention: str, tolerance: float) -> None:
    transformers = pytest.importorskip("transformers")
    model = randomised(build(transformers), torch.Generator().manual_seed(0))
    model.set_attn_implementation(attention)
    loss, (inputs, targets) = nn.CrossEntropyLoss(), causal_data()
    op = GaussNewtonOperator(model, loss, (inputs, targets))
    vectors = op.randn(2, torch.Generator().manual_seed(1))
    gauss_newton = dense_gauss_newton(model, loss, inputs, targets)
    fisher = dense_empirical_fisher(model, loss, inputs, targets)
    first = gradient(whole_loss(loss, outputs(model, inputs), targets), model, create_graph=True)
    hessian_products = torch.stack([gradient(first @ v, model) for v in vectors.T], dim=1)

    def close(product: Tensor, expected: Tensor) -> None:
        assert_close(product, expected, rtol=0, atol=tolerance * expected.abs().max().item())

    close(op @ vectors, gauss_newton @ vectors)
    close(FisherOperator(model, loss, (inputs, targets), kind="empirical") @ vectors, fisher @ vectors)
    close(HessianOperator(model, loss, (inputs, targets)) @ vectors, hessian_products)
    finite = GaussNewtonOperator(model, loss, (inputs, targets), jvp="finite_difference", fd_step=1e-3)
    assert_close(finite @ vectors, op @ vectors, rtol=0, atol=1e-3 * (op @ vectors).abs().max().item())
    assert op.function.has_linear_head(inputs)  # and so the last layer is taken token by token
    one_by_one = GaussNewtonOperator(model, loss, (inputs, targets), batch_size=1)
    close(one_by_one @ vectors, op @ vectors)


def test_an_object_with_logits_is_read_like_a_tensor() -> None:
    class Output:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, input_ids: Tensor) -> Output:
            return Output(self.inner(input_ids))

    case = language_problem("mean")
    wrapped = GaussNewtonOperator(Wrapped(case.model), case.loss, ({"input_ids": case.inputs}, case.targets))
    assert_close(wrapped.to_dense(), GaussNewtonOperator(*case).to_dense())
