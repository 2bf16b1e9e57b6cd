"""Networks that are built from input shape and outputs: sizes, initial values, what does not fit."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import hydra
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import TensorDataset

from curvlab.lab.data import DataSplits
from curvlab.lab.models import (
    MLP,
    VGG13,
    AlexNet,
    ConvNet,
    LeNet5,
    ResNet20,
    SigmoidMLP,
    build_model,
    resnet18,
    resnet20_group_norm,
    resnet20_last_stage,
    resnet50,
    through_resnet20,
)
from tests.refusals import refuses


@pytest.mark.parametrize(
    ("factory", "input_shape", "num_outputs", "expected"),
    [
        (MLP, (30,), 1, (30 + 1) * 128 + (128 + 1) * 128 + 128 + 1),
        (MLP, (1, 8, 8), 10, 65 * 128 + 129 * 128 + 129 * 10),
        (ConvNet, (1, 8, 8), 10, 9 * 8 + 8 + 9 * 8 * 16 + 16 + 257 * 10),
        (LeNet5, (1, 28, 28), 10, 61_706),  # the number usually quoted
        (LeNet5, (3, 32, 32), 100, 61_706 + 2 * 150 + 90 * 85),
        (LeNet5, (1, 16, 16), 10, 61_706 - (400 - 64) * 120),
        (LeNet5, (1, 20, 17), 10, 61_706 - (400 - 96) * 120),
        (ResNet20, (3, 32, 32), 10, 269_722),
        (ResNet20, (1, 28, 28), 10, 269_722 - 2 * 9 * 16),
        (resnet20_group_norm, (3, 32, 32), 10, 269_722),  # a scale and a shift for each channel, as BatchNorm
        (VGG13, (3, 32, 32), 10, 9_404_992 + 5_130),  # configuration B less its linear layers, and one of 513 x 10
        (VGG13, (1, 28, 28), 10, 9_404_992 - 2 * 9 * 64 + 5_130),
        (partial(AlexNet, hidden_size=20), (3, 32, 32), 10, 2_251_584 + 4_097 * 20 + 21 * 30),
        (resnet18, (3, 64, 64), 1000, 11_689_512),
        (resnet50, (3, 64, 64), 1000, 25_557_032),
        (partial(ResNet20, width=8), (3, 16, 16), 100, 71_020),
        # without two blocks in each stage, of two convolutions and their BatchNorms
        (partial(ResNet20, width=8, num_blocks=1), (3, 16, 16), 100, 71_020 - 4 * (9 * 1344 + 2 * 56)),
        # less the first kernel's 7 x 7 - 3 x 3, and 900 classes of 513 and 2,049 numbers
        (partial(resnet18, stem="cifar"), (3, 32, 32), 100, 11_689_512 - 40 * 192 - 900 * 513),
        (partial(resnet50, stem="cifar"), (3, 32, 32), 100, 25_557_032 - 40 * 192 - 900 * 2049),
    ],
)
def test_outputs_and_number_of_parameters(factory, input_shape, num_outputs: int, expected: int) -> None:
    model = factory(input_shape=input_shape, num_outputs=num_outputs).eval()
    inputs = torch.randn(3, *input_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        outputs = model(inputs)
        alone = model(inputs[1:2])
    assert outputs.shape == (3, num_outputs)
    torch.testing.assert_close(outputs[1:2], alone, rtol=1e-3, atol=1e-4)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


def test_mlp_settings() -> None:
    linear, tanh = MLP((4,), 2, hidden_sizes=[]), MLP((4,), 2, hidden_sizes=[3], activation="tanh")
    (weight, bias), (w1, b1, w2, b2), inputs = linear.parameters(), tanh.parameters(), torch.randn(5, 4)
    torch.testing.assert_close(linear(inputs), inputs @ weight.T + bias)
    torch.testing.assert_close(tanh(inputs), torch.tanh(inputs @ w1.T + b1) @ w2.T + b2)


PUBLISHED = "IMAGENET1K_V1"


@pytest.mark.parametrize(
    ("factory", "input_shape", "settings", "text"),
    [
        (MLP, (4,), {"activation": "swish"}, "unknown activation 'swish': choose one of relu, .*, sigmoid"),
        (MLP, (4,), {"hidden_sizes": [3, 0]}, r"hidden_sizes must be positive, got \[3, 0\]"),
        (LeNet5, (1, 8, 8), {}, r"LeNet5 needs images \(C, H, W\) with H, W >= 16, got input_shape=\(1, 8, 8\)"),
        (ConvNet, (30,), {}, r"ConvNet needs images .*Use model=mlp for tables"),
        (VGG13, (3, 64, 64), {}, "at most 32 x 32, got 64 x 64"),
        (ResNet20, (3, 4, 4), {}, r"ResNet20 needs images .*>= 8"),
        (ResNet20, (3, 32, 32), {"width": 7}, "width must be even and at least 2, got 7"),
        (ResNet20, (3, 32, 32), {"num_blocks": 0}, "num_blocks must be at least 1, got 0"),
        (resnet18, (1, 64, 64), {}, r"resnet18 needs 3 channels"),
        (resnet18, (3, 32, 32), {"stem": "tiny"}, "unknown stem 'tiny' for resnet18: choose imagenet or cifar"),
        # weights are checked before any download
        (resnet18, (3, 64, 64), {"weights": "V7"}, f"unknown weights 'V7' .*: choose one of {PUBLISHED}, or null"),
        (resnet50, (3, 64, 64), {"weights": PUBLISHED}, "for 1000 classes, the data has 10: use data=imagenet"),
        (
            partial(resnet18, stem="cifar"), (3, 32, 32), {"weights": PUBLISHED},
            r"pretrained weights for the stem 'imagenet' only: set model.weights=null",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(factory, input_shape, settings: dict, text: str) -> None:
    refuses(text, factory, input_shape=input_shape, num_outputs=10, **settings)


def test_torchvision_weights_that_cannot_be_had(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args, **kwargs):
        raise ConnectionRefusedError("Connection refused")

    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    text = r"IMAGENET1K_V1 are not in .* cache, .*Connection refused"
    refuses(text, resnet18, (3, 64, 64), 1000, weights=PUBLISHED, error=FileNotFoundError)


def test_the_cifar_stem_keeps_the_size() -> None:
    model = resnet18((3, 32, 32), 10, stem="cifar").eval()
    seen: list[torch.Size] = []
    model.layer1.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs.shape))
    model(torch.zeros(1, 3, 32, 32))
    assert seen == [(1, 64, 32, 32)]


def test_resnet20_shortcut_subsamples_and_pads_with_zeros_on_both_sides() -> None:
    block = ResNet20((3, 32, 32), 10).layer2[0]
    inputs = torch.rand(2, 16, 8, 8)
    with torch.no_grad():
        block.bn2.weight.zero_()
        block.bn2.bias.zero_()
        outputs = block.eval()(inputs)
    expected = torch.zeros(2, 32, 4, 4)
    expected[:, 8:24] = inputs[:, :, ::2, ::2]
    assert torch.equal(outputs, expected)


def test_last_stage_on_what_the_others_make_of_images_is_the_whole_network(tmp_path) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = ResNet20((3, 32, 32), 10).eval()
    for module in whole.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_var.copy_(0.5 + torch.rand(module.num_features, generator=generator))
    torch.save(whole.state_dict(), tmp_path / "weights.th")
    images = torch.randn(5, 3, 32, 32, generator=generator)
    data = TensorDataset(images, torch.arange(5))
    plain = DataSplits("five", data, data, (3, 32, 32), 10, "classification", None, "abc", (0.0,) * 3, (1.0,) * 3)
    splits = through_resnet20(plain, weights=tmp_path / "weights.th")
    last = resnet20_last_stage(splits.input_shape, 10, weights=tmp_path / "weights.th").eval()
    last[3].load_state_dict(whole.linear.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(last(splits.test.tensors[0]), whole(images), rtol=1e-4, atol=1e-4)
    assert splits.input_shape == (32, 16, 16)
    assert splits.checksum != plain.checksum
    refuses("takes 32 channels, got 3: make the data by through_resnet20", resnet20_last_stage, (3, 32, 32), 100)


def test_group_norm_outputs_do_not_depend_on_the_batch_in_training_either() -> None:
    model = resnet20_group_norm((3, 16, 16), 10, width=4).train()
    assert not [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    inputs = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(inputs)[1:2], model(inputs[1:2]), rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------ initial values
FACTORIES = [MLP, ConvNet, partial(LeNet5, activation="relu"), ResNet20]


def weights(factory, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    model = build_model(factory, input_shape=(1, 16, 16), num_outputs=3, generator=generator)
    assert not model.training
    return parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("factory", FACTORIES)
def test_weights_follow_from_the_generator_alone(factory) -> None:
    torch.manual_seed(1)
    first, state = weights(factory, 0), torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(weights(factory, 0), first)
    assert not torch.equal(weights(factory, 1), first)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_generator_moves_on_and_the_global_state_comes_back_after_an_error() -> None:
    before = torch.get_rng_state()
    settings = {"input_shape": (2,), "num_outputs": 1, "generator": torch.Generator().manual_seed(0)}
    models = [build_model(MLP, **settings) for _ in range(2)]
    assert not torch.equal(*(parameters_to_vector(model.parameters()) for model in models))

    def factory(input_shape, num_outputs):
        torch.rand(3)
        raise RuntimeError("stop")

    refuses("stop", build_model, factory, **settings, error=RuntimeError)
    assert torch.equal(torch.get_rng_state(), before)


def spread(model: nn.Module) -> float:
    """Return the standard deviation over inputs of the last hidden layer's input to its sigmoid."""
    x = torch.rand(500, 64, generator=torch.Generator().manual_seed(1))
    for layer in list(model.layers)[:-2]:  # type: ignore[arg-type]
        x = layer(x)
    return float(x.std(0).mean())


