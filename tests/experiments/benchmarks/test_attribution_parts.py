"""Parts of bench-attribution: PBRF, removals, predictions, ranks, and dattri's EK-FAC as it is mended."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from scipy.optimize import minimize
from scipy.stats import spearmanr
from torch import Tensor, nn

from curvlab.influence import linear_datamodelling_score, subset_weights
from curvlab.linalg import DenseOperator
from experiments.benchmarks.attribution import removal
from experiments.benchmarks.attribution.libraries.mended import mended
from experiments.benchmarks.attribution.methods import (
    DOT,
    FILTER,
    INFLUENCE,
    SEGMENTS,
    UNROLLED,
    ProximalBregmanResponses,
    near_minimum,
)
from experiments.benchmarks.attribution.ranks import (
    OTHER,
    SAME,
    correlations,
    lds_interval,
    predicted_changes,
    rank_table,
)
from experiments.benchmarks.attribution.rest import (
    BEST,
    OTHER_ORDER,
    PART_WAY,
    best_combination,
    prediction_score,
    rest_rows,
)

# --- What bench-attribution computes: PBRF against an oracle, removals and predictions against closed forms
NUM_TRAIN, NUM_TEST, INPUTS, CLASSES, DAMPING = 80, 3, 4, 3, 0.05


@pytest.fixture
def network(stub_run) -> SimpleNamespace:
    torch.manual_seed(0)
    inputs = torch.randn(NUM_TRAIN + NUM_TEST, INPUTS).double()
    targets = torch.randint(CLASSES, (NUM_TRAIN + NUM_TEST,))
    settings = {"responses": {"rank": 1000, "num_steps": 12, "num_steps_of_subsets": 40, "at_once": 30}}
    settings |= {"seed_name": "test", "num_queries": NUM_TEST, "num_subsets": 2, "fractions": [0.05, 0.1]}
    settings |= {"num_removed_for": 2, "num_random_removals": 5}
    return SimpleNamespace(
        run=stub_run,
        settings=OmegaConf.create(settings),
        key={"seed_name": "test"},
        generator=stub_run.generator,
        label="net",
        loss=nn.CrossEntropyLoss(),
        num_train=NUM_TRAIN,
        train=(inputs[:NUM_TRAIN], targets[:NUM_TRAIN]),
        test=(inputs[NUM_TRAIN:], targets[NUM_TRAIN:]),
    )


def trained(network: SimpleNamespace, weight_decay: float) -> SimpleNamespace:
    model = nn.Linear(INPUTS, CLASSES, bias=False).double().eval()
    length = SimpleNamespace(weight_decay=weight_decay, damping=DAMPING)
    return SimpleNamespace(**vars(network), model=model, length=length)


def softmax(logits: np.ndarray) -> np.ndarray:
    exponents = np.exp(logits - logits.max(1, keepdims=True))
    return exponents / exponents.sum(1, keepdims=True)


def losses_of_queries(weights: np.ndarray, network: SimpleNamespace) -> np.ndarray:
    inputs, targets = (part.numpy() for part in network.test)
    return -np.log(softmax(inputs @ weights.T)[np.arange(NUM_TEST), targets])


def minimiser(network: SimpleNamespace, base: np.ndarray, changes: np.ndarray, strength: float) -> np.ndarray:
    """Minimise 1/N sum D_i + sum_i changes_i l_i / N + strength/2 ‖W - base‖² for logistic regression, by BFGS."""
    inputs, targets = (part.numpy() for part in network.train)
    own, before = np.eye(CLASSES)[targets], softmax(inputs @ base.T)

    def value_and_gradient(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weights = flat.reshape(base.shape)
        logits, reference = inputs @ weights.T, inputs @ base.T
        after = softmax(logits)
        losses, at_base = (np.log(np.exp(h).sum(1)) - (own * h).sum(1) for h in (logits, reference))
        divergence = losses - at_base - ((before - own) * (logits - reference)).sum(1)
        moved = weights - base
        value = (divergence + changes * losses).mean() + strength / 2 * (moved**2).sum()
        gradient = (after - before + changes[:, None] * (after - own)).T @ inputs / NUM_TRAIN + strength * moved
        return float(value), gradient.ravel()

    found = minimize(value_and_gradient, base.ravel(), jac=True, method="BFGS", options={"gtol": 1e-11})
    return found.x.reshape(base.shape)


@pytest.mark.parametrize("weight_decay", [0.0, 0.02])
def test_pbrf_scores_are_those_of_an_oracle(network: SimpleNamespace, weight_decay: float) -> None:
    base = trained(network, weight_decay)
    found = ProximalBregmanResponses(base, DAMPING).scores()  # type: ignore[arg-type]
    assert found["scores"].shape == (NUM_TEST, NUM_TRAIN)
    assert found["gradient_norm_90"] < 1e-6
    weights = base.model.weight.detach().numpy()
    before = losses_of_queries(weights, network)
    for example in (0, 29, 30, 79):  # of the first, the second and the last part
        changes = -np.eye(NUM_TRAIN)[example]
        after = losses_of_queries(minimiser(network, weights, changes, DAMPING + weight_decay), network)
        expected = -NUM_TRAIN * (after - before)
        np.testing.assert_allclose(found["scores"][:, example], expected, rtol=1e-4, atol=1e-7)


def test_pbrf_of_subsets_weighs_them_as_retraining_does(network: SimpleNamespace) -> None:
    base = trained(network, 0.0)
    subsets = torch.rand(2, NUM_TRAIN).argsort(1) < NUM_TRAIN // 2
    found = ProximalBregmanResponses(base, DAMPING).of_subsets(subsets)  # type: ignore[arg-type]
    weights = base.model.weight.detach().numpy()
    before = losses_of_queries(weights, network)
    for predicted, row in zip(found["predicted"], subset_weights(subsets), strict=True):
        after = losses_of_queries(minimiser(network, weights, row.numpy() - 1, DAMPING), network)
        np.testing.assert_allclose(predicted, after - before, rtol=1e-4, atol=1e-7)
    with pytest.raises(ValueError, match="leave out more than 32"):
        ProximalBregmanResponses(base, DAMPING).of_subsets(~subsets[:, :40])  # type: ignore[arg-type]


def test_a_copy_without_a_minimum_stays_where_its_gradient_was_smallest() -> None:
    curvatures = torch.tensor([[2.0], [-1.0]])  # a parabola with a minimum at -1/2, and one that falls both ways

    def objective(u: Tensor) -> tuple[Tensor, Tensor]:
        return (0.5 * curvatures * u**2 + u).sum(1), curvatures * u + 1

    inverse = DenseOperator(torch.tensor([[0.5]]))
    found, norms = near_minimum(objective, torch.zeros(2, 1), inverse=inverse, num_steps=3)
    torch.testing.assert_close(found, torch.tensor([[-0.5], [0.0]]))
    torch.testing.assert_close(norms, torch.tensor([0.0, 1.0]))


# ----------------------------------------------------------------------------------- removals
def linear(network: SimpleNamespace, effects: Tensor) -> SimpleNamespace:
    """Let losses be linear in the weights of the examples, (N, M)."""

    def retrained_losses(weights: Tensor, order: int) -> dict[str, Any]:
        assert order == 0
        return {"losses": weights @ effects, "seconds": 0.0}

    network.retrained_losses = retrained_losses
    return network


def test_rises_without_top_ranked_and_random_examples(network: SimpleNamespace) -> None:
    effects = torch.randn(NUM_TRAIN, NUM_TEST).double()
    linear(network, effects)
    best, worst = effects.T, -effects.T  # removed first: where the score, and so the effect, is lowest; or highest
    ranked = [
        {"scores": s, "method": n, "damping": None, "key": {}} for s, n in ((best, "best"), (worst, "worst"))
    ]
    rises = removal.rises_when_ranked(network, ranked)  # type: ignore[arg-type]
    assert {fraction: tuple(each.shape) for fraction, each in rises.items()} == {0.05: (2, 2), 0.1: (2, 2)}
    for query in range(2):
        order = effects[:, query].argsort()
        for row, kept in ((0, order[4:]), (1, order[:-4])):
            expected = NUM_TRAIN / 76 * effects[kept, query].sum() - effects[:, query].sum()
            torch.testing.assert_close(rises[0.05][row, query], expected)
    at_random = removal.rises_at_random(network)  # type: ignore[arg-type]
    assert at_random[0.1].shape == (5, 2)
    assert (rises[0.1][0] > at_random[0.1]).all()
    assert (rises[0.1][1] < at_random[0.1]).all()
    columns = removal.random_columns(at_random)
    assert columns["removal_10"] == pytest.approx(float(at_random[0.1].mean()))
    assert at_random[0.1].min() <= columns["removal_10_low"] < columns["removal_10"] < columns["removal_10_high"]


# ---------------------------------------------------------------------------------------- rest
def test_predictions_of_subsets_are_ranked_query_by_query() -> None:
    torch.manual_seed(0)
    predicted, losses = torch.randn(20, 4), torch.randn(2, 20, 4)
    expected = np.mean([spearmanr(predicted[:, m], losses.mean(0)[:, m]).statistic for m in range(4)])
    assert prediction_score(predicted, losses).value == pytest.approx(expected)


def test_the_best_combination_finds_what_ranks_right() -> None:
    torch.manual_seed(0)
    subsets = torch.rand(40, 50).argsort(1) < 25
    functions = [10.0**power * torch.randn(3, 50, dtype=torch.float64) for power in (-3, 0, 3)]
    losses = (subset_weights(subsets) - 1) @ (2e3 * functions[0] - functions[1] + 1e-3 * functions[2]).T
    functions.append(2 * functions[0])  # dependent

    def score(scores: Tensor, target: Tensor) -> float:
        return linear_datamodelling_score(scores, subsets, target).value

    assert score(best_combination(functions, subsets, losses), losses) == pytest.approx(1, abs=2e-3)
    # With noise that no function knows, too, none of them is above it.
    noisy = losses + 2 * losses.std() * torch.randn_like(losses)
    found = score(best_combination(functions, subsets, noisy), noisy)
    assert found >= max(score(own, noisy) for own in functions)
    assert found < 0.9


def test_rest_follows_the_chain_of_approximations() -> None:
    torch.manual_seed(0)
    subsets = torch.rand(30, 40).argsort(1) < 20
    functions = [torch.randn(5, 40, dtype=torch.float64) for _ in range(2)]
    unrolled = functions[0] + functions[1]
    scores = {DOT: functions[:1], INFLUENCE: functions[1:], FILTER: functions[1:], SEGMENTS: functions[1:]}
    # Exactly linear losses, which the derivative ranks right; in the other order they are the other way round.
    losses = (subset_weights(subsets) - 1) @ unrolled.T
    part_way = {0.5: -losses, 0.25: 0.25 * losses}
    rows, way = rest_rows(scores | {UNROLLED: [unrolled]}, subsets, torch.stack([losses, -losses]), part_way)
    found = {row["predictor"]: row for row in rows}
    assert [row["predictor"] for row in rows] == [FILTER, BEST, SEGMENTS, UNROLLED, PART_WAY, OTHER_ORDER]
    for name in (BEST, UNROLLED):
        assert found[name]["lds"] == pytest.approx(1, abs=5e-3)
        assert found[name]["lds_part_way"] == pytest.approx(1, abs=5e-3)
    assert found[FILTER]["lds"] < 0.95
    of_unrolled = [(row["share"], round(row["lds"], 6)) for row in way if row["predictor"] == UNROLLED]
    assert of_unrolled == [(0.25, 1.0), (0.5, -1.0), (1.0, 1.0)]
    assert found[PART_WAY]["lds"] == pytest.approx(1)
    assert found[OTHER_ORDER]["lds"] == pytest.approx(-1)


# --- Ranks of halves: they have all of an LDS, and intervals of differences draw halves and queries together
HALVES, QUERIES, EXAMPLES = 40, 12, 60


@pytest.fixture
def subsets() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.rand(HALVES, EXAMPLES).argsort(1) < EXAMPLES // 2


def test_ranks_give_the_lds_and_its_interval(subsets: torch.Tensor) -> None:
    scores = torch.randn(QUERIES, EXAMPLES, dtype=torch.float64)
    truth = (subset_weights(subsets) - 1) @ scores.T / EXAMPLES
    losses = truth + 0.5 * truth.std() * torch.randn_like(truth)
    changes = predicted_changes({"scores": scores}, subsets)
    torch.testing.assert_close(changes, truth)
    assert predicted_changes({"predicted": losses}, subsets) is losses
    ranks = rank_table("net", {SAME: losses, OTHER: -losses}, {"ours": changes})
    assert len(ranks) == HALVES * QUERIES
    expected = [spearmanr(changes[:, m], losses[:, m]).statistic for m in range(QUERIES)]
    np.testing.assert_allclose(correlations(ranks, "ours", SAME), expected)
    np.testing.assert_allclose(correlations(ranks, "ours", OTHER), -np.array(expected))
    # The library's interval of one score draws the same two things, with other random numbers.
    library = linear_datamodelling_score(scores, subsets, losses)
    interval = lds_interval(ranks, {"ours": 1}, SAME)
    assert (interval.low, interval.high) == pytest.approx((library.low, library.high), abs=0.01)
    assert "40 halves x 12 queries" in interval.kind
    # The same halves and queries for all terms: what both have in common falls out.
    nothing = lds_interval(ranks.assign(theirs=ranks.ours), {"ours": 1, "theirs": -1}, SAME)
    assert (nothing.low, nothing.high) == (0, 0)


def test_intervals_know_that_there_are_few_halves(subsets: torch.Tensor) -> None:
    """All queries alike: drawing queries alone would say that nothing is uncertain."""
    torch.manual_seed(0)
    one = torch.randn(HALVES, 1)
    losses, ours = one.expand(-1, QUERIES), (one + torch.randn(HALVES, 1)).expand(-1, QUERIES)
    ranks = rank_table("net", {SAME: losses}, {"ours": ours})
    assert np.ptp(correlations(ranks, "ours", SAME)) < 1e-12
    interval = lds_interval(ranks, {"ours": 1}, SAME)
    assert interval.high - interval.low > 0.2


def test_a_constant_prediction_ranks_nothing() -> None:
    losses = torch.randn(HALVES, QUERIES)
    ranks = rank_table("net", {SAME: losses}, {"ours": torch.zeros_like(losses)})
    assert (correlations(ranks, "ours", SAME) == 0).all()


# --- dattri's EK-FAC as the benchmark mends it, without dattri: its inverse against a dense one
EKFAC_DAMPING = 0.1


def estimate_eigenvector(covariances: dict[str, tuple[Tensor, Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
    """Eigenvectors in columns, as dattri 0.3.0 has them."""
    return {name: (torch.linalg.eigh(a)[1], torch.linalg.eigh(s)[1]) for name, (a, s) in covariances.items()}


@pytest.fixture
def fisher(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    fisher = SimpleNamespace(estimate_eigenvector=estimate_eigenvector)
    func = ModuleType("dattri.func")
    func.fisher = fisher  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dattri", ModuleType("dattri"))
    monkeypatch.setitem(sys.modules, "dattri.func", func)
    return fisher


def covariance(size: int) -> Tensor:
    factor = torch.randn(size, size, dtype=torch.float64)
    return factor @ factor.T


def test_the_mended_inverse_is_the_dense_one(fisher: SimpleNamespace) -> None:
    torch.manual_seed(0)
    layers = {"0": nn.Linear(4, 3).double(), "2": nn.Linear(3, 2).double()}
    covariances = {n: (covariance(m.in_features + 1), covariance(m.out_features)) for n, m in layers.items()}
    lambdas = {n: torch.rand(m.out_features, m.in_features + 1).double() for n, m in layers.items()}
    mended(object)
    attributor = mended(object)()  # again, as a call that is repeated for its seconds does
    attributor.module_name, attributor.name_to_module = list(layers), layers
    attributor.cached_q, attributor.cached_lambdas = fisher.estimate_eigenvector(covariances), lambdas
    attributor.damping = EKFAC_DAMPING
    gradients = torch.randn(5, sum(p.numel() for m in layers.values() for p in m.parameters())).double()
    found = attributor.transform_test_rep(0, gradients)

    start = 0
    for name, layer in layers.items():
        rows, columns = layer.out_features, layer.in_features + 1
        size = rows * columns
        # Where an entry of [W b], row by row, lies among the weights and then the biases.
        place = torch.arange(rows * (columns - 1)).view(rows, -1)
        place = torch.cat([place, place.numel() + torch.arange(rows)[:, None]], dim=1).flatten()
        (q_a, q_s), scale = estimate_eigenvector(covariances)[name], lambdas[name].flatten() + EKFAC_DAMPING
        rotation = torch.kron(q_s, q_a)
        dense = rotation @ torch.diag(1 / scale) @ rotation.T
        own = gradients[:, start : start + size][:, place] @ dense
        torch.testing.assert_close(found[:, start : start + size][:, place], own)
        start += size
