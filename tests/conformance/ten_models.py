"""Ten models of transformers and torchvision with random weights, one batch layout each as their users have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torchvision
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models.convnext import CNBlockConfig

from curvlab.problem import Data
from tests.models import Examples

NUM_CLASSES, VOCABULARY, NUM_TRAIN = 3, 11, 4
IGNORED, PADDING = -100, 1

Inputs = Tensor | dict[str, Tensor]


@dataclass(frozen=True)
class Problem:
    """A model in eval mode and its data.

    Attributes:
        name: of MODELS.
        model: fp32.
        inputs: of all training examples at once; what a test computes by hand.
        targets: of all training examples.
        data: the same examples as the model's users have them.
        test: (inputs, targets) of two further examples.
    """

    name: str
    model: nn.Module
    inputs: Inputs
    targets: Tensor
    data: Data
    test: tuple[Inputs, Tensor]


# ------------------------------------------------------------------------------------------ models
def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16, num_labels=NUM_CLASSES, pad_token_id=PADDING,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def opt() -> nn.Module:
    config = transformers.OPTConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, ffn_dim=32, num_attention_heads=2,
        max_position_embeddings=16, word_embed_proj_dim=16, pad_token_id=PADDING,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, intermediate_size=32,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
        decoder_start_token_id=0, pad_token_id=PADDING,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        image_size=16, patch_size=4, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, num_labels=NUM_CLASSES,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def swin() -> nn.Module:
    return torchvision.models.SwinTransformer(
        patch_size=[2, 2], embed_dim=8, depths=[2, 2], num_heads=[1, 2], window_size=[4, 4],
        num_classes=NUM_CLASSES,
    )  # fmt: skip


def convnext() -> nn.Module:
    blocks = [CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)]
    return torchvision.models.ConvNeXt(blocks, num_classes=NUM_CLASSES)


def resnet() -> nn.Module:
    # torchvision's ResNet has 64 channels at the least, 5 million parameters.
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=NUM_CLASSES
    )
    return transformers.ResNetForImageClassification(config)


def mobilenet() -> nn.Module:
    blocks = [[1, 16, 1, 1], [6, 24, 2, 2], [6, 96, 1, 1]]  # of 17: expansion, channels, number, stride
    return torchvision.models.MobileNetV2(NUM_CLASSES, width_mult=0.1, inverted_residual_setting=blocks)


# ------------------------------------------------------------------------------------------ examples
def images(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return (
        torch.randn(count, 3, 16, 16, generator=generator),
        torch.randint(NUM_CLASSES, (count,), generator=generator),
    )


def pixel_values(count: int, generator: torch.Generator) -> tuple[Inputs, Tensor]:
    pixels, labels = images(count, generator)
    return {"pixel_values": pixels}, labels


def tokens(count: int, length: int, generator: torch.Generator) -> Tensor:
    return torch.randint(2, VOCABULARY, (count, length), generator=generator)


def padded(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The last example is two tokens shorter: its ids filled up on the right, and the attention mask."""
    mask = torch.ones_like(ids)
    mask[-1, -2:] = 0
    return ids.masked_fill(mask == 0, PADDING), mask


def next_tokens(ids: Tensor, mask: Tensor) -> Tensor:
    labels = ids.masked_fill(mask == 0, IGNORED)
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], dim=1)


def sentences(count: int, generator: torch.Generator) -> tuple[Inputs, Tensor]:
    """As a tokenizer returns them for BERT, with a class for each sentence."""
    ids, mask = padded(tokens(count, 6, generator))
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
    return inputs, torch.randint(NUM_CLASSES, (count,), generator=generator)


def whole_blocks(count: int, generator: torch.Generator) -> tuple[Inputs, Tensor]:
    """Text cut into blocks of one length: no padding, no mask, only ids."""
    ids = tokens(count, 6, generator)
    return ids, next_tokens(ids, torch.ones_like(ids))


