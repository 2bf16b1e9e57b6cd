"""QNG against dense products of its factors, the moving average, and the recursion of the authors' code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dense_curvature import (
    SIZE,
    colored_vectors,
    inverse,
    moving_average,
    parameters,
    quasi_natural_inverse,
    set_gradients,
    update,
)
from torch import nn

from curvlab.optim import QNG


def updated(vectors: np.ndarray, **settings: float) -> QNG:
    members = parameters()
    optimizer = QNG(members, 1.0, **settings)
    for d in vectors:
        update(optimizer, members, d)
    return optimizer


@pytest.mark.parametrize("count", [1, 3, 8])
def test_up_to_its_rank_it_is_the_moving_average_from_the_identity(count: int) -> None:
    vectors = colored_vectors(count)
    found = inverse(updated(vectors, rank=8, decay=0.9))
    expected = np.linalg.inv(moving_average(vectors, 0.9, start=1.0))
    assert np.linalg.norm(found - expected) <= 1e-10 * np.linalg.norm(expected)


@pytest.mark.parametrize("rank", [1, 4])
def test_beyond_its_rank_it_is_the_product_of_the_newest_factors(rank: int) -> None:
    vectors = colored_vectors(11)
    expected, factors = quasi_natural_inverse(vectors, decay=0.8, rank=rank)
    np.testing.assert_allclose(inverse(updated(vectors, rank=rank, decay=0.8)), expected, rtol=1e-8, atol=1e-10)
    A = np.linalg.multi_dot(factors) if rank > 1 else factors[0]
    np.testing.assert_allclose(np.linalg.inv(A @ A.T), expected, rtol=1e-8, atol=1e-10)


def test_the_printed_beta_is_not_the_root_that_is_needed() -> None:
    decay, q = 0.9, colored_vectors(1)[0]
    squared = q @ q
    needed = decay * np.eye(SIZE) + (1 - decay) * np.outer(q, q)
    for beta, fits in {
        (np.sqrt(decay + (1 - decay) * squared) - np.sqrt(decay)) / squared: True,
        (np.sqrt(decay) + (1 - decay) * squared - np.sqrt(decay)) / squared: False,  # as printed: 1 - decay
    }.items():
        K = np.sqrt(decay) * np.eye(SIZE) + beta * np.outer(q, q)
        assert np.allclose(K @ K.T, needed) is fits


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_its_matrix_is_a_multiple_of_the_identity_and_its_rank_not_twice_it(rank: int) -> None:
    G = np.linalg.inv(inverse(updated(colored_vectors(15), rank=rank, decay=0.9)))
    values = np.linalg.svd(G - 0.9**rank * np.eye(SIZE), compute_uv=False)
    assert values[rank - 1] > 1e-3
    assert values[rank] < 1e-10 * values[0]  # Observation 1 allows as much again


@pytest.mark.parametrize(("rank", "differs"), [(1, False), (2, True), (5, True)])
def test_as_coded_it_follows_the_authors_recursion_which_is_not_the_product(rank: int, differs: bool) -> None:
    vectors = colored_vectors(9) + 1.0  # with a common direction: the code takes it out once for each factor
    coded, _ = quasi_natural_inverse(vectors, decay=0.9, rank=rank, as_coded=True)
    found = inverse(updated(vectors, rank=rank, decay=0.9, as_coded=True))
    np.testing.assert_allclose(found, coded, rtol=1e-8, atol=1e-10)
    product, _ = quasi_natural_inverse(vectors, decay=0.9, rank=rank)
    G, G_as_coded = np.linalg.inv(product), np.linalg.inv(coded)
    assert bool(np.linalg.norm(G_as_coded - G) > 0.05 * np.linalg.norm(G)) is differs


def test_sampled_gradients_of_zero_only_let_it_decay() -> None:
    G = np.linalg.inv(inverse(updated(np.zeros((3, SIZE)), rank=5, decay=0.9)))
    np.testing.assert_allclose(G, 0.9**3 * np.eye(SIZE), rtol=1e-12)


def test_scopes_are_optimizers_of_their_own() -> None:
    vectors = colored_vectors(9)
    for scope, sizes in {"global": [20], "group": [13, 7], "tensor": [12, 1, 7]}.items():
        members = parameters()
        groups = [{"params": members[:2]}, {"params": members[2:]}]
        optimizer = QNG(groups, 1.0, rank=3, decay=0.9, scope=scope)
        for d in vectors:
            update(optimizer, members, d)
        expected = np.zeros((SIZE, SIZE))
        for end, size in zip(np.cumsum(sizes), sizes, strict=True):
            own = slice(end - size, end)
            expected[own, own] = quasi_natural_inverse(vectors[:, own], decay=0.9, rank=3)[0]
        np.testing.assert_allclose(inverse(optimizer), expected, rtol=1e-8, atol=1e-8)


def test_momentum_is_a_sum() -> None:
    members, vectors = parameters(), colored_vectors(4)
    optimizer = QNG(members, 0.5, rank=2, decay=0.9, momentum=0.8)
    total, expected = np.zeros(SIZE), np.zeros(SIZE)
    for g in vectors:
        update(optimizer, members, g)
        total = 0.8 * total + g
        expected -= 0.5 * inverse(optimizer) @ total
        optimizer.step()
    found = torch.cat([parameter.detach().reshape(-1) for parameter in members])
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-10)


def test_single_precision_stays_close() -> None:
    vectors = colored_vectors(60, size=300)
    directions = []
    for dtype in (torch.float32, torch.float64):
        parameter = nn.Parameter(torch.zeros(300, dtype=dtype))
        optimizer = QNG([parameter], 1.0, rank=8, decay=0.9)
        for d in vectors:
            update(optimizer, [parameter], d)
        set_gradients([parameter], vectors[0])
        optimizer.step()
        directions.append(parameter.detach().double())
    assert (directions[0] - directions[1]).norm() <= 1e-4 * directions[1].norm()
