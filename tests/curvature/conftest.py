import pytest
import torch
from curvature_cases import Problem, all_problems

PROBLEMS = all_problems()


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture(params=list(PROBLEMS))
def each_problem(request: pytest.FixtureRequest) -> Problem:
    """Every model with every loss."""
    return PROBLEMS[request.param]()
