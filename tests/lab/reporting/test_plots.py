"""Plots and panels; a method has its colour in all figures, and what is no method has none."""

from __future__ import annotations

import itertools
import warnings
from io import BytesIO
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from numpy.testing import assert_allclose
from PIL import Image

from curvlab.lab import panels
from curvlab.lab.claims import t_interval
from curvlab.lab.names import for_readers, name_tasks, reader_names
from curvlab.lab.reporting import plots


@pytest.fixture
def ax() -> Axes:
    return plots.figure()[1][0, 0]


# --- Plots
def test_figure_returns_a_grid_and_leaves_the_settings_alone() -> None:
    before = dict(mpl.rcParams)
    fig, axes = plots.figure(2, 3, sharex=True)
    assert axes.shape == (2, 3)
    assert plots.figure()[1].shape == (1, 1)
    assert dict(mpl.rcParams) == before
    assert not axes[0, 0].spines["top"].get_visible()
    buffer = BytesIO()
    fig.savefig(buffer, format="png")
    width, height = Image.open(buffer).size
    assert (width, height) == (1200, 780)  # 8, for 3 × 3.2, by 2 × 2.6 inches at 150 dots
    wide, row = plots.figure(1, 5)
    assert row.shape == (1, 5)
    assert wide.get_size_inches() == pytest.approx([8.0, 5.2])  # 3 panels, and 2 below
    assert len(wide.axes) == 5
    tall, _ = plots.figure(1, 2, panel_size=(11.2, 3.2))  # 22.4 inches: three rows, two filled
    assert tall.get_size_inches() == pytest.approx([8.0, 6.4])


def test_the_finding_stands_above_the_title_and_what_would_be_cut_gets_smaller(tmp_path: Path) -> None:
    figure, axes = plots.figure(1, 2)
    figure.suptitle("its own title")
    axes[0, 1].set_title("a_title_of_one_word_too_long_for_a_panel_of_3.2_inches")
    told = "It holds on the first of two networks, and on the second is at most 12 % of what is printed."
    plots.headline(figure, told)
    axes[0, 0].set_title("mlp-2: r = -0.02 to -.1, 5-9, 1e-05")
    plots.write_png(figure, tmp_path / "figure.png")
    assert axes[0, 0].get_title() == "mlp-2: r = −0.02 to −.1, 5-9, 1e-05"
    assert figure.get_suptitle().splitlines()[2:] == ["its own title"]
    assert "12\u00a0%" in figure.get_suptitle()  # no line begins with a unit
    assert axes[0, 1].title.get_fontsize() < 10
    assert axes[0, 1].title.get_window_extent().x1 <= figure.bbox.width + 1


def labelled_figure() -> plots.Figure:
    figure, axes = plots.figure(2, 2)
    for ax in axes.flat:
        ax.plot([0, 1], [1e-3, 2e5])
        ax.set_yscale("log")
        ax.set_ylabel("a long label\nof two lines")
    figure.legend(["what it shows"], loc="outside lower center")
    figure.colorbar(axes[0, 0].scatter([0], [1], c=[1.0]), ax=axes[0, 0])
    return figure


def test_a_figure_is_written_as_matplotlib_would_with_its_axes_laid_out(tmp_path: Path) -> None:
    figure = labelled_figure()
    before = figure.axes[0].get_position().bounds
    plots.write_png(figure, tmp_path / "figure.png")
    assert figure.axes[0].get_position().bounds != before
    whole = BytesIO()
    labelled_figure().savefig(whole, format="png", dpi=110, metadata={"Software": None})
    assert (tmp_path / "figure.png").read_bytes() == plots.quantised(whole.getvalue())
    small, large = (
        np.asarray(Image.open(file).convert("RGB"), float) for file in (tmp_path / "figure.png", whole)
    )
    assert np.abs(small - large).mean() < 1  # 160 colours show the same, of 256 levels a pixel
    assert len(np.unique(small.reshape(-1, 3), axis=0)) <= 160


