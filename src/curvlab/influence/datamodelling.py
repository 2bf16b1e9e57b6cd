"""Does a score predict retraining: the linear datamodelling score, and removal of the top-ranked points."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from curvlab.arguments import real, tensor, whole
from curvlab.influence.bank import centred_ranks, weighted_correlations
from curvlab.influence.derivatives import Measurement, checked_measurement
from curvlab.influence.retraining.responses import of_copies
from curvlab.problem import Data, Loss, Problem
from curvlab.problem.batch import Inputs
from curvlab.progress import can_be_silent, progress_bar
from curvlab.seeding import generator_of
from curvlab.shown import Shown, Summary, counted

_AT_ONCE = 100  # measurements


@dataclass(frozen=True, repr=False)
class DatamodellingScore(Shown):
    """Rank correlation of predicted with actual measurements after retraining.

    Attributes:
        value: mean over measurements.
        low: lower end of the interval.
        high: upper end of the interval.
        per_measurement: (M,), Spearman's correlation over the subsets, fp64 on the CPU; 0 where the scores or the
            measurements are constant.
        num_subsets: retrained sets behind it.
    """

    value: float
    low: float
    high: float
    per_measurement: Tensor
    num_subsets: int

    def summary(self) -> Summary:
        """Return the score with its interval."""
        return Summary(
            "linear datamodelling score",
            f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})",
            f"{counted(len(self.per_measurement), 'measurement')}",
            (counted(self.num_subsets, "retrained subset"),),
        )


@can_be_silent
def linear_datamodelling_score(
    scores: Tensor,
    subsets: Tensor,
    retrained_losses: Tensor,
    *,
    confidence: float = 0.95,
    num_resamples: int = 2000,
    progress: bool = True,
    generator: torch.Generator | int | None = None,
) -> DatamodellingScore:
    """Return the LDS of scores (Park et al. 2023): 1 where they rank all retrainings right.

    The prediction for a subset with weights w is sum_i (w_i - 1) / N · score_i, the first-order change of the
    measurement. Spearman's correlation with what was measured is taken for each measurement, over the subsets. The
    percentile bootstrap draws subsets and measurements anew; ranks stay those among all subsets.

    Args:
        scores: (M, N), the change of each measurement per unit of weight added to an example, as influence,
            `unrolled_response` and all others here give them: helpful examples score negative on a loss.
        subsets: (S, N), True where an example was trained on; or the weights of the examples.
        retrained_losses: (S, M), measured after training on each subset; (R, S, M) for R seeds: their mean counts.
        confidence: of the interval.
        num_resamples: of the bootstrap.
        progress: show a bar.
        generator: of the bootstrap, or a seed; by default 0.
    """
    for name, given in {"scores": scores, "subsets": subsets, "retrained_losses": retrained_losses}.items():
        tensor(name, given)
    if not 0 < real("confidence", confidence) < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
    whole("num_resamples", num_resamples)
    measured = retrained_losses.mean(0) if retrained_losses.ndim == 3 else retrained_losses
    _check(scores, subsets, measured)
    weights = subset_weights(subsets) if subsets.dtype == torch.bool else subsets
    generator = generator_of(generator)
    once, drawn = torch.ones(1, len(weights)).double(), _counts(num_resamples, len(weights), generator)
    of_each, own, means = _counts(num_resamples, scores.shape[0], generator), [], torch.zeros(()).double()
    for columns in progress_bar("datamodelling score", torch.arange(scores.shape[0]).split(_AT_ONCE)):
        changes = (weights.double() - 1).to(scores.device) @ scores[columns].double().T / scores.shape[1]
        ranks = (_ranks(changes), _ranks(measured[:, columns]))
        own.append(_correlation(*ranks, once)[0])
        means = means + (_correlation(*ranks, drawn) * of_each[:, columns]).sum(1) / scores.shape[0]
    per_measurement = torch.cat(own)
    tail = (1 - confidence) / 2
    low, high = torch.quantile(means, torch.tensor([tail, 1 - tail], dtype=means.dtype)).tolist()
    return DatamodellingScore(float(per_measurement.mean()), low, high, per_measurement, len(weights))


def random_halves(num_examples: int, num_subsets: int, *, generator: torch.Generator | int) -> Tensor:
    """Return random subsets of half the examples (rounded down), (num_subsets, num_examples), True inside."""
    whole("num_examples", num_examples, least=2)
    whole("num_subsets", num_subsets)
    generator = generator_of(generator)
    drawn = torch.rand(num_subsets, num_examples, generator=generator, device=generator.device)
    return drawn.argsort(1).argsort(1) < num_examples // 2


def subset_weights(subsets: Tensor) -> Tensor:
    """Return example weights that make the loss the mean over each subset, (S, N): N / size inside, 0 outside.

    For `train_ensemble`, whose batches are divided by their size whatever the weights are.
    """
    tensor("subsets", subsets, ndim=2, shape="(S, N)")
    sizes = subsets.sum(1, keepdim=True)
    if not bool((sizes > 0).all()):
        raise ValueError("a subset is empty: each must hold one example at least")
    return subsets * (subsets.shape[1] / sizes.double())


def removal_weights(scores: Tensor, fraction: float) -> Tensor:
    """Return weights of a training without each measurement's most helpful examples, (M, N) -> (M, N).

    The most helpful are those with the lowest scores: without them the loss rises most. At least one is removed.
    """
    tensor("scores", scores, ndim=2, shape="(M, N)")
    if not 0 < real("fraction", fraction) < 1:
        raise ValueError(f"fraction must be between 0 and 1, got {fraction}")
    count = max(1, math.floor(fraction * scores.shape[1]))
    kept = torch.ones_like(scores, dtype=torch.bool)
    kept.scatter_(1, scores.topk(count, largest=False).indices, False)
    return subset_weights(kept)


@can_be_silent
def ensemble_measurements(
    model: nn.Module | Problem,
    loss: Loss | None = None,
    test: Data | None = None,
    parameters: Tensor | None = None,
    *,
    measurement: Measurement | None = None,
    batch_size: int | None = None,
    progress: bool = True,
) -> Tensor:
    """Return what each of K copies of a model measures on each test example, (K, P) -> (K, M).

    Args:
        model: whose parameters are replaced; not changed. Or a `Problem` in the place of model, loss and test.
        loss: as for `influence`.
        test: examples that are measured.
        parameters: of the copies, as `train_ensemble` returns them.
        measurement: (outputs, targets) -> (M,), one number for each test example; default: its loss.
        batch_size: examples at a time.
        progress: show a bar.

    Cost: one forward pass for each copy.
    """
    if parameters is None:
        raise TypeError("pass parameters=..., those of the copies, (K, P)")
    positions = tensor("parameters", parameters, ndim=2, shape="(K, P)").T
    if not isinstance(model, Problem):
        model = copy.deepcopy(model).eval()
    problem = Problem.of(model, loss, test, batch_size=batch_size)
    measure = checked_measurement(problem, measurement)

    def of_batch(inputs: Inputs, targets: Tensor, _: Tensor | None) -> Tensor:
        return of_copies(problem, positions, inputs, targets, measure)

    return torch.cat(list(problem.map(of_batch, name="measurements")), dim=1)


def _check(scores: Tensor, subsets: Tensor, measured: Tensor) -> None:
    num_measurements, num_examples = scores.shape
    if subsets.ndim != 2 or subsets.shape[1] != num_examples:
        raise ValueError(
            f"subsets have shape {tuple(subsets.shape)}: one row for each subset and one column for each of the "
            f"{num_examples} examples that have scores are needed"
        )
    if measured.shape != (len(subsets), num_measurements):
        raise ValueError(
            f"retrained_losses have shape {tuple(measured.shape)}: one row for each of the {len(subsets)} subsets "
            f"and one column for each of the {num_measurements} measurements are needed"
        )
    if len(subsets) < 3:
        raise ValueError(f"a rank correlation needs three subsets at least, got {len(subsets)}; 50 are usual")
    for name, values in (("scores", scores), ("retrained_losses", measured)):
        if not bool(values.isfinite().all()):
            raise ValueError(f"{name} are not finite: look for a training or a solver that diverged")


def _ranks(values: Tensor) -> Tensor:
    return torch.from_numpy(centred_ranks(values.double().cpu().numpy()))


def _counts(num_resamples: int, size: int, generator: torch.Generator) -> Tensor:
    """Return how often each of `size` things is drawn in each resample, (num_resamples, size)."""
    drawn = torch.randint(size, (num_resamples, size), generator=generator, device=generator.device).cpu()
    return torch.zeros(num_resamples, size, dtype=torch.float64).scatter_add_(
        1, drawn, torch.ones(num_resamples, size, dtype=torch.float64)
    )


def _correlation(x: Tensor, y: Tensor, counts: Tensor) -> Tensor:
    return torch.from_numpy(weighted_correlations(x.numpy(), y.numpy(), counts.numpy()))
