"""Panels: what figures are made of, each from a data frame and the names of its columns.

    figure, rows = panels.rows(table, by="task", columns=2)
    for (left, right), task, own in rows:
        panels.lines(left, own, x="epoch", y="loss", by="optimizer")     # mean and 95 % t interval over seeds
        panels.scatter(right, own, x="pbrf", y="lissa", by="optimizer")  # on y = x
        panels.frame(left, x="epoch", y="loss (nats)", title=task, log="y")
    panels.legend(figure)

Recipes: `lines`, `traces`, `scatter`, `bars`, `forest`, `heat_map`, `histogram`. What they share:

    ax, table   where, and of what; `x`, `y`, `value`, `low`, `high`, ... are names of its columns
    by          the column of groups, each with its colour, marker and legend entry; None: all rows are one, whose
                legend entry is `label`
    styles      by group; else `styles_of`. Where one panel lacks a group that another has, make them once for
                both: styles = panels.styles_of(table.method.unique())
    **look      changes every line or point as matplotlib does: linestyle, marker, linewidth, alpha, color, ...

A method has one colour in all figures (`COLORS` of `curvlab.lab.names`); what is no method is grey.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.image import AxesImage
from matplotlib.patheffects import withStroke

from curvlab.lab.names import COLORS, style_of, styles_of
from curvlab.lab.reporting import plots

__all__ = ["COLORS", "styles_of"]  # beside the recipes, which are called panels.lines, ...

GREY = "#555555"  # of what is no method: rules, y = x

Style = dict[str, Any]
Styles = Mapping[Any, Style] | None


def _groups(
    table: pd.DataFrame, by: str | None, styles: Styles, label: str
) -> Iterator[tuple[str, Style, pd.DataFrame]]:
    """Yield (legend entry, style, rows) of each group, in the order of the table; of all rows without `by`."""
    if by is None:
        yield label, dict((styles or {}).get(label) or style_of(label)), table
        return
    found = styles or styles_of(table[by].unique())
    for name, own in table.groupby(by, sort=False, dropna=False):
        yield str(name), dict(found[name]), own


def rows(
    table: pd.DataFrame, by: str, *, columns: int, panel_size: tuple[float, float] = (3.2, 2.7), **settings: Any
) -> tuple[Figure, list[tuple[np.ndarray, Any, pd.DataFrame]]]:
    """Return a figure with a row of panels for each value of a column, and of each (axes, value, its table).

    The values come in the order of the table; `columns` panels of `panel_size` inches stand in a row; `settings`
    go to `plots.figure`.
    """
    names = table[by].unique().tolist()
    figure, axes = plots.figure(max(1, len(names)), columns, panel_size=panel_size, **settings)
    return figure, [(row, name, table[table[by] == name]) for row, name in zip(axes, names, strict=False)]


def legend(
    figure: Figure, *, title: str = "", columns: int = 4, axes: Iterable[Axes] | None = None, size: float = 8.5
) -> None:
    """Put one legend below all panels, each entry once, at most `columns` side by side.

    `title` says what holds for all panels: what bands and dots mean; where there are `counts`, what these are is
    added. Entries are those of all axes, or of `axes`.
    """
    if any(text.get_gid() == plots.COUNTS for ax in figure.axes for text in ax.texts):
        title += f"\n{plots.COUNTS_NOTE}"
    entries: dict[str, Artist] = {}
    for ax in figure.axes if axes is None else axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(label.upper() if label in ("sgd", "ngd") else label, handle)
    for number in range(max(1, min(columns, len(entries))), 0, -1):  # as many columns as the figure has room for
        made = figure.legend(
            list(entries.values()),
            list(entries),
            loc="outside lower center",
            ncols=number,
            frameon=False,
            fontsize=size,
        )
        if number == 1 or made.get_window_extent().width <= figure.bbox.width:
            made.set_title(title, FontProperties(size=size))  # `plots.write_png` breaks its lines
            break
        made.remove()


def frame(ax: Axes, *, x: str = "", y: str = "", title: str = "", log: str = "", size: float = 10) -> None:
    """Name the axes and the panel, and make the axes of `log` ("x", "y", "xy") logarithmic.

    Call it once the panel is drawn: labels are 0.1, 0.2, ... where few decades are shown, else powers of ten.
    """
    for axis, text in (("x", x), ("y", y)):
        if text:
            getattr(ax, f"set_{axis}label")(text)
        if axis in log and np.isfinite(getattr(ax.dataLim, f"minpos{axis}")):  # a logarithm needs something drawn
            getattr(ax, f"set_{axis}scale")("log")
            low, high = sorted(getattr(ax, f"get_{axis}lim")())
            if high < 3000 * low:
                plots.readable_log(getattr(ax, f"{axis}axis"))
    if title:
        ax.set_title(title, fontsize=size)


def rule(ax: Axes, *, x: float | None = None, y: float | None = None, label: str = "", **style: Any) -> None:
    """Draw a thin dashed line across the panel at x or at y, of what the data are compared with."""
    look: Style = {"color": GREY, "linestyle": "--", "linewidth": 1, "zorder": 0.9, "label": label} | style
    if x is not None:
        ax.axvline(x, **look)
    if y is not None:
        ax.axhline(y, **look)


def seeds(counts: Iterable[int]) -> str:
    """Say how many seeds there are, from the numbers of all tasks or groups: "5 seeds", "3 to 10 seeds"."""
    numbers = [int(number) for number in counts]
    few, many = min(numbers), max(numbers)
    return f"{few} to {many} seeds" if few < many else f"{many} seed{'s' * (many != 1)}"


def counts(ax: Axes, table: pd.DataFrame, *, x: str, valid: str, by: str, styles: Styles = None) -> None:
    """Write below the data how many seeds of each group count at each x, where not all do; call it last.

    Groups of one colour have their marks beside the numbers. `valid` is a column of truth values, or one that is
    nan where a seed does not count.
    """
    groups = list(_groups(table, by, styles, ""))
    colors = [style["color"] for _, style, _ in groups]
    for _, style, own in groups:
        flags = own[valid] if own[valid].dtype == bool else own[valid].notna()
        mark = str(style["marker"]) if colors.count(style["color"]) > 1 else ""
        plots.counts_at_foot(ax, own[x], flags, color=style["color"], mark=mark, alpha=style.get("alpha"))


# ------------------------------------------------------------------------------------ over x
def lines(
    ax: Axes,
    table: pd.DataFrame,
    *,
    x: str,
    y: str,
    by: str | None = None,
    low: str | None = None,
    high: str | None = None,
    stderr: str | None = None,
    bars: bool = False,
    seeds: bool = False,
    least: float = 0.0,
    styles: Styles = None,
    label: str = "",
    **look: Any,
) -> None:
    """Draw a line for each group, and where its mean lies; nan is left out.

    The interval is the 95 % t interval over rows of equal x (seeds); where the table has one row for each x, it
    lies between the columns `low` and `high`, or 1.96 `stderr` up and down.

    bars: whether intervals are bars with caps instead of a band.
    seeds: whether the rows are drawn, too, as small dots.
    least: a band of rows does not go below this share of the mean, for logarithmic axes.
    """
    for name, own_style, group in _groups(table, by, styles, label):
        own = group.dropna(subset=[y])
        style = {"markersize": 3.5, "linewidth": 1.2} | own_style | look
        color, mean = style["color"], own.groupby(x)[y].mean()
        ends = None
        if stderr is not None:
            half = 1.96 * own.groupby(x)[stderr].mean()
            ends = (mean - half, mean + half)
        elif low is not None and high is not None:
            ends = own.groupby(x)[low].mean(), own.groupby(x)[high].mean()  # in the mean's order, not the table's
        if seeds:
            ax.scatter(own[x], own[y], s=6, alpha=0.5, color=color, marker=style.get("marker"), linewidths=0)
        if bars:
            ends = ends or plots.t_ends(own.groupby(x)[y])
            errors = np.clip([mean - ends[0], ends[1] - mean], 0, None)  # rounding, where all are the same
            ax.errorbar(mean.index, mean, yerr=errors, capsize=3, label=name, **style)
            continue
        ax.plot(mean.index, mean, label=name, **style)
        if ends is not None:
            paid: Any = {"steps-post": "post"}.get(style.get("drawstyle", ""))
            ax.fill_between(mean.index, *ends, color=color, alpha=0.15, linewidth=0, step=paid)
        else:
            plots.seeds_around_mean(ax, own[x], own[y], color=color, least=least)


def traces(
    ax: Axes,
    table: pd.DataFrame,
    *,
    x: str,
    y: str,
    run: str = "seed",
    by: str | None = None,
    styles: Styles = None,
    label: str = "",
    **look: Any,
) -> None:
    """Draw a thin line for each value of the column `run` (chain, seed, point), in the colour of its group."""
    for name, own_style, group in _groups(table, by, styles, label):
        style = {"color": own_style["color"], "linewidth": 0.9, "alpha": 0.7} | look
        for number, (_, own) in enumerate(group.groupby(run, sort=False)):
            ax.plot(own[x], own[y], label=name if number == 0 else None, **style)


# ------------------------------------------------------------------------------------ points
def scatter(
    ax: Axes,
    table: pd.DataFrame,
    *,
    x: str,
    y: str,
    by: str | None = None,
    identity: bool = True,
    hollow: str | None = None,
    styles: Styles = None,
    label: str = "",
    size: float = 14,
    **look: Any,
) -> None:
    """Draw a point of `size` square points for each row, and with `identity` the line y = x.

    `hollow` is a column of truth values: these points are empty rings.
    """
    for name, style, own in _groups(table, by, styles, label):
        kind: Style = {
            "s": size,
            "marker": style["marker"],
            "edgecolors": style["color"],
            "linewidths": 0.7,
        } | look
        filled = own if hollow is None else own[~own[hollow].astype(bool)]
        ax.scatter(filled[x], filled[y], color=style["color"], label=name, **kind)
        if hollow is not None:
            empty = own[own[hollow].astype(bool)]
            ax.scatter(empty[x], empty[y], facecolors="none", **kind)
    if identity:
        plots.identity_line(ax)


def bars(
    ax: Axes,
    table: pd.DataFrame,
    *,
    name: str,
    value: str | Mapping[str, str],
    by: str | None = None,
    low: str | None = None,
    high: str | None = None,
    paper: str | None = None,
    upright: bool = False,
    styles: Styles = None,
) -> None:
    """Draw horizontal bars from the top down (or `upright` ones), several for each name side by side.

    name: the column of labels, in the order of the table; a row for each, or, with `by`, for each and each group.
    value: a column, with its interval from `low` to `high`; or several columns with their legend entries, with
        intervals in columns of the same names that end in "_low" and "_high", where there are any.
    paper: a column of the paper's values, drawn as black marks across the bars; nan: none.
    """
    names = table[name].unique().tolist()
    if isinstance(value, str):
        parts = [(entry, style, own, value, low, high) for entry, style, own in _groups(table, by, styles, value)]
    else:
        looks = styles or styles_of(value.values())
        parts = [(entry, looks[entry], table, key, *_ends_beside(table, key)) for key, entry in value.items()]
    height = 0.8 / max(1, len(parts))
    for index, (entry, style, own, column, lower, upper) in enumerate(parts):
        places = np.array([names.index(each) for each in own[name]]) + (index - (len(parts) - 1) / 2) * height
        errors = None
        if lower is not None and upper is not None:
            errors = np.clip([own[column] - own[lower], own[upper] - own[column]], 0, None)
        seen = [withStroke(linewidth=2.5, foreground="white")]  # on a dark bar
        kind: Style = {"color": style["color"], "label": entry, "error_kw": {"path_effects": seen}}
        if upright:
            ax.bar(places, own[column], 0.94 * height, yerr=errors, **kind)
        else:
            ax.barh(places, own[column], 0.94 * height, xerr=errors, **kind)
        if paper is not None:
            marks = (own[paper], places) if not upright else (places, own[paper])
            shape: Style = {"marker": "_" if upright else "|", "s": 70, "color": "black", "zorder": 3}
            ax.scatter(*marks, label="the paper's" if index == 0 else None, **shape)
    if upright:
        ax.set(xticks=range(len(names)), xticklabels=names, xlim=(-0.6, len(names) - 0.4))
    else:
        ax.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.4, -0.6))
    ax.grid(axis="x" if upright else "y", visible=False)


def _ends_beside(table: pd.DataFrame, column: str) -> tuple[str | None, str | None]:
    ends = (f"{column}_low", f"{column}_high")
    return ends if set(ends) <= set(table) else (None, None)


def forest(
    ax: Axes,
    table: pd.DataFrame,
    *,
    name: str,
    value: str,
    low: str,
    high: str,
    by: str | None = None,
    paper: str | None = None,
    hollow: str | None = None,
    styles: Styles = None,
    label: str = "",
    paper_label: str = "the paper's",
) -> None:
    """Draw a value with its interval for each name, from the top down, groups a little apart.

    name: the column of labels, in the order of the table; a row for each, or, with `by`, for each and each group.
    low, high: the ends; nan: no interval.
    paper: a column of the paper's values, drawn as black diamonds; nan: none.
    hollow: a column of truth values: what is not valid, drawn as a ring.
    """
    names = table[name].unique().tolist()
    groups = list(_groups(table, by, styles, label))
    for index, (entry, style, own) in enumerate(groups):
        places = np.array([names.index(each) for each in own[name]]) + 0.7 / len(groups) * (
            index - (len(groups) - 1) / 2
        )
        errors = np.clip([own[value] - own[low], own[high] - own[value]], 0, None)
        kind: Style = {"markersize": 5} | style | {"linestyle": "none"}
        ax.errorbar(own[value], places, xerr=errors, capsize=3, label=entry, **kind)
        if hollow is not None:
            ring = own[hollow].to_numpy(bool)
            ax.plot(own[value][ring], places[ring], **kind | {"markerfacecolor": "white", "zorder": 3})
        if paper is not None:
            mark: Style = {"marker": "d", "s": 40, "facecolors": "none", "edgecolors": "black", "zorder": 4}
            ax.scatter(own[paper], places, label=paper_label if index == 0 else None, **mark)
    ax.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.5, -0.5))


# ------------------------------------------------------------------------------------ tables and densities
def heat_map(
    ax: Axes,
    table: pd.DataFrame,
    *,
    x: str,
    y: str,
    value: str,
    text: str = "",
    limits: tuple[float, float] | None = None,
    cmap: str = "viridis",
) -> AxesImage:
    """Show a value by two columns as colours, the mean where several rows share a cell; return it for a colorbar.

    x ascends from the left and y from the top; `text` is the format of the number in each cell ("{:.2f}"; empty:
    none), `limits` the values at the ends of the colours `cmap`, the smallest and the largest unless given.
    """
    cells = table.pivot_table(value, y, x, dropna=False)
    values = cells.to_numpy(dtype=float)
    low, high = limits or (np.nanmin(values), np.nanmax(values))
    image = ax.imshow(values, cmap=cmap, vmin=low, vmax=high, aspect="auto", interpolation="nearest")
    for (row, column), own in np.ndenumerate(values if text else np.empty((0, 0))):
        if np.isfinite(own):
            red, green, blue, _ = image.cmap(image.norm(own))
            dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
            colour = "white" if dark else "black"
            ax.text(column, row, text.format(own), ha="center", va="center", fontsize=9, color=colour)
    ax.set_xticks(range(len(cells.columns)), [_short(entry) for entry in cells.columns])
    ax.set_yticks(range(len(cells.index)), [_short(entry) for entry in cells.index])
    ax.grid(visible=False)
    ax.tick_params(length=0)
    return image


def _short(entry: Any) -> str:
    return f"{entry:g}" if isinstance(entry, float | int) else str(entry)


def histogram(
    ax: Axes,
    table: pd.DataFrame,
    *,
    value: str,
    by: str | None = None,
    bins: int | Sequence[float] = 40,
    styles: Styles = None,
    label: str = "",
    **look: Any,
) -> None:
    """Draw the density of a column as an outline for each group, all over the same bins; nan is left out."""
    edges = np.histogram_bin_edges(table[value].dropna(), bins=bins).tolist()
    for name, style, own in _groups(table, by, styles, label):
        kind: Style = {"color": style["color"], "linestyle": style.get("linestyle", "-"), "linewidth": 1.2} | look
        ax.hist(own[value].dropna(), bins=edges, density=True, histtype="step", label=name, **kind)
