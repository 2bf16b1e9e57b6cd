"""Every published picture, drawn from its tables: a hue is a method, the same in all; titles are of two lines."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.artist import Artist
from matplotlib.colors import to_hex, to_rgba_array
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from curvlab.lab import Computed, all_targets, panels, plots
from curvlab.lab.claims import load_claims
from curvlab.lab.names import method_of, name_tasks
from curvlab.lab.reporting.findings import picture_title
from curvlab.lab.targets.target import published

ROOT = Path(__file__).parents[2]
RESULTS = {path.relative_to(ROOT / "results").as_posix(): path for _, path in published(ROOT / "results")}
PARTS = ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor")


def artists(figure: Figure) -> Iterator[tuple[str, Artist]]:
    """Yield what is drawn of data, each with its legend entry; no images and no bars of their colours."""
    for ax in figure.axes:
        entries = {part: each.get_label() for each in ax.containers for part in each.get_children()}
        for artist in (*ax.lines, *ax.collections, *ax.patches, *ax.texts):
            entry = str(entries.get(artist, artist.get_label()))
            if ax.get_label() != "<colorbar>" and getattr(artist, "get_array", lambda: None)() is None:
                yield "" if entry.startswith("_") else entry, artist


def hues(artist: Artist) -> set[str]:
    """Return the colours of an artist that are no greys, whatever their alpha; those that are seen."""
    given: list[Any] = [getattr(artist, f"get_{part}")() for part in PARTS if hasattr(artist, f"get_{part}")]
    colors = np.concatenate([to_rgba_array(each) for each in given if not isinstance(each, str) or each != "auto"])
    return {to_hex(each[:3]).upper() for each in colors if each[3] > 0 and np.ptp(each[:3]) > 0.02}


def misused_hues(figure: Figure) -> dict[str, set[str]]:
    """Return the legend entries, "" for what has none, with the hues that are no method's that they name.

    A method's entry has its colour and no other, another entry has none; what has no entry has that of a method
    which a text of the figure names.
    """
    texts = " ".join(text.get_text() for text in figure.findobj(Text)).lower().replace("-", " ")
    told = {color for name, color in panels.COLORS.items() if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", texts)}
    found = defaultdict(set)
    for entry, artist in artists(figure):
        method = method_of(entry)
        if not entry:
            found[entry] |= hues(artist) - told
        elif not isinstance(artist, Text):
            found[entry] |= hues(artist) ^ ({panels.COLORS[method]} if method else set())
    return {entry: wrong for entry, wrong in found.items() if wrong}


@pytest.mark.parametrize("place", RESULTS)
def test_hues_of_published_pictures_are_of_methods_and_titles_are_of_two_lines(place: str) -> None:
    key, folder = place.rpartition("/")[0], RESULTS[place]
    for name, figure in all_targets()[key].load("draw")(Computed.of(folder)).items():
        assert misused_hues(figure) == {}, name
        if name == "figure.png" and (folder / "claims.json").is_file():
            name_tasks(figure)
            plots.headline(figure, picture_title(key, load_claims(folder)))
            assert len(figure.get_suptitle().splitlines()) <= 2, figure.get_suptitle()


def test_no_published_picture_is_cut_at_an_edge() -> None:
    cut = {}
    for path in sorted((ROOT / "results").rglob("figure*.png")):
        pixels = np.asarray(Image.open(path).convert("L"))
        cut[path.relative_to(ROOT).as_posix()] = min(edge.min() for edge in (*pixels[[0, -1]], *pixels.T[[0, -1]]))
    assert {name: darkest for name, darkest in cut.items() if darkest < 200} == {}


def test_the_first_check_finds_a_setting_with_a_methods_hue_and_a_method_with_anothers() -> None:
    figure, axes = plots.figure()
    table = pd.DataFrame(
        {"x": [1, 2, 1, 2], "y": [1.0, 2.0, 3.0, 4.0], "of": ["NGD", "NGD", "width 3", "width 3"]}
    )
    panels.lines(axes[0, 0], table, x="x", y="y", by="of", bars=True)
    assert misused_hues(figure) == {}
    axes[0, 0].plot([1], [1], color=panels.COLORS["sgd"], label="width 4")
    axes[0, 0].plot([1], [1], color=panels.COLORS["ginger"], label="SGD")
    axes[0, 0].plot([1], [1], color="0.5", label="QNG, τ = 1")
    axes[0, 0].axvspan(0, 1, color=panels.COLORS["adam"])
    colors = {name: panels.COLORS[name] for name in ("sgd", "ginger", "qng", "adam")}
    wrong = {"width 4": {"sgd"}, "SGD": {"sgd", "ginger"}, "QNG, τ = 1": {"qng"}, "": {"adam"}}
    assert misused_hues(figure) == {entry: {colors[name] for name in own} for entry, own in wrong.items()}
