"""Scatters of one score against another, each with the training image that it is of (lissa-fig1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation, blended_transform_factory
from PIL import Image

from curvlab.influence.scores import MIN_PEARSON, SLOPES
from curvlab.lab import Computed, panels, plots
from curvlab.lab.names import reader_names
from experiments.lissa.fig1.agreement_panels import CHOICES, panels_error

NUM_POINTS = 4  # of each task
COLORS = dict(zip((*CHOICES, "exact"), ("lissa", "lissa.auto", "lissa", "exact"), strict=True))
NOTE = (
    "a dot: the change of a test loss per unit weight of the image above (nats); dashed: x = y\n"
    f"r: mean ± s.e. over seeds; agree: r ≥ {MIN_PEARSON:g}, slope within a factor of {SLOPES[1]:g} of one; "
    "else apart; k/n: in k of n seeds\n"
    "axes that end in powers of ten: linear around 0, logarithmic beyond"
)


@dataclass(frozen=True)
class Shown:
    """What is shown of one task.

    Attributes:
        computed: the tables, and images_<task>.png.
        task: label.
    """

    computed: Computed
    task: str

    @cached_property
    def scores(self) -> list[pd.DataFrame]:
        """Scores by training point, in the order of the panels."""
        return [own for _, own in self.computed[f"scores_{self.task}"].groupby("point", sort=False)]

    @cached_property
    def panels(self) -> pd.DataFrame:
        """What is measured of each panel."""
        table = self.computed["table"]
        return table[table.task == self.task]

    @cached_property
    def images(self) -> list[np.ndarray]:
        """(H, W) or (H, W, 3) for each training point."""
        strip = np.asarray(Image.open(self.computed.folder / f"images_{self.task}.png")) / 255
        return np.split(strip, len(self.scores), axis=1)

    def has(self, place: int, kind: str) -> bool:
        """Return whether a point has this panel: a choice of batches by its prefix, or "exact" solutions."""
        if place >= len(self.scores):
            return False
        column = "exact" if kind == "exact" else f"{kind}lissa_0"
        return column in self.scores[place] and bool(self.scores[place][column].notna().any())


def grid(rows: Sequence[tuple[Shown, str, str]]) -> Figure:
    """Return rows of scatters, each a task, a kind of panel, and what stands above the row."""
    figure, axes = plots.figure(len(rows), NUM_POINTS, panel_size=(2.0, 2.4))
    for row, (shown, kind, label) in zip(axes, rows, strict=True):
        has = [shown.has(place, kind) for place in range(NUM_POINTS)]
        drawn = [_pair(shown, place, kind) for place in range(NUM_POINTS) if has[place]]
        far = any(map(_far, drawn))
        for place, ax in enumerate(row):
            if not has[place]:
                ax.set_axis_off()
                continue
            _scatter(ax, shown, place, kind, far=far)
            image, inset = shown.images[place], ax.inset_axes((0, 1.02, 0.28, 0.28))  # above: it covers no point
            stretched = (image - image.min()) / (np.ptp(image) or 1.0)
            inset.imshow(stretched, cmap="gray", vmin=0, vmax=1, interpolation="nearest")  # RGB ignores cmap
            inset.set_axis_off()
        row[0].set_ylabel("PBRF, exact" if kind == "exact" else "PBRF by SGD", fontsize=8.5)
        above = ScaledTranslation(0, 32 / 72, figure.dpi_scale_trans)  # points
        place_of = blended_transform_factory(figure.transFigure, row[0].transAxes) + above
        figure.text(0.01, 1, label, transform=place_of, fontsize=9, weight="bold")
    for ax in axes[-1]:
        ax.set_xlabel("CG" if rows[-1][1] == "exact" else "LiSSA", fontsize=8.5)
    figure.supxlabel(NOTE, fontsize=8.5)
    return figure


def _pair(shown: Shown, place: int, kind: str) -> pd.DataFrame:
    """Return columns x, y and usual, the largest exact score, nan where nothing is solved exactly."""
    panel = shown.scores[place]
    names = ("cg", "exact") if kind == "exact" else (f"{kind}lissa_0", f"{kind}pbrf_1")
    usual = panel[["cg", "exact"]].abs().max().max()
    return pd.DataFrame({"x": panel[names[0]], "y": panel[names[1]], "usual": usual})


def _scatter(ax: Axes, shown: Shown, place: int, kind: str, *, far: bool) -> None:
    """Draw LiSSA of seed 0 and SGD on the next seed's batches (its own where all the data are a batch), or CG."""
    drawn, own = _pair(shown, place, kind), shown.panels[shown.panels.position == place]
    ax.tick_params(labelsize=7.5)
    if kind == "exact":
        said = f"r = {own.cg_exact_pearson.dropna().mean():.3f}"
    else:
        own = own[own.constant == CHOICES[kind]]
        if own.lissa_pbrf_case.iloc[0] == "overflow":
            over = {"LiSSA": not np.isfinite(drawn.x).all(), "SGD": not np.isfinite(drawn.y).all()}
            why = " and ".join(name for name, does in over.items() if does) + " overflow"
            ax.text(0.5, 0.5, why, transform=ax.transAxes, ha="center", va="center", fontsize=7, color=panels.GREY)
            ax.set(xticks=[], yticks=[])
            return
        cases = own.lissa_pbrf_case.value_counts()
        share = "" if cases.iloc[0] == len(own) else f" {cases.iloc[0]}/{len(own)}"
        said = f"r = {_with_error(own.lissa_pbrf_pearson.dropna())}\n{cases.index[0]}{share}"
    ax.set_title(f"\n\n{said}", fontsize=8.5, loc="left", x=0.32, y=1.03)  # below the row's label
    look = {"color": panels.COLORS[COLORS[kind]], "marker": "o"}
    panels.scatter(ax, drawn, x="x", y="y", identity=False, size=5, styles={"": look})
    for axis in (ax.xaxis, ax.yaxis):
        axis.get_major_formatter().set_powerlimits((-4, 5))  # type: ignore[attr-defined]  # a factor would be covered
    if far:
        _widen(ax, drawn)
    plots.identity_line(ax)


