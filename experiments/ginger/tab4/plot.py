"""Table 4, plot: training loss over decay and rank beside the printed table, and over damping."""

from __future__ import annotations

from matplotlib.figure import Figure

from curvlab.lab import Computed
from experiments.ginger.printed import sensitivity
from experiments.ginger.race.sensitivity_plot import draw_sensitivity


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figure."""
    return {"figure.png": draw_sensitivity(computed["table"], sensitivity("Table 4"), "min_train_loss")}