def test_pale_bands_keep_their_hue() -> None:
    methods = ("sgd", "ngd", "ginger", "adam", "qng", "exact", "filter", "soap")
    colors = [*(panels.COLORS[name] for name in methods), *plots.shades(4)]
    figure, axes = plots.figure()
    for place, color in enumerate(colors):
        axes[0, 0].fill_between([0, 1], place, place + 0.8, color=color, alpha=0.15, linewidth=0)
        axes[0, 0].plot([0, 1], [place, place + 0.8], color=color, label=str(place))
    axes[0, 0].legend()
    whole = BytesIO()
    figure.savefig(whole, format="png")
    few = Image.open(BytesIO(plots.quantised(whole.getvalue())))
    drawn, kept = (np.asarray(image.convert("RGB"), int) for image in (Image.open(whole), few))
    for color in colors:
        pale = np.round(255 * (0.85 + 0.15 * np.array(to_rgb(color))))
        band = np.abs(drawn - pale).max(-1) <= 1
        assert band.sum() > 1000
        assert np.abs(kept[band] - pale).max() <= 6


def test_lines_without_a_color_are_greys(ax: Axes) -> None:
    assert [ax.plot([0, 1], [k, k])[0].get_color() for k in range(3)] == plots.shades(5)[:3]
    assert plots.shades(0) == []
    greys = [to_rgb(color) for color in plots.shades(5)]
    assert [min(grey) for grey in greys] == [max(grey) for grey in greys] == sorted({max(grey) for grey in greys})


def test_measured_points_have_bars_of_95_percent(ax: Axes) -> None:
    plots.measured(ax, [1.0, 2.0], [3.0, 4.0], [0.5, 0.0], color="black", label="points")
    (bars,) = ax.containers[0].lines[2]
    first = bars.get_segments()[0]
    np.testing.assert_allclose(first, [[1.0, 3.0 - 0.98], [1.0, 3.0 + 0.98]])
    assert ax.get_legend_handles_labels()[1] == ["points"]


def test_identity_line_stays_within_the_data(ax: Axes) -> None:
    ax.scatter([0.0, 10.0], [-1.0, 2.0])
    limits = ax.get_xlim(), ax.get_ylim()
    plots.identity_line(ax)
    assert (ax.get_xlim(), ax.get_ylim()) == limits
    x, y = ax.lines[0].get_data()
    assert list(x) == list(y) == [limits[0][0], limits[1][1]]


def test_an_interval_over_seeds_has_three(ax: Axes) -> None:
    x, y = [0, 0, 0, 1, 1, 2, 2], [1.0, 2.0, 3.0, 5.0, 7.0, 4.0, np.nan]
    plots.seeds_around_mean(ax, x, y, color="black")
    band, line, dots = ax.collections
    half = 4.30265273 / 3**0.5  # Student's t for 2 degrees of freedom, times the standard error
    corners = band.get_paths()[0].vertices
    assert set(corners[:, 0]) == {0.0}
    assert (corners[:, 1].min(), corners[:, 1].max()) == pytest.approx((2 - half, 2 + half))
    np.testing.assert_allclose(line.get_segments()[0], [[0, 2 - half], [0, 2 + half]])
    np.testing.assert_array_equal(dots.get_offsets(), [[1, 5], [1, 7]])
    plots.seeds_around_mean(ax, x, y, color="black", least=0.2)
    assert ax.collections[3].get_paths()[0].vertices[:, 1].min() == pytest.approx(0.4)


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_counts_stand_below_all_that_is_drawn_where_not_every_seed_counts(ax: Axes, scale: str) -> None:
    ax.set_yscale(scale)
    ax.plot([1, 2], [3.0, 5.0])
    low, high = ax.get_ylim()
    plots.counts_at_foot(ax, [1, 1, 2, 2, 4, 4], [True, False, True, True, False, False], color="red")
    plots.counts_at_foot(ax, [1, 1], [True, True], color="green")  # no row
    plots.counts_at_foot(ax, [2, 2], [False, True], color="blue")
    written = [(*text.get_position(), text.get_text(), text.get_color()) for text in ax.texts]
    expected = [(1, "1", "red"), (4, "0", "red"), (2, "1", "blue")]
    assert [(x, text, color) for x, _, text, color in written] == expected
    heights = [y for _, y, _, _ in written]
    assert ax.get_ylim()[0] < heights[2] < heights[1] == heights[0] < low
    assert ax.get_ylim()[1] == pytest.approx(high)
    assert ax.get_xlim()[1] >= 4  # shown, though nothing is drawn there