def _sizes(drawn: pd.DataFrame) -> tuple[float, float]:
    """Return the largest score, and the largest exact one; where nothing is solved exactly, the median."""
    scores = drawn[["x", "y"]].abs()
    return float(scores.max().max()), float(drawn.usual.fillna(scores.stack().median()).iloc[0])


def _far(drawn: pd.DataFrame) -> bool:
    """Return whether stochastic scores leave the exact ones far behind, or where there are none, their median."""
    largest, usual = _sizes(drawn)
    return bool(np.isfinite(largest) and largest > (1000 if drawn.usual.isna().any() else 10) * usual > 0)


def _widen(ax: Axes, drawn: pd.DataFrame) -> None:
    """Make axes logarithmic beyond the range of the exact scores."""
    largest, usual = _sizes(drawn)
    edge = 1.5 * largest * max(largest / usual, 1) ** 0.05  # a point at the edge would be cut in half
    tick = 10.0 ** np.floor(np.log10(largest))
    for axis in "xy":
        getattr(ax, f"set_{axis}scale")("symlog", linthresh=usual)
        ax.set(**{f"{axis}lim": (-edge, edge), f"{axis}ticks": [-tick, 0.0, tick]})
    ax.minorticks_off()


def _with_error(values: pd.Series) -> str:
    """Return mean ± s.e. of panels, one for each seed, each of which has the batches of two runs."""
    found, error = float(values.mean()), panels_error(values)
    return f"{found:.2f}" + (f" ± {error:.2f}" if np.isfinite(error) else "")


def by_training_loss(computed: Computed) -> list[tuple[Shown, str]]:
    """Return the tasks, each with what is told of it, the largest training loss first."""
    ordered = computed["summary"].sort_values("train loss", ascending=False)
    names = reader_names(ordered.task, whole=True)
    return [
        (
            Shown(computed, row["task"]),
            f"{names[row['task']]}: loss {row['train loss']:.2g}, |B| = {row['batch size']} by C = 2, median r of "
            f"{row['points']} images {row['pearson lissa-pbrf, C = 2']:.2g} ({panels.seeds([row['seeds']])})",
        )
        for _, row in ordered.iterrows()
    ]


def _early_converged_and_fitted(computed: Computed) -> list[tuple[Shown, str]]:
    """Return the network of the largest training loss, those converged near one (eight units), and one fitted.

    It is the first when trained on, without that the network of the smallest training loss.
    """
    ordered = by_training_loss(computed)
    fitted = (own for own in ordered if own[0].task == ordered[0][0].task.replace("-early", ""))
    return [ordered[0], *(own for own in ordered[1:] if "8-tanh" in own[0].task), next(fitted, ordered[-1])]


def headline(computed: Computed) -> Figure:
    """Return the paper's figure, LiSSA with C = 2 and the PBRF: stopped early, converged, and fitted."""
    first, *others, last = _early_converged_and_fitted(computed)
    return grid([(shown, "", label) for shown, label in (first, *others[:1], last)])


def choices(computed: Computed) -> Figure:
    """Return other converged networks; and the fitted one by other choices of batches, and solved exactly."""
    _, *others, (fitted, _) = _early_converged_and_fitted(computed)
    name = reader_names(computed["summary"].task, whole=True)[fitted.task]
    told = {"measured_": "Lissa.auto", "importance_": "LiSSA", "exact": "solved exactly, CG"}
    rows = [
        (fitted, kind, f"{name}: {', '.join(filter(None, (method, CHOICES.get(kind))))}")
        for kind, method in told.items()
        if fitted.has(0, kind)
    ]
    return grid([*((shown, "", label) for shown, label in others[1:]), *rows])
