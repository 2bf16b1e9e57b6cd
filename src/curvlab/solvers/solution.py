"""What every solver returns, and the residual that it must state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from curvlab.linalg import LinearOperator
from curvlab.shown import Shown, Summary, counted, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, repr=False)
class Solution(Shown):
    """An approximate solution of A x = b.

    Attributes:
        x: (P,) or (P, K), as b was.
        residual: () or (K,), ‖b - A x‖ / ‖b‖, recomputed from x at the end; 0 where b is 0.
        converged: whether every column met the solver's tolerance. False is an answer that must be handled.
        num_matvecs: products paid for, counted per vector, set-up and the final residual included.
        error: () or (K,), an estimate of ‖x - A⁻¹b‖ / ‖x‖ from solvers that have one (averaging Lissa); else None.
        history: (steps, K), relative residuals by step, on the CPU, those before an interruption included; None
            from solvers that take no steps (Direct). Of conjugate gradients and minimum residuals
            those of the recurrence, of TrainingFilter of the flow at its end, nan at
            steps where it did not look. Of Lissa ‖b - A_t u‖ / ‖b‖ on each step's own batch, at the u before it:
            nobody pays for the residual of the full data at each step, and the batch's noise is in it.
        method: what solved it, in words, from conjugate gradients: whether a preconditioner was taken, and which.
    """

    x: Tensor
    residual: Tensor
    converged: bool
    num_matvecs: int
    error: Tensor | None = None
    history: Tensor | None = None
    method: str = ""

    def summary(self) -> Summary:
        """Return the largest residual, sizes, cost, and that the tolerance was missed."""
        columns = 1 if self.x.ndim == 1 else self.x.shape[1]
        residuals = self.residual.reshape(-1)
        worst = float(residuals.max()) if len(residuals) else 0.0
        cost = [counted(self.num_matvecs, "product")]
        if self.history is not None:
            cost.append(counted(len(self.history), "step"))
        if self.error is not None and self.error.numel():
            cost.append(f"estimated relative error {float(self.error.max()):.2g}")
        if self.method:
            cost.append(f"by {self.method}")
        missed = "not converged: allow more steps, raise the damping, or read x with that residual in mind"
        return Summary(
            "solution of A x = b: relative residual",
            f"{worst:.2g}" + (" at most" if columns > 1 else ""),
            f"{counted(columns, 'right-hand side')}, {counted(self.x.shape[0], 'unknown')}",
            tuple(cost),
            () if self.converged else (missed,),
        )

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the residual of each right-hand side by step, on a logarithmic scale; `residual` beside its end.

        Args:
            ax: to draw on; a new figure's by default.

        Returns:
            The axes; `ax.figure.savefig(...)` keeps the picture.
        """
        if self.history is None:
            raise ValueError(
                "this solver takes no steps (Direct), or took none: an iterative one keeps its residuals, such as "
                "ConjugateGradient"
            )
        if ax is None:
            ax = new_figure().add_subplot()
        numbers = torch.arange(1, len(self.history) + 1)
        for column, (line, end) in enumerate(zip(self.history.T, self.residual.reshape(-1), strict=True)):
            seen = line.isfinite()
            (drawn,) = ax.semilogy(numbers[seen], line[seen], linewidth=1, label=f"right-hand side {column}")
            ax.plot([len(self.history)], [float(end)], marker="o", markersize=3, color=drawn.get_color())
        ax.set_xlabel("step (dot: recomputed from x at the end)")
        ax.set_ylabel("relative residual")
        ax.set_title("; ".join(self.summary().problems), fontsize=8, wrap=True)
        if self.history.shape[1] <= 8:
            ax.legend(fontsize=7)
        return ax


def relative_norm(operator: LinearOperator, residuals: Tensor, right_hand_sides: Tensor) -> Tensor:
    """Return ‖r‖ / ‖b‖ of each column of two (P, K); 0 where b is 0, nan where its length overflows."""
    scale = operator.norm(right_hand_sides)
    known = torch.where(scale == 0, torch.zeros_like(scale), operator.norm(residuals) / scale)
    return torch.where(scale.isfinite(), known, torch.full_like(scale, torch.nan))