def test_a_logarithmic_axis_of_less_than_a_decade_has_several_labels(ax: Axes) -> None:
    ax.plot([0.07, 0.15], [0, 1])
    ax.set_xscale("log")
    plots.readable_log(ax.xaxis)
    low, high = ax.get_xlim()
    assert len([tick for tick in ax.xaxis.get_majorticklocs() if low <= tick <= high]) >= 2


def test_a_title_that_reaches_into_its_neighbours_is_broken_into_lines(tmp_path: Path) -> None:
    drawing, axes = plots.figure(1, 3, panel_size=(2.0, 2.0))
    long = "logistic regression on a table of diabetes"
    for ax, title in zip(axes[0], (long, long, "short"), strict=True):
        ax.set_title(title)
    plots.write_png(drawing, tmp_path / "wrapped.png")
    titles = [ax.get_title() for ax in axes[0]]
    assert [title.replace("\n", " ") for title in titles] == [long, long, "short"]
    assert all("\n" in title for title in titles[:2])
    boxes = [ax.title.get_window_extent() for ax in axes[0]]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_what_is_too_wide_for_a_picture_is_broken_into_lines_and_what_is_cut_is_told(tmp_path: Path) -> None:
    drawing, axes = plots.figure(panel_size=(4.0, 6.0))
    entries = [" ".join([word] * 30) for word in ("first", "second")]
    for entry in entries:
        axes[0, 0].plot([1, 2], [1, 2], label=entry)
    panels.legend(drawing, title=f"{'the note ' * 30}\nits second line")
    drawing.supxlabel("what is below " * 20)
    with warnings.catch_warnings(action="error"):
        plots.write_png(drawing, tmp_path / "wrapped.png")
    (legend,) = drawing.legends
    assert legend.get_title().get_text().endswith("\nits second line")
    assert [text.get_text().replace("\n", " ") for text in legend.get_texts()] == entries
    for artist in (legend, legend.get_title(), *legend.get_texts(), *drawing.texts):
        box = artist.get_window_extent()
        assert 0 <= box.x0 <= box.x1 <= drawing.bbox.width, artist
    pixels = np.asarray(Image.open(tmp_path / "wrapped.png").convert("L"))
    assert pixels[:, [0, -1]].min() == 255
    axes[0, 0].text(1.0, 0.5, "far off", transform=drawing.transFigure)
    with pytest.warns(UserWarning, match=r"cut.png: cut at the edge, write it shorter: far off"):
        plots.write_png(drawing, tmp_path / "cut.png")


# --- Panels draw the numbers of their columns: offsets, line data, legend entries of one made-up table
@pytest.fixture
def seeds() -> pd.DataFrame:
    """Three seeds of two optimizers at two epochs: means 2 and 4 of sgd, 20 and 40 of ngd."""
    rows = [
        {"optimizer": name, "epoch": epoch, "seed": seed, "loss": scale * epoch * (seed + 1)}
        for name, scale in (("sgd", 1.0), ("ngd", 10.0))
        for epoch in (1, 2)
        for seed in (0, 1, 2)
    ]
    return pd.DataFrame(rows)


def labels(ax: Axes) -> list[str]:
    return ax.get_legend_handles_labels()[1]


def bars_of(ax: Axes) -> list[np.ndarray]:
    """Segments of the one collection of error bars."""
    (bars,) = (entry for entry in ax.collections if hasattr(entry, "get_segments"))
    return bars.get_segments()


