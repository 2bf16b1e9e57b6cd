"""One problem on several processes (`torchrun`): the work is spread, the results are the same."""

from curvlab.distributed.chains import estimate_llc
from curvlab.distributed.data_parallel import DataParallelOperator
from curvlab.distributed.gradient import mean_gradient
from curvlab.distributed.influence import influence
from curvlab.distributed.launch import joined, launched
from curvlab.distributed.ranks import Ranks

__all__ = [
    "DataParallelOperator",
    "Ranks",
    "estimate_llc",
    "influence",
    "joined",
    "launched",
    "mean_gradient",
]
