import pytest

from tests.curvature.curvature_cases import Problem, all_problems

PROBLEMS = all_problems()


@pytest.fixture(params=list(PROBLEMS))
def each_problem(request: pytest.FixtureRequest) -> Problem:
    """Every model with every loss."""
    return PROBLEMS[request.param]()
