import os
import time
from pathlib import Path

import pytest

from curvlab.atomic_file import remove_stale, write_atomically


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
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failed_write_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: type[BaseException]
) -> None:
    path = tmp_path / "table.csv"
    write_atomically(path, b"old")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(step, fail)
    with pytest.raises(error):
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
