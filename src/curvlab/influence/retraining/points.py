"""The proximal Bregman objective of single points, each in units of its own weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vjp, vmap

from curvlab.arguments import positive, real
from curvlab.curvature import GaussNewtonOperator
from curvlab.curvature.linearise import use_vmap
from curvlab.influence.derivatives import checked_points
from curvlab.linalg import LinearOperator, flatten, flatten_columns, identity, unflatten, unflatten_columns
from curvlab.problem import Data, Loss, Problem
from curvlab.problem.batch import Batch, Inputs, take, weighted
from curvlab.problem.model_function import check_finite
from curvlab.problem.records import Records


class ProximalBregmanObjective:
    """Q_z(θ) = 1/N sum_n D(h_n(θ), h_n(θ*), y_n) + ε l(z; θ) + damping/2 ‖θ - θ*‖² for each point z.

    Klochkov & Liu (2024), Eq. 5, after Bae et al. (2022), whose ε down-weights; ours up-weights. θ* are the
    model's parameters, D the Bregman divergence of the loss in the outputs. Everything is expressed in the
    scaled displacement u = (θ - θ*) / ε, (P, K), one column for each point, because θ* + εu differs from θ*
    in the last digits only when ε = 1e-8. For the same reason gradients are formed from ∇l(h) - ∇l(h*), never
    from values of D, and in double precision by default.

    Args:
        model: in eval mode; copied, never changed. Or a `Problem` in the place of model, loss, train and weights.
        loss: nn.CrossEntropyLoss, nn.MSELoss or nn.BCEWithLogitsLoss.
        train: data of the mean Bregman divergence.
        points: indices of the K training examples z. Or
        candidates: other examples, as if they were added to the training set.
        damping: proximity weight, positive.
        epsilon: weight ε of a point's loss, not zero: a number, or (K,), one for each point. For an exact
            response take c / ‖∇l(z)‖: all points then move about equally far, neither across the kinks of a ReLU
            network nor so little that rounding decides.
        batch_size: training examples at a time, 512 by default, with all points together; half of the larger of
            the two whenever memory runs out, with a MemoryWarning.
        memory_budget: bytes for each product with the curvature, see curvlab.curvature.DataOperator.
        dtype: of parameters, data and results.
        weights: w of the training examples, (N,), not negative, where the training loss was 1/N Σ_i w_i l_i: the
            first term is then 1/N sum_n w_n D_n. ε stays what is added to l(z) itself, so leaving example i out
            is ε = -w_i/N.
    """

    def __init__(
        self,
        model: nn.Module | Problem,
        loss: Loss | None = None,
        train: Data | None = None,
        points: Tensor | Sequence[int] | None = None,
        *,
        candidates: Data | None = None,
        damping: float,
        epsilon: float | Tensor,
        batch_size: int | None = None,
        memory_budget: float | None = None,
        dtype: torch.dtype = torch.float64,
        weights: Tensor | None = None,
    ) -> None:
        damping = positive("damping", damping, "it is the weight of the proximity term")
        if (points is None) == (candidates is None):
            raise TypeError("pass points=..., the indices of the examples whose weight changes, or candidates=...")
        problem = Problem.of(model, loss, train, weights, memory_budget, batch_size=batch_size)
        if problem.loss.reduction != "mean":
            raise ValueError("the objective is a mean over training examples: use a loss with reduction='mean'")
        self.damping = damping
        self.problem = problem.normalised().copied(dtype)
        if candidates is None:
            chosen = checked_points(points, self.problem.num_examples)
            candidates = [batch for index in chosen.split(1) for batch in self.problem.data.select(index)]
        self.points = self.problem.with_data(candidates, name="candidates")
        self.num_examples, self.num_points = self.problem.num_examples, self.points.num_examples
        self.shape = (self.problem.num_parameters, self.num_points)
        self.epsilon = per_point(epsilon, self.num_points).to(self.problem.device, dtype)
        self._parameters = self.problem.parameters  # of the copy, which nobody changes
        self._records = Records()

    def depends_on(self) -> Mapping[str, Any]:
        """Return what it is made of, as settings of a checkpoint. Cost: a pass over the data."""
        problem = self.problem
        return {
            "damping": self.damping,
            "epsilon": self.epsilon,
            "model": problem.model,
            "loss": problem.given_loss,
            "train": problem.data,
            "weights": problem.weights,
            "points": self.points.data,
        }

    def zeros(self) -> Tensor:
        """Return u = 0, the displacement at θ*, (P, K)."""
        return torch.zeros(self.shape, dtype=self.problem.dtype, device=self.problem.device)

    def curvature(self, dtype: torch.dtype) -> LinearOperator:
        """Return G + damping I at θ*, the Hessian of every Q_z there up to ε, in `dtype`."""
        return GaussNewtonOperator(self.problem.copied(dtype)) + self.damping * identity

    def curvature_at(self, column: Tensor, index: int, dtype: torch.dtype) -> LinearOperator:
        """Return the Gauss-Newton matrix of Q_z at θ* + εu for point `index`, its own loss included."""
        problem = self.problem.copied(dtype, parameters=flatten(self._moved(column, index)))
        curvature = GaussNewtonOperator(problem) + self.damping * identity
        epsilon = float(self.epsilon[index])
        if epsilon < 0:  # the point is down-weighted: leaving its part out keeps the matrix definite
            return curvature
        point = problem.with_data(self.points.data.select(torch.tensor([index])))
        return curvature + epsilon * GaussNewtonOperator(point)

    def gradient(self, displacement: Tensor, *, columns: Tensor | None = None) -> Tensor:
        """Return ∇Q_z(θ* + εu) / ε for each point, (P, K) -> (P, K); the target is zero.

        `columns` (K',) says which points the columns of u belong to; all by default. Cost: 4F of the training data
        a column, F a forward.
        """
        return self._gradient(self.problem, displacement, columns)

    def sampled_gradient(
        self,
        displacement: Tensor,
        *,
        batch_size: int,
        probabilities: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return an unbiased estimate of `gradient` from one batch, shared by all points.

        Drawn with replacement, uniformly or by `probabilities`, (N,), then weighted to keep the mean:
        the examples that `GaussNewtonOperator.sample` draws. A batch that does not fit into memory is summed in
        pieces. Cost: 4F of the batch a column.
        """
        return self._gradient(self.problem.sample(batch_size, generator, probabilities), displacement, None)

    def value(self, displacement: Tensor, *, columns: Tensor | None = None) -> Tensor:
        """Return Q_z(θ* + εu), (K,). Cost: 1F a column. Rounding hides it where ε‖u‖ is below about 1e-7."""
        function, loss = self.problem.function, self.problem.loss
        chosen = range(self.num_points) if columns is None else columns.tolist()
        moved = [self._moved(*each) for each in zip(displacement.unbind(1), chosen, strict=True)]

        def of_batch(inputs: Inputs, targets: Tensor, weights: Tensor | None) -> Tensor:
            reference = function(function.parameters, inputs)
            found = []
            for values in moved:
                divergence = loss.bregman_divergence(function(values, inputs), reference, targets)
                found.append(divergence.sum() if weights is None else weights @ divergence)
            return torch.stack(found)

        with torch.no_grad():
            divergence = sum(self.problem.map(of_batch), start=torch.zeros_like(displacement[0]))
            own = torch.stack([self._own_loss(*each) for each in zip(moved, chosen, strict=True)])
        epsilon = self._epsilon(columns)
        proximity = 0.5 * self.damping * epsilon**2 * displacement.square().sum(0)
        return divergence / self.problem.divisor + epsilon * own + proximity

    def _gradient(self, problem: Problem, displacement: Tensor, columns: Tensor | None) -> Tensor:
        """Return the gradient with the divergence of `problem`'s examples."""
        epsilon, num_columns = self._epsilon(columns), displacement.shape[1]

        def of_batch(inputs: Inputs, targets: Tensor, weights: Tensor | None) -> Tensor:
            at_once = min(problem.memory.columns, num_columns)
            blocks = zip(displacement.split(at_once, dim=1), epsilon.split(at_once), strict=True)
            found = [self._divergence_gradient(inputs, targets, weights, *block) for block in blocks]
            return found[0] if len(found) == 1 else torch.cat(found, dim=1)

        total = torch.zeros_like(displacement)
        for part in problem.map(of_batch, num_columns=num_columns):
            total += part
        return total / problem.divisor + self._own_gradients(displacement, columns) + self.damping * displacement

    def _divergence_gradient(
        self, inputs: Inputs, targets: Tensor, weights: Tensor | None, displacement: Tensor, epsilon: Tensor
    ) -> Tensor:
        """Return 1/ε sum_n w_n J_n(θ)ᵀ [∇l(h_n(θ)) - ∇l(h_n(θ*))] over one batch, (P, K) and (K,) -> (P, K)."""
        function, loss, parameters = self.problem.function, self.problem.loss, self._parameters

        def pulled_back(weight: Tensor, step: Sequence[Tensor], batch: tuple[Any, ...]) -> tuple[Tensor, ...]:
            inputs, targets, at_reference, weights = batch
            moved = tuple(p + weight * s for p, s in zip(parameters, step, strict=True))
            outputs, pull_back = vjp(lambda values: function(values, inputs), moved)[:2]
            change = (loss.gradient(outputs, targets) - at_reference) / weight
            return pull_back(weighted(change, weights))[0]

        def together(epsilon: Tensor, steps: Sequence[Tensor], *batch: Any) -> tuple[Tensor, ...]:
            inputs, targets, weights = batch
            with torch.no_grad():
                reference = function(parameters, inputs)
            given = (inputs, targets, loss.gradient(reference, targets), weights)
            return reference, *vmap(pulled_back, in_dims=(0, 0, None))(epsilon, steps, given)

        if use_vmap(function, "auto", inputs):
            steps = tuple(unflatten_columns(displacement, parameters))
            found = self._records.replay("divergence", together, epsilon, steps, inputs, targets, weights)
            if found is not None:
                reference, *pieces = found
                check_finite(reference)
                loss.check(reference, targets)
                return flatten_columns(pieces)
        with torch.no_grad():
            reference = function(parameters, inputs)
        check_finite(reference)
        loss.check(reference, targets)
        batch = (inputs, targets, loss.gradient(reference, targets), weights)
        if use_vmap(function, "auto", inputs):
            return flatten_columns(vmap(pulled_back, in_dims=(0, 0, None))(epsilon, steps, batch))
        columns = [
            flatten(pulled_back(weight, unflatten(column, parameters), batch))
            for weight, column in zip(epsilon, displacement.unbind(1), strict=True)
        ]
        return torch.stack(columns, dim=1)

    def _own_gradients(self, displacement: Tensor, columns: Tensor | None) -> Tensor:
        """Return ∇l(z; θ* + εu) for each column's point, (P, K)."""
        function, loss = self.problem.function, self.problem.loss
        epsilon, found = self._epsilon(columns), torch.empty_like(displacement)

        def own(values: Sequence[Tensor], inputs: Inputs, target: Tensor) -> Tensor:
            one = inputs[None] if isinstance(inputs, Tensor) else {name: v[None] for name, v in inputs.items()}
            return loss.own_loss(function(values, one), target[None]).sum()

        for (inputs, targets), rows in self._all_points if columns is None else self._read_points(columns):
            places = rows.to(found.device)
            steps = unflatten_columns(epsilon[places] * displacement[:, places], self._parameters)
            moved = tuple(value + step for value, step in zip(self._parameters, steps, strict=True))
            if loss.by_vmap and use_vmap(function, "auto", inputs):
                pieces = self._records.call("own", vmap(grad(own)), moved, inputs, targets)
            else:
                each = [
                    grad(own)(tuple(value[k] for value in moved), take(inputs, k), targets[k])
                    for k in range(len(targets))
                ]
                pieces = [torch.stack(piece) for piece in zip(*each, strict=True)]
            found[:, places] = flatten_columns(pieces)
        return found

    @cached_property
    def _all_points(self) -> list[tuple[Batch, Tensor]]:
        """The points in batches of equal shapes, with their places: each step of an iteration takes them all."""
        return self._read_points(torch.arange(self.num_points))

    def _read_points(self, columns: Tensor) -> list[tuple[Batch, Tensor]]:
        return list(self.points.data.select_with_places(columns.cpu()))

    def _own_loss(self, parameters: list[Tensor], index: int) -> Tensor:
        """Return l(z), () for point `index`; not finite where an optimiser has diverged: that is its business."""
        ((inputs, target),) = self.points.data.select(torch.tensor([index]))
        return self.problem.loss.own_loss(self.problem.function(parameters, inputs), target).sum()

    def _epsilon(self, columns: Tensor | None) -> Tensor:
        return self.epsilon if columns is None else self.epsilon[columns]

    def _moved(self, column: Tensor, index: int) -> list[Tensor]:
        steps = unflatten(self.epsilon[index] * column, self.problem.parameters)
        return [value + step for value, step in zip(self.problem.parameters, steps, strict=True)]


def per_point(epsilon: float | Tensor, num_points: int) -> Tensor:
    """Return epsilon as (K,), checked: one value for all points, or one each; none of them zero."""
    given = epsilon if isinstance(epsilon, Tensor) else real("epsilon", epsilon)
    values = torch.as_tensor(given, dtype=torch.float64)
    if values.ndim and values.shape != (num_points,):
        raise ValueError(
            f"epsilon has shape {tuple(values.shape)} for {num_points} points: give one number, or one for each "
            "point"
        )
    if not ((values != 0) & values.isfinite()).all():
        raise ValueError(
            "epsilon must not be zero, and finite: it is the weight of the point's loss; the paper has 1e-8"
        )
    return values.expand(num_points)
