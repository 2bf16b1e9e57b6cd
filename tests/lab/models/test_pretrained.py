from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from torch import nn

from curvlab.lab.data import load_cifar10
from curvlab.lab.models import ResNet20, resnets
from curvlab.lab.models.pretrained import load_weights
from curvlab.problem import freeze

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


def test_plain_state_dict_without_a_hash_in_its_name(tmp_path: Path) -> None:
    source, model = nn.Linear(3, 2), nn.Linear(3, 2)
    torch.save(source.state_dict(), tmp_path / "own.th")
    load_weights(model, tmp_path / "own.th")
    assert torch.equal(model.weight, source.weight)


def test_damaged_file_is_noticed_by_its_hash(tmp_path: Path) -> None:
    path = save(tmp_path, nn.Linear(3, 2).state_dict())
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"net-.*\.th' is damaged: its sha256 starts with"):
        load_weights(nn.Linear(3, 2), path)


def test_unreadable_or_unsafe_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.th"
    for content in (b"", b"no checkpoint"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"own.th' is no readable checkpoint"):
            load_weights(nn.Linear(3, 2), path)
    torch.save(nn.Linear(3, 2), path)  # a pickled module could run code
    with pytest.raises(ValueError, match=r"own.th' is no readable checkpoint"):
        load_weights(nn.Linear(3, 2), path)
    torch.save(torch.zeros(3), path)
    with pytest.raises(ValueError, match=r"own.th' holds a Tensor, not a state dict"):
        load_weights(nn.Linear(3, 2), path)


def test_other_architecture_is_refused_before_anything_is_copied(tmp_path: Path) -> None:
    path = save(tmp_path, nn.Linear(3, 2).state_dict())
    model = nn.Linear(3, 4)
    before = model.weight.clone()
    with pytest.raises(ValueError, match=r"does not fit this Linear: weight has shape \(4, 3\) here and \(2, 3\)"):
        load_weights(model, path)
    assert torch.equal(model.weight, before)


def test_surplus_weights_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path, nn.Linear(3, 2).state_dict())
    with pytest.raises(ValueError, match=r"does not fit this Linear: it holds bias, which is not in the model"):
        load_weights(nn.Linear(3, 2, bias=False), path)


def test_missing_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"looked for '.*own.th'\. Put the file there, set CURVLAB_DATA"):
        ResNet20((3, 32, 32), 10, weights=tmp_path / "own.th")
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


@pytest.mark.data
def test_staged_weights_do_not_fit_other_data(data_root) -> None:
    path = data_root(STAGED) / STAGED
    with pytest.raises(ValueError, match=r"linear.weight has shape \(100, 64\) here and \(10, 64\) there"):
        ResNet20((3, 32, 32), 100, weights=path)
