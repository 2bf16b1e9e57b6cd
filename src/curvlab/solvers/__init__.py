"""Inverse products: x = A⁻¹ b for an operator that already carries its damping; the filter of a training run."""

from curvlab.solvers.block_cg import BlockConjugateGradient
from curvlab.solvers.cg import ConjugateGradient
from curvlab.solvers.default import default_solver
from curvlab.solvers.direct import Direct
from curvlab.solvers.gradient_flow import TrainingFilter
from curvlab.solvers.lissa import DivergenceError, Lissa
from curvlab.solvers.lissa_settings import (
    LissaHyperparameters,
    LissaRecipe,
    lissa_hyperparameters,
    measure_constant,
    measure_recipe,
)
from curvlab.solvers.minres import MinimumResidual
from curvlab.solvers.preconditioners import Ekfac, Nystrom, Rows
from curvlab.solvers.solution import Solution
from curvlab.solvers.solver import IndefiniteOperatorError, Preconditioner, Solver

__all__ = [
    "BlockConjugateGradient",
    "ConjugateGradient",
    "Direct",
    "DivergenceError",
    "Ekfac",
    "IndefiniteOperatorError",
    "Lissa",
    "LissaHyperparameters",
    "LissaRecipe",
    "MinimumResidual",
    "Nystrom",
    "Preconditioner",
    "Rows",
    "Solution",
    "Solver",
    "TrainingFilter",
    "default_solver",
    "lissa_hyperparameters",
    "measure_constant",
    "measure_recipe",
]
