"""The package: what its installation gives, in a fresh process; generators and seeds; files written whole."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from curvlab.curvature import GaussNewtonOperator
from curvlab.files import DamagedFileError, decode, encode, remove_stale, write_atomically
from curvlab.linalg import identity
from curvlab.optim import UniformDirection, unit_directions
from curvlab.solvers import Ekfac, Lissa, Nystrom
from tests.refusals import refuses

# --- What `pip install curvlab` gives
ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Imports every module of the library from the folder given, and uses it; packages named after it are not found.
IMPORTED = """
import importlib, sys, warnings
from importlib.machinery import PathFinder
from pathlib import Path

class Permitted(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in REFUSED else super().find_spec(name, path, target)

DESCRIBED, REFUSED = sys.argv[2], set(sys.argv[3:])
sys.meta_path[:] = [Permitted if finder is PathFinder else finder for finder in sys.meta_path]
sys.path.insert(0, sys.argv[1])
source = Path(sys.argv[1])
for path in sorted(source.joinpath("curvlab").rglob("*.py")):
    parts = path.relative_to(source).with_suffix("").parts
    if parts[1:2] != ("lab",):
        importlib.import_module(".".join(part for part in parts if part != "__init__"))
import curvlab, torch
from curvlab.curvature import GaussNewtonOperator
warnings.simplefilter("error")
op = GaussNewtonOperator(torch.nn.Linear(3, 2), torch.nn.MSELoss(), (torch.ones(4, 3), torch.ones(4, 2)))
print(curvlab.__file__, (op @ torch.ones(8)).sum().item())
exec(DESCRIBED, {"__name__": "__main__"})
"""
# Of text that is the same in every process: no address, no order of sets.
DESCRIBED = """
from functools import partial
from torch import nn
from curvlab.described import described
class Own:
    def __init__(self): self.inner = {"a", "b", "c", "d", "e"}
    def f(self, x): return x in {"u", "v", "w", "x", "y"}
own = Own()
functions = [own.f, partial(own.f, 1), lambda x: own, len, nn.functional.relu]
print(described([own, nn.MSELoss(), object, *functions]))
"""
# What pip calls, without the second that pip takes.
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


def normalised(requirement: str) -> str:
    """Return the name of a distribution, e.g. of "hydra_core>=1.3", as metadata has it after PEP 503."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()  # type: ignore[index]


def needed(names: list[str]) -> set[str]:
    """Return these distributions and, of those that are installed, all that they require without an extra."""
    found, left = set(), [*map(normalised, names)]
    while left:
        if (name := left.pop()) not in found:
            found.add(name)
            with contextlib.suppress(PackageNotFoundError):  # of another system
                left += [normalised(line) for line in requires(name) or () if "extra ==" not in line]
    return found


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that the wheel is unpacked into."""
    checkout, unpacked = (tmp_path_factory.mktemp(name) for name in ("checkout", "unpacked"))
    shutil.copytree(ROOT / "src", checkout / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    subprocess.run([sys.executable, "-c", BUILD, str(checkout)], check=True, capture_output=True, cwd=checkout)
    (wheel,) = checkout.glob("curvlab-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    return unpacked


@pytest.fixture(scope="module")
def used(installed: Path) -> subprocess.CompletedProcess[str]:
    """Return how `IMPORTED` ended, where nothing is found but the library and what it requires."""
    own = needed(["curvlab", *PROJECT["dependencies"]])  # as in an environment that has these alone
    distributions = packages_distributions().items()
    refused = sorted(name for name, of in distributions if not own & set(map(normalised, of)))
    assert {"hydra", "pandas", "matplotlib", "torchvision"} <= set(refused)
    # -I: neither this folder nor PYTHONPATH is looked into.
    command = [sys.executable, "-I", "-c", IMPORTED, str(installed), DESCRIBED, *refused]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=installed)


def test_the_wheel_has_its_licence_and_all_modules(installed: Path) -> None:
    names = {path.relative_to(installed).as_posix() for path in installed.rglob("*") if path.is_file()}
    assert [name for name in names if name.endswith("/LICENSE")]
    assert "curvlab/py.typed" in names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"curvlab"}
    assert {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")} <= names


def test_it_imports_its_own_dependencies_alone_and_warns_of_nothing(
    installed: Path, used: subprocess.CompletedProcess[str]
) -> None:
    """A first product loads torch's forward mode, of whose warnings users can change nothing."""
    assert (used.returncode, used.stderr) == (0, "")
    # (2/8) J^T J 1, J 1 = 4 for each output: 1/4 * 4 * sum over 4 examples and 2 outputs of (3 inputs + 1 bias).
    assert used.stdout.splitlines()[0].split() == [str(installed / "curvlab" / "__init__.py"), "32.0"]


def test_work_is_described_as_in_another_process(
    used: subprocess.CompletedProcess[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Strings have other hashes there, and objects other addresses."""
    exec(DESCRIBED, {"__name__": "__main__"})  # noqa: S102 - here
    assert capsys.readouterr().out == used.stdout.split("\n", 1)[1]


def test_every_extra_stands_in_the_table() -> None:
    table = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `\[(\w+)\]` \|", table, re.MULTILINE)) == set(PROJECT["optional-dependencies"])


def test_the_citation_has_the_version_and_the_five_papers() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == PROJECT["version"]
    titles = (ROOT / "experiments" / "papers" / "titles.txt").read_text(encoding="utf-8").splitlines()
    papers = [line.split(": ")[1] for line in titles if not line.startswith("benchmarks")]
    assert len(citation["references"]) == len(papers) == 5
    for paper, reference in zip(papers, citation["references"], strict=True):
        assert str(reference["year"]) == re.search(r"\d{4}", paper)[0]  # type: ignore[index]
        assert reference["authors"]


# --- A whole number stands for a generator in what draws and is no call of `conformance/calls`
def system() -> tuple[GaussNewtonOperator, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    data = (torch.randn(12, 4).double(), torch.arange(12) % 2)
    op = GaussNewtonOperator(model, nn.CrossEntropyLoss(), data)
    return op, torch.randn(op.shape[0], 3).double()


def direction(op: Any, _: Any, seed: Any) -> torch.Tensor:
    x = nn.Parameter(torch.ones(op.shape[0], dtype=torch.float64))
    optimizer = UniformDirection([x], op + identity, delta=0.1, alpha=1.0, generator=seed)
    x.square().sum().backward()
    optimizer.step()
    return x.detach()


DRAWING: dict[str, Callable[[Any, torch.Tensor, Any], Any]] = {
    "stationary_error": lambda op, b, seed: Lissa(0.1, 4, 5).stationary_error(op + identity, b, generator=seed),
    "Nystrom": lambda op, b, seed: Nystrom(3).build(op + identity, generator=seed)[0] @ b,
    "Ekfac": lambda op, b, seed: Ekfac().build(op + identity, generator=seed)[0] @ b,
    "unit_directions": lambda op, _, seed: unit_directions(op, 2, generator=seed),
    "UniformDirection": direction,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DRAWING)
def test_a_number_is_a_generator_with_that_seed(name: str) -> None:
    op, b = system()
    by_number = torch.as_tensor(DRAWING[name](op, b, 3))
    by_generator = torch.as_tensor(DRAWING[name](op, b, torch.Generator().manual_seed(3)))
    assert torch.equal(by_number, by_generator)


# --- Files: written whole or not at all; tensors read back as written, or named as damaged
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
    refuses(reason, decode, content, "toy-1 key", error=DamagedFileError)


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
