"""Inverse products: x = A⁻¹ b for an operator that already carries its damping; the filter of a training run."""

from curvlab.solvers.block_conjugate_gradient import BlockConjugateGradient
from curvlab.solvers.bunch_kaufman import BunchKaufman, IndefiniteSolution
from curvlab.solvers.chebyshev import Chebyshev
from curvlab.solvers.conjugate_gradient import ConjugateGradient
from curvlab.solvers.default import default_solver
from curvlab.solvers.direct import Direct
from curvlab.solvers.hyperparameters import LissaHyperparameters, lissa_hyperparameters
from curvlab.solvers.importance_recipe import measure_importance_recipe
from curvlab.solvers.lissa import DivergenceError, Lissa
from curvlab.solvers.minimum_residual import MinimumResidual
from curvlab.solvers.preconditioners import Ekfac, Nystrom, Rows
from curvlab.solvers.recipe import LissaRecipe, measure_constant, measure_recipe
from curvlab.solvers.solution import Solution
from curvlab.solvers.solver import IndefiniteOperatorError, Solver
from curvlab.solvers.training_filter import TrainingFilter

__all__ = [
    "BlockConjugateGradient",
    "BunchKaufman",
    "Chebyshev",
    "ConjugateGradient",
    "Direct",
    "DivergenceError",
    "Ekfac",
    "IndefiniteOperatorError",
    "IndefiniteSolution",
    "Lissa",
    "LissaHyperparameters",
    "LissaRecipe",
    "MinimumResidual",
    "Nystrom",
    "Rows",
    "Solution",
    "Solver",
    "TrainingFilter",
    "default_solver",
    "lissa_hyperparameters",
    "measure_constant",
    "measure_importance_recipe",
    "measure_recipe",
]
