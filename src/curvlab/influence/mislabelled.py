"""Mislabelled examples: labels corrupted on purpose, scores that should find them, and how well they do.

A score is a suspicion here, one number for each training example: the higher, the earlier it is inspected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.arguments import not_negative, tensor, whole
from curvlab.seeding import generator_of
from curvlab.shown import Shown, Summary, counted


@dataclass(frozen=True, repr=False)
class CorruptedLabels(Shown):
    """Labels of which some are wrong.

    Attributes:
        labels: (N,), as given to the training.
        mislabelled: (N,), True where the label was replaced.
    """

    labels: Tensor
    mislabelled: Tensor

    def summary(self) -> Summary:
        """Return how many are wrong."""
        return Summary("mislabelled examples", f"{int(self.mislabelled.sum()):,} of {len(self.labels):,}")


def corrupt_labels(
    labels: Tensor, *, num_classes: int, fraction: float, generator: torch.Generator | int
) -> CorruptedLabels:
    """Give a random fraction of the examples (rounded) a label drawn uniformly from the other classes.

    Bae et al. (2022), D.3, assign "random labels": drawn from all classes, one in ten of them would be right, and
    there would be nothing to find. Here every corrupted label is wrong.

    Args:
        labels: (N,), class indices.
        num_classes: from which the new labels are drawn.
        fraction: of the examples, between 0 and 1; at least one is left as it is, and one is changed.
        generator: of the choice and of the labels, or a seed.
    """
    tensor("labels", labels, ndim=1, shape="(N,)")
    count = round(not_negative("fraction", fraction) * len(labels))
    if not 0 < count < len(labels):
        raise ValueError(
            f"fraction={fraction} of {len(labels)} examples are {count}: at least one must be mislabelled, and "
            "one must not"
        )
    whole("num_classes", num_classes, least=2, why="a wrong label needs another class")
    device, generator = labels.device, generator_of(generator)
    chosen = torch.randperm(len(labels), generator=generator, device=generator.device)[:count].to(device)
    shift = torch.randint(1, num_classes, (count,), generator=generator, device=generator.device).to(labels)
    corrupted, mislabelled = labels.clone(), torch.zeros_like(labels, dtype=torch.bool)
    corrupted[chosen] = (labels[chosen] + shift) % num_classes
    mislabelled[chosen] = True
    return CorruptedLabels(corrupted, mislabelled)


@dataclass(frozen=True, repr=False)
class DetectionCurve(Shown):
    """How many mislabelled examples are found when examples are inspected in the order of a score.

    Attributes:
        found: (N + 1,) fp64 on the CPU, share of the mislabelled ones among the first 0, 1, ..., N examples.
    """

    found: Tensor

    def summary(self) -> Summary:
        """Return the area, and what the first tenth of the examples shows."""
        return Summary(
            "detection curve: area",
            f"{self.area:.3f}",
            f"{self.at(0.1):.0%} found in the first tenth of {counted(len(self.found) - 1, 'example')}",
        )

    def at(self, inspected: float) -> float:
        """Return the share that is found when a fraction of all examples (rounded down) was inspected."""
        if not 0 <= inspected <= 1:
            raise ValueError(f"inspected is a fraction between 0 and 1, got {inspected}")
        # The small number, because 0.07 * 100 is 7.000000000000001, and 0.29 * 100 is 28.999999999999996.
        return float(self.found[math.floor(inspected * (len(self.found) - 1) + 1e-9)])

    @property
    def area(self) -> float:
        """Area under the curve over the fraction inspected: 0.5 for a random order, on average."""
        return float((self.found[1:] + self.found[:-1]).mean() / 2)


def detection_curve(scores: Tensor, mislabelled: Tensor) -> DetectionCurve:
    """Return the curve of inspecting examples from the highest score to the lowest, (N,), (N,).

    Examples with equal scores are inspected in random order: the curve is the mean over all orders.
    """
    tensor("scores", scores)
    if scores.shape != tensor("mislabelled", mislabelled).shape or scores.ndim != 1:
        raise ValueError(
            f"need one score for each example, got shapes {tuple(scores.shape)}, {tuple(mislabelled.shape)}"
        )
    if bool(scores.isnan().any()):
        raise ValueError(f"{int(scores.isnan().sum())} scores are nan: they have no place in an order")
    if not bool(mislabelled.any()):
        raise ValueError("no example is mislabelled: there is nothing to find")
    _, group, sizes = torch.unique(-scores.double().cpu(), return_inverse=True, return_counts=True)
    wrong = torch.zeros(len(sizes), dtype=torch.float64)
    wrong.index_add_(0, group, mislabelled.double().cpu())
    share = (wrong / sizes).repeat_interleave(sizes) / wrong.sum()  # a tie's examples stand for their mean
    return DetectionCurve(torch.cat([torch.zeros(1, dtype=torch.float64), share.cumsum(0)]))


# ------------------------------------------------------------------------ what people use for this
def margins(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the output of the label less the largest of the others, (N, C), (N,) -> (N,).

    Of logits, averaged over the epochs of a training, that is the area under the margin (Pleiss et al. 2020). Low
    margins are suspicious: the score is the negative.
    """
    tensor("outputs", outputs, ndim=2, shape="(N, C)")
    tensor("labels", labels, ndim=1, shape="(N,)", rows=len(outputs))
    own = outputs.gather(1, labels[:, None]).squeeze(1)
    return own - outputs.scatter(1, labels[:, None], -torch.inf).amax(1)


def confident_learning_scores(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return suspicions by confident learning (Northcutt et al. 2021), (N, C), (N,) -> (N,).

    The threshold of class j is the mean of p_j over the examples that are labelled j. An example counts in the
    confident joint for the class of the largest p_j among those at or above their thresholds. Where that is not
    its label, it lies off the diagonal, and comes before all others; in both groups, the order is that of the
    normalised margin, max_{j != y} p_j - p_y. (cleanlab prunes as many as the joint estimates; a complete order
    needs no such number.)

    Args:
        probabilities: out of sample: of networks that did not see the example.
        labels: as given, with errors.
    """
    tensor("probabilities", probabilities)
    if probabilities.ndim != 2 or tensor("labels", labels).shape != probabilities.shape[:1]:
        raise ValueError(
            f"need probabilities (N, C) and labels (N,), got {tuple(probabilities.shape)}, {tuple(labels.shape)}"
        )
    num_classes = probabilities.shape[1]
    if len(labels) and not (int(labels.min()) >= 0 and int(labels.max()) < num_classes):
        raise ValueError(f"labels must be classes from 0 to {num_classes - 1}, got {int(labels.max())}")
    given = torch.nn.functional.one_hot(labels, probabilities.shape[1]).to(probabilities)
    # A class without examples has no threshold that could be reached.
    counts = given.sum(0)
    thresholds = torch.where(counts > 0, (given * probabilities).sum(0) / counts.clamp(min=1), torch.inf)
    confident = torch.where(probabilities >= thresholds, probabilities, -torch.inf)
    off_diagonal = confident.amax(1).isfinite() & (confident.argmax(1) != labels)
    suspicion = -margins(probabilities, labels)  # from -1 to 1
    return suspicion + 3.0 * off_diagonal.to(suspicion)
