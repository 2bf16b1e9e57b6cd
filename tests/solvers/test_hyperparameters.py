import math
from dataclasses import asdict

import pytest

from curvlab.solvers import Lissa, LissaHyperparameters, lissa_hyperparameters

# Klochkov & Liu (2024), Table 1: parameters, tr/P, lambda_max; step size, batch size, steps.
TABLE_1 = {
    "ResNet-18": (11.69e6, 1.32e-3, 270, 0.003, 100, 150),
    "ResNet-50": (25.56e6, 8.17e-4, 470, 0.002, 5, 200),
    "OPT 1.3B": (1.3e9, 9.28e-6, 780, 0.001, 30, 500),
    "Llama-1 7B": (6.74e9, 5.69e-6, 1600, 0.0005, 50, 1000),
    "Mistral 7B": (7.24e9, 8.18e-5, 5600, 0.0002, 200, 2000),
}


@pytest.mark.parametrize("model", list(TABLE_1))
def test_table_1_up_to_its_rounding(model: str) -> None:
    size, mean_trace, largest, step_size, batch_size, num_steps = TABLE_1[model]
    ours = lissa_hyperparameters(trace=mean_trace * size, largest_eigenvalue=largest, damping=5.0)
    assert ours.step_size == pytest.approx(1 / (largest + 5.0))
    assert 0.75 <= step_size / ours.step_size <= 1.15  # one digit is printed, cut off more often than rounded
    # T follows from the printed step size, up to rounding to 1.5 digits, hence is at least ours or nearly so.
    assert 2 <= step_size * 5.0 * num_steps <= 2.5
    assert 0.88 <= num_steps / ours.num_steps <= 1.6
    if model == "ResNet-50":  # what the table prints is not its own formula (DESIGN section 6)
        assert 80 <= ours.batch_size <= 95
    else:
        assert ours.batch_size == pytest.approx(batch_size, rel=0.15)


def test_resnet_50_with_the_parameters_of_the_table() -> None:
    ours = lissa_hyperparameters(trace=25e6 * 8.17e-4, largest_eigenvalue=470, damping=5.0)
    assert ours.batch_size == 87


def test_exact_values_and_use() -> None:
    settings = lissa_hyperparameters(
        trace=10.0, largest_eigenvalue=4.0, damping=1.0, constant=7.0, num_time_constants=3.0
    )
    assert settings == LissaHyperparameters(step_size=0.2, batch_size=18, num_steps=15)
    assert Lissa(**asdict(settings)) == Lissa(0.2, 18, 15)


@pytest.mark.parametrize("name", ["trace", "largest_eigenvalue", "damping", "constant", "num_time_constants"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_positive_numbers_only(name: str, value: float) -> None:
    settings = {"trace": 10.0, "largest_eigenvalue": 4.0, "damping": 1.0} | {name: value}
    with pytest.raises(ValueError, match=f"{name} must be positive"):
        lissa_hyperparameters(**settings)


def test_trace_per_parameter_is_noticed() -> None:
    with pytest.raises(ValueError, match=r"pass tr\(G\), not tr\(G\)/P"):
        lissa_hyperparameters(trace=1.32e-3, largest_eigenvalue=270, damping=5.0)
