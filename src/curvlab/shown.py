"""How results show themselves: two lines when printed, a small table in a notebook, never a tensor.

Every layer may import this module.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Summary:
    """What a reader wants of a result first.

    Attributes:
        name: of the quantity.
        value: with its error.
        about: of the error, or of how much there is of it.
        cost: and settings, each with its unit.
        problems: why it is not to be used as it is, and what to change.
    """

    name: str
    value: str
    about: str = ""
    cost: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


class Shown:
    """A result that shows its `summary` wherever Python would print its fields."""

    @abstractmethod
    def summary(self) -> Summary:
        """Return what is shown."""

    def __repr__(self) -> str:
        """Return two lines: the value with its error, then the cost; and a third where there are problems."""
        summary = self.summary()
        lines = [f"{summary.name} {summary.value}" + (f" ({summary.about})" if summary.about else "")]
        lines += ["  " + ", ".join(summary.cost)] if summary.cost else []
        lines += ["  not to be used: " + "; ".join(summary.problems)] if summary.problems else []
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return a small table for notebooks."""
        summary = self.summary()
        rows = [
            (summary.name, summary.value),
            ("of", summary.about),
            ("cost", ", ".join(summary.cost)),
            *(("not to be used", problem) for problem in summary.problems),
        ]
        cells = "".join(f"<tr><th>{escape(n)}</th><td>{escape(value)}</td></tr>" for n, value in rows if value)
        return f"<table>{cells}</table>"


def counted(number: int, what: str) -> str:
    """Return e.g. "1 product", "1,200 products"."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def first_values(values: Tensor, most: int = 4) -> str:
    """Return the first few numbers of a vector: "7.66, 3.1, ... (25)"."""
    shown = ", ".join(f"{value:.5g}" for value in values[:most].tolist())
    return shown if len(values) <= most else f"{shown}, ... ({len(values)})"


def new_figure(**settings: Any) -> Figure:
    """Return a figure of matplotlib, which only who draws needs: the library does not depend on it."""
    try:
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise ImportError(
            'drawing needs matplotlib: pip install "curvlab[lab]", or matplotlib by itself'
        ) from error
    return plt.figure(**settings)
