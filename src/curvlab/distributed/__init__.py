"""One problem on several processes (`torchrun`): the work is spread, the results are the same."""

from curvlab.distributed.chains import estimate_llc
from curvlab.distributed.data_parallel import DataParallelOperator
from curvlab.distributed.gradient import mean_gradient
from curvlab.distributed.influence import influence
from curvlab.distributed.launch import joined, launched
from curvlab.distributed.ranks import Ranks
from curvlab.distributed.sharded import (
    ShardedGaussNewtonOperator,
    ShardedHessianOperator,
    is_sharded,
    shard_parameters,
)

__all__ = [
    "DataParallelOperator",
    "Ranks",
    "ShardedGaussNewtonOperator",
    "ShardedHessianOperator",
    "estimate_llc",
    "influence",
    "is_sharded",
    "joined",
    "launched",
    "mean_gradient",
    "shard_parameters",
]
