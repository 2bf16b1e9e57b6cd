"""Causal language models of Hugging Face transformers, with random or published weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import nn

Family: TypeAlias = Literal["opt", "llama", "mistral", "gpt2"]
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def small_causal_language_model(
    *,
    input_shape: Sequence[int],
    num_outputs: int,
    family: Family = "opt",
    num_layers: int,
    width: int,
    num_heads: int,
    attention: str = "eager",
) -> nn.Module:
    """Return a causal language model with random weights: transformer decoder, feed-forward 4 x width, no dropout.

    OPT and GPT-2 have learned positions and tied embeddings (GPT-2 and OPT-1.3B tie them too), Llama and Mistral
    rotary positions, RMSNorm and an untied head.

    Args:
        input_shape: (T,), tokens of a sequence: the number of positions.
        num_outputs: V, size of the vocabulary.
        family: architecture.
        num_layers: decoder layers.
        width: of the residual stream; a multiple of num_heads.
        num_heads: attention heads.
        attention: "eager" computes attention from plain kernels, which have forward-mode derivatives in every
            version of PyTorch; "sdpa" is PyTorch's own.
    """
    import transformers

    if len(input_shape) != 1:
        raise ValueError(
            f"language models read token sequences (T,), got input_shape={tuple(input_shape)}: choose text, "
            "e.g. data=documentation or data=ptb"
        )
    if width % num_heads:
        raise ValueError(f"width must be a multiple of num_heads, got {width} and {num_heads}")
    common = {"vocab_size": num_outputs, "attn_implementation": attention}
    length = input_shape[0]
    if family == "opt":
        config = transformers.OPTConfig(
            **common, hidden_size=width, num_hidden_layers=num_layers, ffn_dim=4 * width,
            word_embed_proj_dim=width, num_attention_heads=num_heads, max_position_embeddings=length,
            dropout=0.0, attention_dropout=0.0,
        )  # fmt: skip
    elif family == "gpt2":
        config = transformers.GPT2Config(
            **common, n_embd=width, n_layer=num_layers, n_head=num_heads, n_positions=length, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=2, eos_token_id=2,
        )  # fmt: skip
    elif family in ("llama", "mistral"):
        kind = transformers.LlamaConfig if family == "llama" else transformers.MistralConfig
        config = kind(
            **common, hidden_size=width, num_hidden_layers=num_layers, intermediate_size=4 * width,
            num_attention_heads=num_heads, num_key_value_heads=num_heads, max_position_embeddings=length,
        )  # fmt: skip
    else:
        raise ValueError(f"unknown family '{family}': choose opt, llama, mistral or gpt2")
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def pretrained_causal_language_model(
    *,
    input_shape: Sequence[int],
    num_outputs: int,
    name: str,
    revision: str | None = None,
    dtype: str = "float32",
    attention: str = "eager",
) -> nn.Module:
    """Return `transformers.AutoModelForCausalLM.from_pretrained(name)`: from the hub, or from a local folder.

    Args:
        input_shape: (T,), tokens of a sequence; must fit the model's positions.
        num_outputs: size of the tokenizer's vocabulary; the model's may be larger (OPT pads it).
        name: e.g. facebook/opt-1.3b, or a folder written by `save_pretrained`.
        revision: commit or tag on the hub.
        dtype: float32 (as the paper's finite differences need), float64 or bfloat16.
        attention: see `small_causal_language_model`.
    """
    import transformers

    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype '{dtype}': choose {', '.join(DTYPES)}")
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            name, revision=revision, dtype=DTYPES[dtype], attn_implementation=attention
        )
    except OSError as error:
        raise FileNotFoundError(
            f"no model '{name}': {(str(error).strip().splitlines() or ['not found'])[0]} Check the name on "
            "huggingface.co, log in for gated models, or give the folder of a downloaded copy (model.name=...)."
        ) from error
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and input_shape[0] > positions:
        raise ValueError(f"{name} has {positions} positions: choose sequence_length={positions} or less")
    if model.config.vocab_size < num_outputs:
        raise ValueError(
            f"{name} has {model.config.vocab_size} tokens, but the tokenizer {num_outputs}: use the model's own "
            "tokenizer, tokenizer.pretrained=${model.name}"
        )
    causal: nn.Module = model
    return causal
