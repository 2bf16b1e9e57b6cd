from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from curvlab.solvers import BlockConjugateGradient, Chebyshev, ConjugateGradient, Direct, Lissa, Nystrom

FOLDER = Path(__file__).parents[2] / "conf" / "solver"
EXPECTED = {
    "block_conjugate_gradient": BlockConjugateGradient(rtol=1e-2),
    "chebyshev": Chebyshev(rtol=1e-2),
    "conjugate_gradient": ConjugateGradient(rtol=1e-2),
    "nystrom_conjugate_gradient": ConjugateGradient(rtol=1e-2, preconditioner=Nystrom(300)),
    "direct": Direct(5000),
    "lissa": Lissa(0.1, 20, 50),
}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_config_builds_the_solver(name: str) -> None:
    config = OmegaConf.load(FOLDER / f"{name}.yaml")
    if name == "lissa":  # has no defaults: its settings belong to a model
        config.merge_with({"step_size": 0.1, "batch_size": 20, "num_steps": 50})
    assert instantiate(config) == EXPECTED[name]
