"""Looks by name: a method has its colour in all figures, and what is no method has none."""

from __future__ import annotations

import numpy as np
from matplotlib.colors import to_rgb

from curvlab.lab import panels, plots


def test_a_method_has_one_color_whatever_stands_beside_it() -> None:
    methods = ["NGD", "exact_solve", "Ginger", "Ginger, never clipped", "lemma, δ = 0.1", "mine"]
    found = panels.styles_of(methods)
    assert panels.styles_of(methods[::-1]) == found
    assert all(panels.styles_of([name])[name]["color"] == found[name]["color"] for name in methods)
    assert found["NGD"]["color"] == panels.COLORS["ngd"] == panels.styles_of(["ngd-high"])["ngd-high"]["color"]
    assert found["Ginger"]["color"] == found["Ginger, never clipped"]["color"], "a variant of it"
    assert found["Ginger"]["marker"] != found["Ginger, never clipped"]["marker"]
    assert [panels.style_of(name)["color"] for name in ("sgdish", "mine")] == 2 * plots.shades(1), (
        "words, not letters"
    )
    optimizers = ["SGD", "NGD", "Ginger", "Adam", "QNG", "momentum, clipped", "Muon", "SOAP", "uniform direction"]
    solvers = ["LiSSA", "Lissa.auto", "CG", "block CG", "default", "Chebyshev", "exact solve", "filter of the run"]
    scores = ["PBRF", "influence", "EK-FAC", "SOURCE", "TRAK", "unrolled", "gradient dot product"]
    own = [panels.style_of(name)["color"] for name in (*optimizers, *solvers, *scores)]
    assert len(set(own)) == len(own), "no colour is two methods"
    assert all(np.ptp(to_rgb(color)) > 0.15 for color in panels.COLORS.values()), "and none is a setting's grey"


def test_settings_are_told_apart_by_greys_and_numbers_of_them_go_from_dark_to_bright() -> None:
    for names in (range(30), [str(number) for number in range(30)]):
        found = panels.styles_of(names)
        assert [found[name]["color"] for name in names] == plots.shades(30)
        assert len({(style["color"], style["marker"]) for style in found.values()}) == 30
    assert panels.styles_of([4, 1])[1]["color"] == panels.styles_of([1, 4])[1]["color"] == plots.shades(2)[0]
    beside = panels.styles_of(["wide", "SGD", "narrow"])
    assert [beside[name]["color"] for name in ("wide", "narrow")] == plots.shades(2)
