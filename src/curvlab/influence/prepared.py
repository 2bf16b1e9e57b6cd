"""Influence for many queries: what does not depend on the query is set up once, and can be stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from curvlab.arguments import whole
from curvlab.curvature import GaussNewtonOperator
from curvlab.curvature.examples import covering_layers, own_gauss_newton
from curvlab.curvature.rows import DenseRows, OuterRows
from curvlab.files import decode, encode, write_atomically
from curvlab.influence.derivatives import (
    Measurement,
    derivatives_along,
    directional_derivatives,
    per_example_gradients,
    sources_of,
)
from curvlab.influence.results import Origin
from curvlab.influence.scores import Influence, Retraining, check_run, curvature_added, warn_unless_converged
from curvlab.iterate import Key
from curvlab.linalg import LinearOperator, identity
from curvlab.problem import Data, Loss, Problem
from curvlab.progress import can_be_silent
from curvlab.seeding import generator_of
from curvlab.shown import Shown, Summary, counted
from curvlab.solvers import BlockConjugateGradient, default_solver
from curvlab.solvers.preconditioners import Rows
from curvlab.solvers.preconditioners.nystrom import NystromInverse
from curvlab.solvers.preconditioners.rows import RowsInverse
from curvlab.training import RunLength, TrainingHistory, TrainingRun

_HEADER = "curvlab-prepared-influence-1"


@can_be_silent
def prepare_influence(
    model: nn.Module | Problem,
    loss: Loss | None = None,
    train: Data | None = None,
    *,
    damping: float | None = None,
    run: TrainingHistory | RunLength | TrainingRun | None = None,
    retraining: Retraining | None = None,
    num_queries: int = 25,
    rtol: float = 1e-2,
    batch_size: int | None = None,
    memory_budget: float | None = None,
    weights: Tensor | None = None,
    progress: bool = True,
    generator: torch.Generator | int | None = None,
) -> PreparedInfluence:
    """Return influence on this training set with the set-up of its solver done: see `PreparedInfluence`.

    Set up are the rows of the examples that hold most of the curvature (`Rows`), or a Nyström approximation of
    rank 4 `num_queries` of all of it: what `default_solver` would build anew at every call of `influence`.

    Args:
        model: in eval mode; or a `Problem` in the place of model, loss, train and weights.
        loss: as for `influence`.
        train: likewise.
        damping: likewise; this or `run`.
        run: likewise.
        retraining: likewise.
        num_queries: about how many test examples one call will ask for; more do no harm.
        rtol: residual to reach for each query.
        batch_size: examples at a time.
        memory_budget: bytes for each pass.
        weights: of the training examples, as for `influence`.
        progress: show bars.
        generator: of the set-up's random numbers, or a seed; by default 0.

    Cost: that of `Rows` or `Nystrom(4 num_queries)`, which `num_matvecs` of the result counts.

    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <torch._C.Generator object at ...>
    >>> model, data = nn.Linear(4, 3), (torch.randn(20, 4), torch.arange(20) % 3)
    >>> prepared = prepare_influence(model, nn.CrossEntropyLoss(), data, damping=0.1)
    >>> prepared.scores(data, points=[0, 5]).scores.shape
    torch.Size([20, 2])
    """
    damping, _ = curvature_added(damping, run, retraining, filtered=False)
    num_queries = whole("num_queries", num_queries)
    problem = Problem.of(model, loss, train, weights, memory_budget, batch_size=batch_size).normalised()
    check_run(run, problem)
    damped = GaussNewtonOperator(problem) + damping * identity
    solver = default_solver(problem.num_parameters, num_queries, rtol=rtol, operator=damped)
    recipe, rank = solver.preconditioner, None
    inverse, num_matvecs = None, 0
    if recipe is not None and not isinstance(recipe, LinearOperator):
        inverse, num_matvecs = recipe.build(damped, generator=generator_of(generator, problem.device))
        rank = recipe.rank if isinstance(recipe, Rows) else None
    solver = replace(solver, preconditioner=inverse)
    return PreparedInfluence(problem, damped, solver, num_matvecs, rank)


@dataclass(frozen=True, eq=False, repr=False)
class PreparedInfluence(Shown):
    """Influence of the examples of one training set, for one query after another; `prepare_influence` makes it.

    Attributes:
        problem: model, loss and training set.
        damped: G + damping I.
        solver: with the approximate inverse as its preconditioner.
        num_matvecs: products that the set-up took.
        rank: of the rows' compression, if they are compressed.
    """

    problem: Problem
    damped: LinearOperator
    solver: BlockConjugateGradient
    num_matvecs: int
    rank: int | None = None

    def summary(self) -> Summary:
        """Return what is set up, and what it took."""
        inverse = self.solver.preconditioner
        kind = "nothing to set up" if inverse is None else type(inverse).__name__.removesuffix("Inverse")
        return Summary(
            "prepared influence:",
            kind,
            f"{counted(self.problem.num_examples, 'training example')}, damping {self.damped.damping:.3g}",
            (counted(self.num_matvecs, "product"), f"residual {self.solver.rtol:g} for each query"),
        )

    @can_be_silent
    def scores(
        self,
        test: Data,
        *,
        points: Tensor | Sequence[int] | None = None,
        measurement: Measurement | None = None,
        progress: bool = True,
    ) -> Influence:
        """Return what `influence(..., test, points=points)` returns, solved for the test examples.

        Cost: for each test example a gradient, a few products, and a derivative of the training losses.
        """
        solution = self._solved(per_example_gradients(self.problem.with_data(test), measurement=measurement).T)
        sources, chosen = sources_of(self.problem, points)
        scores = -directional_derivatives(sources, directions=solution.x, batch_size=self._batch_size).T
        measured, damping = measurement is not None, self.damped.damping
        origin = Origin.of(
            self.problem, measured=measured, damping=damping, curvature="Gauss-Newton", solver=self.solver
        )
        return Influence(scores, solution, "test", chosen, origin)

    @can_be_silent
    def by_module(
        self,
        test: Data,
        *,
        points: Tensor | Sequence[int] | None = None,
        of: Callable[[str], str] | None = None,
        progress: bool = True,
    ) -> dict[str, Tensor]:
        """Return the part of each score that goes through each module, by name, (num_test, num_points) each.

        -∇_b l(z)ᵀ x_b for the parameters b of a module, with x = (G + damping I)⁻¹ ∇l(test) solved over all
        parameters: the parts sum to `scores`. The gradient of the training example is what is split. kronfluence
        splits likewise, but its inverse couples no two modules.

        Args:
            test: the queries.
            points: indices of training examples; None: all.
            of: the name of the part that a parameter belongs to; by default the module that holds it.
            progress: show bars.

        Cost: as `scores`, with a derivative of the training losses for each module.
        """
        of = of or (lambda name: name.rpartition(".")[0] or name)
        x = self._solved(per_example_gradients(self.problem.with_data(test)).T).x
        sources, _ = sources_of(self.problem, points)
        found: dict[str, Tensor] = {}
        sizes = [parameter.numel() for parameter in self.problem.parameters]
        for name, rows in zip(self.problem.function.names, torch.arange(len(x)).split(sizes), strict=True):
            found.setdefault(of(name), torch.zeros_like(x))[rows] = x[rows]
        return {
            name: -directional_derivatives(sources, directions=part, batch_size=self._batch_size).T
            for name, part in found.items()
        }

    @can_be_silent
    def by_token(
        self,
        test: Data,
        *,
        points: Tensor | Sequence[int] | None = None,
        split: str = "points",
        progress: bool = True,
    ) -> Tensor:
        """Return the part of each score that each predicted token has, (num_test, num_points, T), for sequences.

        A sequence's loss is a mean over its predicted tokens, 1/T Σ_t l_t, so -∇(l_t / T)ᵀ x sums to the score
        over t; 0 where a target is ignored, and behind the end of shorter sequences. kronfluence splits the same
        sum by the position at which a layer reads, not by the token that is predicted.

        Args:
            test: the queries.
            points: indices of training examples; None: all.
            split: "points" splits each training example by its tokens, "test" each query by its own; the latter
                solves a system for each point.
            progress: show bars.

        Cost: as `scores`.
        """
        if split not in ("points", "test"):
            raise ValueError(f"split must be 'points' or 'test', got {split!r}")
        if not self.problem.loss.token_wise:
            raise ValueError(
                f"{type(self.problem.given_loss).__name__} has no tokens: by_token needs nn.CrossEntropyLoss over "
                "sequences, outputs (N, T, C) and targets (N, T)"
            )
        tested, (sources, _) = self.problem.with_data(test), sources_of(self.problem, points)
        solved, other = (tested, sources) if split == "points" else (sources, tested)
        x = self._solved(per_example_gradients(solved).T).x
        pieces = derivatives_along(other, x, self._token_losses, self._batch_size)
        longest = max(piece.shape[2] for piece in pieces)
        padded = [nn.functional.pad(piece, (0, longest - piece.shape[2])) for piece in pieces]
        found = -torch.cat(padded)  # (N of the other side, K, T)
        return found.transpose(0, 1) if split == "points" else found

    def _token_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return each token's part of its sequence's own loss, (N, T)."""
        loss = self.problem.loss
        if targets.ndim != 2:
            raise ValueError(
                f"by_token is for sequences: targets (N, T), got shape {tuple(targets.shape)}. An example of one "
                "prediction has one token: take `scores`"
            )
        losses = loss.per_example(outputs.reshape(-1, 1, outputs.shape[-1]), targets.reshape(-1, 1))
        whole, own = loss.per_example(outputs, targets).detach(), loss.own_loss(outputs, targets).detach()
        share = torch.where(whole != 0, own / torch.where(whole != 0, whole, 1.0), 0.0)  # 1/T
        return losses.reshape(targets.shape) * share[:, None]

    # -------------------------------------------------------------------------------- the file
    def save(self, path: str | Path) -> None:
        """Write what was set up to a file, atomically. Cost: a product, by which `load` knows the matrix again."""
        inverse = self.solver.preconditioner
        kept: tuple[Any, ...] | None = None
        if isinstance(inverse, NystromInverse):
            kept = (inverse.vectors, inverse.eigenvalues)
        elif isinstance(inverse, RowsInverse):
            kept = tuple(part.tensors for part in inverse.parts)
        entry = {"key": _key(self.damped).entries, "kind": type(inverse).__name__, "kept": kept}
        others = {"rtol": self.solver.rtol, "num_matvecs": self.num_matvecs, "rank": self.rank}
        others |= {"damping": self.damped.damping}
        write_atomically(Path(path), encode(entry | others, _HEADER))

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: nn.Module | Problem,
        loss: Loss | None = None,
        train: Data | None = None,
        *,
        batch_size: int | None = None,
        memory_budget: float | None = None,
        weights: Tensor | None = None,
    ) -> PreparedInfluence:
        """Return what `save` wrote, for the same model, loss and training set, which the file does not hold.

        Raises:
            ValueError: the file belongs to another matrix: the model was trained on, the data is other data.
            DamagedFileError: the file is no such thing.

        Cost: a product to compare with the file's; of rows, the factor of their kernel.
        """
        problem = Problem.of(model, loss, train, weights, memory_budget, batch_size=batch_size).normalised()
        entry = decode(Path(path).read_bytes(), _HEADER, device=problem.device)
        matrix, kept = GaussNewtonOperator(problem), entry["kept"]
        damped: LinearOperator = matrix + entry["damping"] * identity
        if changed := _key(damped).differs_in(entry["key"]):
            raise ValueError(
                f"{path} belongs to another {' and '.join(changed)}: prepare_influence for this model and data"
            )
        inverse: LinearOperator | None = None
        if entry["kind"] == "NystromInverse":
            vectors, eigenvalues = kept
            inverse = NystromInverse(vectors, eigenvalues, damped.damping, like=damped)
        elif entry["kind"] == "RowsInverse":
            layers = covering_layers(own_gauss_newton(matrix)) or [None]  # type: ignore[list-item]
            parts: list[OuterRows | DenseRows] = [
                OuterRows(layer, *tensors)
                if layer is not None and len(tensors) == 3
                else DenseRows(layer, *tensors)
                for layer, tensors in zip(layers, kept, strict=True)
            ]
            inverse = RowsInverse(parts, damped.damping, entry["rank"], like=damped)
        solver = BlockConjugateGradient(entry["rtol"], preconditioner=inverse)
        return cls(problem, damped, solver, entry["num_matvecs"], entry["rank"])

    @property
    def _batch_size(self) -> int:
        return self.problem.data.batch_size

    def _solved(self, columns: Tensor) -> Any:
        solution = self.solver.solve(self.damped, columns.contiguous())
        warn_unless_converged(solution)
        return solution


def _key(damped: LinearOperator) -> Key:
    return Key("prepared influence", {"matrix": damped})
