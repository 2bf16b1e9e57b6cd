"""Curvature of models whose parameters, and vectors, are cut up over the ranks (FSDP2), by finite differences.

Each rank moves its part of the parameters, and the model runs as it does in training: nothing but FSDP2's own
forward and backward is needed (Klochkov & Liu 2024, Sec. 2).
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, Self, cast

import torch
from torch import Tensor, nn

from curvlab.curvature.linearise import FD_STEP
from curvlab.influence.derivatives import Measurement
from curvlab.linalg import LinearOperator
from curvlab.parallel.examples_over_ranks import ExamplesOverRanks
from curvlab.parallel.sharded_model import CutVectors, MovedParameters, trained_parameters
from curvlab.problem import Batches, Data, Loss, ModelFunction, Problem, output_loss
from curvlab.problem.batch import weighted
from curvlab.problem.memory import Memory
from curvlab.problem.model_function import check_finite, check_mode, plain_lookups, swapped
from curvlab.problem.problem import Piece
from curvlab.ranks import SAME_SEEDS, Ranks
from curvlab.seeding import Seed, as_generator

# ‖θ‖ of the network that FD_STEP was chosen on. Rounding θ + δv costs eps ‖θ‖ / step, so that the step grows with
# the norm of larger networks.
_NORM_OF_STEP = 55.0


class ShardedOperator(LinearOperator):
    """1/n sum over all ranks' examples of symmetric matrices, on vectors of which rank r holds P_r of P numbers.

    Solvers, spectra, estimators and `influence` of curvlab run on it as on DataParallelOperator: a vector is what
    this rank holds of it, (P_r,) or (P_r, K), and inner products are summed over the ranks. Per rank they need 1/R
    of the memory. `cut.own_part` and `cut.whole` go between the two for small models.

    Derivatives along v are central differences, [f(θ + δv) - f(θ - δv)] / 2δ with δ = fd_step / ‖v‖. Relative
    errors of products are about 1e-9 in float64 and 1e-3 in float32 for smooth networks, more where kinks (ReLU)
    are near; no solver reaches a smaller residual. A network in float64 that computes some layers in float32 (the
    norms of Llama and Mistral) needs the step of float32, `fd_step=1e-3`, and has its errors. All ranks make the
    same calls, because each takes part in gathering the parameters.

    Args:
        model: in eval mode, under `fully_shard` (see `shard_parameters`) with a mesh of all ranks, in float32 or
            float64 throughout. Its parameters and gradients are as before after each call.
        loss: see GaussNewtonOperator.
        share: this rank's own examples; shares may be of any sizes.
        batch_size: examples at a time.
        fd_step: norm of the perturbation δv of the parameters; None: 1e-6 in float64 and 1e-3 in float32, more in
            proportion to the parameters' norm where that is above 55.
        ranks: the process group's by default.

    Attributes:
        cut: how vectors are cut up.

    Memory beside the vectors: a copy of this rank's parameters, their gradients, and what FSDP2 takes for a
    training step with one batch. Ranks with fewer batches than others repeat an example, with weight 0.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        share: Data,
        *,
        batch_size: int = 8,
        fd_step: float | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        ranks = Ranks.current() if ranks is None else ranks
        if fd_step is not None and not fd_step > 0:
            raise ValueError(f"fd_step must be positive, got {fd_step}")
        trained = trained_parameters(model, ranks)
        self.cut = CutVectors([parameter.shape for parameter in trained], ranks)
        super().__init__(sum(self.cut.sizes), dtype=trained[0].dtype, device=trained[0].device)
        self.num_rows, self.ranks = self.cut.num_own, ranks
        self.model, self.loss, self.fd_step = model, output_loss(loss), fd_step
        function = ModelFunction(model)  # its parameters are parts here: FSDP2's forward is run instead
        check_mode(model)
        data = Batches(share, batch_size=batch_size, device=self.device, dtype=self.dtype)
        self.problem = Problem(function, self.loss, data, Memory(estimates=False), loss)
        self._examples = ExamplesOverRanks(ranks, self.problem)

    # ------------------------------------------------------------------------------------ products
    @abstractmethod
    def _add_product(self, at: MovedParameters, piece: Piece, vector: Tensor, delta: Tensor, row: Tensor) -> None:
        """Add the sum over a piece's examples of weighted matrices times a vector, (P_r,), to `row`."""

    @torch.inference_mode(False)
    def matmat(self, vectors: Tensor) -> Tensor:
        """Return A V, (P_r, K) -> (P_r, K)."""
        rows = vectors.detach().T.contiguous()
        total = torch.zeros_like(rows)
        if len(rows) > 0:
            with self._moving() as at:
                deltas = self._deltas(at, vectors)
                for piece in self._in_step():
                    for vector, delta, row in zip(rows, deltas, total, strict=True):
                        self._add_product(at, piece, vector, delta, row)
            total /= self.divisor
        return total.T

    @torch.inference_mode(False)
    def gradient(self) -> Tensor:
        """Return this rank's part of the gradient of the mean loss over all ranks' examples, (P_r,). Cost: 3F."""
        total = torch.zeros(self.num_rows, dtype=self.dtype, device=self.device)
        with self._moving() as at:
            for piece in self._in_step():
                self._add_gradient(at, piece, total)
        return total / self.divisor

    def _add_gradient(self, at: MovedParameters, piece: Piece, row: Tensor, scale: float | Tensor = 1.0) -> None:
        outputs = self._outputs(piece)
        at.pull_back(outputs, scale * weighted(self.loss.gradient(outputs.detach(), piece[1]), piece[2]), row)

    def _outputs(self, piece: Piece) -> Tensor:
        """Return the model's outputs, with their graph where gradients are on."""
        inputs, targets, _ = piece
        cached = hasattr(getattr(self.model, "config", None), "use_cache")  # memory that nobody here reads
        keywords: dict[str, Any] = {"use_cache": False} if cached else {}
        with swapped(plain_lookups(self.model)):
            if isinstance(inputs, Mapping):
                found = self.model(**keywords, **inputs)
            else:
                found = self.model(inputs, **keywords)
        outputs: Tensor = found if isinstance(found, Tensor) else found.logits
        check_finite(outputs.detach())
        self.loss.check(outputs.detach(), targets)
        return outputs

    def _moving(self) -> MovedParameters:
        return MovedParameters(self.model, self.cut)

    def _deltas(self, at: MovedParameters, vectors: Tensor) -> Tensor:
        """Return δ for each column, (K,)."""
        step = self.fd_step
        if step is None:
            own = torch.stack([values.square().sum() for values in at.origin]).sum()
            norm = float(self.ranks.sum(own).sqrt())
            step = FD_STEP[self.dtype] * max(1.0, norm / _NORM_OF_STEP)
        # A zero vector moves nothing, whatever δ is: the clamp only keeps it finite.
        return step / self.norm(vectors).clamp(min=torch.finfo(self.dtype).tiny)

    def _moved(self, at: MovedParameters, piece: Piece, vector: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs at θ + δv and at θ - δv; the parameters are then θ again. Cost: 2F."""
        with torch.no_grad():
            at.move(vector, delta)
            plus = self._outputs(piece)
            at.move(vector, -delta)
            minus = self._outputs(piece)
            at.move(vector, None)
        return plus, minus

    # ------------------------------------------------------------------------------------ examples
    def sample(
        self, batch_size: int, generator: torch.Generator | None = None, probabilities: Tensor | None = None
    ) -> Self:
        """Return the operator on `batch_size` of all ranks' examples, see DataParallelOperator."""
        mine, factors, divisor = self._examples.draw(batch_size, generator, probabilities)
        if len(mine):
            return self._of(self.problem.part(mine, weights=factors, divisor=divisor))
        return self._of(replace(self.problem, selected=[], given_divisor=divisor))

    def weighted(self, weights: Tensor) -> Self:
        """Return 1/n Σ_i w_i A_i over all ranks' examples (DataOperator.weighted), by this rank's own `weights`.

        All ranks call it.
        """
        divisor = self.divisor
        own = self._examples.refused_together(lambda: self.problem.weighted(weights).part(divisor=divisor))
        return self._of(own)

    def _of(self, problem: Problem) -> Self:
        chosen = copy.copy(self)
        chosen.problem = problem
        return chosen

    def _in_step(self, *, whole: bool = False) -> Iterator[Piece]:
        """Yield this rank's batches; where only other ranks still have some, an example with weight 0.

        Args:
            whole: of the whole data, in its order; refused for a sample.
        """
        if whole and not self.problem.is_whole:
            raise ValueError("this takes the whole data: pass the operator itself, not a sample of it")
        data = self.problem.data.in_fixed_order()
        pieces = (replace(self.problem, data=data) if whole else self.problem).passes()
        spare: Piece | None = None
        while True:
            found = next(pieces, None)
            if not bool(self.ranks.sum(torch.tensor(0 if found is None else 1))):
                return
            if found is None and spare is None:
                spare = (*data.select(torch.zeros(1, dtype=torch.long))[0], torch.zeros(1))
            yield cast("Piece", spare if found is None else found)

    def example_gradients(self, data: Data, measurement: Measurement | None = None) -> Tensor:
        """Return this rank's part of each example's gradient of its loss or a measurement, (P_r, N).

        Args:
            data: the same on every rank.
            measurement: (outputs, targets) -> (N,); None: the loss of each, class weights of mean one.

        Cost: 3F of each example on every rank, for they go through it together. Memory: N P_r.
        """
        measured = measurement or self._examples.normalised_loss.own_loss
        examples = Batches(data, batch_size=1, device=self.device, dtype=self.dtype).in_fixed_order()
        self.ranks.agree(
            torch.tensor(examples.num_examples), "how many examples they measure: pass the same on every rank"
        )
        rows = torch.zeros(examples.num_examples, self.num_rows, dtype=self.dtype, device=self.device)
        with torch.inference_mode(False), torch.enable_grad(), self._moving() as at:
            for index, row in enumerate(rows):
                ((inputs, targets),) = examples.select(torch.tensor([index]))
                outputs = self._outputs((inputs, targets, None))
                leaf = outputs.detach().requires_grad_()
                (signal,) = torch.autograd.grad(_one_each(measured(leaf, targets), targets).sum(), leaf)
                # All ranks have gone through the same example, and what they pull back is summed.
                at.pull_back(outputs, signal if self.ranks.is_first else torch.zeros_like(signal), row)
        return rows.T

    @torch.inference_mode(False)
    def example_derivatives(self, directions: Tensor) -> Tensor:
        """Return the derivative of each example's own loss along directions, (P_r, K) -> (N, K), on the CPU.

        Of all ranks' examples, class weights of mean one. Cost: 2F of the data a direction.
        """
        measured = self._examples.normalised_loss.own_loss
        rows = [torch.zeros(0, directions.shape[1], dtype=self.dtype)]
        with self._moving() as at:
            deltas = self._deltas(at, directions)
            for piece in self._in_step(whole=True):
                columns = []
                for vector, delta in zip(directions.T.contiguous(), deltas, strict=True):
                    plus, minus = self._moved(at, piece, vector, delta)
                    columns.append((measured(plus, piece[1]) - measured(minus, piece[1])) / (2 * delta))
                if piece[2] is None:
                    rows.append(torch.stack(columns, dim=1).cpu())
        return torch.cat(self.ranks.gather(torch.cat(rows)))

    @property
    def num_examples(self) -> int:
        """N, examples of all ranks together."""
        return self._examples.num

    @property
    def divisor(self) -> float:
        """n, by which a product divides the sum over all ranks' examples."""
        return self._examples.divisor if self.problem.given_divisor is None else self.problem.given_divisor

    # ------------------------------------------------------------------------------------- vectors
    def gram(self, left: Tensor, right: Tensor) -> Tensor:
        """Return LᵀR, summed over the ranks."""
        return self.ranks.sum(super().gram(left, right))

    def inner(self, left: Tensor, right: Tensor) -> Tensor:
        """Return <l, r> column by column, summed over the ranks."""
        return self.ranks.sum(super().inner(left, right))

    def randn(self, num_columns: int, generator: Seed = None) -> Tensor:
        """Return this rank's part of the vectors that one process would draw (with a CPU's generator)."""
        generator = as_generator(generator)
        drawn = self.cut.randn(num_columns, generator, torch.empty(0, dtype=self.dtype, device=self.device))
        after = torch.zeros(1)
        if generator is not None:  # a number from where they have come to, on whatever device they draw
            after = torch.rand(1, generator=generator.clone_state(), device=generator.device).cpu()
        self.ranks.agree(after, SAME_SEEDS)
        return drawn

    def tensor_slices(self, sizes: Sequence[int]) -> list[slice]:
        """Return each parameter's place in this rank's part of a vector; `sizes` are those of whole ones."""
        if list(sizes) != self.cut.sizes:
            raise ValueError(
                "tensor_sizes of a sharded model must be those of its parameters, cut as they are: "
                "[p.numel() for p in model.parameters() if p.requires_grad]"
            )
        return self.cut.slices

    def to_dense(self, *, chunk_size: int = 256) -> NoReturn:
        """Raise: a dense matrix would have to lie on one rank."""
        raise NotImplementedError("a sharded operator has no dense form: take DataParallelOperator")


class ShardedGaussNewtonOperator(ShardedOperator):
    """The mean Gauss-Newton matrix JᵀSJ, see GaussNewtonOperator; J v by central differences.

    Cost of a product, in forwards F of the share: 5F.
    """

    @property
    def is_psd(self) -> bool:
        """Whether the loss is known to be convex in the outputs: of a function, where it says so."""
        return self.loss.is_psd is True

    def _add_product(self, at: MovedParameters, piece: Piece, vector: Tensor, delta: Tensor, row: Tensor) -> None:
        plus, minus = self._moved(at, piece, vector, delta)
        with torch.enable_grad():
            outputs = self._outputs(piece)
        curved = self.loss.hessian_product(outputs.detach(), piece[1], (plus - minus) / (2 * delta))
        at.pull_back(outputs, weighted(curved, piece[2]), row)

    @torch.inference_mode(False)
    def quadratic_forms(self, vectors: Tensor) -> Tensor:
        """Return vᵀG v for each column, (P_r, K) -> (K,), fp64, by two forward passes each."""
        total = torch.zeros(vectors.shape[1], dtype=torch.float64, device=self.device)
        with self._moving() as at:
            deltas = self._deltas(at, vectors)
            for piece in self._in_step():
                for index, vector in enumerate(vectors.T.contiguous()):
                    plus, minus = self._moved(at, piece, vector, deltas[index])
                    tangents = (plus - minus) / (2 * deltas[index])
                    # S at the mean of the two: h(θ) but for δ².
                    curved = self.loss.hessian_product((plus + minus) / 2, piece[1], tangents)
                    total[index] += (tangents * weighted(curved, piece[2])).double().sum()
        return self.ranks.sum(total) / self.divisor

    @torch.inference_mode(False)
    def output_curvatures(self) -> Tensor:
        """Return N/n tr(S_i) of all ranks' examples, (N,), fp64, see curvlab.curvature.output_curvatures.

        The scores of importance sampling that need no gradient: `importance_probabilities(scores, uniform=0.1)`
        are weights for `sample` and for `Lissa`. Exact traces, `Rows` and `Ekfac` need gradients of single
        examples layer by layer, which a sharded operator does not form. Cost: one forward of the data.
        """
        own = [torch.zeros(0, dtype=torch.float64)]
        with torch.no_grad(), self._moving():
            for piece in self._in_step(whole=True):
                outputs = self._outputs(piece)
                if piece[2] is None:
                    own.append(self.loss.hessian_traces(outputs, piece[1]).double().cpu())
        return torch.cat(self.ranks.gather(torch.cat(own))) * (self.num_examples / self.divisor)


class ShardedHessianOperator(ShardedOperator):
    """The mean Hessian, see HessianOperator: [∇L(θ + δv) - ∇L(θ - δv)] / 2δ. Cost of a product: 6F."""

    def _add_product(self, at: MovedParameters, piece: Piece, vector: Tensor, delta: Tensor, row: Tensor) -> None:
        for sign in (1.0, -1.0):
            at.move(vector, sign * delta)
            self._add_gradient(at, piece, row, sign / (2 * delta))
        at.move(vector, None)


def _one_each(values: Tensor, targets: Tensor) -> Tensor:
    """Return a measurement's values, or say what they must be."""
    if values.shape != targets.shape[:1]:
        raise ValueError(
            f"measurement must return one number for each example, shape {tuple(targets.shape[:1])}, got "
            f"{tuple(values.shape)}"
        )
    return values
