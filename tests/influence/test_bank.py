"""Retrainings that are predicted: banks of them, and the linear datamodelling score."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from curvlab import progress
from curvlab.influence import (
    ensemble_measurements,
    influence_scores,
    linear_datamodelling_score,
    random_halves,
    removal_weights,
    subset_weights,
)
from curvlab.influence.bank import AGAINST, Bank, ceiling, lds, lds_of_predictions, load_bank
from curvlab.linalg import flatten
from curvlab.solvers import Direct
from curvlab.training import train_ensemble
from tests.refusals import refuses

# --- Banks of retrainings: LDS against scipy's Spearman, nested intervals, files, and what is refused
K, R, S, M, N = 3, 4, 40, 6, 30


@pytest.fixture
def scores() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((K, M, N))


@pytest.fixture
def bank(scores: np.ndarray) -> Bank:
    """Return losses that follow each network's scores, with noise; standard ones follow their mean."""
    generator = np.random.default_rng(0)
    subsets = generator.random((S, N)).argsort(1).argsort(1) < N // 2
    weights = np.where(subsets, 2.0, 0.0) - 1
    single = np.einsum("sn,kmn->ksm", weights, scores) + 3 * generator.standard_normal((K, S, M))
    standard = np.einsum("sn,mn->sm", weights, scores.mean(0)) + 5 * generator.standard_normal((R, S, M))
    return Bank(
        name="made-up",
        subsets=subsets,
        single_run=single.astype(np.float32),
        standard=standard.astype(np.float32),
        scored=generator.random((K, M)).astype(np.float32),
        queries=np.arange(M),
        recipe={"task": "net", "seconds": {}},
    )


def own_lds(predicted: np.ndarray, measured: np.ndarray) -> float:
    return float(np.mean([spearmanr(predicted[:, m], measured[:, m]).statistic for m in range(M)]))


def test_lds_is_spearmans_correlation_by_every_column(bank: Bank, scores: np.ndarray) -> None:
    # The sum of the scores of those inside orders subsets of one size as the prediction does.
    inside = np.einsum("sn,kmn->ksm", bank.subsets.astype(float), scores)
    single, standard = bank.single_run.astype(float), bank.standard.astype(float).mean(0)
    others = [(single.sum(0) - single[k]) / (K - 1) for k in range(K)]
    expected = {
        "same seed": np.mean([own_lds(inside[k], single[k]) for k in range(K)]),
        "other seeds": np.mean([own_lds(inside[k], others[k]) for k in range(K)]),
        "standard": np.mean([own_lds(inside[k], standard) for k in range(K)]),
    }
    for against in AGAINST:
        found = lds(scores, bank, against=against)
        assert found.value == pytest.approx(expected[against], abs=1e-12)
        assert found.low < found.value < found.high
        assert found.per_network.shape == (K, M)
    assert lds(scores, bank).against == "standard"
    assert lds(5 * scores, bank).value == lds(scores, bank).value == -lds(-scores, bank).value
    assert repr(found).startswith(f"linear datamodelling score, standard {found.value:.3f} (")
    torch_too = linear_datamodelling_score(*map(_tensor, (scores[0], bank.subsets, bank.standard)))
    assert lds(scores[0], bank).value == pytest.approx(torch_too.value, abs=1e-6)


def _tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def test_intervals_draw_the_networks_too(bank: Bank, scores: np.ndarray) -> None:
    """Three networks of which one is scored upside down: their mean is uncertain, each of them is not."""
    mixed = scores * np.array([1, 1, -1])[:, None, None]

    def width(own: np.ndarray) -> float:
        found = lds(own, bank, against="same seed")
        return found.high - found.low

    assert width(mixed) > 0.8 > 2 * width(scores)


