"""Independent numbers, some from each chunk of probes, kept on disk with the state of what draws the probes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from curvlab.checkpoint import fingerprint
from curvlab.linalg import LinearOperator


class ResumedForms:
    """The forms of an estimator, chunk by chunk; with a file, it begins with those that the file has.

    Attributes:
        count: forms so far.

    Args:
        operator: what the forms are of.
        name: of the estimator and its settings: a file of others is refused.
        checkpoint: the file, saved after a chunk when a minute has passed; None: nothing is kept.
        generator: what draws the probes, put where it was; required with `checkpoint`.
    """

    def __init__(
        self,
        operator: LinearOperator,
        name: str,
        *,
        checkpoint: str | Path | None,
        generator: torch.Generator | None,
    ) -> None:
        self._chunks: list[Tensor] = []
        self._generator, self._file = generator, None
        if checkpoint is not None:
            if generator is None:
                raise ValueError("a checkpoint keeps the state of the probes' generator: pass generator=...")
            settings = {"forms": name, "generator": fingerprint([generator.get_state()])}
            self._file = operator.checkpoint(checkpoint, settings)
            if (kept := self._file.load()) is not None:
                self._chunks = [kept["forms"]]
                generator.set_state(kept["generator"])
        self.count = sum(map(len, self._chunks))

    def add(self, forms: Tensor) -> None:
        """Take the forms of one more chunk, (k,)."""
        self._chunks.append(forms.cpu())
        self.count += len(forms)
        if self._file is not None and self._generator is not None and self._file.due(self.count):
            self._file.save({"forms": self.all(), "generator": self._generator.get_state()})

    def all(self) -> Tensor:
        """Return all forms so far, (count,), on the CPU."""
        return torch.cat(self._chunks)
