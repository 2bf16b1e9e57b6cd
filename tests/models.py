"""Models and data that several tests give to what they test."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

CPU_ERROR = "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried"


class Limited(nn.Sequential):
    """Layers on a machine that has room for a few rows at a time; `seen`: how many there were in each forward."""

    def __init__(self, *layers: nn.Module, most: int, error: Exception | None = None) -> None:
        super().__init__(*layers)
        self.most, self.error, self.seen = most, error or torch.OutOfMemoryError("CUDA out of memory"), []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        if len(x) > self.most:
            raise self.error
        return super().forward(x)


class Examples(Dataset):
    """Map-style, single examples."""

    def __init__(self, examples: list[Any]) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Any:
        return self.examples[index]