def test_differences_are_paired(bank: Bank, scores: np.ndarray) -> None:
    ours = bank.predictions(scores)
    nothing = lds_of_predictions([ours, np.exp(ours)], bank)
    assert (nothing.value, nothing.low, nothing.high) == (0, 0, 0)
    theirs = ours + 2 * ours.std() * np.random.default_rng(2).standard_normal(ours.shape)
    found = lds_of_predictions([ours, theirs], bank)
    parts = [lds_of_predictions([own], bank) for own in (ours, theirs)]
    assert found.value == pytest.approx(parts[0].value - parts[1].value)
    assert found.high - found.low < sum(part.high - part.low for part in parts)
    alone = lds_of_predictions([ours[:1], theirs], bank, against="same seed")  # on the network that both have
    each = [lds_of_predictions([own[:1]], bank, against="same seed").value for own in (ours, theirs)]
    assert alone.value == pytest.approx(each[0] - each[1])


def test_a_ceiling_is_what_the_expected_losses_would_have(bank: Bank) -> None:
    """Of 400 subsets, whose expected losses are known; the seeds add noise of their own."""
    generator = np.random.default_rng(4)
    expected = generator.standard_normal((400, M))
    standard = expected + 2 * generator.standard_normal((10, 400, M))
    single = expected + generator.standard_normal((3, 400, M))
    subsets = np.zeros((400, N), dtype=bool)
    known = replace(bank, subsets=subsets, standard=standard, single_run=single)  # type: ignore[arg-type]
    for against in AGAINST[1:]:
        found = ceiling(known, against=against)
        best = lds_of_predictions([np.stack([expected] * 3)], known, against=against)
        assert found.value == pytest.approx(best.value, abs=0.02)
        assert found.low < found.value < found.high < 1
    with pytest.raises(ValueError, match="against must be one of 'other seeds', 'standard', got 'same seed'"):
        ceiling(known, against="same seed")
    refuses("has one seed: it takes two", ceiling, replace(known, standard=known.standard[:1]))


def test_a_bank_is_read_as_it_was_written(bank: Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bank.save(tmp_path / "made-up.npz")
    monkeypatch.setenv("CURVLAB_BANKS", str(tmp_path))
    for name in ("made-up", tmp_path / "made-up.npz"):
        found = load_bank(name)
        assert found.name == bank.name
        assert found.recipe == bank.recipe
        for field in ("subsets", "single_run", "standard", "scored", "queries"):
            np.testing.assert_array_equal(getattr(found, field), getattr(bank, field))
            assert getattr(found, field).dtype == getattr(bank, field).dtype
    assert found.fraction == 0.5
    refuses(r"no bank 'other': .* holds made-up", load_bank, "other", error=FileNotFoundError)


def test_what_is_refused(bank: Bank, scores: np.ndarray) -> None:
    refuses(r"shape \(30, 6\): bank 'made-up' wants \(6, 30\), queries x examples", lds, scores[0].T, bank)
    refuses("for each of its 3 networks", lds, np.concatenate([scores, scores]), bank)
    refuses("for each of its 3 networks", lds, scores[:0], bank)
    with pytest.raises(ValueError, match="the same for all examples: they rank no subsets"):
        bank.predictions(np.ones((bank.single_run.shape[2], bank.subsets.shape[1])))
    refuses("scores are not finite", lds, scores * np.inf, bank)
    refuses("scores are complex", lds, scores + 0j, bank)
    refuses("against must be one of 'same seed', 'other seeds', 'standard'", lds, scores, bank, against="both")
    with pytest.raises(ValueError, match="has one network: there are no other seeds"):
        lds(scores[0], replace(bank, single_run=bank.single_run[:1]), against="other seeds")
    refuses(r"predictions have shape \(3, 6, 30\), not \(networks, 40, 6\)", lds_of_predictions, [scores], bank)


def test_a_bank_prints_its_sizes_not_its_numbers() -> None:
    printed = str(load_bank("digits", "results/banks"))
    assert len(printed.splitlines()) <= 3
    assert "300 single runs of 3 networks, 1000 standard of 10 seeds" in printed


# --- The linear datamodelling score against scipy, and against retrainings that are known in closed form
FP64 = torch.float64


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=FP64)


def halves(num_examples: int, num_subsets: int, seed: int = 0) -> Tensor:
    return random_halves(num_examples, num_subsets, generator=seed)


