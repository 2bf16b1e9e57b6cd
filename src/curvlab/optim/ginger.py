"""Ginger: natural gradient with a moving average of the Fisher matrix, cut to a low rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from curvlab.arguments import positive
from curvlab.optim.low_rank import LowRankOptimizer, ParameterBlock, Pieces, Scope, norm

PUBLISHED_GINGER: dict[str, Any] = {
    "decay": 0.99,
    "damping": 1e-5,
    "momentum": 0.9,
    "scope": "tensor",
    "clip": 1.0,
}
"""Settings of the authors' code beside lr and rank: Ginger(parameters, lr=0.1, rank=4, **PUBLISHED_GINGER).

Its second gradient is that of `sampled_label_loss`, with the model in eval mode.
"""

_LEAST_PERIOD = 8  # updates between measurements of BBᵀ, at least


class Ginger(LowRankOptimizer):
    """w <- w - lr (γI + U diag(σ) Uᵀ)⁻¹ ∇L, U diag(σ) Uᵀ ≈ G_t = α G_{t-1} + (1-α) d_t d_tᵀ, G_0 = 0 (Sec. 2.3).

    d_t is the gradient for labels that the model draws itself, scaled so that E d dᵀ is the Fisher matrix
    (Eq. 8; `sampled_label_loss` has that scale). After each update all but the τ largest eigenvalues are dropped.

    Usage, in each step::

        optimizer.zero_grad()
        sampled_label_loss(loss, model(inputs), targets, generator=generator).backward()
        optimizer.update_curvature()
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()

    The printed formulas (Eq. 17, Algorithm 1) do not fit each other. Consistent, and what the authors' code
    computes, is (γI + αUΣUᵀ + (1-α) d dᵀ)⁻¹ = γ⁻¹I - (U K Uᵀ + β h hᵀ) with K from ασ in place of σ in Eq. 16,
    h = (γI + αUΣUᵀ)⁻¹ d, β = (1-α)/(1 + (1-α) hᵀd). The best approximation of that inverse of rank τ (beside γ⁻¹I)
    keeps the τ largest κ = σ/(γ(γ+σ)) of the matrix in brackets, which grow with σ. So it keeps the same
    eigenvectors as the best approximation of αUΣUᵀ + (1-α) d dᵀ itself, and its error is κ of the first σ dropped.
    We update that matrix: σ = γ²κ/(1-γκ), Eq. 18, loses all digits where σ >> γ, in single precision already for
    σ = 1 and γ = 1e-5, and the state would depend on γ.

    The state is B (τ, P) with orthonormal rows, and C (τ, τ): U diag(σ) Uᵀ = Bᵀ C B. An update finds the part of d
    outside the rows, p, and the vector w that is dropped from the span of B and p, by an eigendecomposition of
    size τ + 1; a reflection that takes w to the last row and leaves it out makes B the basis of what is kept. That
    costs O(Pτ), where multiplying by all eigenvectors would cost O(Pτ²) (the paper's "future direction").

    B is in single precision, also for bfloat16 parameters (double for double); C in double, on the host. Rows that
    have lost orthonormality by more than rounding are repaired: BBᵀ is measured in every max(τ, 8)-th update, and
    the repair leaves Bᵀ C B as it is. With B in single precision, a gradient within the rows but for 1e-7 of its
    length has a direction wrong by up to 1e-7 ‖∇L‖/γ.

    Cost: update 12 Pτ flops (about 7 passes over B; BBᵀ is 2 Pτ more on average), τ³ on the host and one wait for
    the device; step 4 Pτ flops and one wait. Memory: (τ + 1) P numbers with momentum, else τP; 2 P temporary.
    State of a parameter: "rows", "momentum", "step"; the first of each block also "core" (C), "num_rows_used",
    "num_updates".

    Args:
        params: real floating-point; settings may differ between groups.
        lr: factor of the step.
        rank: τ.
        decay: α.
        damping: γ. Outside the rows the step is lr/γ times the gradient: γ = 1e-5 needs lr as small, or clip.
        momentum: μ, m <- μm + (1-μ)∇L, divided by 1-μᵗ, takes the place of ∇L.
        scope: one matrix for all parameters together ("global"), each group, or each tensor.
        weight_decay: decoupled, as in torch.optim.AdamW: each step also takes lr · weight_decay of the parameters.
            (Added to the gradient it would be multiplied by G⁻¹, up to 1/γ.)
        maximize: step uphill.
        clip: bound on each entry of the direction, before lr; None: no bound.
        normalize: take γ G⁻¹ for G⁻¹: lr is then that of SGD, from which the step differs within the rows alone.

    Example:
        >>> from curvlab.optim import sampled_label_loss
        >>> model, loss = torch.nn.Linear(3, 2), torch.nn.CrossEntropyLoss()
        >>> inputs, targets = torch.eye(3), torch.tensor([0, 1, 1])
        >>> generator = torch.Generator().manual_seed(0)
        >>> settings = {"rank": 2, "decay": 0.9, "damping": 0.1, "normalize": True}
        >>> optimizer, before = Ginger(model.parameters(), lr=0.1, **settings), loss(model(inputs), targets)
        >>> for _ in range(20):
        ...     optimizer.zero_grad()
        ...     sampled_label_loss(loss, model(inputs), targets, generator=generator).backward()
        ...     optimizer.update_curvature()
        ...     optimizer.zero_grad()
        ...     loss(model(inputs), targets).backward()
        ...     _ = optimizer.step()
        >>> bool(loss(model(inputs), targets) < 0.9 * before)
        True

    Raises:
        ValueError: a setting out of range.
        TypeError: parameters or gradients of another kind.
    """

    momentum_is_average = True

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        rank: int,
        decay: float,
        damping: float,
        momentum: float = 0.0,
        scope: Scope = "global",
        weight_decay: float = 0.0,
        maximize: bool = False,
        clip: float | None = None,
        normalize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "rank": rank,
            "decay": decay,
            "damping": damping,
            "momentum": momentum,
            "scope": scope,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "clip": clip,
            "normalize": normalize,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def eigendecompositions(self) -> list[tuple[Tensor, Tensor]]:
        """Return σ (k,), falling, and U (P, k) of each block, k the vectors seen so far up to τ.

        Blocks stand as in `scope`, parameters in the order of the groups. Cost: O(Pτ²), and another copy of B.
        """
        found = []
        for block in self._blocks():
            values, vectors = torch.linalg.eigh(_core(block))
            kept = block.state.get("num_rows_used", 0)
            values, vectors = values.flip(0)[:kept], vectors.flip(1)[:, :kept].to(block.parameters[0].device)
            pieces = []
            for parameter in block.parameters:
                rows = block.rows(parameter)
                if rows is None:
                    rows = vectors.new_zeros(block.num_rows, parameter.numel())
                pieces.append(rows.mT.double() @ vectors)
            found.append((values.clamp_min(0).to(vectors), torch.cat(pieces)))
        return found

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        positive("damping", group["damping"], "it is γ of the paper")

    def _block(self, members: list[Tensor], settings: dict[str, Any]) -> ParameterBlock:
        block = super()._block(members, settings)
        block.num_rows = min(block.num_rows, block.size)
        return block

    def _measure(self, block: ParameterBlock, pieces: Pieces) -> tuple[Pieces, Tensor]:
        # Twice: the first remainder is orthogonal to the rows up to rounding of d, the second up to its own.
        first = block.product(pieces)
        remainder = block.minus_combination(pieces, first)
        second = block.product(remainder)
        remainder = block.minus_combination(remainder, second)
        numbers = [first.double() + second.double(), torch.stack([norm(remainder), norm(pieces)])]
        if (block.state.get("num_updates", 0) + 1) % max(block.num_rows, _LEAST_PERIOD) == 0:
            numbers.append(block.gram().flatten())
        return remainder, torch.cat(numbers)

    # Differs from Algorithm 1 in:
    # 1. α stands where the moving average asks for it (see the class); the printed K and h belong to two matrices.
    # 2. The matrix is kept, not its inverse: the state does not depend on γ, and Eq. 18 is not needed.
    # 3. One reflection takes what is dropped out of the basis, O(Pτ); all eigenvectors would cost O(Pτ²).
    # 4. A gradient within the rows but for rounding adds no direction; rows that drift are made orthonormal again.
    # Differs from the authors' code (`PUBLISHED_GINGER`) in:
    # 5. One matrix for all parameters is the default, and nothing is clipped unless asked for.
    def _update_blocks(self, measured: list[tuple[ParameterBlock, Pieces, Tensor]]) -> None:
        by_size: dict[int, list[tuple[ParameterBlock, Pieces, Tensor]]] = {}
        for own in measured:
            by_size.setdefault(own[0].num_rows, []).append(own)
        for size, members in by_size.items():
            self._update_stack(size, members)

    def _update_stack(self, size: int, members: list[tuple[ParameterBlock, Pieces, Tensor]]) -> None:
        """Update n blocks of `size` rows: with a matrix for each tensor, calls cost more than their arithmetic."""
        blocks = [block for block, *_ in members]
        numbers = torch.stack([own[: size + 2] for *_, own in members])  # coordinates, remainder, length
        used = [block.state.get("num_rows_used", 0) for block in blocks]
        rounding = torch.tensor([10 * torch.finfo(block.dtype).eps for block in blocks], dtype=torch.float64)
        decay = torch.tensor([block.settings["decay"] for block in blocks], dtype=torch.float64)[:, None, None]
        is_new = numbers[:, size] > rounding * numbers[:, size + 1]
        vectors = torch.cat([numbers[:, :size], (numbers[:, size] * is_new)[:, None]], 1)
        extended = torch.zeros(len(blocks), size + 1, size + 1, dtype=torch.float64)
        extended[:, :size, :size] = decay * torch.stack([_core(block) for block in blocks])
        extended += (1 - decay) * (vectors[:, :, None] * vectors[:, None])
        for (block, _, own), of_block in zip(members, extended, strict=True):
            if len(own) > size + 2:
                _repair(block, own[size + 2 :].view(size, size), of_block)
        # What is dropped: a row of zeros where there is one, or else the eigenvector of the smallest eigenvalue.
        # Decompositions are made one by one: in a stack, LAPACK gives other last digits.
        units = torch.eye(size + 1, dtype=torch.float64)[used]
        adds = is_new.tolist()
        for index in [place for place, new in enumerate(adds) if new and used[place] == size]:
            units[index] = torch.linalg.eigh(extended[index].clone()).eigenvectors[:, 0]
        units[:, -1] += torch.where(units[:, -1] >= 0, 1.0, -1.0)
        units /= torch.linalg.vector_norm(units, dim=1, keepdim=True)
        reflections = torch.eye(size + 1, dtype=torch.float64) - 2 * (units[:, :, None] * units[:, None])
        for index in [place for place, new in enumerate(adds) if new]:
            block, pieces, own = members[index]
            reflection = reflections[index].clone()
            extended[index] = reflection @ extended[index].clone() @ reflection
            unit = units[index].to(block.dtype).to(block.parameters[0].device, non_blocking=True)
            block.reflect_(unit, pieces, float(1 / own[size]))
        cores = extended[:, :size, :size]
        cores = (cores + cores.mT) / 2
        for block, core, before, new in zip(blocks, cores, used, adds, strict=True):
            state = block.state
            state["core"], state["num_rows_used"] = core.clone(), min(before + new, size)
            state["num_updates"] = state.get("num_updates", 0) + 1

    def _scale(self, block: ParameterBlock) -> float:
        return float(1 / block.settings["damping"])

    def _inverse(self, block: ParameterBlock) -> Tensor:
        values, vectors = torch.linalg.eigh(_core(block))
        values = values.clamp_min(0)
        return (vectors * (values / (block.settings["damping"] + values))) @ vectors.T


def _core(block: ParameterBlock) -> Tensor:
    """Return C, (num_rows, num_rows)."""
    core = block.state.get("core")
    return torch.zeros(block.num_rows, block.num_rows, dtype=torch.float64) if core is None else core


def _repair(block: ParameterBlock, gram: Tensor, extended: Tensor) -> None:
    """Make the rows of B orthonormal again where BBᵀ shows drift; change C with them, so that BᵀCB stays."""
    used = gram.diagonal() > 0.5
    gram = torch.where(used[:, None] & used, gram, torch.eye(len(gram), dtype=gram.dtype))
    drift = float((gram - torch.eye(len(gram), dtype=gram.dtype)).abs().max())
    if drift <= 20 * torch.finfo(block.dtype).eps:
        return
    values, vectors = torch.linalg.eigh(gram)
    root = (vectors * values.sqrt()) @ vectors.T
    block.transform_((vectors / values.sqrt()) @ vectors.T)
    size = len(gram)
    extended[:size] = root @ extended[:size]
    extended[:, :size] = extended[:, :size] @ root
