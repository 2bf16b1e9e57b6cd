"""Where chains ended: is the step stable there, and has the loss held them, or their localization alone?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from curvlab.linalg import LinearOperator
from curvlab.problem.batch import Batch
from curvlab.problem.memory import with_halving
from curvlab.sampling.chains import ChainTraces
from curvlab.sampling.sgld import SGLD
from curvlab.spectrum import top_eigenvalues
from curvlab.training import EnsembleLosses

LANCZOS_STEPS = 8
_EIGENVALUE_RTOL = 0.02
_NUM_CHAINS = 4  # of which the ends are measured
_SHARE = 0.01  # of the chains' gradients that the products may cost
_GRADIENTS_PER_PRODUCT = 3
_MAX_EXAMPLES = 2048


@dataclass(frozen=True)
class ChainEnds:
    """What was measured at the last positions of up to four chains.

    Attributes:
        top_eigenvalue: λmax, the largest eigenvalue of the loss's Hessian, loss per squared parameter. Of a sample
            of the data, and so rather too high; by eight Lanczos products, and so rather too low.
        stability: step_size (nbeta λmax + localization)/4; the limit of stable steps is 1.
        unheld_value: the estimate that chains without any loss would give: nbeta (E[L] - L(w0)) over normal
            distances from w0 with the variance that the localization gives in as many steps. On a quadratic
            nbeta tr(H)/(2 localization), of which the estimate is the part 1/(1 + nbeta h/localization) for equal
            curvatures h: close to 1 where the loss is not seen.
    """

    top_eigenvalue: float
    stability: float
    unheld_value: float


class BatchHessian(LinearOperator):
    """Return S (scale H + shift I) S: H the Hessian of one batch's loss at one position, S = diag(roots)."""

    def __init__(
        self,
        losses: EnsembleLosses,
        position: Tensor,
        batch: Batch,
        weights: Tensor | None = None,
        *,
        scale: float = 1.0,
        shift: float = 0.0,
        roots: Tensor | None = None,
    ) -> None:
        super().__init__(len(position), dtype=position.dtype, device=position.device)
        self._losses, self._position, self._batch, self._weights = losses, position, batch, weights
        self._scale, self._shift, self._roots = scale, shift, roots

    def matmat(self, vectors: Tensor) -> Tensor:
        """Return the products, column by column."""
        return torch.stack([self._product(vector) for vector in vectors.unbind(1)], dim=1)

    def _product(self, vector: Tensor) -> Tensor:
        scaled = vector if self._roots is None else self._roots * vector
        product = self._losses.hessian_product(self._position, self._batch, scaled, weights=self._weights)
        product = self._scale * product + self._shift * scaled
        return product if self._roots is None else self._roots * product


def measure_ends(sampler: SGLD, traces: ChainTraces, *, seed: int) -> ChainEnds:
    """Return the curvature at the ends of chains that `sampler` has taken.

    Args:
        sampler: with its step size, temperature and localization.
        traces: of `run_chains`.
        seed: of the sample of examples, and of Lanczos' first vectors.

    Cost: 8 Hessian products of a sample for each of up to 4 chains: 1 % of the chains' gradients, but no sample is
    smaller than a step's batch, nor larger than 2,048 examples. Two gradients of it more for each. Half as many
    examples whenever memory runs out, with a MemoryWarning.
    """
    losses, (num_chains, num_steps) = sampler.losses, traces.losses.shape
    chains = range(min(num_chains, _NUM_CHAINS))
    if not bool(torch.isfinite(traces.positions[: len(chains)]).all()):
        return ChainEnds(math.nan, math.nan, math.nan)
    batch_size = losses.num_examples if sampler.batch_size is None else sampler.batch_size
    paid = num_chains * num_steps * batch_size * _SHARE
    wanted = int(paid / (_GRADIENTS_PER_PRODUCT * LANCZOS_STEPS * len(chains)))
    size = max(batch_size, min(wanted, _MAX_EXAMPLES, losses.num_examples))
    device = losses.start.device

    def of_examples(count: int) -> ChainEnds:
        return _measured(sampler, traces, chains, count, torch.Generator(device).manual_seed(seed))

    # A product needs twice what a step does.
    return with_halving(of_examples, size, lambda count: f"curvature at the ends is now that of {count} examples.")


def _measured(
    sampler: SGLD, traces: ChainTraces, chains: Sequence[int], size: int, generator: torch.Generator
) -> ChainEnds:
    losses, nbeta, localization = sampler.losses, sampler.nbeta, sampler.localization
    indices = None if size >= losses.num_examples else losses.draw(1, size, [generator])[0, 0]
    batch, weights = losses.batch(indices), losses.weights_of(indices, 2)
    tops, stiffnesses, unheld = [], [], []
    for chain in chains:
        position = traces.positions[chain]
        roots = None if traces.scales is None else traces.scales[chain].sqrt()
        matrix = BatchHessian(
            losses,
            position,
            batch,
            None if weights is None else weights[0],
            scale=nbeta,
            shift=localization,
            roots=roots,
        )
        found = top_eigenvalues(matrix, rtol=_EIGENVALUE_RTOL, max_matvecs=LANCZOS_STEPS, generator=generator)
        stiffness, direction = float(found.values[0]), found.vectors[:, 0]
        along = direction if roots is None else roots * direction
        stiffnesses.append(stiffness)
        tops.append((stiffness / float(along @ along) - localization) / nbeta if nbeta > 0 else 0.0)
        spread = _variances_alone(sampler, traces.losses.shape[1], roots, like=position).sqrt()
        noise = torch.randn(position.shape, generator=generator, dtype=position.dtype, device=position.device)
        pair = torch.stack([losses.start, losses.start + spread * noise])
        at_start, away = losses.losses_and_gradients(pair, batch, shared=True, weights=weights, by_vmap=False)[0]
        unheld.append(nbeta * float(away - at_start))
    return ChainEnds(max(tops), sampler.step_size * max(stiffnesses) / 4, fmean(unheld))


def _variances_alone(sampler: SGLD, num_steps: int, roots: Tensor | None, *, like: Tensor) -> Tensor:
    """Return each parameter's variance after these steps without any loss, (P,), to first order in the step."""
    time = sampler.step_size * sampler.reach * num_steps * (torch.ones_like(like) if roots is None else roots**2)
    pull = sampler.localization
    return time if pull == 0 else -torch.expm1(-pull * time) / pull
