"""Which retraining is meant: closed forms of damping and filter, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from curvlab.influence import Retraining, influence_scores
from curvlab.training import RunLength

RUN = RunLength.constant(0.05, 40, momentum=0.5, weight_decay=0.2)


def gradient_flow(time: float, curvature: np.ndarray) -> np.ndarray:
    """(1 - e^{-time C}) C⁻¹, by eigenvectors."""
    values, vectors = np.linalg.eigh(curvature)
    return vectors @ np.diag(-np.expm1(-time * values) / values) @ vectors.T


def own_time(steps: int) -> float:
    """What a unit gradient moves momentum SGD in so many steps from rest, step by step."""
    position, velocity = 0.0, 0.0
    for _ in range(steps):
        velocity = 0.5 * velocity + 1
        position += 0.05 * velocity
    return position


@pytest.mark.parametrize(
    ("retraining", "time"),
    [
        (None, own_time(40)),
        (Retraining.as_many_steps(), own_time(40)),
        (Retraining.as_many_epochs(0.5), own_time(20)),
        (Retraining.as_many_epochs(0.1), own_time(4)),
        (Retraining.of_length(7.5), 7.5),
    ],
)
def test_the_retraining_sets_damping_and_filter(least_squares, retraining, time) -> None:
    arguments = (least_squares.model, least_squares.loss, least_squares.train, least_squares.test)
    curvature = least_squares.gram.numpy() + 0.2 * np.eye(15)
    test, points = (g.numpy() for g in (least_squares.test_gradients, least_squares.train_gradients))
    for filtered, inverse in (
        (False, np.linalg.inv(curvature + np.eye(15) / time)),
        (True, gradient_flow(time, curvature)),
    ):
        found = influence_scores(*arguments, run=RUN, retraining=retraining, filtered=filtered, rtol=1e-10)
        np.testing.assert_allclose(found, -test @ inverse @ points.T, rtol=1e-7, atol=1e-9)


def test_a_share_of_a_run_keeps_its_schedule() -> None:
    falling = RunLength(tuple(np.linspace(1.0, 0.0, 101)[:-1]))
    half = Retraining.as_many_epochs(0.5).time(falling)
    assert half == pytest.approx(falling.time / 2, rel=0.02)  # its first half alone is three quarters
    assert Retraining.as_many_epochs(1.0).time(falling) == pytest.approx(falling.time)


def test_what_is_refused(least_squares) -> None:
    arguments = (least_squares.model, least_squares.loss, least_squares.train, least_squares.test)
    for fraction in (0.0, 1.5):
        with pytest.raises(ValueError, match=r"kept must be above 0 and at most 1, got .*: 0.5 for halves"):
            Retraining.as_many_epochs(fraction)
    for length in (0.0, float("inf")):
        with pytest.raises(ValueError, match="a sum of learning rates, must be positive and finite"):
            Retraining.of_length(length)
    with pytest.raises(ValueError, match=r"0\.01 of 40 steps is no step"):
        Retraining.as_many_epochs(0.01).time(RUN)
    with pytest.raises(ValueError, match="pass run too, or damping = 1 / length alone"):
        influence_scores(*arguments, damping=0.1, retraining=Retraining.of_length(10.0))
