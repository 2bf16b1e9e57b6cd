"""Files: written whole or not at all; tensors read back as written, or named as damaged."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest
import torch

from curvlab.files import DamagedFileError, decode, encode, remove_stale, write_atomically

WHOLE = encode({"x": torch.arange(200.0), "names": ["a", None], "n": 3}, "toy-1 key")


def flipped(place: int) -> bytes:
    content = bytearray(WHOLE)
    content[place] ^= 1
    return bytes(content)


def test_what_is_written_is_read() -> None:
    found = decode(WHOLE, "toy-1 key")
    assert torch.equal(found.pop("x"), torch.arange(200.0))
    assert found == {"names": ["a", None], "n": 3}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it does not begin with 'toy-1 key'"),
        (b"PK a zip archive\n", "it does not begin with"),
        (flipped(2), "it does not begin with"),
        (WHOLE.replace(b"toy-1 key", b"toy-1 other"), "it does not begin with"),
        (WHOLE[:-1], "its checksum is wrong"),
        (flipped(-600), "its checksum is wrong"),  # in a tensor, where torch.load would not notice it
        (encode({"run": os.getcwd}, "toy-1 key"), "it does not load: UnpicklingError"),
    ],
)
def test_damage_is_named(content: bytes, reason: str) -> None:
    with pytest.raises(DamagedFileError, match=reason):
        decode(content, "toy-1 key")


def test_a_view_is_kept_without_the_memory_that_it_lies_in() -> None:
    whole = torch.randn(1000, 100)
    views = {"first": whole[:3], "nested": [(whole[:, 2], whole[0])]}
    content = encode(views, "toy-1 key")
    assert len(content) < 4 * (300 + 1000 + 100) + 4000
    found = decode(content, "toy-1 key")
    assert torch.equal(found["first"], whole[:3])
    assert torch.equal(found["nested"][0][0], whole[:, 2])
    assert len(encode({"whole": whole}, "toy-1 key")) > 400_000


def test_writes_new_folders_and_over_old_files(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "table.csv"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert [entry.name for entry in path.parent.iterdir()] == ["table.csv"]


def test_others_may_read_the_file(tmp_path: Path) -> None:
    write_atomically(tmp_path / "table.csv", b"x")
    assert (tmp_path / "table.csv").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("step", ["os.fsync", "os.replace"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    path = tmp_path / "table.csv"
    write_atomically(path, b"old")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(step, fail)
    with pytest.raises(type(error), match=r"table\.csv" if isinstance(error, OSError) else None):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1


def test_stale_files_are_old_hidden_and_temporary(tmp_path: Path) -> None:
    names = [".table.csv.a.tmp", ".table.csv.live.tmp", ".other.b.tmp", "table.csv", "plain.tmp"]
    for name in names:
        (tmp_path / name).write_bytes(b"x")
        if "live" not in name:
            os.utime(tmp_path / name, (time.time() - 7200, time.time() - 7200))
    remove_stale(tmp_path, "table.csv")
    assert {path.name for path in tmp_path.iterdir()} == set(names) - {".table.csv.a.tmp"}
    remove_stale(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(names) - {".table.csv.a.tmp", ".other.b.tmp"}
    remove_stale(tmp_path, older_than=0)
    assert {path.name for path in tmp_path.iterdir()} == {"table.csv", "plain.tmp"}
