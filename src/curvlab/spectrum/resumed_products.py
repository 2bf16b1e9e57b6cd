"""Products in the order in which an estimator asks for them, kept on disk, so that none is computed twice."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from curvlab.checkpoint import fingerprint
from curvlab.linalg import LinearOperator
from curvlab.spectrum.probes import checked_product

_CHUNK = 32  # columns between two looks at the clock; operators on data take no more at once anyway


class ResumedProducts:
    """A V for one V after another, 32 columns at a time; with a file, those that it has are read.

    A call that is repeated with the generator in the state it had draws the same vectors again, which is cheap,
    and finds its products here. The file holds all of them: num_matvecs vectors.

    Args:
        operator: A, (P, P).
        name: of the estimator and its settings: a file of others is refused.
        checkpoint: the file, saved after a chunk when a minute has passed; None: nothing is kept.
        generator: what draws the vectors; required with `checkpoint`.
    """

    def __init__(
        self,
        operator: LinearOperator,
        name: str,
        *,
        checkpoint: str | Path | None,
        generator: torch.Generator | None,
    ) -> None:
        self.operator, self._file = operator, None
        self._known: list[Tensor] = []
        self._num_used = 0
        if checkpoint is not None:
            if generator is None:
                raise ValueError("a checkpoint belongs to the probes of a generator: pass generator=...")
            settings = {"products": name, "generator": fingerprint([generator.get_state()])}
            self._file = operator.checkpoint(checkpoint, settings)
            if (kept := self._file.load()) is not None:
                self._known = kept["products"]

    def of(self, vectors: Tensor) -> Tensor:
        """Return A V, (P, K) -> (P, K), the next of the estimator's products; refuse what is not finite."""
        chunks = [self._next(chunk) for chunk in vectors.split(_CHUNK, dim=1)]
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=1)

    def _next(self, chunk: Tensor) -> Tensor:
        if self._file is None:
            return checked_product(self.operator, chunk)
        if self._num_used == len(self._known):
            self._known.append(checked_product(self.operator, chunk))
            if self._file.due(len(self._known)):
                self._file.save({"products": self._known})
        self._num_used += 1
        return self._known[self._num_used - 1].to(chunk)