def test_is_the_mean_spearman_correlation() -> None:
    scores, subsets = draw(4, 30), halves(30, 25)
    measured = subsets.double() @ scores.T + 20 * draw(25, 4, seed=1)
    found = linear_datamodelling_score(scores, subsets, measured)
    predicted = torch.stack([scores[:, subset].sum(1) for subset in subsets])
    expected = [spearmanr(predicted[:, m], measured[:, m]).statistic for m in range(4)]
    torch.testing.assert_close(found.per_measurement, torch.tensor(expected, dtype=FP64))
    assert found.value == pytest.approx(sum(expected) / 4)
    assert found.low < found.value < found.high
    assert found.num_subsets == 25


def test_many_measurements_tell_how_long_they_will_take_and_are_those_of_few(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scores, subsets, measured = draw(250, 30), halves(30, 25), draw(25, 250, seed=1)
    parts = [linear_datamodelling_score(scores[m], subsets, measured[:, m]) for m in torch.arange(250).split(50)]
    clock = itertools.count(0, 6)
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    with caplog.at_level("INFO", logger="curvlab"):
        whole = linear_datamodelling_score(scores, subsets, measured)
        linear_datamodelling_score(scores, subsets, measured, progress=False)
    assert [line.partition(": ")[0] for line in caplog.messages] == ["datamodelling score"]
    torch.testing.assert_close(whole.per_measurement, torch.cat([part.per_measurement for part in parts]))


def test_sign_and_scale_and_constant_scores_that_predict_nothing() -> None:
    scores, subsets = draw(3, 20), halves(20, 12)
    measured = (subsets.double() @ scores.T) ** 3  # ranks are all that counts
    assert linear_datamodelling_score(scores, subsets, measured).value == pytest.approx(1.0)
    assert linear_datamodelling_score(-5 * scores, subsets, measured).value == pytest.approx(-1.0)
    assert linear_datamodelling_score(scores, subset_weights(subsets), measured).value == pytest.approx(1.0)
    scores[0] = 1.0
    found = linear_datamodelling_score(scores, subsets, measured)
    assert (found.per_measurement != 0).tolist() == [False, True, True]


def test_seeds_are_averaged() -> None:
    scores, subsets = draw(3, 20), halves(20, 40)
    truth = subsets.double() @ scores.T
    seeds = truth + 10 * draw(8, 40, 3, seed=2)
    averaged = linear_datamodelling_score(scores, subsets, seeds)
    assert averaged.value == linear_datamodelling_score(scores, subsets, seeds.mean(0)).value
    assert averaged.value > linear_datamodelling_score(scores, subsets, seeds[0]).value


def test_interval_covers_the_value_of_more_subsets() -> None:
    """20 experiments with 30 subsets each: the interval holds the value of 4,000 subsets in nearly all of them."""
    scores = draw(5, 40)
    many = halves(40, 4000)
    noise = 5.0

    def measured(subsets: Tensor, seed: int) -> Tensor:
        return subsets.double() @ scores.T + noise * draw(len(subsets), 5, seed=seed)

    truth = linear_datamodelling_score(scores, many, measured(many, 99), num_resamples=10).value
    covered = 0
    for seed in range(20):
        subsets = halves(40, 30, seed=seed + 1)
        found = linear_datamodelling_score(scores, subsets, measured(subsets, seed + 1))
        covered += found.low <= truth <= found.high
        assert 0.02 < found.high - found.low < 0.6
    assert covered >= 17


def test_interval_follows_its_generator() -> None:
    scores, subsets = draw(3, 20), halves(20, 12)
    measured = draw(12, 3, seed=1)
    once, again, other = (
        linear_datamodelling_score(scores, subsets, measured, generator=seed) for seed in (1, 1, 2)
    )
    assert (once.low, once.high) == (again.low, again.high) != (other.low, other.high)


def test_halves_are_halves_and_removal_takes_the_lowest_scores() -> None:
    subsets = halves(11, 200)
    assert bool((subsets.sum(1) == 5).all())
    assert float(subsets.double().mean(0).min()) > 0.3  # 5 of 11, each example alike
    weights = subset_weights(subsets)
    torch.testing.assert_close(weights.mean(1), torch.ones(200, dtype=FP64))
    assert bool((weights[~subsets] == 0).all())
    scores = torch.tensor([[0.0, -3.0, 1.0, -1.0], [5.0, 4.0, 3.0, 2.0]])
    weights = removal_weights(scores, 0.5)
    expected = torch.tensor([[2.0, 0.0, 2.0, 0.0], [2.0, 2.0, 0.0, 0.0]], dtype=FP64)
    torch.testing.assert_close(weights, expected)
    assert (removal_weights(scores, 0.01) == 0).sum(1).tolist() == [1, 1]


def test_measurements_are_those_of_separate_models() -> None:
    torch.manual_seed(0)
    for first in (nn.Linear(4, 3), nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.Flatten())):
        model = nn.Sequential(first, nn.Tanh(), nn.Linear(3, 3)).to(FP64)
        start = flatten(model.parameters()).detach().clone()
        parameters = start + draw(3, len(start))
        test = (draw(30, 4), torch.arange(30) % 3)
        losses = ensemble_measurements(model, nn.CrossEntropyLoss(), test, parameters, batch_size=29)
        first_logits = ensemble_measurements(
            model, nn.CrossEntropyLoss(), test, parameters, measurement=lambda outputs, targets: outputs[:, 0]
        )
        assert torch.equal(flatten(model.parameters()), start)
        for k in range(3):
            torch.nn.utils.vector_to_parameters(parameters[k], model.parameters())
            outputs = model(test[0]).detach()
            torch.testing.assert_close(losses[k], nn.functional.cross_entropy(outputs, test[1], reduction="none"))
            torch.testing.assert_close(first_logits[k], outputs[:, 0])