def test_lines_are_means_with_t_intervals(ax: Axes, seeds: pd.DataFrame) -> None:
    panels.lines(ax, seeds, x="epoch", y="loss", by="optimizer")
    assert labels(ax) == ["sgd", "ngd"]
    assert_allclose(ax.lines[0].get_xydata(), [[1, 2], [2, 4]])
    assert_allclose(ax.lines[1].get_xydata(), [[1, 20], [2, 40]])
    assert ax.lines[1].get_color() == panels.COLORS["ngd"]
    band = ax.collections[0].get_paths()[0].vertices
    interval = t_interval([2, 4, 6])
    assert_allclose([band[:, 1].min(), band[:, 1].max()], [interval.low, interval.high])


def test_a_band_does_not_depend_on_the_order_of_rows(ax: Axes) -> None:
    table = pd.DataFrame({"x": [3, 1, 2], "y": [30.0, 10, 20], "low": [29.0, 9, 19], "high": [31.0, 11, 21]})
    panels.lines(ax, table, x="x", y="y", low="low", high="high")
    corners = ax.collections[0].get_paths()[0].vertices
    for x, y in ((1, 10), (2, 20), (3, 30)):
        assert sorted(set(corners[corners[:, 0] == x, 1])) == [y - 1, y + 1]


@pytest.mark.parametrize("given", [{"low": "low", "high": "high"}, {"stderr": "stderr"}], ids=["ends", "stderr"])
def test_bars_of_lines_are_the_columns(ax: Axes, given: dict[str, str]) -> None:
    table = pd.DataFrame({"x": [1, 3], "y": [5.0, 6.0], "stderr": [1.0, 2.0]})
    table = table.assign(low=table.y - 1.96 * table.stderr, high=table.y + 1.96 * table.stderr)
    panels.lines(ax, table, x="x", y="y", label="ours", bars=True, linestyle="none", **given)
    assert_allclose(bars_of(ax), [[[1, 3.04], [1, 6.96]], [[3, 2.08], [3, 9.92]]])
    assert labels(ax) == ["ours"]


def test_seeds_are_dots_beside_bars_of_their_t_interval(ax: Axes, seeds: pd.DataFrame) -> None:
    one = seeds[(seeds.optimizer == "sgd") & (seeds.epoch == 1)]
    panels.lines(ax, one, x="epoch", y="loss", bars=True, seeds=True)
    assert_allclose(ax.collections[0].get_offsets(), [[1, 1], [1, 2], [1, 3]])
    interval = t_interval([1.0, 2.0, 3.0])
    assert_allclose(bars_of(ax), [[[1, interval.low], [1, interval.high]]])


def test_traces_are_one_line_a_run(ax: Axes, seeds: pd.DataFrame) -> None:
    panels.traces(ax, seeds, x="epoch", y="loss", by="optimizer")
    assert len(ax.lines) == 6
    assert_allclose(ax.lines[4].get_xydata(), [[1, 20], [2, 40]])
    assert labels(ax) == ["sgd", "ngd"]


def test_scatter_keeps_its_axes_and_rings_what_is_hollow(ax: Axes) -> None:
    table = pd.DataFrame({"pbrf": [1.0, 2.0], "lissa": [10.0, 20.0], "lost": [False, True]})
    panels.scatter(ax, table, x="pbrf", y="lissa", hollow="lost", label="points")
    filled, empty = ax.collections
    assert_allclose(filled.get_offsets(), [[1, 10]])
    assert_allclose(empty.get_offsets(), [[2, 20]])
    assert len(empty.get_facecolors()) == 0
    assert labels(ax) == ["points", "x = y"]


