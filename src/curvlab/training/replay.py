"""A training run walked through again, forwards, and backwards from few stored states."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from curvlab.linalg import flatten, unflatten
from curvlab.problem import Data, Loss, ModelFunction, Problem
from curvlab.problem.batch import Inputs
from curvlab.problem.parameters import checked_model
from curvlab.training.history import State, TrainingHistory, TrainingRun
from curvlab.training.steps import Loss as TrainingLoss
from curvlab.training.steps import MeanLoss, differs_in_training


@dataclass(frozen=True)
class ReplayedStep:
    """One step of a run, seen from before it.

    Attributes:
        number: from 0.
        state: parameters and the optimizer's vectors before the step.
        indices: (B,), its examples.
        inputs: (B, ...).
        targets: (B, ...).
        weights: (B,), of its examples in the loss.
        lr: its learning rate.
    """

    number: int
    state: State
    indices: Tensor
    inputs: Inputs
    targets: Tensor
    weights: Tensor
    lr: float


class Replay:
    """The steps θ_0, θ_1, ..., θ_T of a run, computed again.

    Equal to the training by `train` to rounding, with the loss L_B = 1/|B| sum_i w_i l_i of each batch. Models
    with dropout or BatchNorm are refused: their forward differs in training.

    Attributes:
        run: start, batches, rates and rule.
        problem: model, loss and training data.
        function: the model as a function of its parameters, a copy in eval mode.
        num_examples: N.
        peak_states: the most states held at a time so far.

    Args:
        model: as trained; its parameters' values do not matter here. Or a `Problem` in the place of the three.
        loss: mean over the batch, as `train` had it.
        train_data: as `train` had it.
        run: the training, or what `train(..., record=True)` returned.
    """

    def __init__(
        self,
        model: nn.Module | Problem,
        loss: Loss | None = None,
        train_data: Data | None = None,
        *,
        run: TrainingRun | TrainingHistory,
    ) -> None:
        different = differs_in_training(model.model if isinstance(model, Problem) else checked_model(model))
        if different is not None:
            raise ValueError(
                f"{different} differs in training and in evaluation, so the run cannot be walked through again: "
                "train the model without it"
            )
        self.problem, self.run = Problem.of(model, loss, train_data), TrainingRun.of(run)
        self._data = self.problem.data.in_fixed_order()
        self._loss = MeanLoss(cast("TrainingLoss", self.problem.given_loss))
        self.function = ModelFunction(copy.deepcopy(self.problem.model).eval())
        self.num_examples = self._data.num_examples
        self.peak_states = 0
        self._check(self.problem.model)

    def depends_on(self) -> dict[str, Any]:
        """Return what a walk along the run depends on, for its checkpoints."""
        problem = self.problem
        return {"model": problem.model, "loss": problem.given_loss, "data": problem.data, "run": self.run}

    def _check(self, model: nn.Module) -> None:
        run, size = self.run, self.function.num_parameters
        if run.start.shape != (size,):
            raise ValueError(
                f"the run's start has shape {tuple(run.start.shape)}, but the model has {size} parameters that "
                "require gradients: pass curvlab.linalg.flatten of them, taken before the training"
            )
        run.check_data(self._data.together, self.num_examples, self.function.dtype)
        weights = run.example_weights
        if weights is not None and weights.shape != (self.num_examples,):
            raise ValueError(
                f"example_weights have shape {tuple(weights.shape)}, but there are {self.num_examples} examples"
            )
        given = self.problem.weights
        if given is not None and (weights is None or not torch.equal(given.to(weights), weights)):
            raise ValueError("the problem's weights are not those that the run was trained with: leave them out")
        largest = max(int(batch.max()) for batch in run.batches)
        if largest >= self.num_examples:
            raise ValueError(
                f"the run's batches name example {largest}, but there are {self.num_examples}: pass the data that "
                "the model was trained on"
            )
        self._check_training_mode(model)

    def _check_training_mode(self, model: nn.Module) -> None:
        """Refuse dropout that no module shows, as transformers have it. Cost: a forward of one example."""
        inputs, _ = self._data.together(self.run.batches[0][:1])
        training = ModelFunction(copy.deepcopy(model).train())
        try:
            with torch.no_grad():
                training(training.parameters, inputs)
        except ValueError as error:
            if "train mode" not in str(error):
                raise
            raise ValueError(
                f"{type(model).__name__} is another function at each call in training ({error}), so the run "
                "cannot be walked through again: train it without (Hugging Face: the dropouts of its config at 0)"
            ) from error

    def first_state(self) -> State:
        """Return θ_0 and the optimizer's vectors, 0."""
        start = self.run.start.to(self.function.device, self.function.dtype)
        return (start, *(torch.zeros_like(start) for _ in range(self.run.rule.num_buffers)))

    def forwards(self, state: State | None = None, *, first: int = 0, stop: int | None = None) -> Iterator[State]:
        """Yield the states after steps first, ..., stop - 1 from the state before step `first`."""
        state = self.first_state() if state is None else state
        for number in range(first, self.run.num_steps if stop is None else stop):
            step = self.step(number, state)
            state = self.updated(step, self.gradient(step))
            yield state

    def end(self) -> State:
        """Return the state after the last step. Cost: the training's."""
        *_, state = self.forwards()
        return state

    @property
    def spacing(self) -> int:
        """√T, rounded up: of the states that are stored on the way to the end."""
        return math.isqrt(self.run.num_steps - 1) + 1

    def backwards(self, kept: list[State] | None = None, *, stop: int | None = None) -> Iterator[ReplayedStep]:
        """Yield the steps from the last to the first, from one stored state in √T.

        Every √T-th state is stored on the way to the end, and those between two of them when the way back gets
        there: at most 2 √T + 1 states at a time.

        Args:
            kept: states before the steps 0, √T, 2 √T, ...; taken away when they are passed. None: found here.
            stop: number of the last step, plus one; None: all steps.

        Cost: twice the training's; once where `kept` is given.
        """
        spacing, stop = self.spacing, self.run.num_steps if stop is None else stop
        if kept is None:
            kept = [self.first_state()]
            for number, state in enumerate(self.forwards(stop=(stop - 1) // spacing * spacing), start=1):
                if number % spacing == 0:
                    kept.append(state)
        while stop > 0:
            first = (stop - 1) // spacing * spacing
            del kept[first // spacing + 1 :]
            states = [kept[-1], *self.forwards(kept[-1], first=first, stop=stop - 1)]
            for number in reversed(range(first, stop)):
                self.peak_states = max(self.peak_states, len(kept) - 1 + len(states))
                yield self.step(number, states.pop())
            stop = first

    def step(self, number: int, state: State) -> ReplayedStep:
        """Return step `number` with its batch on the model's device."""
        indices = self.run.batches[number]
        inputs, targets = self._data.together(indices)
        weights = (
            torch.ones(len(indices)) if self.run.example_weights is None else self.run.example_weights[indices]
        )
        dtype, device = self.function.dtype, self.function.device
        return ReplayedStep(
            number, state, indices, inputs, targets, weights.to(device, dtype), self.run.learning_rates[number]
        )

    def loss(self, values: Sequence[Tensor], step: ReplayedStep, weights: Tensor) -> Tensor:
        """Return L_B, () at parameters shaped as the model's."""
        return self._loss(self.function(values, step.inputs), step.targets, weights)

    def gradient(self, step: ReplayedStep) -> Tensor:
        """Return ∇L_B before the step, (P,). Cost: one forward and one backward pass."""
        return self._gradient(self.values(step.state[0]), step, step.weights, create_graph=False)

    def gradient_with_graph(self, step: ReplayedStep) -> tuple[Tensor, list[Tensor]]:
        """Return ∇L_B (P,), and what it can be differentiated by: each parameter, and the weights (B,)."""
        values, weights = self.values(step.state[0]), step.weights.clone().requires_grad_()
        return self._gradient(values, step, weights, create_graph=True), [*values, weights]

    def _gradient(
        self, values: list[Tensor], step: ReplayedStep, weights: Tensor, *, create_graph: bool
    ) -> Tensor:
        for value in values:
            value.requires_grad_()
        with torch.enable_grad():
            loss = self.loss(values, step, weights)
            return flatten(torch.autograd.grad(loss, values, create_graph=create_graph, materialize_grads=True))

    def values(self, position: Tensor) -> list[Tensor]:
        """Return (P,) as tensors of the parameters' shapes, without a graph."""
        return [value.detach() for value in unflatten(position, self.function.live_parameters)]

    def updated(self, step: ReplayedStep, gradient: Tensor) -> State:
        """Return the state after the step."""
        return self.run.rule.update(step.state, gradient, lr=step.lr, step=step.number + 1)
