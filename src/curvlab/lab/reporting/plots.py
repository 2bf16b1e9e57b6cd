"""The house style of figures: readable when small, safe for colour-blind readers, no pyplot and no state.

drawing, axes = figure(2, 5)
axes[0, 0].scatter(x, y, color=shades(1)[0])
drawing.savefig("figure.png")
"""

from __future__ import annotations

import io
import math
import re
import textwrap
import warnings
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from numpy.typing import ArrayLike
from PIL import Image
from scipy import stats

from curvlab.files import write_atomically

_DPI = 110
_WIDEST = 8.0  # inches: text of 8.5 points is 10 pixels high where a page shows the picture 700 pixels wide
_NARROWEST = 1.7  # inches: of a panel
_NUM_COLORS = 160

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p", "*", "<")  # a second cue beside colour, same order
MIN_SEEDS = 3  # of an interval over seeds
_GLYPHS = dict(zip(MARKERS, "●■▲◆▼✚✖⬟★◀", strict=True))  # the marks in a text
COUNTS = "counts"  # the gid of numbers at the foot
COUNTS_NOTE = "numbers at the foot: how many seeds count, where not all do"
_FOOT = 0.1  # height of a row of numbers, as a share of the axis
_DARKEST, _BRIGHTEST = 0.13, 0.64  # greys that are seen on white


def shades(count: int) -> list[str]:
    """Return so many greys from dark to bright: of what is no method, as hues are the methods' (`lab.names`)."""
    return [to_hex((grey, grey, grey)) for grey in np.linspace(_DARKEST, _BRIGHTEST, count)]


_STYLE: dict[str, Any] = {
    "figure.dpi": 150,  # savefig keeps it
    "figure.facecolor": "white",
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.labelsize": 10,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.formatter.limits": (-3, 4),
    "axes.formatter.use_mathtext": True,
    "axes.prop_cycle": cycler(color=shades(5)),
}


def figure(
    num_rows: int = 1, num_columns: int = 1, *, panel_size: tuple[float, float] = (3.2, 2.6), **settings: Any
) -> tuple[Figure, np.ndarray]:
    """Return a figure in the house style and its axes, always an array (num_rows, num_columns).

    No figure is wider than a page: a row that would be goes on below, and the panels of more than one row get
    narrower.

    Args:
        num_rows: rows of panels.
        num_columns: columns of panels.
        panel_size: width and height of one panel in inches.
        settings: passed on to `Figure.subplots` (sharex, height_ratios, ...).
    """
    width, height = panel_size
    rows, columns = num_rows, num_columns
    if num_rows == 1 and num_columns * width > _WIDEST and "width_ratios" not in settings:
        rows = math.ceil(num_columns * width / (1.31 * _WIDEST))  # a little too wide: narrower panels
        columns = math.ceil(num_columns / rows)
        rows = math.ceil(num_columns / columns)  # none is left empty
    width = min(width, max(_WIDEST / columns, _NARROWEST))
    # rcParams are read when axes are made, so the style need not outlive this call.
    with mpl.rc_context(_STYLE):  # type: ignore[arg-type]  # a plain dict of keys
        drawing = Figure(figsize=(columns * width, rows * height), layout="constrained")
        axes = drawing.subplots(rows, columns, squeeze=False, **settings)
    for spare in axes.flat[num_rows * num_columns :]:
        spare.remove()
    return drawing, axes.flatten()[: num_rows * num_columns].reshape(num_rows, num_columns)


def headline(drawing: Figure, text: str) -> None:
    """Put the finding above all panels, at the left, above the title that the figure has."""
    size = 11.0
    letters = int(drawing.get_figwidth() * 72 / (0.6 * size))  # that a line has room for
    below = drawing.get_suptitle()
    whole = (each.replace(" %", "\u00a0%") for each in (text, below))  # no line begins with a unit
    lines = [line for each in whole for line in textwrap.wrap(each, max(letters, 30))]
    drawing.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=size, weight="bold")


def write_png(drawing: Figure, path: Path) -> None:
    """Write a PNG of 110 dpi and 160 colours, without date and version: the same figure gives the same bytes.

    160 colours show a plot as it is, pale bands included. A hyphen before a number becomes a minus.
    Titles and notes that are too wide are broken into lines, labels made smaller; of a text that reaches over the
    edge all the same a UserWarning tells.
    """
    if path.suffix != ".png":
        raise ValueError(f"figures are written as PNG, got {path.name!r}; name it {path.stem}.png.")
    drawing.set_dpi(_DPI)
    for text in drawing.findobj(Text):
        if "$" not in (words := text.get_text()):
            text.set_text(re.sub(r"(?<![\w.)-])-(?=\.?\d)", "−", words))
    if (engine := drawing.get_layout_engine()) is not None:
        _break_notes(drawing)
        engine.execute(drawing)
        if _wrap_titles(drawing):
            engine.execute(drawing)
        drawing.set_layout_engine(None)  # savefig would draw all twice, for a layout that is there
        _shrink_what_is_cut(drawing)
    buffer = io.BytesIO()
    drawing.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})
    write_atomically(path, quantised(buffer.getvalue()))
    if cut := _cut(drawing):  # legends have their place once they are drawn
        warnings.warn(f"{path.name}: cut at the edge, write it shorter: {'; '.join(cut)}", stacklevel=2)


