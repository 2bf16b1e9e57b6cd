"""The proximal Bregman objective, for many training points at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap

from curvlab.curvature import GaussNewtonOperator
from curvlab.curvature.linearise import use_vmap
from curvlab.influence.proximal_bregman.passes import WeightedBatch, drawn_batches, pieces, weighted_batches
from curvlab.influence.proximal_bregman.point_weights import per_point
from curvlab.linalg import (
    ExampleDraws,
    LinearOperator,
    flatten,
    flatten_columns,
    identity,
    unflatten,
    unflatten_columns,
)
from curvlab.problem import Batches, Data, ModelFunction, OutputLoss, output_loss
from curvlab.problem.batch import Batch, Inputs
from curvlab.problem.memory import Memory
from curvlab.problem.model_function import check_finite
from curvlab.problem.own_losses import of_mean_weight_one
from curvlab.problem.problem import checked_weights


class ProximalBregmanObjective:
    """Q_z(θ) = 1/N sum_n D(h_n(θ), h_n(θ*), y_n) + ε l(z; θ) + damping/2 ‖θ - θ*‖² for each point z.

    Klochkov & Liu (2024), Eq. 5, after Bae et al. (2022), whose ε down-weights; ours up-weights. θ* are the
    model's parameters, D the Bregman divergence of the loss in the outputs. Everything is expressed in the
    scaled displacement u = (θ - θ*) / ε, (P, K), one column for each point, because θ* + εu differs from θ*
    in the last digits only when ε = 1e-8. For the same reason gradients are formed from ∇l(h) - ∇l(h*), never
    from values of D, and in double precision by default.

    Args:
        model: in eval mode; copied, never changed.
        loss: nn.CrossEntropyLoss, nn.MSELoss or nn.BCEWithLogitsLoss.
        train: data of the mean Bregman divergence.
        points: the K examples z.
        damping: proximity weight, positive.
        epsilon: weight ε of a point's loss, not zero: a number, or (K,), one for each point. For an exact
            response take c / ‖∇l(z)‖: all points then move about equally far, neither across the kinks of a ReLU
            network nor so little that rounding decides.
        batch_size: training examples at a time in full-batch gradients and values, with all points together; half
            of the larger of the two whenever memory runs out, with a MemoryWarning.
        memory_budget: bytes for each product with the curvature, see curvlab.curvature.DataOperator.
        dtype: of parameters, data and results.
        weights: w of the training examples, (N,), not negative, where the training loss was 1/N Σ_i w_i l_i: the
            first term is then 1/N sum_n w_n D_n. ε stays what is added to l(z) itself, so leaving example i out
            is ε = -w_i/N.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module,
        train: Data,
        points: Data,
        *,
        damping: float,
        epsilon: float | Tensor,
        batch_size: int = 512,
        memory_budget: float | None = None,
        dtype: torch.dtype = torch.float64,
        weights: Tensor | None = None,
    ) -> None:
        if not damping > 0:
            raise ValueError(f"damping must be positive, got {damping}: it is the weight of the proximity term")
        self.damping = damping
        self.model, self.loss_module, self.train = copy.deepcopy(model).to(dtype), loss, train
        self.function = ModelFunction(self.model)
        self.loss = output_loss(loss)
        if self.loss.reduction != "mean":
            raise ValueError("the objective is a mean over training examples: use a loss with reduction='mean'")
        self._train = Batches.of(self.function, train, batch_size=batch_size)
        self._batch_size, self._memory_budget = batch_size, memory_budget
        self._pass_size: Memory | None = None
        self._points = Batches.of(self.function, points, batch_size=1)
        self.loss = output_loss(of_mean_weight_one(loss, self._train.targets()))
        self._total_count = sum(self.loss.count(targets) for targets in self._train.targets())
        self.num_examples, self.num_points = self._train.num_examples, self._points.num_examples
        self.shape = (self.function.num_parameters, self.num_points)
        self.epsilon = per_point(epsilon, self.num_points).to(self.function.device, dtype)
        self.weights: Tensor | None = None
        if weights is not None:
            self.weights = checked_weights(weights, self.num_examples).to(self.function.device, dtype)
            self._train = self._train.in_fixed_order()

    def fixed_tensors(self) -> Iterator[Tensor]:
        """Yield what the objective is made of: model, ε, points and training data, batch by batch."""
        yield from self.model.state_dict().values()
        yield self.epsilon
        if self.weights is not None:
            yield self.weights
        for source in (self._points, self._train):
            for inputs, targets in source:
                yield from [inputs] if isinstance(inputs, Tensor) else inputs.values()
                yield targets

    def zeros(self) -> Tensor:
        """Return u = 0, the displacement at θ*, (P, K)."""
        return torch.zeros(self.shape, dtype=self.function.dtype, device=self.function.device)

    def curvature(self, dtype: torch.dtype) -> LinearOperator:
        """Return G + damping I at θ*, the Hessian of every Q_z there up to ε, in `dtype`."""
        return self._train_curvature(copy.deepcopy(self.model), dtype) + self.damping * identity

    def curvature_at(self, column: Tensor, index: int, dtype: torch.dtype) -> LinearOperator:
        """Return the Gauss-Newton matrix of Q_z at θ* + εu for point `index`, its own loss included."""
        model = copy.deepcopy(self.model)
        with torch.no_grad():
            for parameter, value in zip(
                ModelFunction(model).live_parameters, self._moved(column, index), strict=True
            ):
                parameter.copy_(value)
        curvature = self._train_curvature(model, dtype) + self.damping * identity
        epsilon = float(self.epsilon[index])
        if epsilon < 0:  # the point is down-weighted: leaving its part out keeps the matrix definite
            return curvature
        return curvature + epsilon * self._gauss_newton(self._points.select(torch.tensor([index])), model, dtype)

    def _train_curvature(self, model: nn.Module, dtype: torch.dtype) -> LinearOperator:
        operator = self._gauss_newton(self.train, model, dtype)
        return operator if self.weights is None else operator.weighted(self.weights)

    def _gauss_newton(self, data: Data, model: nn.Module, dtype: torch.dtype) -> GaussNewtonOperator:
        return GaussNewtonOperator(
            model.to(dtype),
            self.loss_module,
            data,
            batch_size=self._batch_size,
            memory_budget=self._memory_budget,
        )

    def _within_memory(self, compute: Callable[[Memory], Tensor], num_columns: int) -> Tensor:
        """Return compute(size of a pass), all at once as long as that fits."""
        if self._pass_size is None:
            self._pass_size = Memory(columns=self.num_points)
        size = self._pass_size
        return size.run(lambda: compute(size), columns=num_columns)

    def gradient(self, displacement: Tensor, *, columns: Tensor | None = None) -> Tensor:
        """Return ∇Q_z(θ* + εu) / ε for each point, (P, K) -> (P, K); the target is zero.

        `columns` (K',) says which points the columns of u belong to; all by default. Cost: 4F of the training data
        a column, F a forward.
        """
        epsilon = self._epsilon(columns)

        def summed(size: Memory) -> Tensor:
            return self._divergence_gradients(
                weighted_batches(self._train, self.weights), displacement, epsilon, size
            )

        divergence = self._within_memory(summed, displacement.shape[1])
        return divergence / self._total_count + self._regular_gradient(displacement, columns)

    def sampled_gradient(
        self,
        displacement: Tensor,
        *,
        batch_size: int,
        weights: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return an unbiased estimate of `gradient` from one batch, shared by all points.

        Drawn with replacement, uniformly or with probability ∝ `weights`, (N,), then weighted to keep the mean:
        the examples that `GaussNewtonOperator.sample` draws. A batch that does not fit into memory is summed in
        pieces. Cost: 4F of the batch a column.
        """
        divisor = batch_size / self.num_examples * self._total_count
        factors: Tensor | None = None
        if weights is not None:
            drawn, factors = ExampleDraws(weights, self.num_examples).draw(batch_size, generator)
        else:
            source = generator.device if generator is not None else torch.device("cpu")
            drawn = torch.randint(self.num_examples, (batch_size,), generator=generator, device=source)
        if self.weights is not None:
            own = self.weights[drawn.to(self.weights.device)]
            factors = own if factors is None else factors.to(own) * own

        def summed(size: Memory) -> Tensor:
            return self._divergence_gradients(
                drawn_batches(self._train, drawn, factors), displacement, self.epsilon, size
            )

        divergence = self._within_memory(summed, displacement.shape[1])
        return divergence / divisor + self._regular_gradient(displacement, None)

    def value(self, displacement: Tensor, *, columns: Tensor | None = None) -> Tensor:
        """Return Q_z(θ* + εu), (K,). Cost: 1F a column. Rounding hides it where ε‖u‖ is below about 1e-7."""
        own, chosen = torch.zeros_like(displacement[0]), self._chosen(columns)

        def summed(size: Memory) -> Tensor:
            divergence = torch.zeros_like(own)
            for (inputs, targets), loss in pieces(weighted_batches(self._train, self.weights), size, self.loss):
                reference = self.function(self.function.parameters, inputs)
                for k, (index, column) in enumerate(zip(chosen, displacement.unbind(1), strict=True)):
                    outputs = self.function(self._moved(column, index), inputs)
                    divergence[k] += loss.bregman_divergence(outputs, reference, targets).sum()
            return divergence

        with torch.no_grad():
            divergence = self._within_memory(summed, 1)  # one point after the other in any case
            for k, index in enumerate(chosen):
                ((inputs, target),) = self._points.select(torch.tensor([index]))
                outputs = self.function(self._moved(displacement[:, k], index), inputs)
                own[k] = self.loss.own_loss(outputs, target).sum()
        epsilon = self._epsilon(columns)
        proximity = 0.5 * self.damping * epsilon**2 * displacement.square().sum(0)
        return divergence / self._total_count + epsilon * own + proximity

    def _chosen(self, columns: Tensor | None) -> list[int]:
        return list(range(self.num_points)) if columns is None else columns.tolist()

    def _epsilon(self, columns: Tensor | None) -> Tensor:
        return self.epsilon if columns is None else self.epsilon[columns]

    def _moved(self, column: Tensor, index: int) -> list[Tensor]:
        steps = unflatten(self.epsilon[index] * column, self.function.parameters)
        return [value + step for value, step in zip(self.function.parameters, steps, strict=True)]

    def _divergence_gradients(
        self, batches: Iterable[WeightedBatch], displacement: Tensor, epsilon: Tensor, size: Memory
    ) -> Tensor:
        """Return the sum over batches, in passes of so many examples and points, (P, K)."""
        total = torch.zeros_like(displacement)
        for batch, loss in pieces(batches, size, self.loss):
            for start in range(0, displacement.shape[1], size.columns):
                block = slice(start, start + size.columns)
                total[:, block] += self._divergence_gradient(batch, loss, displacement[:, block], epsilon[block])
        return total

    def _divergence_gradient(
        self, batch: Batch, loss: OutputLoss, displacement: Tensor, epsilon: Tensor
    ) -> Tensor:
        """Return 1/ε sum_n J_n(θ)ᵀ [∇l(h_n(θ)) - ∇l(h_n(θ*))] over one batch, (P, K) and (K,) -> (P, K)."""
        inputs, targets = batch
        with torch.no_grad():
            reference = self.function(self.function.parameters, inputs)
        check_finite(reference)
        loss.check(reference, targets)
        at_reference = loss.gradient(reference, targets)

        def pulled_back(weight: Tensor, *step: Tensor) -> tuple[Tensor, ...]:
            moved = tuple(p + weight * s for p, s in zip(self.function.parameters, step, strict=True))
            outputs, pull_back = vjp(lambda values: self.function(values, inputs), moved)[:2]
            return pull_back((loss.gradient(outputs, targets) - at_reference) / weight)[0]

        parameters = self.function.parameters
        if use_vmap(self.function, "auto", inputs):
            return flatten_columns(vmap(pulled_back)(epsilon, *unflatten_columns(displacement, parameters)))
        columns = [
            flatten(pulled_back(weight, *unflatten(column, parameters)))
            for weight, column in zip(epsilon, displacement.unbind(1), strict=True)
        ]
        return torch.stack(columns, dim=1)

    def _regular_gradient(self, displacement: Tensor, columns: Tensor | None) -> Tensor:
        """Return ∇l(z; θ) + damping u."""
        gradients = []
        for column, index in zip(displacement.unbind(1), self._chosen(columns), strict=True):
            ((inputs, target),) = self._points.select(torch.tensor([index]))
            gradients.append(self._point_gradient(self._moved(column, index), inputs, target))
        return torch.stack(gradients, dim=1) + self.damping * displacement

    def _point_gradient(self, parameters: list[Tensor], inputs: Inputs, target: Tensor) -> Tensor:
        leaves = [parameter.requires_grad_() for parameter in parameters]
        with torch.enable_grad():
            outputs = self.function(leaves, inputs)  # not finite when an optimiser has diverged: its business
            own = self.loss.own_loss(outputs, target).sum()
            gradients = torch.autograd.grad(own, leaves, allow_unused=True, materialize_grads=True)
        return flatten(gradients).detach()