def test_influence_predicts_retraining_of_a_ridge_regression(generator) -> None:
    """A convex, converged case: halves retrained together, and the first order ranks them well."""
    x, y = draw(40, 3), draw(40, 1, seed=1)
    model, loss = nn.Linear(3, 1, bias=False).to(FP64), nn.MSELoss()
    test = (draw(6, 3, seed=2), draw(6, 1, seed=3))
    decay = 1.0
    settings = {"num_epochs": 300, "batch_size": 40, "lr": 0.1, "momentum": 0.0, "weight_decay": decay}
    settings["generator"] = generator
    whole = train_ensemble(model, loss, (x, y), example_weights=torch.ones(1, 40), **settings)
    gram = 2 * x.T @ x / 40 + decay * torch.eye(3, dtype=FP64)
    torch.testing.assert_close(whole.parameters[0], torch.linalg.solve(gram, 2 * x.T @ y / 40)[:, 0])
    torch.nn.utils.vector_to_parameters(whole.parameters[0], model.parameters())
    scores = influence_scores(model, loss, (x, y), test, damping=decay, solver=Direct())
    subsets = halves(40, 60)
    copies = train_ensemble(model, loss, (x, y), example_weights=subset_weights(subsets), **settings)
    measured = ensemble_measurements(model, loss, test, copies.parameters)
    assert linear_datamodelling_score(scores, subsets, measured).value > 0.9


def test_what_does_not_fit_or_cannot_be_ranked_is_refused() -> None:
    for subsets, measured, text in (
        ((5, 8), (5, 2), r"subsets have shape \(5, 8\).* 9 examples that have scores"),
        ((5, 9), (5, 3), r"retrained_losses have shape \(5, 3\).* 5 subsets and .* 2 measurements"),
        ((2, 9), (2, 2), "needs three subsets at least, got 2"),
    ):
        refuses(text, linear_datamodelling_score, draw(2, 9), torch.ones(*subsets), draw(*measured))
    scores, subsets, measured = draw(2, 9), halves(9, 5), draw(5, 2)
    measured[1, 1] = torch.nan
    text = "retrained_losses are not finite: look for a training"
    refuses(text, linear_datamodelling_score, scores, subsets, measured)
    refuses("a subset is empty", subset_weights, torch.zeros(1, 3, dtype=torch.bool))
    refuses("fraction must be between 0 and 1, got 5", removal_weights, scores, 5)
    refuses("num_examples must be at least 2, got 1", halves, 1, 4)
