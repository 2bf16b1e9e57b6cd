"""Generators, and the global random state seeded from one and put back, for code of others that takes none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch

# What every public function that draws takes: a generator, a whole number as its seed, or nothing.
Seed: TypeAlias = torch.Generator | int | None


def generator_of(generator: Seed, device: torch.device | str = "cpu") -> torch.Generator:
    """Return the generator, or a new one seeded with a number, which lives on `device`; None is the number 0."""
    if isinstance(generator, torch.Generator):
        return generator
    if generator is not None and (isinstance(generator, bool) or not isinstance(generator, int)):
        raise TypeError(
            f"generator is a torch.Generator or a whole number as seed, got {type(generator).__name__}: "
            "torch.Generator().manual_seed(0), or 0"
        )
    return torch.Generator(device).manual_seed(generator or 0)


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
