from __future__ import annotations

from pathlib import Path

import hydra
import pytest
from omegaconf import OmegaConf

CONFIGS = sorted((Path(__file__).parents[3] / "conf" / "data").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_has_the_common_keys_and_a_loader(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = OmegaConf.load(path)
    assert {"_target_", "root", "num_train", "num_test"} <= set(config)
    assert callable(hydra.utils.get_method(config["_target_"]))
    monkeypatch.delenv("CURVLAB_DATA", raising=False)
    assert config.root == "data"
    monkeypatch.setenv("CURVLAB_DATA", "elsewhere")
    assert config.root == "elsewhere"


@pytest.mark.parametrize("name", ["digits", "breast_cancer", "diabetes"])
def test_built_in_sets_load_from_their_config(name: str) -> None:
    config = OmegaConf.load(next(path for path in CONFIGS if path.stem == name))
    splits = hydra.utils.instantiate(config, num_train=12)
    assert splits.name == name
    assert len(splits.train) == 12


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("mnist", "MNIST"),
        ("fashion_mnist", "FashionMNIST"),
        ("cifar10", "cifar10"),
        ("cifar100", "cifar100"),
        ("imagenet_sample", "imagenet-sample"),
    ],
)
def test_real_sets_load_from_their_config(data_root, name: str, folder: str) -> None:
    data_root(folder)
    config = OmegaConf.load(next(path for path in CONFIGS if path.stem == name))
    splits = hydra.utils.instantiate(config, num_train=10, num_test=5)
    assert splits.name == name
    assert (len(splits.train), len(splits.test)) == (10, 5)
