"""Why a claim is not reproduced: one cause of a closed list, by experiments/papers/causes.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import yaml

from curvlab.lab.reporting.claims import NOT_REPRODUCED, REFUTED, UNDECIDED
from curvlab.lab.targets.target import ROOT

CAUSES: Mapping[str, str] = {
    "regime": "holds for other networks than some that were tried, of another training loss",
    "reduced scale": "fewer weights, examples or epochs than in the paper",
    "power": "undecided: too few seeds, examples or units for the criterion",
    "misprint": "a sign, a factor or a number as printed; mended, it holds",
    "refuted": "computed as stated, and false",
    "solver": "the paper's solver or its settings leave it",
    "paper silent": "depends on a setting that the paper does not state",
}
PATTERNS = ROOT / "experiments" / "papers" / "causes.yaml"


def cause(name: str, verdict: str, path: Path = PATTERNS) -> str | None:
    """Return why the claim "<paper>/<item>/<claim>" is not reproduced; None with another verdict.

    Raises:
        ValueError: a cause of the file is not in the closed list.
    """
    if verdict == UNDECIDED:
        return "power"
    if verdict not in (NOT_REPRODUCED, REFUTED):
        return None
    for found, patterns in _patterns(path).items():
        if found not in CAUSES:
            raise ValueError(f"{path.name}: {found!r} is no cause; the list is {', '.join(CAUSES)}.")
        fits = any(fnmatchcase(name, pattern) for pattern in patterns)
        if fits and (verdict == NOT_REPRODUCED or found == "misprint"):
            return found
    return "refuted"


@cache
def _patterns(path: Path) -> dict[str, list[str]]:
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
