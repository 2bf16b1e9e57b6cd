"""Banks of retrainings: LDS against scipy's Spearman, nested intervals, files, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from curvlab.influence import linear_datamodelling_score
from curvlab.influence.bank import AGAINST, Bank, ceiling, lds, lds_of_predictions, load_bank

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
    with pytest.raises(ValueError, match="has one seed: it takes two"):
        ceiling(replace(known, standard=known.standard[:1]))


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
    with pytest.raises(FileNotFoundError, match=r"no bank 'other': .* holds made-up"):
        load_bank("other")


def test_what_is_refused(bank: Bank, scores: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"shape \(30, 6\): bank 'made-up' wants \(6, 30\), queries x examples"):
        lds(scores[0].T, bank)
    with pytest.raises(ValueError, match="for each of its 3 networks"):
        lds(np.concatenate([scores, scores]), bank)
    with pytest.raises(ValueError, match="scores are not finite"):
        lds(scores * np.inf, bank)
    with pytest.raises(ValueError, match="against must be one of 'same seed', 'other seeds', 'standard'"):
        lds(scores, bank, against="both")
    with pytest.raises(ValueError, match="has one network: there are no other seeds"):
        lds(scores[0], replace(bank, single_run=bank.single_run[:1]), against="other seeds")
    with pytest.raises(ValueError, match=r"predictions have shape \(3, 6, 30\), not \(networks, 40, 6\)"):
        lds_of_predictions([scores], bank)


def test_a_bank_prints_its_sizes_not_its_numbers() -> None:
    printed = str(load_bank("digits"))
    assert len(printed.splitlines()) <= 3
    assert "300 single runs of 3 networks, 1000 standard of 10 seeds" in printed
