"""What `pip install curvlab` gives: the library, with its own dependencies alone."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {"scikit-learn": "sklearn", "hydra-core": "hydra", "pyyaml": "yaml", "pillow": "PIL"}

IMPORTED = """
import importlib, sys
from pathlib import Path

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in REFUSED:
            raise ImportError(f"{name} is no dependency of the library")

REFUSED = set(sys.argv[2:])
sys.meta_path.insert(0, Refuse())
source = Path(sys.argv[1])
for path in sorted(source.rglob("*.py")):
    parts = path.relative_to(source.parent).with_suffix("").parts
    if parts[1:2] != ("lab",):
        importlib.import_module(".".join(part for part in parts if part != "__init__"))
print(len(sys.modules))
"""


def distributions(lines: list[str]) -> set[str]:
    return {re.split(r"[><=\[]", line)[0] for line in lines}


def test_the_library_imports_its_own_dependencies_alone() -> None:
    extras = PROJECT["optional-dependencies"]
    others = distributions([line for name in ("lab", "wandb", "language") for line in extras[name]])
    refused = sorted(MODULES.get(name, name) for name in others - distributions(PROJECT["dependencies"]))
    assert {"hydra", "pandas", "matplotlib", "torchvision"} <= set(refused)
    command = [sys.executable, "-c", IMPORTED, str(ROOT / "src" / "curvlab"), *refused]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
