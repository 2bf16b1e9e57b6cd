"""Products, influence and SGLD by torch.func and autograd alone; nothing here comes from src."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

CROSS_ENTROPY = nn.CrossEntropyLoss()


class Reference:
    """A copy of the model in float64 with data, as a function of its parameters.

    The loss is the mean of cross-entropy over all targets that are not ignored.
    """

    def __init__(
        self, model: nn.Module, inputs: Tensor | Mapping[str, Tensor], targets: Tensor, dtype=torch.float64
    ) -> None:
        self.model = copy.deepcopy(model).to(dtype)
        self.inputs = cast(inputs, dtype)
        self.targets = targets
        self.names = [name for name, _ in self.model.named_parameters()]
        self.values = [parameter.detach().clone() for parameter in self.model.parameters()]

    def logits(self, values) -> Tensor:
        """(all predictions, C)."""
        given = dict(zip(self.names, values, strict=True))
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no forward mode
            if isinstance(self.inputs, Mapping):
                found = functional_call(self.model, given, (), self.inputs)
            else:
                found = functional_call(self.model, given, (self.inputs,))
        found = found if isinstance(found, Tensor) else found.logits
        return found.flatten(0, -2)

    def loss(self, values) -> Tensor:
        return CROSS_ENTROPY(self.logits(values), self.targets.flatten())

    def unflatten(self, vector: Tensor) -> list[Tensor]:
        pieces = vector.to(self.values[0].dtype).split([value.numel() for value in self.values])
        return [piece.view_as(value) for piece, value in zip(pieces, self.values, strict=True)]

    def gauss_newton_product(self, vector: Tensor) -> Tensor:
        """Jᵀ S J v: forward mode, the derivative of the loss's gradient by the logits, reverse mode."""
        labels = self.targets.flatten()
        outputs, tangents = jvp(lambda *v: self.logits(v), tuple(self.values), tuple(self.unflatten(vector)))
        _, curved = jvp(grad(lambda h: CROSS_ENTROPY(h, labels)), (outputs,), (tangents,))
        _, pull_back = vjp(lambda *v: self.logits(v), *self.values)
        return flat(pull_back(curved))

    def hessian_product(self, vector: Tensor) -> Tensor:
        """Reverse over reverse: the gradient of gᵀv."""
        leaves = [value.clone().requires_grad_() for value in self.values]
        first = torch.autograd.grad(self.loss(leaves), leaves, create_graph=True, materialize_grads=True)
        inner = sum((g * v).sum() for g, v in zip(first, self.unflatten(vector), strict=True))
        return flat(torch.autograd.grad(inner, leaves, materialize_grads=True))

    def gradient(self) -> Tensor:
        leaves = [value.clone().requires_grad_() for value in self.values]
        return flat(torch.autograd.grad(self.loss(leaves), leaves, materialize_grads=True))

    def gauss_newton_rows(self) -> Tensor:
        """R with RᵀR = G: rows S^½ J of the predictions that count, over the square root of their number.

        S^½ for softmax: (Diag(p) - ppᵀ) = BᵀB with B = Diag(√p) - √p pᵀ.
        """
        kept = (self.targets.flatten() != CROSS_ENTROPY.ignore_index).nonzero().flatten()
        leaves = [value.clone().requires_grad_() for value in self.values]
        logits = self.logits(leaves)[kept]
        p = logits.detach().softmax(1)
        roots = torch.diag_embed(p.sqrt()) - p.sqrt()[:, :, None] * p[:, None, :]
        mixed = (roots @ logits[:, :, None])[:, :, 0] / len(kept) ** 0.5
        rows = [
            flat(torch.autograd.grad(entry, leaves, retain_graph=True, materialize_grads=True))
            for entry in mixed.flatten()
        ]
        return torch.stack(rows)


def cast(inputs, dtype):
    def one(value: Tensor) -> Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    return {k: one(v) for k, v in inputs.items()} if isinstance(inputs, Mapping) else one(inputs)


def flat(tensors) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def damped_inverse(rows: Tensor, damping: float, vectors: Tensor) -> Tensor:
    """(RᵀR + damping I)⁻¹ B for B (P, K), by Woodbury: exact up to rounding."""
    inner = damping * torch.eye(len(rows), dtype=rows.dtype) + rows @ rows.T
    return (vectors - rows.T @ torch.linalg.solve(inner, rows @ vectors)) / damping


def sgld_excess(
    reference: Reference,
    *,
    nbeta: float,
    localization: float,
    step_size: float,
    num_burnin_steps: int,
    num_draws: int,
    generator: torch.Generator,
) -> float:
    """Mean of L(w) - L(w0) along one chain, w <- w - ε/2 [nβ ∇L + γ (w - w0)] + √ε ξ, all data at each step."""
    start = flat(reference.values)
    position, losses = start.clone(), []
    for _ in range(num_burnin_steps + num_draws):
        leaves = [piece.clone().requires_grad_() for piece in reference.unflatten(position)]
        loss = reference.loss(leaves)
        losses.append(float(loss.detach()))
        gradient = flat(torch.autograd.grad(loss, leaves, materialize_grads=True))
        drift = nbeta * gradient + localization * (position - start)
        noise = torch.randn(len(start), dtype=start.dtype, generator=generator)
        position = position - step_size / 2 * drift + step_size**0.5 * noise
    return sum(losses[num_burnin_steps:]) / num_draws - losses[0]
