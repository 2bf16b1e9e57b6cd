"""Sampling around a model's parameters: SGLD, the local learning coefficient, WBIC."""

from curvlab.sampling.chains import ChainTraces, run_chains
from curvlab.sampling.choose_settings import SGLDSettings, choose_sgld_settings
from curvlab.sampling.descent import descent_to_minimum
from curvlab.sampling.diagnostics import Drift, drift, effective_sample_size, split_rhat
from curvlab.sampling.estimate_llc import default_nbeta, estimate_llc
from curvlab.sampling.learning_coefficient import LLC
from curvlab.sampling.rmsprop import RMSProp
from curvlab.sampling.sgld import SGLD, SGLDInfo, SGLDState

__all__ = [
    "LLC",
    "SGLD",
    "ChainTraces",
    "Drift",
    "RMSProp",
    "SGLDInfo",
    "SGLDSettings",
    "SGLDState",
    "choose_sgld_settings",
    "default_nbeta",
    "descent_to_minimum",
    "drift",
    "effective_sample_size",
    "estimate_llc",
    "run_chains",
    "split_rhat",
]
