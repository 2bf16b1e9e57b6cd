"""A matrix of some of a model's parameters, chosen by their names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn


@contextmanager
def only_parameters(model: nn.Module, *patterns: str) -> Iterator[int]:
    """Let only parameters whose names match a pattern require gradients, inside; yield their number P.

        with only_parameters(model, "transformer.h.11.*", "*.ln_f.*"):
            op = GaussNewtonOperator(model, loss, data)   # (P, P); it keeps the choice after the block

    Operators and functions take the parameters that require gradients when they are built or called. Afterwards
    each parameter requires gradients as before. Parameters that match and were frozen are part of the choice.

    Args:
        model: any module; tied parameters have the first of their names, as in named_parameters().
        patterns: as of a shell: * stands for any characters, dots too, ? for one, [ab] for one of several.
    """
    named = dict(model.named_parameters())
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in named):
            near = get_close_matches(pattern, named, n=3, cutoff=0.0)
            raise ValueError(f"no parameter's name matches '{pattern}': names are like {', '.join(near)}")
    if not patterns:
        raise ValueError("no pattern is given: nothing would be left to differentiate by")
    before = {name: parameter.requires_grad for name, parameter in named.items()}
    try:
        for name, parameter in named.items():
            parameter.requires_grad_(any(fnmatchcase(name, pattern) for pattern in patterns))
        yield sum(parameter.numel() for parameter in named.values() if parameter.requires_grad)
    finally:
        for name, parameter in named.items():
            parameter.requires_grad_(before[name])
