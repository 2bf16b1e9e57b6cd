"""L-BFGS to a gradient norm over all groups together, for many groups."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from curvlab.influence.responses import FullBatchLBFGS
from curvlab.influence.responses.minimizers import Objective
from curvlab.training import TrainingDivergedError, minimize


class TightLBFGS(FullBatchLBFGS):
    """`FullBatchLBFGS` whose steps do not end before the norm is reached.

    torch stops once no component of the gradient is above `tolerance_grad`, there a tenth of the norm: with more
    than 100 numbers (20 groups of 31 parameters) the norm may still be above its goal then, and never moves on.
    """

    def __call__(self, objective: Objective, start: Tensor, num_examples: int, /) -> Tensor:
        """Return the minimisers."""
        found = nn.Parameter(start.clone())
        everything = torch.arange(num_examples, device=start.device)

        def closure() -> Tensor:
            values, found.grad = objective(found.detach(), everything)
            return values.sum()

        for line_search, norm in (("strong_wolfe", max(1e-6, self.gradient_norm)), (None, self.gradient_norm)):
            optimizer = torch.optim.LBFGS(
                [found],
                line_search_fn=line_search,
                tolerance_grad=norm / max(10.0, 2 * start.numel() ** 0.5),
                tolerance_change=0.0,
                history_size=30,
            )
            end = minimize(closure, [found], optimizer, gradient_norm=norm, max_steps=self.max_steps)
        if not end.converged:
            raise TrainingDivergedError(
                f"L-BFGS ended at a gradient norm of {end.gradient_norm:.2g}, not {self.gradient_norm:g}: "
                "allow a larger gradient_norm."
            )
        return found.detach()
