"""One picture of all headlines: each with its verdict, and the one claim that stands for it on its own scale."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.lab.claims import claims
from curvlab.lab.reporting import plots
from curvlab.lab.reporting.findings import HEADLINE_VERDICTS, IN_PART, Finding, PaperFindings, written
from curvlab.lab.targets.target import PRESETS

_COLORS = {  # none of a method
    claims.REPRODUCED: "#1A7A3A",
    claims.DIRECTION_ONLY: "#2F66C4",
    IN_PART: "#B07800",
    claims.UNDECIDED: "#777777",
    claims.NOT_REPRODUCED: "#B3261E",
    claims.OUT_OF_REACH: "#777777",
}
_COUNTED = {  # of a headline's claims, beside its verdict
    "hold": (claims.REPRODUCED,),
    "short": (claims.DIRECTION_ONLY,),
    "open": (claims.UNDECIDED,),
    "fail": (claims.NOT_REPRODUCED, claims.REFUTED),
}
_WIDTH, _ROW, _HEADING, _TOP = 576.0, 33.0, 22.0, 73.0  # points, as is the unit of the axes
_LEFT, _RIGHT, _VALUES, _PAPER = 256.0, 332.0, 338.0, 466.0  # of a row's strip; where the numbers beside it begin
_OURS, _BAND, _HOLDS = "#222222", "#ececec", "#bfe0c8"
_DIAMOND: dict[str, Any] = {"marker": "D", "markersize": 4.5, "color": "black", "markerfacecolor": "white"}
_BOXED: dict[str, Any] = {"fontsize": 7, "weight": "bold", "ha": "center", "va": "center", "color": "#444444"}
_BOXED["bbox"] = {"boxstyle": "square,pad=0.15", "facecolor": "none", "edgecolor": "#999999", "linewidth": 0.6}
_LETTERS = 22  # that there is room for at the right
_LOG_SPREAD = 50.0  # of positive values, from which on a row is logarithmic


def forest(papers: Sequence[PaperFindings], titles: Mapping[str, str]) -> Figure:
    """Return the picture: one row a headline, with the verdict that all its claims give it, in words and colour.

    Below is the claim that was chosen to show, behind the first letter of its preset: dot and bar are ours with
    its interval, the diamond is the paper's number, and the band is green where the criterion holds. Every row has
    a scale of its own.

    Args:
        papers: what was found on each.
        titles: of the papers, by key.
    """
    counts = Counter(finding.verdict for paper in papers for finding in paper.findings)
    height = _TOP + _HEADING * len(papers) + _ROW * counts.total() + 4
    drawing, grid = plots.figure(1, 1, panel_size=(_WIDTH / 72, height / 72))
    drawing.set_layout_engine("none")
    axes = grid[0, 0]
    axes.set_position((0, 0, 1, 1))
    axes.set(xlim=(0, _WIDTH), ylim=(height, 0))
    axes.axis("off")
    presets = {finding.preset for paper in papers for finding in paper.findings} - {""}
    _draw_key(axes, counts, sorted(presets, key=PRESETS.index))
    y = _TOP
    for paper in papers:
        title = titles.get(paper.paper, paper.paper)
        axes.text(4, y + 15, title, fontsize=10.5, weight="bold", va="center")
        y += _HEADING
        for finding in paper.findings:
            _draw_headline(axes, y, finding)
            y += _ROW
    return drawing


def _draw_key(axes: Axes, counts: Mapping[str, int], presets: Sequence[str]) -> None:
    x = 4.0
    axes.text(x, 11, f"{sum(counts.values())} headlines:", fontsize=10.5, weight="bold", va="center")
    x += 92
    for verdict in (each for each in HEADLINE_VERDICTS if counts[each]):
        words = f"{counts[verdict]} {verdict}"
        axes.text(x, 11, words, fontsize=10.5, weight="bold", va="center", color=_COLORS[verdict])
        x += 6.6 * len(words) + 10
    note = "Bold: the verdict, and how the claims of a headline came out. Below, one of them:"
    axes.text(4, 28, note, fontsize=8.5, va="center", color="#333333")
    axes.plot([8, 28], [45, 45], color=_OURS, linewidth=2.2)
    axes.plot(18, 45, marker="o", markersize=5.5, color=_OURS)
    axes.text(34, 45, "ours, with its interval", fontsize=8.5, va="center")
    axes.plot(158, 45, **_DIAMOND)
    axes.text(166, 45, "the paper's number or range", fontsize=8.5, va="center")
    axes.fill_betweenx([40, 50], 312, 330, color=_HOLDS, linewidth=0)
    axes.text(335, 45, "where this claim holds (a scale for each row)", fontsize=8.5, va="center")
    axes.text(4, 62, "the preset that decides:", fontsize=8.5, va="center")
    for place, preset in enumerate(presets):
        axes.text(128 + 90 * place, 62, _letter(preset), **_BOXED)
        axes.text(138 + 90 * place, 62, preset, fontsize=8.5, va="center")


def _letter(preset: str) -> str:
    return preset[:1].upper()


def _draw_headline(axes: Axes, top: float, finding: Finding) -> None:
    color, shown = _COLORS[finding.verdict], finding.shown
    axes.fill_betweenx([top + 1, top + _ROW - 4], 0, 4, color=color, linewidth=0)
    axes.text(9, top + 6, finding.headline.says, fontsize=9, va="center")
    verdicts = [result.weighed for result in finding.results.values()]
    counts = {words: sum(map(verdicts.count, which)) for words, which in _COUNTED.items()}
    counted = ", ".join(f"{count} {words}" for words, count in counts.items() if count)
    axes.text(
        _WIDTH - 4,
        top + 6,
        f"{finding.verdict}: {counted}" if counted else finding.verdict,
        fontsize=8.5,
        weight="bold",
        color=color,
        ha="right",
        va="center",
    )
    axes.text(13, top + 20, _letter(finding.preset), **_BOXED if finding.preset else {})
    axes.text(22, top + 20, finding.headline.short, fontsize=8.5, va="center", color="#444444")
    if shown is not None:
        _draw_strip(axes, top + 20, shown, finding.headline.number, finding.headline.per)


def _draw_strip(axes: Axes, y: float, result: claims.ClaimResult, paper: Sequence[float], per: float) -> None:
    value, interval, criterion = result.value, result.interval, result.claim.criterion
    if value is None or interval is None:
        return
    low, high = (value if math.isnan(end) else end for end in (interval.low, interval.high))
    printed = [number / per for number in paper]
    bounds = [bound for bound in (criterion.at_least, criterion.at_most) if bound is not None]
    direction = [end for end in (criterion.direction_at_least, criterion.direction_at_most) if end is not None]
    place = _scale([value, *bounds, *direction, *printed], low, high)
    holds_from = _LEFT if criterion.at_least is None else place(criterion.at_least)
    holds_to = _RIGHT if criterion.at_most is None else place(criterion.at_most)
    axes.fill_betweenx([y - 7, y + 7], _LEFT, _RIGHT, color=_BAND, linewidth=0)
    axes.fill_betweenx([y - 7, y + 7], holds_from, holds_to, color=_HOLDS, linewidth=0)
    ends = [place(each) for each in printed]
    axes.plot(ends, [y + 3.5] * len(ends), **_DIAMOND, linewidth=1)
    axes.plot([place(low), place(high)], [y - 2] * 2, color=_OURS, linewidth=2.2, solid_capstyle="butt")
    axes.plot(place(value), y - 2, marker="o", markersize=5.5, color=_OURS)
    spread = "" if low == high else f" ({written(per * low)} to {written(per * high)})"
    axes.text(_VALUES, y, f"{written(per * value)}{spread}", fontsize=8.5, va="center", color="#222222")
    words = paper_words(result.claim.paper_value, paper)
    axes.text(_PAPER, y, words, fontsize=8.5, va="center", color="#555555")


def paper_words(value: float | str | None, numbers: Sequence[float]) -> str:
    """Return what the paper has: its numbers, or else its words, where there is room for them.

    Args:
        value: the claim's `paper_value`.
        numbers: those that stand for it in the picture.
    """
    words = " to ".join(map(written, numbers or ([value] if isinstance(value, float) else [])))
    words = words or str(value or "").removesuffix(", no number")
    return f"paper: {words}" if words and len(words) <= _LETTERS - 7 else "paper: no number"


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
        share = (number - first + margin) / (last - first + 2 * margin)
        return _LEFT + (_RIGHT - _LEFT) * min(1.0, max(0.0, share))

    return place
