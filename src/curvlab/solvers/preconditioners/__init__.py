"""Preconditioners for conjugate gradients: operators that approximate an inverse, and recipes for them."""

from curvlab.solvers.preconditioners.ekfac import Ekfac, KroneckerInverse
from curvlab.solvers.preconditioners.nystrom import Nystrom, NystromInverse
from curvlab.solvers.preconditioners.rows import Rows, RowsInverse
from curvlab.solvers.preconditioners.rows_plan import RowsPlan, plan_rows
from curvlab.solvers.solver import predicted_steps

__all__ = [
    "Ekfac",
    "KroneckerInverse",
    "Nystrom",
    "NystromInverse",
    "Rows",
    "RowsInverse",
    "RowsPlan",
    "plan_rows",
    "predicted_steps",
]