def causal(count: int, generator: torch.Generator) -> tuple[Inputs, Tensor]:
    ids, mask = padded(tokens(count, 6, generator))
    return {"input_ids": ids, "attention_mask": mask}, next_tokens(ids, mask)


def translation(count: int, generator: torch.Generator) -> tuple[Inputs, Tensor]:
    """The decoder reads the labels shifted by one, as T5 shifts them: start token first."""
    source, source_mask = padded(tokens(count, 6, generator))
    written, mask = padded(tokens(count, 4, generator))
    read = torch.cat([torch.zeros_like(written[:, :1]), written[:, :-1]], dim=1)
    inputs = {"input_ids": source, "attention_mask": source_mask, "decoder_input_ids": read}
    return inputs, written.masked_fill(mask == 0, IGNORED)


# ------------------------------------------------------------------------------------------ layouts
def map_style(inputs: Inputs, targets: Tensor) -> Examples:
    """A data set of single examples; an integer as the target where there is a class."""
    return Examples([(rows_of(inputs, n), int(t) if t.ndim == 0 else t) for n, t in enumerate(targets)])


def rows_of(inputs: Inputs, rows: Any) -> Any:
    return {k: v[rows] for k, v in inputs.items()} if isinstance(inputs, Mapping) else inputs[rows]


def pair(inputs: Inputs, targets: Tensor) -> Data:
    return inputs, targets


def loader(inputs: Inputs, targets: Tensor) -> Data:
    return DataLoader(map_style(inputs, targets), batch_size=3)


def batches(inputs: Inputs, targets: Tensor) -> Data:
    return [(rows_of(inputs, rows), targets[rows]) for rows in (slice(0, 1), slice(1, NUM_TRAIN))]


def tensor_dataset(inputs: Inputs, targets: Tensor) -> Data:
    return TensorDataset(inputs, targets)


def tokenized(inputs: Inputs, targets: Tensor) -> Data:
    """What a tokenizer returns, with the labels added to it."""
    return {**inputs, "labels": targets}


def language_modelling(inputs: Inputs, targets: Tensor) -> Data:
    """As the collator for language modelling makes batches: the labels are the tokens, not shifted."""
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, IGNORED)
    whole = inputs | {"labels": labels}
    return [rows_of(whole, rows) for rows in (slice(0, 1), slice(1, NUM_TRAIN))]


def labels_alone(inputs: Inputs, targets: Tensor) -> Data:
    """As the collator for pairs of texts: the model makes what its decoder reads from the labels."""
    whole = {key: value for key, value in inputs.items() if key != "decoder_input_ids"} | {"labels": targets}
    rows = [rows_of(whole, n) for n in range(len(targets))]
    return DataLoader(rows, batch_size=3)


Draw = Callable[[int, torch.Generator], tuple[Inputs, Tensor]]
Layout = Callable[[Inputs, Tensor], Data]

MODELS: dict[str, tuple[Callable[[], nn.Module], Draw, Layout]] = {
    "bert": (bert, sentences, tokenized),
    "gpt2": (gpt2, whole_blocks, tensor_dataset),
    "opt": (opt, causal, language_modelling),
    "llama": (llama, causal, map_style),
    "t5": (t5, translation, labels_alone),
    "vit": (vit, pixel_values, pair),
    "swin": (swin, images, tensor_dataset),
    "convnext": (convnext, images, loader),
    "resnet": (resnet, images, batches),
    "mobilenet": (mobilenet, images, map_style),
}


def problem(name: str) -> Problem:
    """Return the model with random weights, all of which matter: an initial bias or layer scale is about zero."""
    build, draw, layout = MODELS[name]
    generator = torch.Generator().manual_seed(0)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model = build().eval()
    torch.set_rng_state(state)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    inputs, targets = draw(NUM_TRAIN, generator)
    return Problem(name, model, inputs, targets, layout(inputs, targets), draw(2, generator))
