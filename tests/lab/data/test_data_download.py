from __future__ import annotations

import socket
from pathlib import Path

import pytest
from torchvision.datasets import CIFAR10, MNIST

from curvlab.lab.data import DataNotFoundError, load_cifar10, load_mnist
from curvlab.lab.data.download import TIMEOUT_SECONDS, download

REFUSED = "http://127.0.0.1:1/"  # nothing listens there: the connection is refused at once
HELP = r"Set the environment variable CURVLAB_DATA, or data.root .* data=digits, .* need no files and no download"


def test_mnist_names_file_reason_and_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MNIST, "mirrors", [REFUSED])
    monkeypatch.chdir(tmp_path)
    text = (
        r"^data=mnist is not there: looked for 'data/MNIST/raw/train-images-idx3-ubyte'\. "
        rf"The download failed: .*refused.* {HELP}"
    )
    with pytest.raises(DataNotFoundError, match=text) as caught:
        load_mnist("data")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__  # no stack trace of urllib
    assert isinstance(caught.value, FileNotFoundError)
    assert "\n" not in str(caught.value)


def test_cifar_names_file_reason_and_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CIFAR10, "url", REFUSED)
    with pytest.raises(
        DataNotFoundError, match=rf"cifar-10-batches-py/data_batch_1'\. The download failed: .*{HELP}"
    ):
        load_cifar10(tmp_path)


def test_a_root_that_cannot_be_written_gives_the_same_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataNotFoundError, match=r"data=mnist is not there: looked for .* The download failed"):
        load_mnist(tmp_path / "file" / "root")


def test_missing_files_are_downloaded_with_a_timeout_that_is_put_back(tmp_path: Path) -> None:
    seen: list[float | None] = []
    download("tiny", tmp_path / "new", lambda: seen.append(socket.getdefaulttimeout()), missing=tmp_path)
    assert seen == [TIMEOUT_SECONDS]
    assert socket.getdefaulttimeout() is None
    assert (tmp_path / "new").is_dir()


def test_nothing_is_downloaded_when_all_is_there(mnist_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: MNIST) -> None:
        raise RuntimeError("downloaded although the files are there")

    monkeypatch.setattr(MNIST, "download", fail)
    assert len(load_mnist(mnist_root).train) == 5
    (mnist_root / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataNotFoundError, match=r"looked for '.*t10k-labels-idx1-ubyte'.*although the files"):
        load_mnist(mnist_root)
