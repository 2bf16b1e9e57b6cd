"""Generators, and the global random state seeded from one and put back, for code of others that takes none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any, TypeAlias

import torch

# What every public function that draws takes: a generator, a whole number as its seed, or nothing.
Seed: TypeAlias = torch.Generator | int | None


def generator_of(generator: Seed, device: torch.device | str = "cpu") -> torch.Generator:
    """Return the generator, or a new one seeded with a number, which lives on `device`; None is the number 0."""
    if isinstance(generator, torch.Generator):
        return generator
    given: Any = generator
    if given is not None and (isinstance(given, bool) or not isinstance(given, Integral)):
        raise TypeError(
            f"generator is a torch.Generator or a whole number as seed, got {_named(generator)}: "
            "torch.Generator().manual_seed(0), or 0"
        )
    seed = int(given or 0)
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"a seed has 64 bits, got {seed}: take one below 2**63")
    return torch.Generator(device).manual_seed(seed)


def _named(thing: object) -> str:
    """Return its class, with its module where that is another's."""
    kind = type(thing)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def as_generator(generator: Seed, device: torch.device | str = "cpu") -> torch.Generator | None:
    """Return what `generator_of` does, but None for None: torch's own generator draws then."""
    return None if generator is None else generator_of(generator, device)


@contextmanager
def seeded_by(generator: torch.Generator, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed the global random state of the CPU and `device` from one draw, and put it back at the end.

    For code of others that draws from the global state and takes no generator: initialisation, dropout.
    """
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    device = torch.device(device)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed every GPU as well
        if devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
