"""The stacked bars of the gaps: with the paper's, where it prints zeros, and where it has no row."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from curvlab.influence.responses import GAPS
from experiments.pbrf.gap_plot import draw

NO_VALUE = "one bar: a stand-in, no value of the paper's"


def row(task: str, paper: float | None) -> dict[str, object]:
    sizes: dict[str, object] = {"task": task}
    for gap in GAPS:
        sizes |= {f"{gap} per_example mean": 2.0, f"{gap} per_example std": 1.0}
        sizes |= {} if paper is None else {f"{gap} paper mean": paper}
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
    assert [text.get_text() for text in upper.texts] == ["paper: 0.000 in all"]
    assert words[len(GAPS) :] == ["hatched: the paper's", NO_VALUE]
    assert max(len(line) for label in lower.get_xticklabels() for line in label.get_text().split("\n")) <= 14


def test_the_legend_names_only_what_is_drawn(computed_of) -> None:
    assert drawn(computed_of, row("a", 0.5))[1][len(GAPS) :] == ["hatched: the paper's"]
    assert drawn(computed_of, row("a", None))[1][len(GAPS) :] == [NO_VALUE]
    assert drawn(computed_of, row("a", 0.0))[1][len(GAPS) :] == []