def test_signals_pass_through_as_they_do_not_by_default() -> None:
    generator = torch.Generator().manual_seed(0)
    models = {}
    for name, factory in (("sigmoid", SigmoidMLP), ("default", partial(MLP, activation="sigmoid"))):
        build = partial(factory, hidden_sizes=[256] * 4)
        models[name] = build_model(build, input_shape=(64,), num_outputs=10, generator=generator)
    with torch.no_grad():
        assert spread(models["sigmoid"]) > 0.1  # of the inputs: 0.29
        assert spread(models["default"]) < 0.01
    linear = [layer for layer in models["sigmoid"].layers if isinstance(layer, nn.Linear)]
    gains = [4.0] * (len(linear) - 1) + [1.0]
    for layer, gain in zip(linear, gains, strict=True):
        limit = gain * math.sqrt(6 / (layer.in_features + layer.out_features))
        assert 0.95 * limit < float(layer.weight.abs().max()) <= limit
        assert not layer.bias.any()
    assert sum(isinstance(layer, nn.Sigmoid) for layer in models["sigmoid"].layers) == len(linear) - 1


# ------------------------------------------------------------------------------------ configs
FOLDER = Path(__file__).parents[3] / "conf" / "model"
# Language models and encoder-decoders are in tests of their own: they read tokens.
READ_TOKENS = ("language_model", "t5", "encoder_decoder")
CONFIGS = sorted(
    path for path in FOLDER.glob("*.yaml") if not any(name in path.read_text() for name in READ_TOKENS)
)
SHAPES = {"convnet": (1, 8, 8), "mlp": (1, 8, 8), "lenet": (1, 28, 28)}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_builds_with_random_weights(path: Path) -> None:
    config = OmegaConf.create({"data": {"root": "somewhere"}, "model": OmegaConf.load(path)})
    if "weights" in config.model:
        assert config.model.weights in ("IMAGENET1K_V1", "somewhere/weights/resnet20-12fca82f.th")
        config.model.weights = None
    shape = SHAPES.get(path.stem, (3, 32, 32))
    factory = partial(hydra.utils.instantiate, config.model)
    generator = torch.Generator().manual_seed(0)
    model = build_model(factory, input_shape=shape, num_outputs=10, generator=generator)
    assert model(torch.zeros(2, *shape)).shape == (2, 10)