@pytest.mark.parametrize("upright", [False, True])
def test_bars_stand_at_their_names_with_the_papers_beside(ax: Axes, upright: bool) -> None:
    table = pd.DataFrame({"model": ["mlp", "lenet"], "ours": [2.0, 3.0], "ours_low": [1.5, 2.0]})
    table = table.assign(ours_high=[2.5, 5.0], paper=[2.2, np.nan], other=[7.0, 8.0])
    panels.bars(
        ax, table, name="model", value={"ours": "measured", "other": "twice"}, paper="paper", upright=upright
    )
    length = "get_height" if upright else "get_width"
    assert [getattr(patch, length)() for patch in ax.patches] == [2, 3, 7, 8]
    shown = (ax.get_xticklabels if upright else ax.get_yticklabels)()
    assert [text.get_text() for text in shown] == ["mlp", "lenet"]
    assert_allclose(np.array(bars_of(ax))[:, :, 1 if upright else 0], [[1.5, 2.5], [2, 5]])
    marks = [entry for entry in ax.collections if not hasattr(entry, "get_segments")]
    assert 2.2 in np.asarray(marks[0].get_offsets())
    assert set(labels(ax)) == {"measured", "twice", "the paper's"}


def test_bars_of_groups(ax: Axes) -> None:
    table = pd.DataFrame({"model": ["a", "b", "a"], "method": ["ngd", "ngd", "sgd"], "time": [1.0, 2.0, 3.0]})
    panels.bars(ax, table, name="model", value="time", by="method")
    centres = [round(patch.get_y() + patch.get_height() / 2, 6) for patch in ax.patches]
    assert centres == [-0.2, 0.8, 0.2]
    assert ax.get_ylim()[0] > ax.get_ylim()[1], "from the top down"


def test_forest_has_the_interval_and_the_papers_value(ax: Axes) -> None:
    table = pd.DataFrame({"name": ["first", "second"], "value": [1.0, 2.0], "low": [0.5, 1.5], "high": [1.1, 4.0]})
    table = table.assign(printed=[3.0, np.nan], lost=[True, False])
    panels.forest(ax, table, name="name", value="value", low="low", high="high", paper="printed", hollow="lost")
    assert_allclose(bars_of(ax), [[[0.5, 0], [1.1, 0]], [[1.5, 1], [4, 1]]])
    assert [3.0, 0.0] in np.asarray(ax.collections[-1].get_offsets()).tolist()
    ring = ax.lines[-1]
    assert_allclose(ring.get_xydata(), [[1, 0]])
    assert ring.get_markerfacecolor() == "white"


def test_heat_map_is_ascending_with_its_numbers(ax: Axes) -> None:
    table = pd.DataFrame({"rank": [8, 2, 8, 2], "decay": [0.9, 0.9, 0.5, 0.5], "score": [4.0, 3.0, 2.0, 1.0]})
    image = panels.heat_map(ax, table, x="rank", y="decay", value="score", text="{:.0f}")
    assert image.get_array().tolist() == [[1, 2], [3, 4]]
    assert [text.get_text() for text in ax.get_xticklabels()] == ["2", "8"]
    assert [text.get_text() for text in ax.get_yticklabels()] == ["0.5", "0.9"]
    assert [text.get_text() for text in ax.texts] == ["1", "2", "3", "4"]
    assert image.get_clim() == (1, 4)


def test_histogram_is_a_density_over_shared_bins(ax: Axes) -> None:
    table = pd.DataFrame({"value": [0.0, 1.0, 1.0, np.nan, 4.0], "of": ["a", "a", "a", "a", "b"]})
    panels.histogram(ax, table, value="value", by="of", bins=[0, 1, 5])
    assert labels(ax) == ["a", "b"]
    heights = ax.patches[0].get_xy()[:, 1]
    assert_allclose(np.unique(heights.round(9)), [0, 1 / 6, 1 / 3])


def test_a_figure_of_rows_has_one_legend_below(seeds: pd.DataFrame) -> None:
    figure, found = panels.rows(seeds, "optimizer", columns=2)
    for (left, right), name, own in found:
        assert set(own.optimizer) == {name}
        for ax in (left, right):
            panels.lines(ax, own, x="epoch", y="loss", by="optimizer")
        panels.frame(left, x="epoch", y="loss (nats)", title=str(name), log="y")
        panels.rule(right, y=1, label="as stated")
    panels.legend(figure, title="bands: 95 %")
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["SGD", "as stated", "NGD"]
    assert legend.get_title().get_text() == "bands: 95 %"
    ax = figure.axes[0]
    words = [ax.get_xlabel(), ax.get_ylabel(), ax.get_title(), ax.get_yscale()]
    assert words == ["epoch", "loss (nats)", "sgd", "log"]


