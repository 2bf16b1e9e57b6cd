"""Parameters and vectors cut up over processes."""

from curvlab.distributed.sharded.example_derivatives import directional_derivatives, per_example_gradients
from curvlab.distributed.sharded.model import ShardedModel, is_sharded, shard_parameters
from curvlab.distributed.sharded.operators import ShardedGaussNewtonOperator, ShardedHessianOperator

__all__ = [
    "ShardedGaussNewtonOperator",
    "ShardedHessianOperator",
    "ShardedModel",
    "directional_derivatives",
    "is_sharded",
    "per_example_gradients",
    "shard_parameters",
]
