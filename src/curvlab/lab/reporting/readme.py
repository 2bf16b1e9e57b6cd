"""The parts of README.md that are made of results: the papers' table and the board of attribution.

A part stands between `<!-- NAME: written by `make report` -->` and `<!-- NAME end -->`; the rest is typed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from curvlab.lab import tables
from curvlab.lab.reporting.findings import HEADLINE_VERDICTS, PaperFindings
from curvlab.lab.targets.target import paper_titles

_BOARD = "benchmarks/attribution/laptop"
_QUESTION = "what retraining on a half does, in other orders"
_TASKS = {  # of the board, with the names of its columns
    "mlp-32-tanh-digits-1000-100-epochs": "digits, MLP",
    "mlp-64-tanh-mnist-2000": "MNIST, MLP",
    "mlp-64-tanh-fashion-mnist-2000": "FashionMNIST, MLP",
    "convnet-4-8-cifar10-500": "CIFAR-10, ConvNet",
    "opt-1-32-ptb-128": "Penn Treebank, OPT",
}
_PRICED = "mlp-64-tanh-mnist-2000"
_SCORES = {  # rows of the board, with what they are called there
    "unrolled": "derivative of the training, unrolled",
    "influence at the run's damping": "**influence, damping from the training**",
    "filter of the run": "influence, filtered by the training",
    "SOURCE with exact segments": "SOURCE, segments solved exactly",
    "kronfluence EK-FAC, damping by LDS": "EK-FAC (kronfluence)",
    "dattri EK-FAC mended, damping by LDS": "EK-FAC (dattri, two faults mended)",
    "dattri EK-FAC as shipped, damping by LDS": "EK-FAC (dattri, as shipped)",
    "TRAK, damping by LDS": "TRAK, with a ridge",
    "gradient dot product": "dot product of gradients",
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
    """Return the board of attribution: scores by tasks, and their cost on the MLP on MNIST."""
    found = tables.read_table(results / _BOARD, "which_score")
    found = found[found.question == _QUESTION]
    lines = [f"| score | {' | '.join(_TASKS.values())} | trainings (MNIST) |", "|---" * (len(_TASKS) + 2) + "|"]
    for score, label in _SCORES.items():
        own = {row["task"]: row for row in found[found.score == score].to_dict("records")}
        cells = [
            f"{own[t]['agreement']:.2f} ({own[t]['low']:.2f} to {own[t]['high']:.2f})" if t in own else ""
            for t in _TASKS
        ]
        lines.append(f"| {label} | {' | '.join(cells)} | {own[_PRICED]['trainings']:.0f} |")
    return "\n".join(lines)