def test_counts_are_of_the_seeds_that_count(ax: Axes, seeds: pd.DataFrame) -> None:
    table = seeds.assign(valid=seeds.seed > 0, loss=seeds.loss.where(seeds.epoch == 1))
    panels.lines(ax, table, x="epoch", y="loss", by="optimizer")
    panels.counts(ax, table[table.epoch == 1], x="epoch", valid="valid", by="optimizer")
    assert [text.get_text() for text in ax.texts] == ["2", "2"]
    assert [text.get_color() for text in ax.texts] == [panels.COLORS["sgd"], panels.COLORS["ngd"]]
    alike = {name: {"color": "black", "marker": mark} for name, mark in zip(("sgd", "ngd"), "v^", strict=True)}
    panels.counts(ax, table[table.epoch == 1], x="epoch", valid="valid", by="optimizer", styles=alike)
    assert [text.get_text() for text in ax.texts[2:]] == [
        "▼\u20092",
        "▲\u20092",
    ]  # or nobody could tell whose they are
    panels.legend(ax.figure, title="bands: 95 %")
    assert ax.figure.legends[0].get_title().get_text() == f"bands: 95 %\n{plots.COUNTS_NOTE}"


def test_tasks_have_a_readers_name_that_tells_them_apart() -> None:
    early = "mlp-64-64-mnist-early-curvature-3000"
    said = reader_names([early, "resnet20-cifar10-curvature-200", "the loss moves"])
    assert list(said.values()) == ["MLP on MNIST, stopped early", "ResNet-20 on CIFAR-10", "the loss moves"]
    alike = reader_names(["mlp-64-64-relu-digits", "mlp-64-64-tanh-digits-1000", "exact-ngd-6-6-digits-640"])
    assert list(alike.values()) == [
        "MLP 64-64 relu on digits",
        "MLP 64-64 tanh on 1,000 of digits",
        "MLP 6-6 on 640 of digits",
    ]
    assert reader_names(["mlp-32-tanh-digits-1000-100-epochs"]).popitem()[1] == "MLP on digits, 100 epochs"
    whole = reader_names([early, "ffnn-2-layers-mnist-10000"], whole=True)
    names = ["MLP 64-64 on MNIST, stopped early", "MLP on 10,000 of MNIST, 2 hidden layers"]
    assert list(whole.values()) == names


def test_seeds_are_told_in_words() -> None:
    said = [panels.seeds(counts) for counts in ([1], [5, 5], pd.Series([10.0, 3.0, 4.0]))]
    assert said == ["1 seed", "5 seeds", "3 to 10 seeds"]


def test_readers_names_stand_for_labels_in_every_text_of_a_figure(ax: Axes) -> None:
    table = pd.DataFrame({"task": ["mlp-32-tanh-digits-1000", "resnet20-cifar10-early"], "value": [1.0, 2.0]})
    panels.bars(ax, table, name="task", value="value")
    panels.frame(ax, x="score on mlp-32-tanh-digits-1000", title="resnet20-cifar10-early, 3 seeds")
    name_tasks(ax.get_figure())
    assert ax.get_title() == "ResNet-20 on CIFAR-10, stopped early, 3 seeds"
    assert ax.get_xlabel() == "score on MLP 32 tanh on 1,000 of digits"
    ax.get_figure().canvas.draw()
    names = [text.get_text() for text in ax.get_yticklabels()]
    assert names == ["MLP 32 tanh on 1,000 of digits", "ResNet-20 on CIFAR-10, stopped early"]
    page = "opt-1-32-ptb-128 (`agrees-mlp-8-digits`, scores_mlp-8-digits.csv)"  # ids and files keep theirs
    assert for_readers([page])(page) == "OPT on Penn Treebank (`agrees-mlp-8-digits`, scores_mlp-8-digits.csv)"


# --------------------------------------------------------------------------------------------------- looks by name
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
