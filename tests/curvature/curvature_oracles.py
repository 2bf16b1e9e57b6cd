"""Dense matrices by the slowest routes there are; nothing here comes from src."""

import weakref
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def trainable(model: nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def flat(tensors) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def outputs(model: nn.Module, inputs: Tensor | Mapping[str, Tensor]) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels cannot be differentiated twice
        result = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    return result if isinstance(result, Tensor) else result.logits


def whole_loss(loss: nn.Module, h: Tensor, targets: Tensor) -> Tensor:
    """The loss as torch computes it on the whole data; outputs (N, T, V) count as N·T predictions."""
    if isinstance(loss, nn.CrossEntropyLoss) and h.ndim == 3:
        return loss(h.flatten(0, 1), targets.flatten())
    return loss(h, targets)


def gradient(value: Tensor, model: nn.Module, **settings) -> Tensor:
    grads = torch.autograd.grad(value, trainable(model), allow_unused=True, retain_graph=True, **settings)
    filled = [torch.zeros_like(p) if g is None else g for p, g in zip(trainable(model), grads, strict=True)]
    return flat(filled)


def jacobian(model: nn.Module, inputs) -> Tensor:
    """(all outputs, P), one autograd row at a time."""
    return torch.stack([gradient(output, model) for output in outputs(model, inputs).flatten()])


def output_hessian(loss: nn.Module, h: Tensor, targets: Tensor) -> Tensor:
    """(all outputs, all outputs), of the loss of the whole data."""
    return torch.autograd.functional.hessian(
        lambda flat_h: whole_loss(loss, flat_h.view_as(h), targets), h.detach().flatten()
    )


def dense_gauss_newton(model: nn.Module, loss: nn.Module, inputs, targets: Tensor) -> Tensor:
    rows = jacobian(model, inputs)
    return rows.T @ output_hessian(loss, outputs(model, inputs), targets) @ rows


def dense_hessian(model: nn.Module, loss: nn.Module, inputs, targets: Tensor) -> Tensor:
    first = gradient(whole_loss(loss, outputs(model, inputs), targets), model, create_graph=True)
    return torch.stack([gradient(entry, model) for entry in first])


def dense_empirical_fisher(model: nn.Module, loss: nn.Module, inputs, targets: Tensor) -> Tensor:
    """Σ g gᵀ over examples (or tokens), by reduction divided by how many are not ignored."""
    h = outputs(model, inputs)
    if h.ndim == 3:
        h, targets = h.flatten(0, 1), targets.flatten()
    ignored = getattr(loss, "ignore_index", None)
    total, count = 0.0, 0
    for h_n, target in zip(h, targets, strict=True):
        if ignored is not None and target.item() == ignored:
            continue
        g = gradient(loss(h_n[None], target[None]), model)
        total, count = total + torch.outer(g, g), count + 1
    return total / count if loss.reduction == "mean" else total


def dense_exact_fisher(model: nn.Module, loss: nn.Module, inputs, targets: Tensor) -> Tensor:
    """Σ_k p(k) g_k g_kᵀ over the labels k an example (or token) can have; cross-entropy only."""
    plain = nn.CrossEntropyLoss(reduction="sum")
    h = outputs(model, inputs).flatten(0, -2)
    kept = targets.flatten() != loss.ignore_index
    total = 0.0
    for h_n in h[kept]:
        for k, probability in enumerate(h_n.detach().softmax(0)):
            g = gradient(plain(h_n[None], torch.tensor([k])), model)
            total = total + probability * torch.outer(g, g)
    return total / kept.sum() if loss.reduction == "mean" else total


def counts_in(sample: Tensor, parts: list[Tensor]) -> Tensor:
    """How often each of the linearly independent `parts` was summed up into `sample`; exact or an error."""
    stacked = torch.stack([part.flatten() for part in parts], dim=1)
    found = torch.linalg.lstsq(stacked, sample.flatten()[:, None]).solution[:, 0]
    torch.testing.assert_close(found, found.round(), rtol=0, atol=1e-6)
    torch.testing.assert_close(stacked @ found.round(), sample.flatten(), rtol=1e-9, atol=1e-12)
    return found.round().long()


class Memory(TorchDispatchMode):
    """Watches what every kernel returns, autograd's and forward mode's included.

    `largest`: elements of the largest tensor; `peak`: bytes of all tensors made inside that were alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.peak = self.held = 0
        self.alive: dict[int, int] = {}

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.largest = max(self.largest, leaf.numel())
                self._hold(leaf.untyped_storage())
        self.peak = max(self.peak, self.held)
        return result

    def _hold(self, storage: torch.UntypedStorage) -> None:
        if (key := id(storage)) not in self.alive:
            weakref.finalize(storage, self._lose, key).atexit = False
        self.held += storage.nbytes() - self.alive.get(key, 0)
        self.alive[key] = storage.nbytes()

    def _lose(self, key: int) -> None:
        self.held -= self.alive.pop(key)
