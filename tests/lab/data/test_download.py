"""Files: missing ones are downloaded or named, damaged ones refused with what to do."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest
from torchvision.datasets import CIFAR10, MNIST

from curvlab.lab.data import (
    DamagedDataError,
    DataNotFoundError,
    load_cifar10,
    load_libsvm,
    load_mnist,
    load_penn_treebank,
    load_xsum,
)
from curvlab.lab.data.download import KNOWN, TIMEOUT_SECONDS, check_known, download, file_hash

REFUSED = "http://127.0.0.1:1/"  # nothing listens there: the connection is refused at once
HELP = r"Set the environment variable CURVLAB_DATA, or data.root .* data=digits, .* need no files and no download"
FILE = "MNIST/raw/t10k-labels-idx1-ubyte"


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
    (tmp_path / "file").touch()  # a root that cannot be written gives the same error
    with pytest.raises(DataNotFoundError, match=r"data=mnist is not there: looked for .* The download failed"):
        load_mnist(tmp_path / "file" / "root")


def test_cifar_names_file_reason_and_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CIFAR10, "url", REFUSED)
    with pytest.raises(
        DataNotFoundError, match=rf"cifar-10-batches-py/data_batch_1'\. The download failed: .*{HELP}"
    ):
        load_cifar10(tmp_path)


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
    (mnist_root / FILE).unlink()
    with pytest.raises(DataNotFoundError, match=r"looked for '.*t10k-labels-idx1-ubyte'.*although the files"):
        load_mnist(mnist_root)


# ------------------------------------------------------------------------------------ published files
@pytest.mark.parametrize(
    ("load", "name"),
    [
        (load_mnist, FILE),
        (lambda root: load_libsvm(root, name="mushrooms"), "libsvm/mushrooms"),
        (load_penn_treebank, "ptb/ptb.train.txt"),
        (load_xsum, "xsum/test.jsonl"),
    ],
)
def test_a_published_file_of_another_size_is_refused(tmp_path: Path, load, name: str) -> None:
    for known in KNOWN:
        (tmp_path / known).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / known).write_bytes(b"12345")
    refused = r"\(5 bytes; as published it has [\d,]+\)\. Delete it, then run again to download it, or copy"
    with pytest.raises(DamagedDataError, match=refused) as caught:
        load(tmp_path)
    assert str(tmp_path / name.partition("/")[0]) in str(caught.value)


def test_a_published_file_is_hashed_once_and_again_when_it_changes(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "libsvm" / "mushrooms"
    path.parent.mkdir()
    path.write_bytes(b"as published")
    expected = file_hash(path, 0)
    monkeypatch.setitem(KNOWN, "libsvm/mushrooms", (12, expected))
    check_known(tmp_path, "libsvm/mushrooms", "libsvm/others")
    misses = file_hash.cache_info().misses
    check_known(tmp_path, "libsvm/mushrooms")
    assert file_hash.cache_info().misses == misses
    path.write_bytes(b"as publisHed")
    with pytest.raises(DamagedDataError, match=rf"mushrooms' is damaged \(its sha256 .*{expected[:12]}"):
        check_known(tmp_path, "libsvm/mushrooms")


@pytest.mark.data
def test_one_flipped_pixel_of_mnist_is_refused(data_root, tmp_path: Path) -> None:
    root = data_root("MNIST/raw")
    shutil.copytree(root / "MNIST", tmp_path / "MNIST")
    assert len(load_mnist(tmp_path, num_train=3).train) == 3
    file = tmp_path / "MNIST" / "raw" / "t10k-images-idx3-ubyte"
    content = bytearray(file.read_bytes())
    content[20000] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedDataError, match=r"t10k-images-idx3-ubyte' is damaged \(its sha256 starts with"):
        load_mnist(tmp_path, num_train=3)
