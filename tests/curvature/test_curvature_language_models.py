"""Hugging Face causal language models: mappings as inputs, objects with logits as outputs."""

import pytest
import torch
from curvature_cases import language_problem, randomised
from curvature_oracles import dense_empirical_fisher, dense_gauss_newton, gradient, outputs, whole_loss
from torch import Tensor, nn
from torch.testing import assert_close

from curvlab.curvature import FisherOperator, GaussNewtonOperator, HessianOperator


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


def gemma2(transformers):
    config = transformers.Gemma2Config(
        vocab_size=7, hidden_size=8, num_hidden_layers=1, intermediate_size=12, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, max_position_embeddings=16, final_logit_softcapping=1.0,
        attn_implementation="eager",
    )  # fmt: skip
    return transformers.Gemma2ForCausalLM(config)


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


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


def test_capped_logits_are_taken_as_a_whole() -> None:
    model = randomised(gemma2(pytest.importorskip("transformers")), torch.Generator().manual_seed(0))
    loss, (inputs, targets) = nn.CrossEntropyLoss(), causal_data()
    op = GaussNewtonOperator(model, loss, (inputs, targets))
    assert not op.function.has_linear_head(inputs)
    v = op.randn(1, torch.Generator().manual_seed(1))
    expected = dense_gauss_newton(model, loss, inputs, targets) @ v
    assert_close(op @ v, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("build", [opt, gpt2])
def test_hugging_face_models_in_train_mode_are_refused(build) -> None:
    model = build(pytest.importorskip("transformers")).train()
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        GaussNewtonOperator(model, nn.CrossEntropyLoss(), causal_data()) @ torch.zeros(count(model))


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
