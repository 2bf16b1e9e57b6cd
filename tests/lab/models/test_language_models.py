"""Language models, and published weights."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path

import hydra
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor, nn

from curvlab.lab.data import load_cifar10
from curvlab.lab.models import (
    EncoderDecoder,
    ResNet20,
    add_adapters,
    build_model,
    pretrained_causal_language_model,
    pretrained_encoder_decoder,
    resnets,
    small_causal_language_model,
    small_t5,
)
from curvlab.lab.models.resnets import load_weights
from curvlab.problem import freeze
from curvlab.seeding import seeded_by
from curvlab.training import MeanLoss
from tests.refusals import refuses

# --- Language models: small ones of every family, encoder-decoders against transformers' own loss, published ones
transformers = pytest.importorskip("transformers")
CONF = Path(__file__).parents[3] / "conf" / "model"
SMALL = {"num_layers": 1, "width": 8, "num_heads": 2}


def small(family: str, seed: int = 0, **settings) -> torch.nn.Module:
    factory = partial(small_causal_language_model, family=family, **(SMALL | settings))
    return build_model(factory, input_shape=(6,), num_outputs=300, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", ["opt", "gpt2", "llama", "mistral"])
def test_every_family_is_causal_reproducible_and_in_eval_mode(family: str) -> None:
    model = small(family)
    assert type(model).__name__.lower().startswith(family)
    assert not model.training
    tokens = torch.arange(6)[None] + 10
    changed = tokens.clone()
    changed[0, 4] = 99
    with torch.no_grad():
        logits, other = model(tokens).logits, model(changed).logits
    assert logits.shape == (1, 6, 300)
    torch.testing.assert_close(logits[:, :4], other[:, :4])  # what comes later is not seen
    assert not torch.allclose(logits[:, 4:], other[:, 4:])
    with torch.no_grad():
        torch.testing.assert_close(small(family)(tokens).logits, logits)
        assert not torch.allclose(small(family, seed=1)(tokens).logits, logits)


def test_the_config_builds_opt_with_tied_embeddings() -> None:
    factory = partial(hydra.utils.instantiate, OmegaConf.load(CONF / "opt.yaml"))
    model = build_model(factory, input_shape=(16,), num_outputs=512, generator=torch.Generator().manual_seed(0))
    assert isinstance(model, transformers.OPTForCausalLM)
    assert model.lm_head.weight is model.model.decoder.embed_tokens.weight
    assert model.config._attn_implementation == "eager"


def test_errors_say_what_to_change() -> None:
    build = partial(small_causal_language_model, num_outputs=300)
    refuses(r"read token sequences \(T,\), got input_shape=\(1, 8, 8\)", build, input_shape=(1, 8, 8), **SMALL)
    refuses("multiple of num_heads, got 8 and 3", build, input_shape=(6,), **(SMALL | {"num_heads": 3}))
    refuses("unknown family 'bert'", build, input_shape=(6,), family="bert", **SMALL)


def test_published_weights_are_loaded_from_a_folder(tmp_path: Path) -> None:
    folder, model = tmp_path / "model", small("opt")
    model.save_pretrained(folder)
    config = OmegaConf.load(CONF / "opt_1b.yaml")
    assert config.name == "facebook/opt-1.3b"
    loaded = hydra.utils.instantiate(config, name=str(folder), input_shape=(6,), num_outputs=300)
    assert loaded.config._attn_implementation == "eager"
    tokens = torch.arange(6)[None] + 10
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(tokens).logits, model(tokens).logits)
    double = pretrained_causal_language_model(name=str(folder), dtype="float64", input_shape=(6,), num_outputs=290)
    assert next(double.parameters()).dtype == torch.float64
    load = partial(pretrained_causal_language_model, name=str(folder), num_outputs=300)
    refuses("has 6 positions: choose sequence_length=6 or less", load, input_shape=(7,))
    refuses("has 300 tokens, but the tokenizer 301", load, input_shape=(6,), num_outputs=301)
    refuses("unknown dtype 'int8'", load, input_shape=(6,), dtype="int8")
    nowhere = {"name": str(folder / "nowhere"), "error": FileNotFoundError}
    refuses(r"no model '.*nowhere': .*Check the name", load, input_shape=(6,), **nowhere)


# ------------------------------------------------------------------------------------ encoder-decoders
S, T, V, PADDING, END = 7, 5, 40, 1, 2
SHAPE = {"input_shape": (S, T), "num_outputs": V, "padding": PADDING, "end": END}


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


def test_adapters_are_products_of_matrices_that_start_as_the_generator_says() -> None:
    starts = []
    for seed in (0, 0, 1):
        model = small_t5(**SHAPE, num_layers=1, width=16, num_heads=2)
        projection = model.model.encoder.block[0].layer[0].SelfAttention
        before = projection.q.weight.clone()
        add_adapters(model, rank=2, alpha=6, generator=torch.Generator().manual_seed(seed))
        starts.append(torch.cat([p.flatten() for n, p in model.named_parameters() if "lora_A" in n]))
    assert starts[0].equal(starts[1])
    assert not starts[0].equal(starts[2])
    generator = torch.Generator().manual_seed(1)
    adapter, vector = projection.q, torch.randn(1, 16, generator=generator)
    with torch.no_grad():
        adapter.lora_B["default"].weight.normal_(generator=generator)
    changed = before + 6 / 2 * adapter.lora_B["default"].weight @ adapter.lora_A["default"].weight
    torch.testing.assert_close(adapter(vector), vector @ changed.T)


def test_a_saved_model_loads_with_its_weights(
    model: EncoderDecoder, batch: tuple[Tensor, ...], tmp_path: Path
) -> None:
    documents, _, read = batch
    model.model.save_pretrained(tmp_path)
    config = OmegaConf.load(CONF / "t5_small.yaml")
    config.name = str(tmp_path)
    loaded = instantiate(config, **SHAPE | {"num_outputs": V - 3}).eval()  # a model's vocabulary may be padded
    tokens = torch.cat([documents, read], dim=1)
    torch.testing.assert_close(loaded(tokens), model(tokens))
    load = partial(pretrained_encoder_decoder, **SHAPE | {"name": str(tmp_path)})
    refuses(r"does not fit the tokenizer \(41 tokens", load, num_outputs=V + 1)
    refuses(r"padding 0.*use the model's own", load, padding=0)
    text = r"no model '.*nothing'.*give the folder of a downloaded copy"
    refuses(text, load, name=str(tmp_path / "nothing"), error=FileNotFoundError)


def test_the_small_model_builds_from_its_config_and_for_pairs_only() -> None:
    model = instantiate(OmegaConf.load(CONF / "t5.yaml"), **SHAPE)
    assert model(torch.full((2, S + T), 3)).shape == (2, T, V)
    build = partial(small_t5, **SHAPE | {"num_layers": 1, "width": 16, "num_heads": 2})
    refuses(r"\(S, T\), got input_shape=\(1, 8, 8\): choose pairs", build, input_shape=(1, 8, 8))
    refuses("width must be a multiple of num_heads, got 16 and 5", build, num_heads=5)


# --- Published weights
STAGED = "weights/resnet20-12fca82f.th"


def save(folder: Path, content: object, *, name: str = "net") -> Path:
    """Save under a name that carries the hash, as torch's hub does."""
    path = folder / "weights.th"
    torch.save(content, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return path.rename(folder / f"{name}-{digest[:8]}.th")


def test_data_parallel_prefix_is_dropped(tmp_path: Path) -> None:
    source, model = ResNet20((3, 32, 32), 10), ResNet20((3, 32, 32), 10)
    state = {f"module.{k}": v for k, v in source.state_dict().items() if not k.endswith("tracked")}
    load_weights(model, save(tmp_path, {"state_dict": state, "best_prec1": 1.0}))
    for name, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


def test_unreadable_or_unsafe_files_are_refused(tmp_path: Path) -> None:
    source, model = nn.Linear(3, 2), nn.Linear(3, 2)
    path = tmp_path / "own.th"  # no hash in its name
    torch.save(source.state_dict(), path)
    load_weights(model, path)
    assert torch.equal(model.weight, source.weight)
    for content in (b"", b"no checkpoint"):
        path.write_bytes(content)
        refuses(r"own.th' is no readable checkpoint", load_weights, model, path)
    torch.save(source, path)  # a pickled module could run code
    refuses(r"own.th' is no readable checkpoint", load_weights, model, path)
    torch.save(torch.zeros(3), path)
    refuses(r"own.th' holds a Tensor, not a state dict", load_weights, model, path)
    for content, word in (({"epoch": 3, "model": source.state_dict()}, "epoch"), ({"model": {}}, "model")):
        torch.save(content, path)  # of a training that keeps more than the weights
        refuses(rf"own.th' holds no state dict: {word} is no tensor", load_weights, model, path)
    torch.save({"state_dict": None}, path)
    refuses(r"own.th' holds a NoneType, not a state dict", load_weights, model, path)


def test_what_does_not_fit_or_is_damaged_is_refused_before_anything_is_copied(tmp_path: Path) -> None:
    path, model = save(tmp_path, nn.Linear(3, 2).state_dict()), nn.Linear(3, 4)
    before = model.weight.clone()
    refuses(r"does not fit this Linear: weight has shape \(4, 3\) here and \(2, 3\)", load_weights, model, path)
    assert torch.equal(model.weight, before)
    smaller = nn.Linear(3, 2, bias=False)
    refuses(r"not fit this Linear: bias has shape None here and \(2,\)", load_weights, smaller, path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    refuses(r"net-.*\.th' is damaged: its sha256 starts with", load_weights, nn.Linear(3, 2), path)


def test_missing_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, text = tmp_path / "own.th", r"looked for '.*own.th'\. Put the file there, set CURVLAB_DATA"
    refuses(text, ResNet20, (3, 32, 32), 10, weights=own, error=FileNotFoundError)
    refused = "http://127.0.0.1:1/resnet20-12fca82f.th"
    monkeypatch.setattr(resnets, "PRETRAINED_URL", refused)
    text = r"looked for '.*resnet20-12fca82f.th', and the download from .* failed: .*refused.*model.weights=null"
    with pytest.raises(FileNotFoundError, match=text) as caught:
        ResNet20((3, 32, 32), 10, weights=tmp_path / "resnet20-12fca82f.th")
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_missing_weights_are_downloaded(tmp_path: Path) -> None:
    source, model = nn.Linear(3, 2), nn.Linear(3, 2)
    remote = save(tmp_path, source.state_dict())
    target = tmp_path / "new" / remote.name
    load_weights(model, target, url=remote.as_uri())
    assert torch.equal(model.weight, source.weight)
    assert [path.name for path in target.parent.iterdir()] == [remote.name]


@pytest.mark.data
def test_staged_resnet20_is_as_accurate_as_published(data_root) -> None:
    root = data_root(STAGED, "cifar10/data")
    splits = load_cifar10(root, num_train=1)
    model = ResNet20(splits.input_shape, splits.num_outputs, weights=root / STAGED).eval()
    assert freeze(model, normalization=True, biases=True) == 268_336
    inputs, targets = splits.test.tensors
    with torch.no_grad():
        accuracy = (model(inputs).argmax(1) == targets).double().mean().item()
    assert accuracy >= 0.91
    with pytest.raises(ValueError, match=r"linear.weight has shape \(100, 64\) here and \(10, 64\) there"):
        ResNet20((3, 32, 32), 100, weights=root / STAGED)
