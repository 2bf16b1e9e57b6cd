"""The parts of README.md that are made of results: the papers' table and the board of attribution.

A part stands between `<!-- NAME: written by `make report` -->` and `<!-- NAME end -->`; the rest is typed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from curvlab.lab import tables
from curvlab.lab.reporting.findings import HEADLINE_VERDICTS, PaperFindings
from curvlab.lab.targets.target import paper_titles

_BOARD = "benchmarks/board"
_TASKS = {  # of the board, with the names of its columns; of those that are published
    "mlp-32-tanh-digits-1000": "digits",
    "mlp-32-diabetes": "diabetes (regression)",
    "mlp-16-tanh-breast-cancer": "breast cancer (table)",
    "mlp-64-tanh-mnist-2000": "MNIST",
    "mlp-64-tanh-fashion-mnist-2000": "FashionMNIST",
}
_PRICED = "mlp-32-tanh-digits-1000"
_STANDARD, _SINGLE = "standard", ("same seed", "other seeds")
_SCORES = {  # rows of the board: what they are called, the method by the standard protocol, and by single runs
    "unrolled derivative of one training": ("unrolled", "unrolled"),
    "the same, mean of three others": ("unrolled over other seeds",) * 2,
    "**influence, damping 1/length of the retraining**": (
        "influence, as many epochs",
        "influence at the run's damping",
    ),
    "influence, filtered by the retraining": ("filter, as many epochs", "filter of the run"),
    "SOURCE, segments solved exactly": ("SOURCE with exact segments",) * 2,
    "EK-FAC (ours)": ("EK-FAC",) * 2,
    "EK-FAC (kronfluence)": ("kronfluence EK-FAC",) * 2,
    "EK-FAC (dattri, two faults mended)": ("dattri EK-FAC mended",) * 2,
    "TRAK": ("TRAK",) * 2,
    "dot product of gradients": ("gradient dot product",) * 2,
}


def filled_readme(readme: str, results: Path, papers: Sequence[PaperFindings]) -> str:
    """Return the README's text with its parts as the results have them."""
    parts = {"papers": papers_table(papers), "board": board(results)}
    for name, part in parts.items():
        begin, end = f"<!-- {name}: written by `make report` -->", f"<!-- {name} end -->"
        if begin not in readme or end not in readme:
            raise ValueError(
                f"README.md lacks the line {begin!r} or {end!r}; put both back, the part goes between them"
            )
        whole = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        readme = whole.sub(lambda _, b=begin, p=part, e=end: f"{b}\n{p}\n{e}", readme)  # type: ignore[misc]
    return readme


def papers_table(papers: Sequence[PaperFindings]) -> str:
    """Return the table of the papers: headlines by verdict, and what was found."""
    titles = paper_titles()
    lines = ["| paper | its headlines | what we found |", "|---|---|---|"]
    for paper in papers:
        counts = Counter(finding.verdict for finding in paper.findings)
        words = ", ".join(f"{counts[word]} {word}" for word in HEADLINE_VERDICTS if counts[word])
        page = f"[{titles[paper.paper].partition(':')[0]}](results/{paper.paper}/README.md)"
        lines.append(f"| {page} | {words} | {paper.text} |")
    return "\n".join(lines)


def board(results: Path) -> str:
    """Return the board of attribution: LDS by the standard protocol for each task, means by all, and the price."""
    folders = [
        path.parent for path in sorted((results / _BOARD).glob("*/best.csv")) if "+" not in path.parent.name
    ]
    best, cost = (pd.concat([tables.read_table(f, name) for f in folders]) for name in ("best", "cost"))
    tasks = {task: label for task, label in _TASKS.items() if task in set(best.task)}
    cells: dict[tuple[str, str, str], Any] = {
        (str(row.task), str(row.method), str(row.against)): row for row in best.itertuples()
    }
    seconds = cost.set_index(["task", "method"]).trainings
    means = [f"mean: {against}" for against in (_STANDARD, *_SINGLE)]
    lines = ["| score | " + " | ".join([*tasks.values(), *means, "price on digits"]) + " |"]
    lines.append("|---" * (len(tasks) + 5) + "|")
    for label, (standard, single) in _SCORES.items():
        row = [_cell(cells, (task, standard, _STANDARD)) for task in tasks]
        for against in (_STANDARD, *_SINGLE):
            keys = [(task, standard if against == _STANDARD else single, against) for task in tasks]
            known = [float(cells[key].lds) for key in keys if key in cells]
            row.append(f"{sum(known) / len(known):.2f}" if len(known) == len(tasks) else "")
        price = (_PRICED, standard)
        row.append(f"{seconds[price]:.0f}" if price in seconds.index else "")
        if any(row):
            lines.append(f"| {label} | {' | '.join(row)} |")
    return "\n".join(lines)


def _cell(cells: Mapping[tuple[str, str, str], Any], key: tuple[str, str, str]) -> str:
    if key not in cells:
        return ""
    found = cells[key]
    return f"{found.lds:.2f} ({found.lds_low:.2f} to {found.lds_high:.2f})"
