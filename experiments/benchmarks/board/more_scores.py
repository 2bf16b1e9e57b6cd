"""Scores without gradients, of few directions, and from chains: what the curvature of the others is worth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from curvlab.curvature import GaussNewtonOperator
from curvlab.influence import ensemble_measurements, per_example_gradients
from curvlab.linalg import flatten
from curvlab.sampling import bayesian_influence
from curvlab.spectrum import top_eigenvalues
from experiments.benchmarks.attribution.methods import Method
from experiments.benchmarks.attribution.network import Network, Trained

CLASS, INPUTS, ACTIVATIONS, LOSS = "same label", "nearest inputs", "nearest activations", "loss of the example"
BM25 = "BM25"
LOW_RANK, BAYESIAN = "influence, 50 leading directions", "Bayesian influence"
NUM_DIRECTIONS = 50
_STABILITY = 0.1  # step size (nbeta λmax + localization) / 4


def more_scores(network: Network, trained: Trained) -> Iterator[Method]:
    """Yield each as a row; all take the damping of the run where they need one."""
    labels = (
        (CLASS, lambda: torch.ones(len(network.test[1]), network.num_train)),
        (INPUTS, lambda: _nearness(*(data[0].flatten(1) for data in (network.test, network.train)))),
        (
            ACTIVATIONS,
            lambda: _nearness(*(_hidden(trained.model, x) for x in (network.test[0], network.train[0]))),
        ),
    )
    if network.train[0].is_floating_point():
        for name, similarity in labels:
            yield Method.of(name, partial(_by_label, network, similarity))
    else:  # a text has no label, and its tokens are names, not numbers
        yield Method.of(BM25, lambda: -bm25(network.test[1], network.train[1]), saturation=1.2)
    yield Method.of(LOSS, partial(_losses, network, trained))
    yield Method.of(LOW_RANK, partial(_low_rank, network, trained), num_directions=NUM_DIRECTIONS)
    if chains := network.settings.get("chains"):
        asked: dict[str, Any] = {str(name): int(value) for name, value in chains.items()}
        compute = partial(_bayesian, network, trained, asked)
        yield Method(BAYESIAN, None, asked | {"stability": _STABILITY}, compute)


def _by_label(network: Network, similarity: Callable[[], Tensor]) -> Tensor:
    """Return minus the nearness, times how much more alike the labels are than on average."""
    test, train = network.test[1], network.train[1]
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


def _losses(network: Network, trained: Trained) -> Tensor:
    """Return minus each example's loss, for every query: hard examples as the helpful ones."""
    weights = flatten(trained.model.parameters()).detach()[None]
    own = ensemble_measurements(trained.model, network.loss, network.train, weights, progress=False)[0]
    return -own.expand(len(network.test[1]), -1)


def _low_rank(network: Network, trained: Trained) -> Tensor:
    """Return -∇l(test)ᵀ V (Λ + damping)⁻¹ Vᵀ ∇l(z) of leading eigenvectors (Schioppa et al. 2022: Arnoldi's)."""
    operator = GaussNewtonOperator(trained.model, network.loss, network.train)
    found = top_eigenvalues(
        operator, NUM_DIRECTIONS, rtol=1e-2, max_matvecs=6 * NUM_DIRECTIONS, progress=False,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    test, points = (
        per_example_gradients(trained.model, network.loss, data) @ found.vectors
        for data in (network.test, network.train)
    )
    return -test / (found.values.to(test) + trained.length.damping) @ points.T


def _bayesian(network: Network, trained: Trained, chains: dict[str, Any]) -> dict[str, Any]:
    """Return the covariances of losses at the run's damping and the temperature of the posterior, nbeta = N.

    `per_chain` has those of each chain, of which `scores` are the mean.
    """
    operator = GaussNewtonOperator(trained.model, network.loss, network.train)
    generator = network.run.generator("chains", network.settings.seed_name)
    largest = float(top_eigenvalues(operator, 1, rtol=0.1, progress=False, generator=generator).values[0])
    nbeta, damping = float(network.num_train), trained.length.damping
    step_size = 4 * _STABILITY / (nbeta * (largest + damping))
    found = bayesian_influence(
        trained.model, network.loss, network.train, network.test,
        nbeta=nbeta, localization=nbeta * damping, step_size=step_size, batch_size=network.num_train,
        progress=False, generator=generator, **chains,
    )  # fmt: skip
    return {"status": "done", "scores": found.scores, "per_chain": found.per_chain}
