import itertools
from io import BytesIO
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from curvlab.lab.reporting import plots


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


def test_the_finding_stands_above_the_title_and_what_would_be_cut_gets_smaller(tmp_path: Path) -> None:
    figure, axes = plots.figure(1, 2)
    figure.suptitle("its own title")
    axes[0, 1].set_title("a_title_of_one_word_too_long_for_a_panel_of_3.2_inches")
    plots.headline(
        figure, "It holds on the first of two networks, and on the second it is far from what is printed."
    )
    plots.write_png(figure, tmp_path / "figure.png")
    assert figure.get_suptitle().splitlines()[-1] == "its own title"
    assert figure.get_suptitle().count("\n") == 2
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
    assert np.abs(small - large).mean() < 1  # 256 colours show the same, of 256 levels a pixel
    assert len(np.unique(small.reshape(-1, 3), axis=0)) <= 256


def test_pale_bands_keep_their_hue() -> None:
    figure, axes = plots.figure()
    for place, color in enumerate(plots.PALETTE):
        axes[0, 0].fill_between([0, 1], place, place + 0.8, color=color, alpha=0.15, linewidth=0)
        axes[0, 0].plot([0, 1], [place, place + 0.8], color=color, label=str(place))
    axes[0, 0].legend()
    whole = BytesIO()
    figure.savefig(whole, format="png")
    few = Image.open(BytesIO(plots.quantised(whole.getvalue())))
    drawn, kept = (np.asarray(image.convert("RGB"), int) for image in (Image.open(whole), few))
    for color in plots.PALETTE:
        pale = np.round(255 * (0.85 + 0.15 * np.array(to_rgb(color))))
        band = np.abs(drawn - pale).max(-1) <= 1
        assert band.sum() > 1000
        assert np.abs(kept[band] - pale).max() <= 6


def test_first_lines_take_the_palette() -> None:
    ax = plots.figure()[1][0, 0]
    lines = [ax.plot([0, 1], [k, k])[0].get_color() for k in range(3)]
    assert lines == list(plots.PALETTE[:3])
    assert len(plots.MARKERS) == len(plots.PALETTE) == len(set(plots.PALETTE))


def test_measured_points_have_bars_of_95_percent() -> None:
    ax = plots.figure()[1][0, 0]
    plots.measured(ax, [1.0, 2.0], [3.0, 4.0], [0.5, 0.0], color="black", label="points")
    (bars,) = ax.containers[0].lines[2]
    first = bars.get_segments()[0]
    np.testing.assert_allclose(first, [[1.0, 3.0 - 0.98], [1.0, 3.0 + 0.98]])
    assert ax.get_legend_handles_labels()[1] == ["points"]


def test_identity_line_stays_within_the_data() -> None:
    ax = plots.figure()[1][0, 0]
    ax.scatter([0.0, 10.0], [-1.0, 2.0])
    limits = ax.get_xlim(), ax.get_ylim()
    plots.identity_line(ax)
    assert (ax.get_xlim(), ax.get_ylim()) == limits
    x, y = ax.lines[0].get_data()
    assert list(x) == list(y) == [limits[0][0], limits[1][1]]


@pytest.mark.parametrize("shape", [(5, 7), (1, 5, 7), (5, 7, 1), (3, 5, 7), (5, 7, 3)])
def test_show_image_stretches_values(shape: tuple[int, ...]) -> None:
    ax = plots.figure()[1][0, 0]
    image = np.random.default_rng(0).normal(size=shape)
    plots.show_image(ax, image, title="17")
    shown = ax.images[0].get_array()
    assert shown.shape[:2] == (5, 7)
    assert (shown.min(), shown.max()) == (0, 1)
    assert ax.get_title() == "17"


def test_show_image_keeps_pixels_and_channels_in_place() -> None:
    ax = plots.figure()[1][0, 0]
    image = np.zeros((3, 5, 7))
    image[2, 4, 6] = 8.0
    plots.show_image(ax, image)
    assert np.argwhere(ax.images[0].get_array()).tolist() == [[4, 6, 2]]


def test_show_image_of_one_colour() -> None:
    ax = plots.figure()[1][0, 0]
    plots.show_image(ax, np.full((4, 4), 3.0))
    assert np.all(ax.images[0].get_array() == 0)


def test_refuses_other_shapes_and_corners() -> None:
    ax = plots.figure()[1][0, 0]
    with pytest.raises(ValueError, match=r"with C = 1 or 3, got \(2, 5, 7\)"):
        plots.show_image(ax, np.zeros((2, 5, 7)))
    with pytest.raises(ValueError, match="must be upper or lower, then left or right, got 'top'"):
        plots.annotate(ax, "r = 1", corner="top")


def test_annotate_writes_into_the_corner() -> None:
    ax = plots.figure()[1][0, 0]
    plots.annotate(ax, "r = 1", corner="lower right")
    text = ax.texts[0]
    assert (text.get_text(), text.get_ha(), text.get_va()) == ("r = 1", "right", "bottom")


def test_an_interval_over_seeds_has_three() -> None:
    figure, axes = plots.figure(1, 1)
    ax = axes[0, 0]
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
    figure.clear()


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_counts_stand_below_all_that_is_drawn_where_not_every_seed_counts(scale: str) -> None:
    _, axes = plots.figure()
    ax = axes[0, 0]
    ax.set_yscale(scale)
    ax.plot([1, 2], [3.0, 5.0])
    low, high = ax.get_ylim()
    plots.counts_at_foot(ax, [1, 1, 2, 2, 4, 4], [True, False, True, True, False, False], color="red")
    plots.counts_at_foot(ax, [1, 1], [True, True], color="green")  # no row
    plots.counts_at_foot(ax, [2, 2], [False, True], color="blue")
    written = [(*text.get_position(), text.get_text(), text.get_color()) for text in ax.texts]
    assert [(x, text, color) for x, _, text, color in written] == [
        (1, "1", "red"),
        (4, "0", "red"),
        (2, "1", "blue"),
    ]
    heights = [y for _, y, _, _ in written]
    assert ax.get_ylim()[0] < heights[2] < heights[1] == heights[0] < low
    assert ax.get_ylim()[1] == pytest.approx(high)
    assert ax.get_xlim()[1] >= 4  # shown, though nothing is drawn there


def test_a_logarithmic_axis_of_less_than_a_decade_has_several_labels() -> None:
    _, axes = plots.figure()
    ax = axes[0, 0]
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
