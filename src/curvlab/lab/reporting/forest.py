"""One picture of all headlines: for each, the claim that stands for it, on the scale of its criterion."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from curvlab.lab.claims.claims import (
    DIRECTION_ONLY,
    NOT_REPRODUCED,
    REFUTED,
    REPRODUCED,
    UNDECIDED,
    ClaimResult,
)
from curvlab.lab.reporting import plots
from curvlab.lab.reporting.findings import PaperFindings, written

_COLORS = {
    REPRODUCED: plots.PALETTE[2],
    DIRECTION_ONLY: plots.PALETTE[5],
    UNDECIDED: "#888888",
    NOT_REPRODUCED: plots.PALETTE[1],
    REFUTED: plots.PALETTE[7],
}
_LEFT, _RIGHT = 0.0, 1.0  # of a row's strip, in the axes' own unit
_LINE, _MOST_LINES = 50, 2  # letters that there is room for at the right, and lines
_LOG_SPREAD = 50.0  # of positive values, from which on a row is logarithmic


def forest(papers: Sequence[PaperFindings], titles: Mapping[str, str]) -> Figure:
    """Return the picture: one row a headline, dot and bar our value with its interval, diamond the paper's number.

    Every row has a scale of its own, from the least to the largest of what it shows; shaded is where the criterion
    holds. The colour is the verdict of the claim in the row; the headline's own takes in its other claims, too.

    Args:
        papers: what was found on each; headlines without a value are left out.
        titles: of the papers, by key.
    """
    rows = {paper.paper: [each for each in paper.findings if each.shown is not None] for paper in papers}
    num_rows = len(rows) + sum(map(len, rows.values()))
    drawing, grid = plots.figure(1, 1, panel_size=(8.0, 0.36 * num_rows + 1.0))
    axes = grid[0, 0]
    axes.set(xlim=(-1.75, 2.45), ylim=(num_rows - 0.4, -2.6))
    axes.axis("off")
    row = 0
    for paper, members in rows.items():
        axes.text(-1.75, row, titles.get(paper, paper), fontsize=10, weight="bold", va="center")
        row += 1
        for finding in members:
            name = textwrap.fill(finding.headline.short, 42)
            axes.text(-0.04, row, name, fontsize=8.5, ha="right", va="center", linespacing=1.0)
            if finding.shown is not None:
                paper_has = [number / finding.headline.per for number in finding.headline.number]
                _draw_row(axes, row, finding.shown, paper_has)
            row += 1
    handles: list[Artist] = [
        *(Line2D([], [], color=color, marker="o", markersize=4, label=word) for word, color in _COLORS.items()),
    ]
    if any(finding.headline.number for paper in rows.values() for finding in paper):
        handles.append(Line2D([], [], color="black", marker="D", markersize=4, label="paper's number or range"))
    handles += [
        Patch(color="#dcebdc", label="where the claim holds (each row has its own scale)"),
    ]
    axes.legend(handles=handles, ncols=3, fontsize=8.5, loc="upper center", frameon=False, handletextpad=0.4)
    return drawing


def _draw_row(axes: Axes, row: int, result: ClaimResult, paper: Sequence[float]) -> None:
    value, interval, criterion = result.value, result.interval, result.claim.criterion
    color = _COLORS[result.weighed]
    if value is None or interval is None:
        return
    low, high = (value if math.isnan(end) else end for end in (interval.low, interval.high))
    bounds = [bound for bound in (criterion.at_least, criterion.at_most) if bound is not None]
    place = _scale([value, *bounds, *paper], low, high)
    holds_from = _LEFT if criterion.at_least is None else place(criterion.at_least)
    holds_to = _RIGHT if criterion.at_most is None else place(criterion.at_most)
    axes.fill_betweenx([row - 0.36, row + 0.36], _LEFT, _RIGHT, color="#f2f2f2", linewidth=0)
    axes.fill_betweenx([row - 0.36, row + 0.36], holds_from, holds_to, color="#dcebdc", linewidth=0)
    axes.plot([place(low), place(high)], [row, row], color=color, linewidth=2.2, solid_capstyle="butt")
    axes.plot(place(value), row, marker="o", markersize=5.5, color=color)
    axes.plot(
        [place(each) for each in paper], [row + 0.18] * len(paper), marker="D", markersize=4, color="black", lw=0.8
    )
    spread = "" if low == high else f" ({written(low)} to {written(high)})"
    text = f"{written(value)}{spread}\n{paper_words(result.claim.paper_value, paper)}"
    axes.text(1.04, row, text, fontsize=8, va="center", color="#333333", linespacing=1.0)


def paper_words(value: float | str | None, drawn: Sequence[float]) -> str:
    """Return what the paper says in at most two lines: its words, or as many whole clauses as there is room for.

    Args:
        value: the claim's `paper_value`.
        drawn: the numbers that stand for it in the picture, in our unit.
    """
    numbers = " to ".join(map(written, drawn))
    words = f"paper: {written(value) if isinstance(value, float) else value or numbers or 'not in the paper'}"
    clauses = re.split(r"(?<=[,;:]) ", words)
    clauses = [" ".join(clauses[:2]), *clauses[2:]]  # "paper:" is none
    while len(lines := textwrap.wrap(" ".join(clauses).rstrip(",;:"), _LINE)) > _MOST_LINES and len(clauses) > 1:
        clauses.pop()
    return "\n".join(lines) if len(lines) <= _MOST_LINES else f"paper: {numbers or 'in words'}"


def _scale(fixed: Sequence[float], low: float, high: float) -> Callable[[float], float]:
    """Return the function from a row's values to its strip; the interval may not push the rest together."""
    ends = [*fixed]
    reach = 2 * (max(ends) - min(ends)) or max(abs(ends[0]), 1e-12)
    ends += [max(low, min(ends) - reach), min(high, max(ends) + reach)]
    first, last = min(ends), max(ends)
    logarithmic = first > 0 and last / first > _LOG_SPREAD
    if logarithmic:
        first, last = math.log(first), math.log(last)
    margin = 0.08 * (last - first) or 1.0

    def place(value: float) -> float:
        number = math.log(max(value, 1e-300)) if logarithmic else value
        return min(_RIGHT, max(_LEFT, (number - first + margin) / (last - first + 2 * margin)))

    return place
