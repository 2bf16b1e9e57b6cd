"""Ginger against the dense moving average, the paper's own formulas, and its promises on precision and cost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from curvlab.optim import PUBLISHED_GINGER, Ginger
from tests.optim.conformance import Counter
from tests.optim.dense_curvature import (
    SIZE,
    colored_vectors,
    inverse,
    moving_average,
    parameters,
    printed_algorithm,
    set_gradients,
    update,
)
from tests.refusals import refuses


@pytest.mark.parametrize("damping", [1e-1, 1e-3, 1e-5])
@pytest.mark.parametrize("rank", [12, 20, 25])
def test_with_enough_rank_it_is_the_moving_average(damping: float, rank: int) -> None:
    members, vectors = parameters(), colored_vectors(12)
    optimizer = Ginger(members, 1.0, rank=rank, decay=0.9, damping=damping)
    for count, d in enumerate(vectors, 1):
        update(optimizer, members, d)
        G = moving_average(vectors[:count], 0.9)
        ((sigma, U),) = optimizer.eigendecompositions()
        assert len(sigma) == count
        assert np.linalg.norm((U * sigma) @ U.mT - G) <= 1e-8 * np.linalg.norm(G)
        g = colored_vectors(1, seed=count)[0]
        expected = np.linalg.solve(damping * np.eye(SIZE) + G, g)
        set_gradients(members, g)
        before = torch.cat([parameter.detach().reshape(-1) for parameter in members])
        optimizer.step()
        moved = before - torch.cat([parameter.detach().reshape(-1) for parameter in members])
        assert np.linalg.norm(moved.numpy() - expected) <= 1e-8 * np.linalg.norm(expected)
        assert torch.equal(members[1].grad, torch.tensor(g[12]))  # left alone


def test_more_updates_than_parameters_span_the_space() -> None:
    members, vectors = parameters(), colored_vectors(40)
    optimizer = Ginger(members, 1.0, rank=30, decay=0.9, damping=1e-3)
    for d in vectors:
        update(optimizer, members, d)
    G = moving_average(vectors, 0.9)
    np.testing.assert_allclose(inverse(optimizer), np.linalg.inv(1e-3 * np.eye(SIZE) + G), rtol=1e-8, atol=1e-8)
    assert optimizer.state[members[0]]["rows"].shape == (20, 12)  # no more rows than parameters


@pytest.mark.parametrize("damping", [1e-1, 1e-3, 1e-5])
def test_truncation_is_the_best_of_its_rank_for_the_inverse(damping: float) -> None:
    rank, decay = 4, 0.8
    members, vectors = parameters(), colored_vectors(15)
    optimizer = Ginger(members, 1.0, rank=rank, decay=decay, damping=damping)
    for count, d in enumerate(vectors):
        previous = np.zeros((SIZE, SIZE))
        if count:
            ((sigma, U),) = optimizer.eigendecompositions()
            previous = ((U * sigma) @ U.mT).numpy()
        update(optimizer, members, d)
        exact = np.linalg.inv(damping * np.eye(SIZE) + decay * previous + (1 - decay) * np.outer(d, d))
        # Eq. 17's matrix of rank τ + 1; by Eckart and Young, no matrix of rank τ comes nearer than its next value.
        next_value = np.linalg.eigvalsh(np.eye(SIZE) / damping - exact)[::-1][rank]
        error = np.linalg.norm(exact - inverse(optimizer), 2)
        assert error == pytest.approx(next_value, abs=1e-9 / damping)
        if count > rank:
            assert next_value > 1e-4 / damping  # something is lost at all
            dropped = np.linalg.eigvalsh(decay * previous + (1 - decay) * np.outer(d, d))[::-1][rank]
            assert next_value == pytest.approx(dropped / (damping * (damping + dropped)), rel=1e-6)


def test_the_printed_algorithm_is_another_matrix() -> None:
    # Enough rank for everything, so that only the α-factors are left: 3 % after one update, 74 % after twenty.
    vectors, settings = np.random.default_rng(0).standard_normal((20, 30)), {"decay": 0.97, "damping": 1e-3}
    printed = printed_algorithm(vectors, rank=20, **settings)
    errors = []
    for count, found in enumerate(printed, 1):
        exact = np.linalg.inv(1e-3 * np.eye(30) + moving_average(vectors[:count], 0.97))
        errors.append(np.linalg.norm(found - exact, 2) / np.linalg.norm(exact, 2))
    assert errors[0] == pytest.approx(0.031, abs=5e-4)
    assert errors[-1] == pytest.approx(0.741, abs=5e-3)
    (parameter,) = members = [nn.Parameter(torch.zeros(30, dtype=torch.float64))]
    optimizer = Ginger(members, 1.0, rank=20, **settings)
    for d in vectors:
        update(optimizer, [parameter], d)
    assert np.linalg.norm(inverse(optimizer, 30) - exact, 2) <= 1e-10 * np.linalg.norm(exact, 2)


def test_equation_18_loses_single_precision_where_the_moving_average_does_not() -> None:
    sigma, damping = np.geomspace(0.01, 10, 50).astype(np.float32), np.float32(1e-5)
    kappa = sigma / (damping * (damping + sigma))  # Eq. 16
    with np.errstate(divide="ignore"):
        back = damping**2 * kappa / (1 - damping * kappa)  # Eq. 18
    assert np.abs(back / sigma - 1).max() > 0.1


def test_a_thousand_updates_keep_the_basis_orthonormal_and_the_eigenvalues_bounded() -> None:
    decay, damping, size, rank = 0.99, 1e-2, 400, 8
    generator = torch.Generator().manual_seed(0)
    scales = torch.arange(1, size + 1) ** -0.5
    parameter = nn.Parameter(torch.zeros(size))
    optimizer = Ginger([parameter], 1.0, rank=rank, decay=decay, damping=damping)
    longest = 0.0
    for count in range(1, 1001):
        d = torch.randn(size, generator=generator) * scales
        longest = max(longest, float(d.norm()) ** 2)
        update(optimizer, [parameter], d)
        if count % 50 == 0:
            ((sigma, U),) = optimizer.eigendecompositions()
            assert torch.allclose(U.mT @ U, torch.eye(rank, dtype=torch.float64), rtol=0, atol=1e-5)
            # Lemma 1, 0 < λ_min(G⁻¹) <= λ_max(G⁻¹) = 1/γ, with its lower bound from ‖d‖ written out.
            assert float(sigma.min()) >= 0
            assert float(sigma.max()) <= (1 - decay**count) * longest
            outside = d.double() - U @ (U.mT @ d.double())
            quotient = optimizer.inverse_product(outside) @ outside / (outside @ outside)
            assert float(quotient) == pytest.approx(1 / damping, rel=1e-4)


def test_lost_orthonormality_is_repaired_without_changing_the_matrix() -> None:
    members, vectors = parameters(torch.float32), colored_vectors(15)
    optimizer = Ginger(members, 1.0, rank=5, decay=0.9, damping=1e-2)
    for d in vectors:
        update(optimizer, members, d)
    mixing = torch.eye(5) + 1e-3 * torch.ones(5, 5).tril()
    pieces = [optimizer.state[parameter]["rows"] for parameter in members]
    for rows in pieces:
        rows.copy_(mixing @ rows)
    core = optimizer.state[members[0]]["core"]
    rows = torch.cat(pieces, 1).double()
    expected = rows.mT @ core @ rows
    for _ in range(8):  # BBᵀ is measured in one of eight
        update(optimizer, members, np.zeros(SIZE))
    rows = torch.cat(pieces, 1).double()
    assert (rows @ rows.mT - torch.eye(5)).abs().max() < 1e-6
    ((sigma, U),) = optimizer.eigendecompositions()
    torch.testing.assert_close((U * sigma) @ U.mT, 0.9**8 * expected, rtol=0, atol=1e-6)


def test_settings_of_groups_in_one_matrix() -> None:
    members = parameters()
    with pytest.raises(ValueError, match=r"need one decay, got 0.9 and 0.5: use scope='group'"):
        Ginger(
            [{"params": members[:1]}, {"params": members[1:], "decay": 0.5}], 1.0, rank=2, decay=0.9, damping=1.0
        )
    optimizer = Ginger(
        [{"params": members[:1]}, {"params": members[1:], "lr": 0.0}], 1.0, rank=2, decay=0.9, damping=1.0
    )
    update(optimizer, members, np.ones(SIZE))
    optimizer.step()
    assert members[0].abs().min() > 0
    assert members[2].abs().max() == 0


def test_momentum_is_a_corrected_average_and_clipping_bounds_each_entry() -> None:
    members, vectors = parameters(), colored_vectors(6)
    optimizer = Ginger(members, 0.5, rank=3, decay=0.9, damping=1e-2, momentum=0.8, clip=0.3)
    average = np.zeros(SIZE)
    for count, g in enumerate(vectors, 1):
        update(optimizer, members, g)
        average = 0.8 * average + 0.2 * g
        before = torch.cat([parameter.detach().reshape(-1) for parameter in members]).numpy()
        direction = inverse(optimizer) @ (average / (1 - 0.8**count))
        assert np.abs(direction).max() > 0.3
        optimizer.step()
        after = torch.cat([parameter.detach().reshape(-1) for parameter in members]).numpy()
        np.testing.assert_allclose(before - after, 0.5 * np.clip(direction, -0.3, 0.3), rtol=1e-9, atol=1e-9)


def test_published_settings() -> None:
    optimizer = Ginger(parameters(), 0.1, rank=4, **PUBLISHED_GINGER)
    settings = optimizer.param_groups[0]
    assert [settings[name] for name in ("damping", "clip", "momentum", "scope")] == [1e-5, 1.0, 0.9, "tensor"]


def test_cost_grows_with_the_rank_not_with_its_square() -> None:
    def counted(rank: int) -> tuple[Counter, int]:
        parameter = nn.Parameter(torch.zeros(20_000))
        optimizer = Ginger([parameter], 1.0, rank=rank, decay=0.9, damping=1.0)
        generator = torch.Generator().manual_seed(0)
        for _ in range(rank + 2):
            update(optimizer, [parameter], torch.randn(20_000, generator=generator))
        parameter.grad = torch.randn(20_000, generator=generator)
        with FlopCounterMode(display=False) as flops, Counter() as counter:
            optimizer.update_curvature()
            optimizer.step()
        return counter, flops.get_total_flops()

    (small, _), (large, flops) = counted(10), counted(20)
    assert large.entries / small.entries == pytest.approx(2, rel=0.2)
    assert large.largest == 20 * 20_000  # the rows themselves
    assert flops < 20 * 20_000  # of products of matrices: those of size 21, none of which has a long side


def test_many_tensors_share_the_calls_of_an_update() -> None:
    # With a matrix for each tensor, 30 tensors took 2,318 calls: a call costs more than such arithmetic.
    members = [nn.Parameter(torch.zeros(size)) for size in range(20, 50)]
    optimizer = Ginger(members, 1.0, rank=4, decay=0.9, damping=1.0, scope="tensor")
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        update(optimizer, members, torch.randn(sum(range(20, 50)), generator=generator))
    with Counter() as counter:
        optimizer.update_curvature()
    assert counter.calls < 60 * len(members)


def test_vectors_of_another_size_and_unknown_settings() -> None:
    optimizer = Ginger(parameters(), 1.0, rank=2, decay=0.9, damping=1.0)
    refuses(r"takes a vector of 20 numbers, got \(3,\)", optimizer.inverse_product, torch.zeros(3))
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="sparse=False"):
        Ginger(embedding.parameters(), 1.0, rank=2, decay=0.9, damping=1.0).step()
    with pytest.raises(TypeError, match=r"real floating-point parameters, got torch\.complex64"):
        Ginger([nn.Parameter(torch.zeros(2, dtype=torch.complex64))], 1.0, rank=2, decay=0.9, damping=1.0)
