"""Sampling around a model's parameters: SGLD, the local learning coefficient, WBIC."""

from curvlab.sampling.bayesian_influence import BayesianInfluence, bayesian_influence
from curvlab.sampling.chains import ChainsState, ChainTraces, run_chains
from curvlab.sampling.descent import Descent, descent_to_minimum
from curvlab.sampling.diagnostics import Drift, drift, effective_sample_size, split_rhat
from curvlab.sampling.ends import ChainEnds, measure_ends
from curvlab.sampling.llc import LLC, estimate_llc
from curvlab.sampling.pilots import SettingsWarning, choose_sgld_settings
from curvlab.sampling.settings import SGLDSettings
from curvlab.sampling.sgld import SGLD, RMSProp, SGLDInfo, SGLDState, default_nbeta
from curvlab.sampling.underdamped import UnderdampedLangevin

__all__ = [
    "LLC",
    "SGLD",
    "BayesianInfluence",
    "ChainEnds",
    "ChainTraces",
    "ChainsState",
    "Descent",
    "Drift",
    "RMSProp",
    "SGLDInfo",
    "SGLDSettings",
    "SGLDState",
    "SettingsWarning",
    "UnderdampedLangevin",
    "bayesian_influence",
    "choose_sgld_settings",
    "default_nbeta",
    "descent_to_minimum",
    "drift",
    "effective_sample_size",
    "estimate_llc",
    "measure_ends",
    "run_chains",
    "split_rhat",
]
