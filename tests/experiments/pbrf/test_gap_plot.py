"""The figure of the gaps: with the paper's, where it prints zeros, where it has no row, and for stand-ins."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from curvlab.influence.retraining import GAPS
from experiments.pbrf.gap_plot import draw

NO_VALUE = "one bar: no value of the paper's"
BARS = "t 95 % over seeds of the arithmetic mean (claims:\nthe geometric); to the edge where it reaches 0"
MOVED = "line: how far the influence estimate moves"
PAPER = ["hatched: the paper's", "hollow: the paper's, ± as printed (0.000 left out)", MOVED, BARS]


def row(task: str, paper: float | None, stands_for: str = "", low: float = 1.5) -> dict[str, object]:
    sizes: dict[str, object] = {"task": task, "stands for": stands_for}
    sizes |= {"moved": 1.0, "learned": True, "residual": 1e-3}
    for gap in GAPS:
        sizes |= {f"{gap} per_example mean": 2.0, f"{gap} per_example low": low, f"{gap} per_example high": 2.5}
        sizes |= {} if paper is None else {f"{gap} paper mean": paper, f"{gap} paper ±": 0.1}
    return sizes


def drawn(computed_of, *rows: dict[str, object]) -> tuple[Figure, list[str]]:
    (figure,) = draw(computed_of({"table": pd.DataFrame(rows)})).values()
    return figure, [text.get_text() for text in figure.legends[0].get_texts()]


def test_bars_stand_for_what_there_is(computed_of) -> None:
    figure, words = drawn(
        computed_of, row("mlp-1024-1024-mnist-6000", 0.5), row("logistic", 0.0), row("mlp-32-32-diabetes", None)
    )
    upper, lower = figure.axes
    hatched = [bar for bar in upper.patches if bar.get_hatch()]
    assert [round(bar.get_height(), 6) for bar in hatched] == [0.2] * len(GAPS)
    assert {round(bar.get_x() + bar.get_width() / 2, 6) for bar in hatched} == {0.2}
    plain = {round(bar.get_x() + bar.get_width() / 2, 6) for bar in upper.patches if not bar.get_hatch()}
    assert plain == {-0.2, 0.8, 2.0}  # alone in the middle where the paper has no row
    assert [text.get_text() for text in upper.texts] == ["10", "2.5", "10", "paper: 0.000 in all", "10"]
    assert words[len(GAPS) :] == [*PAPER, NO_VALUE]
    assert max(len(line) for label in lower.get_xticklabels() for line in label.get_text().split("\n")) <= 14


def test_the_legend_names_only_what_is_drawn(computed_of) -> None:
    assert drawn(computed_of, row("a", 0.5))[1][len(GAPS) :] == PAPER
    assert drawn(computed_of, row("a", None))[1][len(GAPS) :] == [MOVED, BARS, NO_VALUE]
    assert drawn(computed_of, row("a", 0.0))[1][len(GAPS) :] == PAPER[1:]
    assert drawn(computed_of, row("a", 0.5, "LR Cancer"))[1][-1] == "*: row that ours stands in for"


def test_rows_that_mean_nothing_say_so(computed_of) -> None:
    untrained = row("a", 0.5) | {"learned": False, "train loss": 0.7, "constant loss": 0.6}
    figure, words = drawn(computed_of, untrained, row("b", 0.5) | {"residual": 0.5}, row("c", 0.5))
    assert words[len(GAPS) :] == [*PAPER, "pale: not solved, or learned nothing"]
    ours = [bar for bar in figure.axes[0].patches if not bar.get_hatch()]
    assert [bar.get_alpha() for bar in ours] == [0.35] * 2 * len(GAPS) + [0.9] * len(GAPS)
    names = [label.get_text() for label in figure.axes[1].get_xticklabels()]
    assert names == ["a\nlearned nothing", "b\nnot solved", "c"]
    (lines,) = [found for found in figure.axes[1].collections if found.get_label().startswith("_child")][-1:]
    assert lines.get_offsets()[:, 1].tolist() == [1.0, 1.0, 1.0]


def test_few_tasks_leave_room_for_the_legend(computed_of) -> None:
    figure, _ = drawn(computed_of, row("a", 0.5), row("b", None))
    figure.draw_without_rendering()
    legend = figure.legends[0].get_window_extent()
    assert legend.x0 >= 0
    assert legend.x1 <= figure.bbox.width


def test_error_bars_are_the_intervals_over_seeds(computed_of) -> None:
    figure, _ = drawn(computed_of, row("a", None), row("b", None, low=-1.0))
    lower = figure.axes[1]
    (segments,) = {tuple(np.round(bars.get_segments(), 6)[:, :, 1].ravel()) for bars in lower.collections[:-1]}
    assert segments == pytest.approx((1.5, 2.5, -1.0, 2.5))  # not cut short: the axis ends first
    assert lower.get_ylim()[0] == pytest.approx(2 / 3)
