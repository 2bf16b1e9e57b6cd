"""A bank of retrainings: ground truth that a method of data attribution is scored against, by numpy alone."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from curvlab.files import write_atomically
from curvlab.shown import Shown, Summary, counted

SAME_SEED, OTHER_SEEDS, STANDARD = AGAINST = ("same seed", "other seeds", "standard")
Array = NDArray[np.float64]


@dataclass(frozen=True, repr=False)
class Bank(Shown):
    """Losses of M queries under networks that were trained again on S subsets of N training examples.

    Two protocols. *Single run*: a retraining starts where one of the K scored networks started, sees its batches
    in its order, with weight N / size on the subset's examples and 0 on others, and takes as many steps.
    *Standard*: it starts elsewhere, in an order of its own, and goes over its subset for as many epochs, in
    batches of the same size: size / N of the steps. A score of network k is judged `against` one of

    - "same seed": single run of network k;
    - "other seeds": single run of the other networks, the mean over them;
    - "standard": the mean over R seeds of the standard protocol, none of which is a scored network's.

    Attributes:
        name: of the task.
        subsets: (S, N), True where an example was trained on.
        single_run: (K, S, M), float32.
        standard: (R, S, M), float32.
        scored: (K, M), the queries' losses under the scored networks.
        queries: (M,), their places in the task's test set.
        recipe: what trains all of it again: config, seeds, commit, versions, seconds.
    """

    name: str
    subsets: NDArray[np.bool_]
    single_run: NDArray[np.float32]
    standard: NDArray[np.float32]
    scored: NDArray[np.float32]
    queries: NDArray[np.int64]
    recipe: Mapping[str, Any]

    def summary(self) -> Summary:
        """Return how many retrainings of which protocol there are."""
        (networks, halves, queries), seeds = self.single_run.shape, len(self.standard)
        retrained = (
            f"{networks * halves} single runs of {networks} networks, {seeds * halves} standard of {seeds} seeds"
        )
        sizes = (counted(self.subsets.shape[1], "example"), counted(halves, "subset"), f"{queries} queries")
        return Summary(f"bank of retrainings, {self.name}", retrained, cost=sizes)

    @property
    def fraction(self) -> float:
        """The size of a subset over N."""
        return float(self.subsets[0].mean())

    def predictions(self, scores: ArrayLike) -> Array:
        """Return the changes of the losses that scores add up to, (M, N) or (K, M, N) -> (K, S, M).

        sum_i (w_i - 1) / N · score_i with w_i = N / size in the subset and 0 outside: scores are the change of a
        query's loss per unit of weight added to an example in the mean training loss, so helpful examples score
        negative. A factor common to a query's scores changes no rank, the sign does.
        """
        if np.iscomplexobj(scores):
            raise ValueError("scores are complex: a change of a loss is a real number")
        found = np.asarray(scores, dtype=float)
        found = found[None] if found.ndim == 2 else found
        wanted = (self.single_run.shape[2], self.subsets.shape[1])
        if found.ndim != 3 or found.shape[1:] != wanted or not 1 <= len(found) <= len(self.single_run):
            raise ValueError(
                f"scores have shape {np.shape(scores)}: bank {self.name!r} wants {wanted}, queries x examples, or "
                f"one such matrix for each of its {len(self.single_run)} networks"
            )
        if not np.isfinite(found).all():
            raise ValueError("scores are not finite: look for a solver that diverged")
        if not np.ptp(found, axis=2).any(axis=1).all():
            raise ValueError("scores of a network are the same for all examples: they rank no subsets")
        weights = self.subsets * (self.subsets.shape[1] / self.subsets.sum(1, keepdims=True)) - 1
        return np.stack([weights @ own.T / self.subsets.shape[1] for own in found])

    def measured(self, against: str, network: int) -> Array:
        """Return the losses after retraining that a score of one network is judged by, (S, M)."""
        if against not in AGAINST:
            raise ValueError(f"against must be one of {', '.join(map(repr, AGAINST))}, got {against!r}")
        if against == SAME_SEED:
            return self.single_run[network].astype(float)
        if against == STANDARD:
            return self.standard.mean(0, dtype=float)
        if len(self.single_run) < 2:
            raise ValueError(f"bank {self.name!r} has one network: there are no other seeds")
        return np.delete(self.single_run, network, axis=0).mean(0, dtype=float)

    @cached_property
    def _ranks(self) -> dict[tuple[str, int], Array]:
        return {}

    def measured_ranks(self, against: str, network: int) -> Array:
        """Return the ranks of the subsets by `measured`, less their mean, (S, M)."""
        key = (against, network)
        if key not in self._ranks:
            self._ranks[key] = centred_ranks(self.measured(against, network))
        return self._ranks[key]

    def save(self, path: str | Path) -> None:
        """Write one compressed file, atomically: the subsets as bits, the losses as they are."""
        arrays = {name: getattr(self, name) for name in ("single_run", "standard", "scored", "queries")}
        told = json.dumps({"name": self.name, "num_examples": self.subsets.shape[1], "recipe": dict(self.recipe)})
        buffer = io.BytesIO()
        np.savez_compressed(
            buffer,
            subsets=np.packbits(self.subsets, axis=1),
            about=np.frombuffer(told.encode(), dtype=np.uint8),
            **arrays,
        )
        write_atomically(Path(path), buffer.getvalue())


def load_bank(name_or_path: str | Path, folder: str | Path | None = None) -> Bank:
    """Return a bank by the path of its file, or by its name in `folder`.

    `folder` is by default that of the environment variable CURVLAB_BANKS, without one the working folder.

    Raises:
        FileNotFoundError: there is none; says which there are.
        ValueError: the file is no bank.
    """
    folder = Path(folder or os.environ.get("CURVLAB_BANKS", "."))
    if not isinstance(name_or_path, str | Path):
        raise TypeError(f"a bank has a name, or the path of its file, got {name_or_path!r}")
    path = next((p for p in (Path(name_or_path), folder / f"{name_or_path}.npz") if p.is_file()), None)
    if path is None:
        known = ", ".join(sorted(found.stem for found in folder.glob("*.npz"))) or "none"
        raise FileNotFoundError(
            f"no bank {str(name_or_path)!r}: {folder} holds {known}. Pass the folder, set CURVLAB_BANKS, or pass "
            "the path of a file."
        )
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is no bank: {folder} holds those that are named")
    with np.load(path, allow_pickle=False) as found:
        about = json.loads(found["about"].tobytes())
        subsets = np.unpackbits(found["subsets"], axis=1, count=about["num_examples"]).astype(bool)
        arrays = {name: found[name] for name in ("single_run", "standard", "scored", "queries")}
    return Bank(name=about["name"], subsets=subsets, recipe=about["recipe"], **arrays)


# ------------------------------------------------------------------------------------------ LDS
@dataclass(frozen=True, repr=False)
class BankScore(Shown):
    """Linear datamodelling score of a method on a bank, or the difference of two methods' scores.

    Attributes:
        value: mean over networks and queries of Spearman's correlation over the subsets.
        low: lower end of the 95 % interval; networks, subsets and queries are drawn anew.
        high: upper end.
        against: what was judged by, see `Bank`.
        per_network: (K, M), of each network and query.
        num_subsets: behind each correlation.
    """

    value: float
    low: float
    high: float
    against: str
    per_network: Array
    num_subsets: int

    def summary(self) -> Summary:
        """Return the score with its interval."""
        networks, queries = self.per_network.shape
        found = f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"
        whole = f"{counted(networks, 'network')}, {counted(self.num_subsets, 'subset')}, {queries} queries"
        return Summary(f"linear datamodelling score, {self.against}", found, whole, ())


def lds(scores: ArrayLike, bank: Bank, *, against: str = STANDARD, num_resamples: int = 1000) -> BankScore:
    """Return the linear datamodelling score of scores on a bank (Park et al. 2023): 1 ranks all retrainings right.

    Args:
        scores: (K, M, N), of each of the bank's networks; or (M, N), of the first one. Sign and unit: those of
            `Bank.predictions`.
        bank: from `load_bank`.
        against: which retrainings judge, see `Bank`.
        num_resamples: of the nested bootstrap: networks, subsets and queries, each drawn with replacement, the
            same subsets and queries for all networks. With one network its own chance is not in the interval.

    Cost: a tenth of a second or two.
    """
    if not isinstance(bank, Bank):
        raise TypeError(f"bank is what load_bank(name) returns, got {bank!r}")
    return lds_of_predictions([bank.predictions(scores)], bank, against=against, num_resamples=num_resamples)


def lds_of_predictions(
    terms: list[Array], bank: Bank, *, against: str = STANDARD, num_resamples: int = 1000
) -> BankScore:
    """Return the LDS of what a method predicts for whole subsets, (K, S, M); of two methods the difference.

    Two are compared on the networks that both have, with the same draws for both: what is hard to rank is so for
    both and falls out. Any increasing function of the predicted losses will do: ranks, say.
    """
    shape = (len(bank.subsets), bank.single_run.shape[2])
    for own in terms:
        if own.ndim != 3 or own.shape[1:] != shape or not 1 <= len(own) <= len(bank.single_run):
            raise ValueError(f"predictions have shape {own.shape}, not (networks, {shape[0]}, {shape[1]})")
    if len(terms) not in (1, 2):
        raise ValueError(f"one method, or two for their difference, not {len(terms)}")
    num_networks, (num_subsets, num_queries) = min(map(len, terms)), shape
    subsets, queries, networks = _draws((num_subsets, num_queries, num_networks), num_resamples)
    all_of_them = np.ones((1, num_subsets))
    own = np.zeros((num_networks, num_queries))
    drawn = np.zeros((num_resamples, num_networks))
    for sign, predicted in zip((1, -1), terms, strict=False):
        for k in range(num_networks):
            measured, ranks = bank.measured_ranks(against, k), centred_ranks(predicted[k])
            own[k] += sign * weighted_correlations(ranks, measured, all_of_them)[0]
            drawn[:, k] += sign * (weighted_correlations(ranks, measured, subsets) * queries).mean(1)
    low, high = np.quantile((drawn * networks).mean(1), [0.025, 0.975])
    return BankScore(float(own.mean()), float(low), float(high), against, own, num_subsets)


def ceiling(bank: Bank, *, against: str = STANDARD, num_splits: int = 20, num_resamples: int = 1000) -> BankScore:
    """Return the LDS of a score that knew the expected losses: what chance of the retrainings leaves to any score.

    Means of half the seeds each correlate over the subsets by r; `num_splits` random splits are averaged. The mean
    of n halves then has the reliability n r / (1 + (n - 1) r) (Spearman 1910; Brown 1910), and the expectation
    correlates with it by the root of that. Against "other seeds" a half is one network. Against the "same seed"
    nothing is left to chance: the ceiling is 1.

    Interval: subsets and queries are drawn anew; the seeds are not.
    """
    if against not in AGAINST[1:]:
        raise ValueError(f"against must be one of {', '.join(map(repr, AGAINST[1:]))}, got {against!r}")
    seeds = (bank.standard if against == STANDARD else bank.single_run).astype(float)
    if len(seeds) < 2:
        raise ValueError(f"bank {bank.name!r} has one seed: it takes two to know their chance")
    half, judges = (len(seeds) // 2, len(seeds)) if against == STANDARD else (1, len(seeds) - 1)
    (num_subsets, num_queries), generator = seeds.shape[1:], np.random.default_rng(0)
    subsets, queries = (_counts(size, num_resamples, generator) for size in (num_subsets, num_queries))
    counts = np.concatenate([np.ones((1, num_subsets)), subsets])
    agreement = np.zeros((len(counts), num_queries))
    for _ in range(num_splits):
        order = generator.permutation(len(seeds))
        first, second = (seeds[order[part]].mean(0) for part in (slice(half), slice(half, 2 * half)))
        agreement += weighted_correlations(centred_ranks(first), centred_ranks(second), counts) / num_splits
    n, agreement = judges / half, np.clip(agreement, 0, 1)
    found = np.sqrt(n * agreement / (1 + (n - 1) * agreement))
    low, high = np.quantile((found[1:] * queries).mean(1), [0.025, 0.975])
    return BankScore(float(found[0].mean()), float(low), float(high), against, found[:1], num_subsets)


def centred_ranks(values: ArrayLike) -> Array:
    """Return each column's ranks, ties averaged, less their mean, (S, M)."""
    from scipy.stats import rankdata  # a quarter of what importing curvlab.influence would take

    ranks: Array = rankdata(np.asarray(values, dtype=float), axis=0)
    return ranks - ranks.mean(0)


def weighted_correlations(x: Array, y: Array, counts: Array) -> Array:
    """Return Pearson's correlation of columns with weights, (S, M), (S, M), (R, S) -> (R, M); 0 for constants."""
    shares = counts / counts.sum(1, keepdims=True)
    mean_x, mean_y = shares @ x, shares @ y
    covariance = shares @ (x * y) - mean_x * mean_y
    variances = (shares @ x**2 - mean_x**2) * (shares @ y**2 - mean_y**2)
    known = variances > 1e-12 * len(x) ** 4
    found: Array = np.where(known, covariance / np.sqrt(np.where(known, variances, 1.0)), 0.0)
    return found


@lru_cache(maxsize=8)
def _draws(sizes: tuple[int, ...], num_resamples: int) -> list[Array]:
    """Return the counts of subsets, queries and networks: the same for every method, so that they are paired."""
    generator = np.random.default_rng(0)
    return [_counts(size, num_resamples, generator) for size in sizes]


def _counts(size: int, num_resamples: int, generator: np.random.Generator) -> Array:
    """Return how often each of `size` things is drawn in each resample, (num_resamples, size)."""
    return generator.multinomial(size, np.full(size, 1 / size), size=num_resamples).astype(float)
