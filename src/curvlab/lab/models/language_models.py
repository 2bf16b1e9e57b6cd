"""Language models of Hugging Face transformers, causal and encoder-decoders, with random or published weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from curvlab.lab.data.download import line_of
from curvlab.seeding import seeded_by

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
    settings = {"revision": revision, "dtype": DTYPES[dtype], "attn_implementation": attention}
    model = _from_pretrained(transformers.AutoModelForCausalLM, name, **settings)
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


# ---------------------------------------------------------------------------------- encoder-decoders
ATTENTION_PROJECTIONS = ("q", "k", "v", "o")  # T5's names


class EncoderDecoder(nn.Module):
    """Documents and what the decoder has read so far -> logits of the next tokens: (B, S + T) -> (B, T, V).

    The first S tokens of a row are the document, the others what the decoder reads (`SummarySplits` has them so).
    One tensor, so that training, evaluation and curvature take these models as any other network: with targets
    (B, T) and nn.CrossEntropyLoss() the loss is the one that transformers computes from labels.

    Args:
        model: e.g. T5ForConditionalGeneration.
        source_length: S.
        padding: the token that fills up documents; it is masked.
    """

    def __init__(self, model: nn.Module, *, source_length: int, padding: int) -> None:
        super().__init__()
        self.model = model
        self.source_length = source_length
        self.padding = padding

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, (B, S + T) -> (B, T, V)."""
        source, read = tokens[:, : self.source_length], tokens[:, self.source_length :]
        outputs = self.model(
            input_ids=source,
            attention_mask=(source != self.padding).long(),
            decoder_input_ids=read,
            use_cache=False,
        )
        logits: Tensor = outputs.logits
        return logits

    @torch.no_grad()
    def generate(self, tokens: Tensor, *, max_length: int, num_beams: int = 1) -> Tensor:
        """Return the tokens written for the documents in (B, S + any): (B, n), n at most max_length.

        The most probable token at each step, or a beam search; in the mode (train, eval) that the model is in.
        """
        source = tokens[:, : self.source_length]
        model: Any = self.model
        written: Tensor = model.generate(
            input_ids=source,
            attention_mask=(source != self.padding).long(),
            max_new_tokens=max_length,
            num_beams=num_beams,
            do_sample=False,
        )
        return written[:, 1:]  # without the token that the decoder begins with


def small_t5(
    *,
    input_shape: Sequence[int],
    num_outputs: int,
    padding: int,
    end: int,
    num_layers: int,
    width: int,
    num_heads: int,
    dropout: float = 0.0,
) -> EncoderDecoder:
    """Return a T5 with random weights (Raffel et al. 2020): encoder and decoder, feed-forward 4 x width.

    Args:
        input_shape: (S, T), tokens of a document and of a summary; positions are relative, so any lengths will do.
        num_outputs: V, size of the vocabulary.
        padding: the tokenizer's <pad>, which is also what the decoder begins with.
        end: the tokenizer's </s>.
        num_layers: of the encoder, and of the decoder.
        width: of the residual stream; a multiple of num_heads.
        num_heads: attention heads.
        dropout: share of what is dropped; the published T5 has 0.1.
    """
    from transformers import T5Config, T5ForConditionalGeneration

    if width % num_heads:
        raise ValueError(f"width must be a multiple of num_heads, got {width} and {num_heads}")
    config = T5Config(
        vocab_size=num_outputs, d_model=width, d_kv=width // num_heads, d_ff=4 * width, num_layers=num_layers,
        num_heads=num_heads, dropout_rate=dropout, pad_token_id=padding, eos_token_id=end,
        decoder_start_token_id=padding,
    )  # fmt: skip
    return EncoderDecoder(T5ForConditionalGeneration(config), source_length=_source(input_shape), padding=padding)


def pretrained_encoder_decoder(
    *, input_shape: Sequence[int], num_outputs: int, padding: int, end: int, name: str, revision: str | None = None
) -> EncoderDecoder:
    """Return `transformers.AutoModelForSeq2SeqLM.from_pretrained(name)`: from the hub, or from a local folder.

    Args:
        input_shape: (S, T), as for `small_t5`.
        num_outputs: size of the tokenizer's vocabulary; the model's may be larger (T5 pads it).
        padding: the tokenizer's <pad>.
        end: the tokenizer's </s>.
        name: e.g. google-t5/t5-small, or a folder written by `save_pretrained`.
        revision: commit or tag on the hub.
    """
    import transformers

    auto = transformers.AutoModelForSeq2SeqLM
    model = _from_pretrained(auto, name, revision=revision, dtype=torch.float32)
    config = model.config
    marks = (config.pad_token_id, config.decoder_start_token_id, config.eos_token_id)
    if config.vocab_size < num_outputs or marks != (padding, padding, end):
        raise ValueError(
            f"{name} does not fit the tokenizer ({num_outputs} tokens, padding {padding}, end {end}): use the "
            "model's own, tokenizer.pretrained=${model.name}"
        )
    return EncoderDecoder(model, source_length=_source(input_shape), padding=padding)


def add_adapters(model: EncoderDecoder, *, rank: int, alpha: float, generator: torch.Generator) -> int:
    """Freeze the model and add LoRA adapters to it, in place; return how many parameters they have.

    W becomes W + alpha/rank B A for the query, key, value and output projections of every attention (Hu et al.
    2022, by the package peft), A (rank, in) random from `generator`, B (out, rank) zero: the outputs stay as they
    are at first.

    Args:
        model: T5, or another with projections of its names.
        rank: of the adapters.
        alpha: their scale times rank.
        generator: of A.
    """
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(ATTENTION_PROJECTIONS), lora_dropout=0.0)
    with seeded_by(generator):
        inject_adapter_in_model(config, model.model)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _from_pretrained(kind: Any, name: str, **settings: Any) -> Any:
    try:
        return kind.from_pretrained(name, **settings)
    except OSError as error:
        raise FileNotFoundError(
            f"no model '{name}': {line_of(error)} Check the name on huggingface.co, log in for gated models, or "
            "give the folder of a downloaded copy (model.name=...)."
        ) from error


def _source(input_shape: Sequence[int]) -> int:
    if len(input_shape) != 2:
        raise ValueError(
            f"encoder-decoder models read documents and summaries, (S, T), got input_shape={tuple(input_shape)}: "
            "choose pairs, e.g. data=shortened_documentation or data=xsum"
        )
    return int(input_shape[0])
