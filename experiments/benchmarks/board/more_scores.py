"""Scores without gradients, of few directions, and from chains: what the curvature of the others is worth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from curvlab.curvature import GaussNewtonOperator
from curvlab.influence import ensemble_measurements
from curvlab.linalg import flatten
from curvlab.sampling import bayesian_influence
from curvlab.spectrum import top_eigenvalues
from experiments.benchmarks.attribution.methods import Method, gradients
from experiments.benchmarks.attribution.network import Trained

CLASS, INPUTS, ACTIVATIONS, LOSS = "same label", "nearest inputs", "nearest activations", "loss of the example"
BM25 = "BM25"
LOW_RANK, BAYESIAN = "influence, 50 leading directions", "Bayesian influence"
NUM_DIRECTIONS = 50
_STABILITY = 0.1  # step size (nbeta λmax + localization) / 4


def more_scores(trained: Trained) -> Iterator[Method]:
    """Yield each as a row; all take the damping of the run where they need one."""
    test, train = trained.test[0], trained.train[0]
    if train.is_floating_point():
        labels: dict[str, Callable[[], Tensor]] = {
            CLASS: lambda: torch.ones(len(test), len(train)),
            INPUTS: lambda: _nearness(test.flatten(1), train.flatten(1)),
            ACTIVATIONS: lambda: _nearness(_hidden(trained.model, test), _hidden(trained.model, train)),
        }
        for name, similarity in labels.items():
            yield Method.of(name, partial(_by_label, trained, similarity))
    else:  # a text has no label, and its tokens are names, not numbers
        yield Method.of(BM25, lambda: -bm25(trained.test[1], trained.train[1]), saturation=1.2)
    yield Method.of(LOSS, partial(_losses, trained))
    yield Method.of(LOW_RANK, partial(_low_rank, trained), num_directions=NUM_DIRECTIONS)
    if chains := trained.settings.get("chains"):
        asked: dict[str, Any] = {str(name): int(value) for name, value in chains.items()}
        yield Method(BAYESIAN, None, asked | {"stability": _STABILITY}, partial(_bayesian, trained, asked))


def _by_label(trained: Trained, similarity: Callable[[], Tensor]) -> Tensor:
    """Return minus the nearness, times how much more alike the labels are than on average."""
    test, train = trained.test[1], trained.train[1]
    if test.is_floating_point():
        spread = train.flatten(1).std(0)
        alike = (-(test.flatten(1)[:, None] - train.flatten(1)).div(spread).square().sum(2) / 2).exp()
    else:
        alike = (test[:, None] == train).double()
    return -(similarity() * (alike - alike.mean(1, keepdim=True)).cpu())


def _nearness(test: Tensor, train: Tensor) -> Tensor:
    """Return e^{-d² / m} with m the median of the squared distances."""
    squares = torch.cdist(test.double(), train.double()).square().cpu()
    return (-squares / squares.median()).exp()


def bm25(queries: Tensor, documents: Tensor, *, saturation: float = 1.2) -> Tensor:
    """Return the BM25 of documents, (M, T), (N, T) token ids -> (M, N) (Robertson & Zaragoza 2009).

    sum over a query's tokens t of log((N - n_t + 1/2) / (n_t + 1/2) + 1) tf (k + 1) / (tf + k): n_t documents have
    t, this one has it tf times, k is the saturation; the + 1, as Lucene has it, keeps common tokens positive. All
    documents have one length, so none is corrected for it.
    """
    size = int(max(queries.max(), documents.max())) + 1
    asked, counts = (
        torch.zeros(len(own), size, dtype=torch.float64).scatter_add_(1, own, torch.ones(own.shape).double())
        for own in (queries.cpu(), documents.cpu())
    )
    having = (counts > 0).sum(0)
    rarity = ((len(documents) - having + 0.5) / (having + 0.5) + 1).log()
    return asked @ (rarity * counts * (saturation + 1) / (counts + saturation)).T


def _hidden(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return what the last linear layer reads."""
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    seen: list[Tensor] = []
    handle = last.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].detach()))
    try:
        with torch.no_grad():
            model(inputs)
    finally:
        handle.remove()
    return seen[0].flatten(1)


def _losses(trained: Trained) -> Tensor:
    """Return minus each example's loss, for every query: hard examples as the helpful ones."""
    weights = flatten(trained.model.parameters()).detach()[None]
    own = ensemble_measurements(trained.model, trained.loss, trained.train, weights, progress=False)[0]
    return -own.expand(len(trained.test[1]), -1)


def _low_rank(trained: Trained) -> Tensor:
    """Return -∇l(test)ᵀ V (Λ + damping)⁻¹ Vᵀ ∇l(z) of leading eigenvectors (Schioppa et al. 2022: Arnoldi's)."""
    operator = GaussNewtonOperator(trained.model, trained.loss, trained.train)
    found = top_eigenvalues(
        operator, NUM_DIRECTIONS, rtol=1e-2, max_matvecs=6 * NUM_DIRECTIONS, progress=False,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    test, points = (own @ found.vectors for own in gradients(trained))
    return -test / (found.values.to(test) + trained.length.damping) @ points.T


def _bayesian(trained: Trained, chains: dict[str, Any]) -> dict[str, Any]:
    """Return the covariances of losses at the run's damping and the temperature of the posterior, nbeta = N.

    `per_chain` has those of each chain, of which `scores` are the mean.
    """
    operator = GaussNewtonOperator(trained.model, trained.loss, trained.train)
    generator = trained.generator("chains")
    largest = float(top_eigenvalues(operator, 1, rtol=0.1, progress=False, generator=generator).values[0])
    nbeta, damping = float(trained.num_train), trained.length.damping
    step_size = 4 * _STABILITY / (nbeta * (largest + damping))
    found = bayesian_influence(
        *trained.arguments,
        nbeta=nbeta, localization=nbeta * damping, step_size=step_size, batch_size=trained.num_train,
        progress=False, generator=generator, **chains,
    )  # fmt: skip
    return {"status": "done", "scores": found.scores, "per_chain": found.per_chain}
