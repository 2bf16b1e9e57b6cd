"""Table 3, plot: accuracy over decay and rank beside the printed table, and over damping."""

from __future__ import annotations

from matplotlib.figure import Figure

from curvlab.lab import Computed
from experiments.ginger.printed import sensitivity
from experiments.ginger.race.sensitivity_plot import draw_sensitivity


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figure."""
    return {"figure.png": draw_sensitivity(computed["table"], sensitivity("Table 3"), "test_accuracy")}
