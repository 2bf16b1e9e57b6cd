"""Parameters and vectors cut up over processes."""

from curvlab.distributed.sharded.model import ShardedModel, is_sharded, shard_parameters
from curvlab.distributed.sharded.operators import ShardedGaussNewtonOperator, ShardedHessianOperator

__all__ = [
    "ShardedGaussNewtonOperator",
    "ShardedHessianOperator",
    "ShardedModel",
    "is_sharded",
    "shard_parameters",
]
