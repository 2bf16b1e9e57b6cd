"""Linear operators on flat vectors: the one abstraction that every solver and estimator knows."""

from curvlab.linalg.dense import DenseOperator
from curvlab.linalg.draws import ExampleDraws
from curvlab.linalg.flatten import flatten, flatten_columns, unflatten, unflatten_columns
from curvlab.linalg.identity import Identity, identity
from curvlab.linalg.operator import DerivedOperator, LinearOperator, ScaledOperator, SumOperator

__all__ = [
    "DenseOperator",
    "DerivedOperator",
    "ExampleDraws",
    "Identity",
    "LinearOperator",
    "ScaledOperator",
    "SumOperator",
    "flatten",
    "flatten_columns",
    "identity",
    "unflatten",
    "unflatten_columns",
]
