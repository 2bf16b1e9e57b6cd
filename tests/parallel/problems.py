"""Models and data of the launched checks, the same on every process, and how answers are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlab.lab.models import build_model, small_causal_language_model
from curvlab.linalg import LinearOperator, identity
from curvlab.parallel import Ranks
from curvlab.spectrum import hutchinson_trace, mean_eigenvalue, sketch_eigenvalues, top_eigenvalues

TOLERANCE = 1e-6
LOSS = nn.CrossEntropyLoss()
LENGTH, VOCABULARY = 6, 24


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def language_model(family: str, num_layers: int = 1) -> nn.Module:
    """A GPT-2, Llama or Mistral from its config class, of width 32."""

    def build(**shape) -> nn.Module:
        return small_causal_language_model(**shape, family=family, num_layers=num_layers, width=32, num_heads=2)

    model = build_model(build, input_shape=(LENGTH,), num_outputs=VOCABULARY, generator=seeded())
    return model.double().eval()


def sequences(num: int) -> tuple[Tensor, Tensor]:
    """Tokens and next tokens; the sequences have different numbers of predictions, as padding leaves them."""
    tokens = torch.randint(VOCABULARY, (num, LENGTH + 1), generator=seeded(1))
    targets = tokens[:, 1:].clone()
    for row, predicted in enumerate(torch.randint(1, LENGTH + 1, (num,), generator=seeded(2)).tolist()):
        targets[row, predicted:] = LOSS.ignore_index
    return tokens[:, :-1], targets


def classifier() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval()
    generator = seeded(4)
    inputs = torch.randn(23, 5, generator=generator, dtype=torch.float64)
    return model, (inputs, torch.randint(3, (23,), generator=generator))


def convolutions() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)).double().eval()
    return model, (torch.randn(9, 1, 3, 3, generator=seeded(6), dtype=torch.float64), torch.arange(9) % 3)


def normed() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Some parameters belong to no linear or convolutional layer."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)).double().eval()
    return model, (torch.randn(9, 5, generator=seeded(8), dtype=torch.float64), torch.arange(9) % 3)


def uneven(ranks: Ranks, data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """This rank's share where the first rank has one example and the last one most of them."""
    inputs, targets = data
    bounds = [*range(ranks.size), len(targets)]
    rows = slice(bounds[ranks.rank], bounds[ranks.rank + 1])
    return inputs[rows], targets[rows]


def close(found: Tensor, expected: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    error = float((found - expected).norm() / expected.norm())
    assert error < tolerance, f"{what}: relative error {error:.2g}"


def once(ranks: Ranks, compute: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """What one process computes, by the first rank for all."""
    return ranks.object_from_first(compute(*arguments, **settings) if ranks.is_first else None)


ESTIMATES: dict[str, Callable[[LinearOperator], Tensor]] = {
    "trace": lambda o: torch.tensor(hutchinson_trace(o, num_matvecs=3, generator=seeded()).value),
    "eigenvalues": lambda o: top_eigenvalues(o, 2, rtol=0.1, generator=seeded()).values,
    "sketch": lambda o: sketch_eigenvalues(o, 2, sketch_size=4, generator=seeded()).values,
    "forms": lambda o: torch.tensor(mean_eigenvalue(o, num_probes=3, batch_size=5, generator=seeded()).value),
}


def close_solves(
    ranks: Ranks, spread: LinearOperator, whole: LinearOperator, sides: Tensor, solvers: Iterable[Any]
) -> None:
    """Solvers and spectra find what they find on one process, by as many products; vectors may be cut up."""
    cut = getattr(spread, "cut", None)
    own = sides if cut is None else cut.own_part(sides)
    for solver in solvers:
        name = f"{type(solver).__name__}, {type(spread).__name__}"
        expected = once(ranks, solver.solve, whole + identity, sides, generator=seeded(9))
        found = solver.solve(spread + identity, own, generator=seeded(9))
        close(found.x if cut is None else cut.whole(found.x), expected.x, name)
        assert found.num_matvecs == expected.num_matvecs, name
        assert found.converged == expected.converged, name
    for name, estimate in ESTIMATES.items():
        close(estimate(spread), once(ranks, estimate, whole), f"{name}, {type(spread).__name__}")


def same_on_all(ranks: Ranks, tensor: Tensor, what: str) -> None:
    assert all(torch.equal(tensor, other) for other in ranks.gather(tensor)), f"{what} differs between ranks"


def refused(call: Callable[[], object], text: str, kind: type[Exception] = ValueError) -> None:
    with pytest.raises(kind, match=text):
        call()


def loss_gradient(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    """The mean loss's gradient by plain autograd."""
    logits = model(data[0]).logits
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(LOSS(logits.flatten(0, 1), data[1].flatten()), parameters)
    return torch.cat([g.flatten() for g in gradients])
