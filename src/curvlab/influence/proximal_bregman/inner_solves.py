"""The solves within the steps of a longer method, each with a file of its own while it is under way."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from curvlab.linalg import LinearOperator
from curvlab.solvers import BlockConjugateGradient, ConjugateGradient, MinimumResidual, Solution, Solver


@dataclass
class InnerSolves:
    """Solves by one solver; where that is one of conjugate gradients or minimum residuals, a killed solve goes on.

    Attributes:
        solver: what solves; a checkpoint of its own is not used, as each solve needs another.
        checkpoint: of the method around; the files lie beside it, <checkpoint>.<step>.<name>.
        step: of that method.
    """

    solver: Solver
    checkpoint: str | Path | None
    step: int = 0
    _files: list[Path] = field(default_factory=list)

    def solve(self, operator: LinearOperator, b: Tensor, name: str) -> Solution:
        """Return the solution, (P,) or (P, K); the method solves the same system again after a kill."""
        solver = self.solver
        known = BlockConjugateGradient | ConjugateGradient | MinimumResidual
        if self.checkpoint is not None and isinstance(solver, known):
            path = Path(self.checkpoint)
            self._files.append(path.with_name(f"{path.name}.{self.step}.{name}"))
            solver = replace(solver, checkpoint=self._files[-1])
        return solver.solve(operator, b)

    def forget(self) -> None:
        """Delete the files: the method itself is saved behind them, or has ended."""
        for file in self._files:
            file.unlink(missing_ok=True)
        self._files.clear()
