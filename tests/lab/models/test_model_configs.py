from __future__ import annotations

from functools import partial
from pathlib import Path

import hydra
import pytest
import torch
from omegaconf import OmegaConf

from curvlab.lab.models import build_model

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
