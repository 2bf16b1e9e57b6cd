"""Preconditioners for conjugate gradients: operators that approximate an inverse."""

from curvlab.solvers.preconditioners.nystrom import Nystrom, NystromInverse
from curvlab.solvers.preconditioners.preconditioner import Preconditioner

__all__ = ["Nystrom", "NystromInverse", "Preconditioner"]
