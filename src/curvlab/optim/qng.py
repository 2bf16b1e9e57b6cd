"""QNG: the quasi-natural gradient, whose matrix is a product of the newest rank-one factors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from curvlab.optim.low_rank import LowRankOptimizer, ParameterBlock, Pieces, Scope, norm


class QNG(LowRankOptimizer):
    """w <- w - lr (A Aᵀ)⁻¹ ∇L, A = K_{t-τ+1} ... K_t, K_i = √α I + β_i q_i q_iᵀ (He et al. 2022; Eq. 9).

    q_i = A⁻¹ d_i with the A before it, and β_i = (√(α + (1-α)‖q_i‖²) - √α)/‖q_i‖². (The printed β reduces to 1-α:
    its root covers too little.) For t <= τ that is Eq. 7 from G_0 = I exactly: A Aᵀ = α A' A'ᵀ + (1-α) d dᵀ.
    Then the oldest factor is dropped with each update, and no small eigenvalue with it.

    With the k <= τ newest q_i as the rows of Q, the oldest first, A⁻¹ = α^(-k/2) (I - Qᵀ T Q), where T⁻¹ is the
    lower triangle of QQᵀ with 1/c_i on its diagonal, c_i = (1 - √(α/(α + (1-α)‖q_i‖²)))/‖q_i‖². So
    (A Aᵀ)⁻¹ = α^-k (I - Qᵀ [T + Tᵀ - Tᵀ QQᵀ T] Q): two products with Q, not 2τ one after the other. And A Aᵀ - α^k
    I has rank k at most, not 2k as Observation 1 has it.

    Usage: as `Ginger`. The authors' code takes its step before the update, ours as they are called.

    Cost: update 6 Pτ flops, τ³ on the host and one wait for the device; step 4 Pτ flops and one wait. Memory: τP
    numbers in single precision (double for double), P more with momentum; 2 P temporary.
    State of a parameter: "rows" (of Q), "momentum", "step"; the first of each block also "gram" (QQᵀ, in double
    precision on the host), "num_updates".

    Args:
        params: real floating-point; settings may differ between groups.
        lr: factor of the step.
        rank: τ.
        decay: α.
        momentum: μ, m <- μm + ∇L takes the place of ∇L, as in the authors' QNG.
        scope: one matrix for all parameters together ("global"), each group, or each tensor.
        weight_decay: decoupled, as in torch.optim.AdamW: each step also takes lr · weight_decay of the parameters.
            (Added to the gradient it would be multiplied by G⁻¹, up to α^-τ.)
        maximize: step uphill.
        clip: bound on each entry of the direction, before lr; None: no bound.
        normalize: take α^k G⁻¹ for G⁻¹: lr is then that of SGD, from which the step differs within the rows alone.
        as_coded: as in the authors' code, where all products with q_i are those of the original vector: T is then
            diagonal, and A⁻¹, both in steps and for new q, is not the inverse of the product for τ > 1.

    Example:
        >>> from curvlab.optim import sampled_label_loss
        >>> model, loss = torch.nn.Linear(3, 2), torch.nn.CrossEntropyLoss()
        >>> inputs, targets = torch.eye(3), torch.tensor([0, 1, 1])
        >>> generator = torch.Generator().manual_seed(0)
        >>> optimizer, before = QNG(model.parameters(), lr=0.1, rank=2, decay=0.9), loss(model(inputs), targets)
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

    momentum_is_average = False

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        rank: int,
        decay: float,
        momentum: float = 0.0,
        scope: Scope = "global",
        weight_decay: float = 0.0,
        maximize: bool = False,
        clip: float | None = None,
        normalize: bool = False,
        as_coded: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "rank": rank,
            "decay": decay,
            "momentum": momentum,
            "scope": scope,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "clip": clip,
            "normalize": normalize,
            "as_coded": as_coded,
        }
        super().__init__(params, defaults)

    # Differs from Eq. 9 in:
    # 1. β is the root that makes K Kᵀ = αI + (1-α) q qᵀ; the printed one reduces to 1-α.
    # 2. The factors are multiplied out in (τ, τ) numbers; Eq. 9 takes 2τ products one after the other.
    # Differs from the authors' code in:
    # 3. Each factor multiplies the result of the one before, not the original vector (unless as_coded).
    def _measure(self, block: ParameterBlock, pieces: Pieces) -> tuple[Pieces, Tensor]:
        triangle = _triangle(block).to(block.dtype).to(block.parameters[0].device, non_blocking=True)
        scale = float(block.settings["decay"] ** (-_num_factors(block) / 2))
        new = block.minus_combination(pieces, triangle @ block.product(pieces), scale=scale)
        return new, torch.cat([block.product(new).double(), norm(new)[None]])

    def _update_blocks(self, measured: list[tuple[ParameterBlock, Pieces, Tensor]]) -> None:
        for block, pieces, numbers in measured:
            state = block.state
            count = state.get("num_updates", 0)
            slot, gram = count % block.num_rows, _gram(block).clone()
            gram[slot] = gram[:, slot] = numbers[:-1]
            gram[slot, slot] = numbers[-1] ** 2
            block.set_row(slot, pieces)
            state["gram"], state["num_updates"] = gram, count + 1

    def _scale(self, block: ParameterBlock) -> float:
        return float(block.settings["decay"] ** -_num_factors(block))

    def _inverse(self, block: ParameterBlock) -> Tensor:
        triangle = _triangle(block)
        return triangle + triangle.T - triangle.T @ _gram(block) @ triangle


def _num_factors(block: ParameterBlock) -> int:
    """Return k."""
    return min(int(block.state.get("num_updates", 0)), block.num_rows)


def _gram(block: ParameterBlock) -> Tensor:
    """Return QQᵀ, (num_rows, num_rows), in the order in which the rows are stored."""
    gram = block.state.get("gram")
    return torch.zeros(block.num_rows, block.num_rows, dtype=torch.float64) if gram is None else gram


def _triangle(block: ParameterBlock) -> Tensor:
    """Return T, (num_rows, num_rows), in the order in which the rows are stored; zero where there is none yet."""
    decay, count = block.settings["decay"], _num_factors(block)
    oldest = block.state.get("num_updates", 0) - count
    order = torch.arange(oldest, oldest + count) % block.num_rows  # from old to new
    gram = _gram(block)[order[:, None], order]
    total = decay + (1 - decay) * gram.diagonal()
    # c, without the difference of its definition, which loses all digits for small q.
    factors = (1 - decay) / total / (1 + (decay / total).sqrt())
    if block.settings["as_coded"]:
        triangle = torch.diag(factors)
    else:
        identity = torch.eye(count, dtype=torch.float64)
        triangle = torch.linalg.solve_triangular(torch.diag(1 / factors) + gram.tril(-1), identity, upper=False)
    stored = torch.zeros(block.num_rows, block.num_rows, dtype=torch.float64)
    stored[order[:, None], order] = triangle
    return stored