def _wrap_titles(drawing: Figure) -> bool:
    """Break titles that reach into a neighbour's or over the picture's edge; return whether there are any."""
    titles = [(ax, title) for ax in drawing.axes for title in _titles(ax) if title.get_text()]
    boxes = [title.get_window_extent() for _, title in titles]
    wrapped = False
    for (ax, title), box in zip(titles, boxes, strict=True):
        others = [other for other in boxes if other is not box]
        if box.x0 >= 0 and box.x1 <= drawing.bbox.width and not any(map(box.overlaps, others)):
            continue
        text = _broken(title, 1.1 * ax.get_window_extent().width)
        wrapped |= text != title.get_text()
        title.set_text(text)
    return wrapped


def _broken(text: Text, width: float) -> str:
    """Return a text with its lines broken where they are wider than so many pixels."""
    lines = text.get_text().splitlines()
    letters = max(int(width / text.get_window_extent().width * max(map(len, lines))), 12)
    parts = (textwrap.wrap(line, letters, break_long_words=False) or [""] for line in lines)  # empty lines stay
    return "\n".join(part for of_line in parts for part in of_line)


def _break_notes(drawing: Figure) -> None:
    """Break the lines of notes and legends that are wider than the picture: no layout makes room for them."""
    width = drawing.bbox.width
    rooms = {each: 0.99 * width for each in drawing.texts}  # suptitle and supxlabel are among them
    for legend in drawing.legends:
        rooms |= {legend.get_title(): 0.98 * width} | dict.fromkeys(legend.get_texts(), 0.9 * width)
    for text, room in rooms.items():
        if text.get_window_extent().width > room:
            text.set_text(_broken(text, 0.97 * room))  # lines of as many letters are not equally wide


def _cut(drawing: Figure) -> list[str]:
    """Return the texts that reach over the picture's edge by more than two pixels.

    Not of ticks: matplotlib keeps those beyond the axes, unseen.
    """
    axes = [axis for ax in drawing.axes for axis in (ax.xaxis, ax.yaxis)]
    ticks = {label for axis in axes for label in (*axis.get_majorticklabels(), *axis.get_minorticklabels())}
    canvas = drawing.bbox.padded(2)
    seen = [each for each in drawing.findobj(Text) if each.get_visible() and each not in ticks]
    boxes = [(text.get_text(), text.get_window_extent()) for text in seen if text.get_text().strip()]
    return [text for text, box in boxes if not (canvas.contains(*box.min) and canvas.contains(*box.max))]


def _titles(ax: Axes) -> list[Text]:
    return [child for child in ax.get_children() if isinstance(child, Text)][-3:]  # centre, left, right


def _shrink_what_is_cut(drawing: Figure) -> None:
    """Make titles and labels smaller that reach over the picture's edge or a neighbour."""
    width, height = drawing.bbox.size
    for ax in drawing.axes:
        ax.apply_aspect()  # where the panel will be
        panel = ax.get_window_extent()
        label = ax.yaxis.label
        own = [child for child in ax.get_children() if isinstance(child, Text)]  # its titles are among them
        for text in (*own, ax.xaxis.label, ax.yaxis.label):
            size = float(text.get_fontsize())
            least = 0.6 * size
            while text.get_text() and size > least:
                box = text.get_window_extent()
                inside = box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height
                long = box.height > 1.1 * panel.height if text is label else box.width > 1.35 * panel.width
                if inside and not long:
                    break
                size *= 0.95
                text.set_fontsize(size)


def quantised(png: bytes) -> bytes:
    """Return a PNG with at most 160 colours; one that has a palette already as it is."""
    image = Image.open(io.BytesIO(png))
    if image.mode == "P":
        return png
    buffer = io.BytesIO()
    # Median cut, the default, greys thin lines; 64 colours, or no k-means, give pale bands one another's hue.
    few = image.convert("RGB").quantize(
        _NUM_COLORS, Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE
    )
    few.save(buffer, format="png", optimize=True)
    return buffer.getvalue()


