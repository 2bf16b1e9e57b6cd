"""All targets, found by their folders."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from curvlab.lab.target.declaration import ROOT, Target

PAPERS = {
    "lissa": "Klochkov & Liu 2024: inverse-Hessian-vector products for influence functions",
    "pbrf": "Bae et al. 2022: what influence functions answer",
    "ginger": "Ginger 2024: curvature approximation of linear complexity",
    "ngd": "Saghir et al. 2024: natural gradient descent and the learning coefficient",
    "rank1": "Semenov 2025: rank-one approximation of the Hessian",
    "benchmarks": "speed and accuracy beside the peers",
}


class UnknownTargetError(ValueError):
    """No target has this name; the text names the nearest."""


def all_targets() -> dict[str, Target]:
    """Return every target by its key, papers in the order of the report, figures and tables counted up."""
    return dict(_declared(ROOT / "experiments"))


@cache
def _declared(folder: Path) -> dict[str, Target]:
    declared = [Target.read(path) for path in (*folder.glob("*/*.py"), *folder.glob("*/*/__init__.py"))]
    found = {target.key: target for target in declared if target is not None}
    return dict(sorted(found.items(), key=lambda entry: _order(entry[0])))


def named_targets(names: Iterable[str]) -> list[Target]:
    """Return the targets that names stand for: "lissa-fig1", "lissa/fig1", a paper's key, "bench", "figures"."""
    targets = all_targets()
    groups = {key: [target for target in targets.values() if target.paper_key == key] for key in PAPERS}
    groups["figures"] = [target for target in targets.values() if target.paper_key != "benchmarks"]
    groups["bench"] = groups["benchmarks"]
    known = {name: [target] for target in targets.values() for name in (target.key, target.make_name)} | groups
    chosen: dict[str, Target] = {}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise UnknownTargetError(f"no target {name!r}{hint} `make help` lists them all.")
        chosen |= {target.key: target for target in known[name]}
    return list(chosen.values())


def _order(key: str) -> tuple[int, int, str, int]:
    paper, item = key.split("/")
    kind, number = re.fullmatch(r"(.*?)(\d*)", item).groups()  # type: ignore[union-attr]  # always matches
    kinds = ("tab", "fig")
    place = list(PAPERS).index(paper) if paper in PAPERS else len(PAPERS)
    return place, kinds.index(kind) if kind in kinds else len(kinds), kind, int(number or 0)
