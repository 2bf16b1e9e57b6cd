"""One problem on several processes (`torchrun`): the work is spread, the results are the same."""

from curvlab.parallel.chains import estimate_llc
from curvlab.parallel.data_parallel import DataParallelOperator
from curvlab.parallel.gradient import mean_gradient
from curvlab.parallel.influence import influence
from curvlab.parallel.launch import joined, launched
from curvlab.parallel.sharded import (
    ShardedGaussNewtonOperator,
    ShardedHessianOperator,
    is_sharded,
    shard_parameters,
)
from curvlab.ranks import Ranks

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
