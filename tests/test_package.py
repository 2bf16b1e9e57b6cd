"""What `pip install curvlab` gives: the library, with its own dependencies alone."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {"scikit-learn": "sklearn", "hydra-core": "hydra", "pyyaml": "yaml", "pillow": "PIL"}

# Imports every module of the library from the folder given, and uses one; packages named after it are refused.
IMPORTED = """
import importlib, sys
from pathlib import Path

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in REFUSED:
            raise ImportError(f"{name} is no dependency of the library")

REFUSED = set(sys.argv[2:])
sys.meta_path.insert(0, Refuse())
sys.path.insert(0, sys.argv[1])
source = Path(sys.argv[1])
for path in sorted(source.joinpath("curvlab").rglob("*.py")):
    parts = path.relative_to(source).with_suffix("").parts
    if parts[1:2] != ("lab",):
        importlib.import_module(".".join(part for part in parts if part != "__init__"))
import curvlab, torch
from curvlab.linalg import DenseOperator
print(curvlab.__file__, (DenseOperator(torch.eye(2)) @ torch.ones(2)).sum().item())
"""
# What pip calls, without the second that pip takes.
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


def distributions(lines: list[str]) -> set[str]:
    return {re.split(r"[><=\[]", line)[0] for line in lines}


def test_the_wheel_imports_its_own_dependencies_alone_and_has_its_licence(tmp_path: Path) -> None:
    checkout, unpacked = tmp_path / "checkout", tmp_path / "unpacked"
    shutil.copytree(ROOT / "src", checkout / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    subprocess.run([sys.executable, "-c", BUILD, str(tmp_path)], check=True, capture_output=True, cwd=checkout)
    (wheel,) = tmp_path.glob("curvlab-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(unpacked)
    assert [name for name in names if name.endswith("/LICENSE")]
    assert "curvlab/py.typed" in names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"curvlab"}
    assert {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")} <= set(names)
    extras = PROJECT["optional-dependencies"]
    others = distributions([line for name in ("lab", "wandb", "language") for line in extras[name]])
    refused = sorted(MODULES.get(name, name) for name in others - distributions(PROJECT["dependencies"]))
    assert {"hydra", "pandas", "matplotlib", "torchvision"} <= set(refused)
    # -I: neither this folder nor PYTHONPATH is looked into.
    command = [sys.executable, "-I", "-c", IMPORTED, str(unpacked), *refused]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [str(unpacked / "curvlab" / "__init__.py"), "2.0"]


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