def readable_log(axis: Axis) -> None:
    """Label a logarithmic axis: 0.05, 0.1, 0.2 where it spans few decades, and only the decades where many.

    Call it after drawing; matplotlib's own labels between powers of ten overlap in small panels.
    """
    low, high = axis.get_view_interval()
    if not np.isfinite(axis.get_minpos()):  # nothing is drawn that a logarithm could show
        getattr(axis.axes, f"set_{axis.axis_name}scale")("linear")  # type: ignore[attr-defined]  # x or y
        return
    decades = np.log10(high / low) if low > 0 else np.inf
    fine: tuple[float, ...]
    fine = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0) if decades < 0.7 else (1.0, 2.0, 5.0)  # or one label may be all there is
    place = axis.axes.get_subplotspec()
    if (
        axis is axis.axes.xaxis and place is not None and place.get_gridspec().ncols > 3 and decades >= 1.1
    ):  # narrow
        fine = (1.0, 3.0) if decades < 2 else (1.0,)
    axis.set_major_locator(LogLocator(subs=fine if decades < 2.5 else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def measured(
    ax: Axes, x: ArrayLike, y: ArrayLike, stderr: ArrayLike, *, color: str, marker: str = "o", label: str = ""
) -> None:
    """Draw points with error bars of 95 %, 1.96 standard errors up and down."""
    bars = 1.96 * np.asarray(stderr, dtype=np.float64)
    ax.errorbar(x, y, yerr=bars, color=color, marker=marker, markersize=4, linestyle="none", label=label)


def seeds_around_mean(
    ax: Axes, x: ArrayLike, y: ArrayLike, *, color: str, alpha: float = 0.15, least: float = 0.0
) -> None:
    """Draw the 95 % t interval of the mean of y at each x as a band, and every seed where there are only two.

    Two values have a t interval, of 12.7 standard errors, but it says nothing of use: it takes three to be drawn.

    Args:
        ax: where.
        x: (n,), each value once for each seed.
        y: (n,); nan is left out.
        color: of band and dots.
        alpha: of the band.
        least: the band does not go below this share of the mean, for logarithmic axes; 0: no such limit.
    """
    table = pd.DataFrame({"x": np.asarray(x), "y": np.asarray(y, dtype=float)})
    grouped = table.dropna(subset="y").groupby("x").y
    mean, count = grouped.mean(), grouped.count()
    lower, upper = t_ends(grouped)
    lower = lower.clip(lower=least * mean) if least else lower
    ax.fill_between(mean.index, lower, upper, color=color, alpha=alpha, linewidth=0)
    alone = upper.notna() & upper.shift(1).isna() & upper.shift(-1).isna()  # a band of no width would not be seen
    ax.vlines(mean.index[alone], lower[alone], upper[alone], color=color, alpha=2 * alpha, linewidth=3)
    few = table[table.x.map(count) == MIN_SEEDS - 1]
    ax.scatter(few.x, few.y, s=5, color=color, alpha=0.6, linewidths=0)


def t_ends(grouped: Any) -> tuple[pd.Series, pd.Series]:
    """Return the ends of the 95 % t interval of each group's mean; nan with fewer than three values."""
    mean, count = grouped.mean(), grouped.count()
    half = (grouped.sem() * stats.t.ppf(0.975, np.maximum(count - 1, 1))).where(count >= MIN_SEEDS)
    return mean - half, mean + half


def counts_at_foot(
    ax: Axes, x: ArrayLike, counts: ArrayLike, *, color: str, mark: str = "", alpha: float | None = None
) -> None:
    """Write below the data how many seeds count at each x where not all do, as a row of its own.

    The axis grows downwards, so that a row covers nothing.
    Call it for one curve after another once everything is drawn and the scales are set.

    Args:
        ax: where.
        x: (n,), each value once for each seed.
        counts: (n,), whether that seed's value counts.
        color: of the curve.
        mark: of the curve, beside the numbers; "": none.
        alpha: of the curve.
    """
    flags = pd.Series(np.asarray(counts, dtype=bool)).groupby(np.asarray(x)).agg(["sum", "size"])
    lacking = flags[flags["sum"] < flags["size"]]
    if lacking.empty:
        return
    scale = ax.yaxis.get_transform()
    low, high = scale.transform(np.array(ax.get_ylim()))
    foot = low - _FOOT * (high - low)
    bottom, place, top = scale.inverted().transform(np.array([foot, (foot + low) / 2, high]))
    ax.set_ylim(bottom, top)
    ax.update_datalim([(value, place) for value in lacking.index], updatey=False)  # there may be no point at all
    ax.autoscale_view(scaley=False)
    look: dict[str, Any] = {"color": color, "alpha": alpha, "fontsize": 7, "ha": "center", "va": "center"}
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.3}
    for value, count in zip(lacking.index.to_numpy(float), lacking["sum"], strict=True):
        ax.text(value, place, f"{_GLYPHS.get(mark, '')}\u2009{count}".strip(), bbox=behind, gid=COUNTS, **look)


def identity_line(ax: Axes) -> None:
    """Draw the dashed line x = y behind the data, over the range that both axes show."""
    low = max(ax.get_xlim()[0], ax.get_ylim()[0])
    high = min(ax.get_xlim()[1], ax.get_ylim()[1])
    limits = ax.get_xlim(), ax.get_ylim()
    ax.plot([low, high], [low, high], color="#555555", linestyle="--", linewidth=1, zorder=0.9, label="x = y")
    ax.set_xlim(*limits[0])
    ax.set_ylim(*limits[1])
