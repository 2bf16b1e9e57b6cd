"""Linear operators on flat vectors: the one abstraction that every solver and estimator knows."""

from curvlab.linalg.algebra import ScaledOperator, SumOperator, identity
from curvlab.linalg.dense import DenseOperator
from curvlab.linalg.flatten import flatten, flatten_columns, unflatten, unflatten_columns
from curvlab.linalg.operator import LinearOperator

__all__ = [
    "DenseOperator",
    "LinearOperator",
    "ScaledOperator",
    "SumOperator",
    "flatten",
    "flatten_columns",
    "identity",
    "unflatten",
    "unflatten_columns",
]
