"""Encoder-decoders as maps from one tensor to logits: against transformers' own loss, generation and files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor, nn

from curvlab.lab.models import EncoderDecoder, add_adapters, pretrained_encoder_decoder, small_t5
from curvlab.seeding import seeded_by
from curvlab.training import MeanLoss

S, T, V, PADDING, END = 7, 5, 40, 1, 2
SHAPE = {"input_shape": (S, T), "num_outputs": V, "padding": PADDING, "end": END}
CONFIGS = Path(__file__).parents[3] / "conf" / "model"


@pytest.fixture
def model() -> EncoderDecoder:
    with seeded_by(torch.Generator().manual_seed(0)):
        return small_t5(**SHAPE, num_layers=1, width=16, num_heads=2).eval()


@pytest.fixture
def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Documents, labels as transformers takes them, and what the decoder reads; both of different lengths."""
    generator = torch.Generator().manual_seed(1)
    documents = torch.randint(3, V, (3, S), generator=generator)
    labels = torch.randint(3, V, (3, T), generator=generator)
    documents[1, 4:] = PADDING
    labels[0, 3:], labels[0, 2] = -100, END
    read = torch.full_like(labels, PADDING)
    read[:, 1:] = labels[:, :-1].masked_fill(labels[:, :-1] == -100, PADDING)
    return documents, labels, read


def test_loss_and_gradient_are_those_of_transformers(model: EncoderDecoder, batch: tuple[Tensor, ...]) -> None:
    documents, labels, read = batch
    model.double()
    theirs = model.model(input_ids=documents, attention_mask=(documents != PADDING).long(), labels=labels).loss
    theirs.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    ours = MeanLoss(nn.CrossEntropyLoss())(model(torch.cat([documents, read], dim=1)), labels)
    ours.backward()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_padding_of_a_document_changes_nothing(model: EncoderDecoder, batch: tuple[Tensor, ...]) -> None:
    documents, _, read = batch
    short = EncoderDecoder(model.model, source_length=4, padding=PADDING)
    whole = model(torch.cat([documents, read], dim=1))[1]
    torch.testing.assert_close(short(torch.cat([documents[:, :4], read], dim=1))[1], whole)


def test_generation_takes_the_most_probable_token_each_time(
    model: EncoderDecoder, batch: tuple[Tensor, ...]
) -> None:
    documents, _, _ = batch
    written = torch.full((3, 1), PADDING)
    for _ in range(4):
        written = torch.cat([written, model(torch.cat([documents, written], dim=1))[:, -1:].argmax(-1)], dim=1)
    found = model.generate(documents, max_length=4)
    for own, expected in zip(found.tolist(), written[:, 1:].tolist(), strict=True):
        length = expected.index(END) + 1 if END in expected else len(expected)
        assert own[:length] == expected[:length]
        assert set(own[length:]) <= {PADDING}


def test_adapters_leave_the_outputs_and_freeze_the_rest(model: EncoderDecoder, batch: tuple[Tensor, ...]) -> None:
    documents, labels, read = batch
    tokens = torch.cat([documents, read], dim=1)
    before = model(tokens)
    generator = torch.Generator().manual_seed(0)
    # 3 attentions (encoder, decoder, between them) with 4 projections of 16 x 16: A and B of 3 x 16 each.
    assert add_adapters(model, rank=3, alpha=6, generator=generator) == 3 * 4 * 2 * 3 * 16
    torch.testing.assert_close(model(tokens), before)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert all("lora_" in name for name in trained)
    nn.functional.cross_entropy(model(tokens)[labels != -100], labels[labels != -100]).backward()
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    assert model.generate(documents, max_length=3).shape[0] == 3


def test_an_adapter_is_the_product_of_its_matrices(model: EncoderDecoder) -> None:
    projection = model.model.encoder.block[0].layer[0].SelfAttention
    before = projection.q.weight.clone()
    add_adapters(model, rank=3, alpha=6, generator=torch.Generator().manual_seed(0))
    adapter = projection.q
    with torch.no_grad():
        adapter.lora_B["default"].weight.normal_(generator=torch.Generator().manual_seed(1))
    vector = torch.randn(1, 16, generator=torch.Generator().manual_seed(2))
    changed = before + 6 / 3 * adapter.lora_B["default"].weight @ adapter.lora_A["default"].weight
    torch.testing.assert_close(adapter(vector), vector @ changed.T)


def test_adapters_start_as_the_generator_says() -> None:
    starts = []
    for seed in (0, 0, 1):
        model = small_t5(**SHAPE, num_layers=1, width=16, num_heads=2)
        add_adapters(model, rank=2, alpha=2, generator=torch.Generator().manual_seed(seed))
        starts.append(torch.cat([p.flatten() for n, p in model.named_parameters() if "lora_A" in n]))
    assert starts[0].equal(starts[1])
    assert not starts[0].equal(starts[2])


def test_a_saved_model_loads_with_its_weights(
    model: EncoderDecoder, batch: tuple[Tensor, ...], tmp_path: Path
) -> None:
    documents, _, read = batch
    model.model.save_pretrained(tmp_path)
    config = OmegaConf.load(CONFIGS / "t5_small.yaml")
    config.name = str(tmp_path)
    loaded = instantiate(config, **SHAPE | {"num_outputs": V - 3}).eval()  # a model's vocabulary may be padded
    tokens = torch.cat([documents, read], dim=1)
    torch.testing.assert_close(loaded(tokens), model(tokens))
    with pytest.raises(ValueError, match=r"does not fit the tokenizer \(41 tokens"):
        pretrained_encoder_decoder(**SHAPE | {"num_outputs": V + 1}, name=str(tmp_path))
    with pytest.raises(ValueError, match=r"padding 0.*use the model's own"):
        pretrained_encoder_decoder(**SHAPE | {"padding": 0}, name=str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"no model '.*nothing'.*give the folder of a downloaded copy"):
        pretrained_encoder_decoder(**SHAPE, name=str(tmp_path / "nothing"))


def test_refuses_shapes_that_are_not_those_of_pairs() -> None:
    small = {"num_layers": 1, "width": 16, "num_heads": 2}
    with pytest.raises(ValueError, match=r"\(S, T\), got input_shape=\(1, 8, 8\): choose pairs"):
        small_t5(**SHAPE | small | {"input_shape": (1, 8, 8)})
    with pytest.raises(ValueError, match="width must be a multiple of num_heads, got 16 and 5"):
        small_t5(**SHAPE | small | {"num_heads": 5})


def test_the_small_model_builds_from_its_config() -> None:
    model = instantiate(OmegaConf.load(CONFIGS / "t5.yaml"), **SHAPE)
    assert model(torch.full((2, S + T), 3)).shape == (2, T, V)
