"""Parameters and vectors cut up over processes."""

from curvlab.parallel.sharded.example_derivatives import directional_derivatives, per_example_gradients
from curvlab.parallel.sharded.model import ShardedModel, is_sharded, shard_parameters
from curvlab.parallel.sharded.operators import ShardedGaussNewtonOperator, ShardedHessianOperator

__all__ = [
    "ShardedGaussNewtonOperator",
    "ShardedHessianOperator",
    "ShardedModel",
    "directional_derivatives",
    "is_sharded",
    "per_example_gradients",
    "shard_parameters",
]
