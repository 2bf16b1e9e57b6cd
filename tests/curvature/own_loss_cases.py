"""Tiny models in float64 whose batches hold their labels, and dense matrices of `model(**batch).loss` by autograd.

Nothing here comes from src.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from unittest.mock import patch

import torch
import transformers
from torch import Tensor, nn

VOCABULARY, CLASSES, PADDING, START, IGNORED = 7, 3, 1, 0, -100
MARK = {"attn_implementation": "eager"}  # plain kernels, which have second derivatives


def bert(num_labels: int = CLASSES) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=4, num_hidden_layers=1, num_attention_heads=2, intermediate_size=6,
        max_position_embeddings=8, num_labels=num_labels, pad_token_id=PADDING, **MARK,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def masked_bert() -> nn.Module:
    return transformers.BertForMaskedLM(bert().config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=4, n_layer=1, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=0, **MARK
    )
    return transformers.GPT2LMHeadModel(config)


def opt() -> nn.Module:
    config = transformers.OPTConfig(
        vocab_size=VOCABULARY, hidden_size=4, num_hidden_layers=1, ffn_dim=6, num_attention_heads=2,
        max_position_embeddings=8, word_embed_proj_dim=4, pad_token_id=PADDING, **MARK,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=4, d_kv=2, d_ff=6, num_layers=1, num_heads=2,
        decoder_start_token_id=START, pad_token_id=PADDING, **MARK,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def ids(*lengths: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens of some sentences, filled up on the right, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    mask = (torch.arange(shape[1]) < torch.tensor(lengths)[:, None]).long()
    tokens = torch.randint(2, VOCABULARY, shape, generator=generator)
    return tokens.masked_fill(mask == 0, PADDING), mask


def sentences(*lengths: int) -> dict[str, Tensor]:
    tokens, mask = ids(*lengths)
    labels = torch.arange(len(lengths)) % CLASSES
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def causal(*lengths: int) -> dict[str, Tensor]:
    """As DataCollatorForLanguageModeling(mlm=False) makes them: the labels are the tokens."""
    tokens, mask = ids(*lengths)
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, IGNORED)}


def masked(*lengths: int) -> dict[str, Tensor]:
    """One token of each sentence is to be guessed."""
    batch = causal(*lengths)
    chosen = torch.arange(batch["labels"].shape[1]) == 1
    return batch | {"labels": batch["labels"].masked_fill(~chosen, IGNORED)}


def translation(*lengths: int) -> dict[str, Tensor]:
    """As DataCollatorForSeq2Seq makes them without a model: no decoder_input_ids."""
    tokens, mask = ids(*lengths)
    written, kept = ids(*[max(1, length - 2) for length in lengths], seed=1)
    return {"input_ids": tokens, "attention_mask": mask, "labels": written.masked_fill(kept == 0, IGNORED)}


@dataclass(frozen=True)
class OwnLossCase:
    """A model, how its batches are made for sentences of given lengths, some of its parameters, and its shift.

    T5 normalises in float32 whatever its dtype, so gradients are rounded there.
    """

    build: Callable[[], nn.Module]
    draw: Callable[..., dict[str, Tensor]]
    patterns: tuple[str, ...]
    shift: int
    rtol: float = 1e-9

    def model(self) -> nn.Module:
        state = torch.get_rng_state()
        torch.manual_seed(0)
        model = self.build().double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        torch.set_rng_state(state)
        return model


CASES = {
    "bert": OwnLossCase(bert, sentences, ("classifier.*", "*.pooler.dense.bias", "*output.LayerNorm.*"), 0),
    "bert masked": OwnLossCase(masked_bert, masked, ("*.transform.dense.*", "*.query.bias"), 0),
    "gpt2": OwnLossCase(gpt2, causal, ("*.ln_?.*", "*.ln_f.*", "*.mlp.c_proj.weight"), 1),
    "opt": OwnLossCase(opt, causal, ("*final_layer_norm.*", "*.fc2.*"), 1),
    "t5": OwnLossCase(
        t5, translation, ("decoder.*.layer_norm.weight", "encoder.*.wo.weight", "*.SelfAttention.q.*"), 0, 1e-6
    ),
}


def chosen(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def flat(tensors) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def own_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """model(**batch).loss; transformers computes that of causal models in float32, here it stays in float64."""
    with patch.object(Tensor, "float", Tensor.double):
        return model(**batch).loss


def own_gradient(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    loss = own_loss(model, batch)
    return flat(torch.autograd.grad(loss, chosen(model), materialize_grads=True))


def own_hessian(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """(P, P), row by row: the gradient of each entry of the gradient of model(**batch).loss."""
    parameters = chosen(model)
    first = flat(
        torch.autograd.grad(own_loss(model, batch), parameters, create_graph=True, materialize_grads=True)
    )
    rows = [torch.autograd.grad(entry, parameters, retain_graph=True, materialize_grads=True) for entry in first]
    return torch.stack([flat(row) for row in rows])


def predictions(model: nn.Module, batch: Mapping[str, Tensor], shift: int) -> tuple[Tensor, Tensor]:
    """Return logits (M, C) with their graph and labels (M,) of all predictions that count."""
    logits, labels = model(**batch).logits, batch["labels"]
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    kept = labels != IGNORED
    return logits[kept], labels[kept]


def own_gauss_newton(model: nn.Module, batch: Mapping[str, Tensor], shift: int) -> Tensor:
    """(P, P): 1/M Σ J_mᵀ (Diag(p) - ppᵀ) J_m over the predictions that count."""
    logits, _ = predictions(model, batch, shift)
    parameters, total = chosen(model), 0.0
    for row in logits:
        jacobian = torch.stack(
            [flat(torch.autograd.grad(z, parameters, retain_graph=True, materialize_grads=True)) for z in row]
        )
        p = row.detach().softmax(0)
        total = total + jacobian.T @ (torch.diag(p) - p[:, None] * p) @ jacobian
    return total / len(logits)


def own_empirical_fisher(model: nn.Module, batch: Mapping[str, Tensor], shift: int) -> Tensor:
    """(P, P): 1/M Σ g_m g_mᵀ with g_m the gradient of prediction m's loss."""
    logits, labels = predictions(model, batch, shift)
    losses = -logits.log_softmax(1)[torch.arange(len(labels)), labels]
    parameters = chosen(model)
    gradients = torch.stack(
        [flat(torch.autograd.grad(one, parameters, retain_graph=True, materialize_grads=True)) for one in losses]
    )
    return gradients.T @ gradients / len(gradients)
