"""Where influence and retraining part for points of one's own: the five gaps of Bae et al. (2022), in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from curvlab.arguments import positive
from curvlab.influence.derivatives import checked_points
from curvlab.influence.retraining.gaps import GAPS, LABELS, Gap, output_gaps
from curvlab.influence.retraining.minimise import SharedBatches
from curvlab.influence.retraining.objective import DownweightedCost, LeftOut
from curvlab.influence.retraining.responses import RETRAINED, cold_optimum, influence_estimate
from curvlab.influence.unrolled import checked_gap
from curvlab.iterate import Checkpoint, iterate
from curvlab.problem import Data, Loss, Problem
from curvlab.progress import can_be_silent, progress_bar
from curvlab.seeding import generator_of
from curvlab.shown import Shown, Summary, counted, new_figure
from curvlab.solvers import BlockConjugateGradient, Solution, Solver
from curvlab.training import Replay, TrainingHistory, TrainingRun, shuffled_batches
from curvlab.training.history import AdamRule, SGDRule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = ("#1a1a1a", "#8a8a8a", "#545454", "#dcdcdc", "#b4b4b4")  # gaps are no methods, whose are hues


@dataclass(frozen=True, eq=False, repr=False)
class GapExplanation(Shown):
    """What lies between retraining without a point and the influence estimate of that, point by point.

    Attributes:
        gaps: warm_start, proximity, non_convergence, linearisation and solver: see `GAPS`; (K,) each.
        responses: displacements from the trained parameters, (K, P) each: cold, warm, proximal, proximal_bregman,
            linearised, influence.
        points: (K,), the training examples, each left out by itself.
        solution: behind the influence estimate.
    """

    gaps: dict[str, Gap]
    responses: dict[str, Tensor]
    points: Tensor
    solution: Solution

    def summary(self) -> Summary:
        """Return the gaps, averaged over points, the largest one first."""
        means = {name: float(gap.per_example.mean()) for name, gap in self.gaps.items()}
        total = sum(means.values())
        parts = sorted(means.items(), key=lambda item: -item[1])
        shares = [f"{LABELS[name]} {value:.2g} ({value / total if total else 0:.0%})" for name, value in parts]
        behind = self.solution.summary()
        return Summary(
            "gaps from retraining to influence:",
            ", ".join(shares),
            f"distance of outputs, mean over {counted(len(self.points), 'point')} left out",
            behind.cost,
            behind.problems,
        )

    def plot(self) -> Figure:
        """Draw the five gaps of each point, stacked; needs matplotlib. `figure.savefig(...)` keeps the picture."""
        figure = new_figure(figsize=(max(5.0, 2.2 + 0.5 * len(self.points)), 3.4), layout="constrained")
        ax = figure.add_subplot()
        bottom = torch.zeros(len(self.points), dtype=torch.float64)
        for (name, gap), color in zip(self.gaps.items(), _COLORS, strict=True):
            size = gap.per_example.double()
            ax.bar(range(len(size)), size.tolist(), 0.7, bottom.tolist(), color=color, label=LABELS[name])
            bottom = bottom + size
        ax.set_xticks(range(len(self.points)), [str(int(point)) for point in self.points])
        ax.set_xlabel("training example left out")
        ax.set_ylabel("distance of the outputs, per example")
        figure.legend(loc="outside right upper", fontsize=8, frameon=False)
        return figure


@can_be_silent
def explain_gap(
    model: nn.Module | Problem,
    loss: Loss | None = None,
    train: Data | None = None,
    points: Tensor | Sequence[int] | None = None,
    *,
    run: TrainingRun | TrainingHistory,
    damping: float | None = None,
    solver: Solver | None = None,
    lr_divisor: float = 10.0,
    progress: bool = True,
    callback: Callable[[RetrainingsState], object] | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
    generator: torch.Generator | int = 0,
) -> GapExplanation:
    """Return how far retraining without each point is from its influence estimate, in the paper's five steps.

    Each response is where the network goes without the point, and each gap the distance of two networks' outputs
    over the training set (Bae et al. 2022, Sec. 4 and C.2):

    | gap | from | to |
    |---|---|---|
    | warm start | retraining from the start, one and a half times the run | from the trained network |
    | proximity | the latter, half as long as the run | with damping/2 ‖θ - θ^s‖² |
    | non-convergence | that | the proximal Bregman objective, whose minimum without a point left out is θ^s |
    | linearisation | that | with outputs linear in θ, and a quadratic loss |
    | solver | that | the estimate (G + damping + weight decay)⁻¹ ∇l(z) / N |

    A large warm-start gap: the scores tell little about retraining from scratch, whatever the solver. A large
    solver gap: the descent is shorter than the estimate, which a larger damping or `filtered=True` mends.

    Args:
        model: as trained by `run`, in eval mode, without BatchNorm or dropout at work; refused where the run,
            walked through again, does not end at its parameters. Or a `Problem` in the place of the three.
        loss: nn.CrossEntropyLoss, nn.MSELoss or nn.BCEWithLogitsLoss, a mean.
        train: as the run had it; other data is refused. Examples must share one shape.
        points: indices of training examples, each left out by itself; None: all.
        run: what `train(..., record=True)` returned; by SGD or Adam, all examples of weight 1.
        damping: λ; by default 1 / (ηT) of a run by SGD, as `influence(run=...)` has it.
        solver: of the estimate; by default block conjugate gradients to a residual of 1e-3.
        lr_divisor: of the learning rate for the two Bregman objectives, ten in the paper.
        progress: show a bar for each retraining.
        callback: called with the `RetrainingsState` after each of the five retrainings.
        checkpoint: file in which what was trained again is kept, and beside it, `<path>.<name>`, the retraining at
            work; the same call goes on there.
        generator: of the order of the batches after the run's own, or a seed.

    Cost: a training, to see that the run is the model's; three and a half for each point, all points at once; the
    estimate; six passes over the data.

    >>> from curvlab.training import train
    >>> _ = torch.manual_seed(0)
    >>> model, data = nn.Linear(3, 2), (torch.randn(30, 3), torch.arange(30) % 2)
    >>> settings = {"num_epochs": 4, "batch_size": 10, "lr": 0.1, "momentum": 0.0, "record": True}
    >>> run = train(model, nn.CrossEntropyLoss(), data, **settings, generator=0)
    >>> found = explain_gap(model, nn.CrossEntropyLoss(), data, [3, 7], run=run)
    >>> list(found.gaps)
    ['warm_start', 'proximity', 'non_convergence', 'linearisation', 'solver']
    """
    run = TrainingRun.of(run)
    problem = Problem.of(model, loss, train)
    if problem.weights is not None:
        raise ValueError("explain_gap is for examples of weight 1: pass a problem without weights")
    rule, l2 = run.rule, getattr(run.rule, "weight_decay", 0.0)
    plain = isinstance(rule, SGDRule) and not rule.nesterov
    adam = isinstance(rule, AdamRule) and not rule.decoupled and (*rule.betas, rule.eps) == (0.9, 0.999, 1e-8)
    if not (plain or adam) or run.example_weights is not None:
        raise ValueError(
            "explain_gap repeats runs of SGD (without nesterov) or of Adam with its usual betas and eps, all "
            f"examples of weight 1, got {rule}"
        )
    damping = run.length().damping - l2 if damping is None else damping
    replay = Replay(problem, run=run)
    chosen = checked_points(points, replay.num_examples)
    *_, end = progress_bar("along the run", replay.forwards(), total=run.num_steps)
    checked_gap(replay, end)
    left_out = LeftOut(problem, groups=list(chosen[:, None]), damping=damping, l2=l2)
    again = _Again(run, replay.num_examples, positive("lr_divisor", lr_divisor), progress, generator_of(generator))
    responses = iterate(
        _Retrainings(left_out, again, checkpoint),
        name="retrainings",
        total=1 + len(RETRAINED),
        progress=progress,
        callback=callback,
        checkpoint=checkpoint,
    )
    solver = solver or BlockConjugateGradient(rtol=1e-3, progress=progress)
    responses["influence"], solution = influence_estimate(left_out, solver, generator=generator)
    found = output_gaps(problem, responses=responses)
    gaps = {name: found["-".join(pair)] for name, pair in GAPS.items()}
    return GapExplanation(gaps, responses, chosen, solution)


@dataclass(frozen=True)
class RetrainingsState:
    """What has been trained again.

    Attributes:
        responses: displacements by name, (P, K) each.
        num_steps: how many there are.
    """

    responses: dict[str, Tensor]
    num_steps: int = 0
    done: bool = False


@dataclass(frozen=True)
class _Retrainings:
    """One response after another; the file of the one at work has its name beside that of all."""

    left_out: LeftOut
    again: _Again
    checkpoint: str | Path | Checkpoint | None

    def depends_on(self) -> Mapping[str, Any]:
        cold = DownweightedCost(self.left_out, self.again.run.start).depends_on
        return {**cold, "run": self.again.run, "more": self.again.more, "lr_divisor": self.again.lr_divisor}

    def init(self) -> RetrainingsState:
        return RetrainingsState({})

    def step(self, state: RetrainingsState) -> RetrainingsState:
        name = ["cold", *RETRAINED][state.num_steps]
        place = self.checkpoint.path if isinstance(self.checkpoint, Checkpoint) else self.checkpoint
        minimizer = replace(self.again(name), checkpoint=None if place is None else f"{place}.{name}")
        if name == "cold":
            found = cold_optimum(self.left_out, minimizer, initial=self.again.run.start)
        else:
            found = RETRAINED[name](self.left_out, minimizer)
        number = state.num_steps + 1
        return RetrainingsState({**state.responses, name: found}, number, number == 1 + len(RETRAINED))

    def result(self, state: RetrainingsState) -> dict[str, Tensor]:
        return dict(state.responses)


class _Again:
    """How a run goes on, or is repeated and goes on: its batches, then half as many new ones, at its last rate."""

    def __init__(
        self, run: TrainingRun, num_examples: int, lr_divisor: float, progress: bool, generator: torch.Generator
    ) -> None:
        self.run, self.lr_divisor, self.progress = run, lr_divisor, progress
        size = len(run.batches[0])
        num_epochs = 1 + run.num_steps * size // num_examples
        more = shuffled_batches(num_examples, batch_size=size, num_epochs=num_epochs, generator=generator)
        self.more = more[: max(1, run.num_steps // 2)]

    def __call__(self, name: str) -> SharedBatches:
        run, first = self.run, 0 if name == "cold" else self.run.num_steps
        rates, last = run.learning_rates, len(run.learning_rates) - 1
        lr = max(rates)
        return SharedBatches(
            [*(run.batches if name == "cold" else ()), *self.more],
            lr=lr / (self.lr_divisor if name in ("proximal_bregman", "linearised") else 1.0),
            optimizer="sgd" if isinstance(run.rule, SGDRule) else "adam",
            momentum=run.rule.momentum if isinstance(run.rule, SGDRule) else 0.0,
            schedule=lambda step, _: rates[min(first + step, last)] / lr,
            progress=name.replace("_", " ") if self.progress else False,
        )
