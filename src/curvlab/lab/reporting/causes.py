"""Why a claim is not reproduced: one cause of a closed list, by experiments/papers/causes.yaml; and what is false.

False as printed is what `false_statements` returns, and nothing else is counted so: a paper's own claims whose
cause is "misprint" or "refuted", and the equations of experiments/papers/derivations.py.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import yaml

from curvlab.lab.claims.claims import NOT_REPRODUCED, REFUTED, UNDECIDED, ClaimResult
from curvlab.lab.reporting.findings import NO_VALUE, with_number
from curvlab.lab.reporting.results import ResultFolder
from curvlab.lab.targets.target import ROOT, paper_titles

MISPRINT, WRONG, ROUNDING, UNEXPLAINED = "misprint", "refuted", "rounding", "not explained"
FALSE = "false as printed"  # in the place of "refuted": what `false_statements` counts, whatever its verdict
FALSE_KINDS = (MISPRINT, WRONG)
CAUSES: Mapping[str, str] = {
    "regime": "holds for other networks or settings of training than some that were tried",
    "reduced scale": "fewer weights, examples or epochs than in the paper",
    "power": "undecided: too few seeds, examples or units for the criterion",
    MISPRINT: "a sign, a factor or a number as printed; mended, it holds",
    WRONG: "an exact statement with a counter-example",
    ROUNDING: "a printed number that was rounded past its bound",
    "solver": "the paper's solver or estimator, or its settings, leave it",
    "paper silent": "depends on a setting that the paper does not state",
    UNEXPLAINED: "measured, and none of these is known to explain it",
}
FOLDER = ROOT / "experiments" / "papers"
PATTERNS = FOLDER / "causes.yaml"


def cause(name: str, verdict: str, path: Path = PATTERNS) -> str | None:
    """Return why the claim "<paper>/<item>/<claim>" is not reproduced; None with another verdict.

    Raises:
        ValueError: a cause of the file is not in the closed list.
    """
    if verdict == UNDECIDED:
        return "power"
    if verdict not in (NOT_REPRODUCED, REFUTED):
        return None
    for found, patterns in _yaml(path).items():
        if found not in CAUSES:
            raise ValueError(f"{path.name}: {found!r} is no cause; the list is {', '.join(CAUSES)}.")
        fits = any(fnmatchcase(name, pattern) for pattern in patterns)
        if fits and (verdict == NOT_REPRODUCED or found in (MISPRINT, ROUNDING)):
            return found
    return WRONG if verdict == REFUTED else UNEXPLAINED


@cache
def _yaml(path: Path) -> dict[str, list[str]]:
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}


@dataclass(frozen=True)
class FalseStatement:
    """A statement that is false as it stands in a paper.

    Args:
        place: in the paper.
        printed: the statement.
        should_be: what holds instead.
        seen: the counter-example, with its number.
        kind: "misprint" or "refuted".
        folder: whose claim it is; None for an equation that a calculation alone refutes.
    """

    place: str
    printed: str
    should_be: str
    seen: str
    kind: str
    folder: ResultFolder | None = None


def own_claims(paper: str, folder: ResultFolder) -> list[ClaimResult]:
    """Return the claims of a folder that stand in the paper itself, by their sources."""
    citation = paper_titles().get(paper, paper).partition(":")[0]
    return [result for result in folder.claims if result.claim.source.startswith(citation)]


def false_statements(paper: str, folders: Iterable[ResultFolder]) -> list[FalseStatement]:
    """Return what is false as printed in a paper, of which these are the result folders to go by."""
    words: Mapping[str, Sequence[str]] = _yaml(FOLDER / "misprints.yaml")
    found = []
    for folder in folders:
        for result in own_claims(paper, folder):
            name = f"{folder.key}/{result.claim.id}"
            kind = cause(name, result.verdict)
            if kind in FALSE_KINDS and paper != "benchmarks":
                should_be, seen = words.get(name, ("", f"{result.claim.measure}: {{}}"))
                place = result.claim.source.partition(", ")[2]
                number = NO_VALUE if result.value is None else with_number(seen, result.value)
                found.append(FalseStatement(place, result.claim.statement, should_be, number, kind, folder))
    return found + [each for own, each in _derived() if own == paper]


def standings(paper: str, chosen: Sequence[ResultFolder]) -> Counter[str]:
    """Return how many of the paper's own claims have each verdict; what is false as printed has no other.

    What was measured and not asked for want of power counts as undecided, as in a headline.
    """
    counts = Counter({FALSE: len(false_statements(paper, chosen))})
    for folder in chosen:
        for result in own_claims(paper, folder):
            why = cause(f"{folder.key}/{result.claim.id}", result.verdict)
            counts[ROUNDING if why == ROUNDING else result.weighed] += why not in FALSE_KINDS
    return counts


@cache
def _derived() -> list[tuple[str, FalseStatement]]:
    """Return the equations whose check is a calculation; none where there are no papers."""
    if not (FOLDER / "derivations.py").is_file():
        return []
    found = []
    for each in importlib.import_module("experiments.papers.derivations").DERIVATIONS:
        seen = with_number(each.shows, each.check(False))
        found.append((each.paper, FalseStatement(each.place, each.printed, each.should_be, seen, MISPRINT)))
    return found
