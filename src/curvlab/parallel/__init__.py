"""One problem on several processes (`torchrun`): the work is spread, the results are the same.

What runs on one process runs here by the same functions: solvers, spectra, `influence`, `mean_gradient` take a
DataParallelOperator, or the operator of a sharded model; `estimate_llc` takes `ranks`.
"""

from curvlab.parallel.data_parallel import DataParallelOperator
from curvlab.parallel.launch import joined, launched
from curvlab.parallel.sharded import ShardedGaussNewtonOperator, ShardedHessianOperator
from curvlab.parallel.sharded_model import is_sharded, shard_parameters
from curvlab.ranks import Ranks

__all__ = [
    "DataParallelOperator",
    "Ranks",
    "ShardedGaussNewtonOperator",
    "ShardedHessianOperator",
    "is_sharded",
    "joined",
    "launched",
    "shard_parameters",
]
