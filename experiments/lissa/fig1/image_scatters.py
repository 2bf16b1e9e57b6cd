"""Scatters of one score against another, each with the training image that it is of (lissa-fig1)."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from curvlab.influence.scores import MIN_PEARSON, SLOPES
from curvlab.lab import Computed, panels, plots
from curvlab.lab.names import reader_names
from experiments.lissa.fig1.agreement_panels import CHOICES, panels_error

NUM_POINTS = 4  # of each task
COLORS = dict(zip((*CHOICES, "exact"), ("lissa", "lissa.auto", "lissa", "exact"), strict=True))
NOTE = (
    "change of a test loss per unit weight of the image above (nats); a dot: a test image, dashed: x = y\n"
    "r: mean ± s.e. over seeds; axes that end in powers of ten: linear around 0, logarithmic beyond\n"
    f"agree: r ≥ {MIN_PEARSON:g}, slope within a factor of {SLOPES[1]:g} of one; else apart; k/n: in k of n seeds"
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


def grid(
    rows: Sequence[tuple[Shown, str, Sequence[int], str]], *, panel_size: tuple[float, float], note: str
) -> Figure:
    """Return rows of scatters, each a task, a kind of panel, places of training points, and a label."""
    figure, axes = plots.figure(len(rows), max(len(places) for _, _, places, _ in rows), panel_size=panel_size)
    for row, (shown, kind, places, label) in zip(axes, rows, strict=True):
        for ax, place in zip(row, places, strict=False):
            if not shown.has(place, kind):
                ax.set_axis_off()
                continue
            _scatter(ax, shown, place, kind)
            image, inset = shown.images[place], ax.inset_axes((0, 1.02, 0.28, 0.28))  # above: it covers no point
            stretched = (image - image.min()) / (np.ptp(image) or 1.0)
            inset.imshow(stretched, cmap="gray", vmin=0, vmax=1, interpolation="nearest")  # RGB ignores cmap
            inset.set_axis_off()
        row[0].set_ylabel(label, fontsize=8.5)
    figure.supxlabel(note, fontsize=8.5)
    return figure


def _scatter(ax: Axes, shown: Shown, place: int, kind: str) -> None:
    """Draw LiSSA of seed 0 and SGD on the next seed's batches (its own where all the data are a batch), or CG."""
    panel, own = shown.scores[place], shown.panels[shown.panels.position == place]
    ax.tick_params(labelsize=7.5)
    if kind == "exact":
        x, y, found = panel.cg, panel.exact, own.cg_exact_pearson.dropna()
        said = f"r = {found.mean():.3f}"
    else:
        own = own[own.constant == CHOICES[kind]]
        x, y = panel[f"{kind}lissa_0"], panel[f"{kind}pbrf_1"]
        if own.lissa_pbrf_case.iloc[0] == "overflow":
            over = {"LiSSA": not np.isfinite(x).all(), "SGD": not np.isfinite(y).all()}
            why = " and ".join(name for name, does in over.items() if does) + " overflow"
            ax.text(0.5, 0.5, why, transform=ax.transAxes, ha="center", va="center", fontsize=7, color=panels.GREY)
            ax.set(xticks=[], yticks=[])
            return
        cases = own.lissa_pbrf_case.value_counts()
        share = "" if cases.iloc[0] == len(own) else f" {cases.iloc[0]}/{len(own)}"
        said = f"r = {_with_error(own.lissa_pbrf_pearson.dropna())}\n{cases.index[0]}{share}"
    ax.set_title(said, fontsize=8.5, loc="left", x=0.32, y=1.03)
    drawn = pd.DataFrame({"x": x, "y": y})
    look = {"color": panels.COLORS[COLORS[kind]], "marker": "o"}
    panels.scatter(ax, drawn, x="x", y="y", identity=False, size=5, styles={"": look})
    _widen(ax, panel, x, y)
    plots.identity_line(ax)


def _widen(ax: Axes, panel: pd.DataFrame, x: pd.Series, y: pd.Series) -> None:
    """Make axes logarithmic beyond the range of the exact scores where stochastic ones leave it far behind.

    Where nothing is solved exactly, beyond their median, if the largest would squeeze all others.
    """
    solved = panel[["cg", "exact"]].abs().max().max()  # nan where nothing is solved exactly
    usual, far = (solved, 10) if np.isfinite(solved) else (np.median(np.abs([x, y])), 1000)
    largest = max(x.abs().max(), y.abs().max())
    if largest > far * usual > 0:
        edge = 1.5 * largest * (largest / usual) ** 0.05  # a point at the edge would be cut in half
        tick = 10.0 ** np.floor(np.log10(largest))
        for axis in "xy":
            getattr(ax, f"set_{axis}scale")("symlog", linthresh=usual)
            ax.set(**{f"{axis}lim": (-edge, edge), f"{axis}ticks": [-tick, 0.0, tick]})
        ax.minorticks_off()


def _with_error(values: pd.Series) -> str:
    """Return mean ± s.e. of panels, one for each seed, each of which has the batches of two runs."""
    found, error = float(values.mean()), panels_error(values)
    return f"{found:.2f}" + (f" ± {error:.2f}" if np.isfinite(error) else "")


def by_training_loss(computed: Computed) -> list[tuple[Shown, pd.Series]]:
    """Return the tasks with their rows of the summary, the largest training loss first."""
    ordered = computed["summary"].sort_values("train loss", ascending=False)
    return [(Shown(computed, row["task"]), row) for _, row in ordered.iterrows()]


def _early_converged_and_fitted(computed: Computed) -> list[tuple[Shown, pd.Series]]:
    ordered = by_training_loss(computed)
    fitted = (own for own in ordered if own[0].task == ordered[0][0].task.replace("-early", ""))
    return [ordered[0], *(own for own in ordered[1:] if "8-tanh" in own[0].task), next(fitted, ordered[-1])]


def headline(computed: Computed) -> Figure:
    """Return the paper's figure, LiSSA with C = 2 and the PBRF, of a network stopped early, and of it when fitted.

    Without such a pair the networks of the largest and the smallest training loss. Between them those that have
    converged at a loss of about 1, ours of eight units.
    """
    chosen = _early_converged_and_fitted(computed)
    names = reader_names(computed["summary"].task, whole=True)
    rows = [
        (
            shown,
            "",
            range(NUM_POINTS),
            f"{textwrap.fill(names[shown.task], 24)}\nloss {row['train loss']:.2g}, |B| = {row['batch size']}\n"
            f"{panels.seeds([row['seeds']])}, median r\n"
            f"of {row['points']} images: {row['pearson lissa-pbrf, C = 2']:.2g}",
        )
        for shown, row in chosen
    ]
    return grid(rows, panel_size=(2.0, 2.4), note=f"x: LiSSA with |B| by C = 2, y: PBRF by SGD:\n{NOTE}")


def choices(computed: Computed) -> Figure:
    """Return the fitted network's points by each choice of batches, and solved exactly."""
    shown = _early_converged_and_fitted(computed)[-1][0]
    rows = [
        (shown, kind, range(NUM_POINTS), f"{label}\n(x: CG)" if kind == "exact" else f"PBRF by SGD\n{label}")
        for kind, label in (CHOICES | {"exact": "exact PBRF"}).items()
        if shown.has(0, kind)
    ]
    return grid(rows, panel_size=(2.0, 2.2), note=f"x: LiSSA, Lissa.auto where C is measured, or CG:\n{NOTE}")
