"""Linear operators on flat vectors: the one abstraction that every solver and estimator knows."""

from curvlab.linalg.dense import DenseOperator
from curvlab.linalg.draws import ExampleDraws
from curvlab.linalg.operator import (
    DerivedOperator,
    Identity,
    LinearOperator,
    ScaledOperator,
    SumOperator,
    checked_operator,
    generator_for,
    identity,
)
from curvlab.linalg.vectors import (
    bordered,
    checked_product,
    describe,
    draw_probes,
    flatten,
    flatten_columns,
    orthonormalise,
    unflatten,
    unflatten_columns,
)

__all__ = [
    "DenseOperator",
    "DerivedOperator",
    "ExampleDraws",
    "Identity",
    "LinearOperator",
    "ScaledOperator",
    "SumOperator",
    "bordered",
    "checked_operator",
    "checked_product",
    "describe",
    "draw_probes",
    "flatten",
    "flatten_columns",
    "generator_for",
    "identity",
    "orthonormalise",
    "unflatten",
    "unflatten_columns",
]
