"""The trace at many checkpoints of one training, with the same probes at each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from curvlab.linalg import LinearOperator
from curvlab.spectrum.estimate import Estimate
from curvlab.spectrum.probes import Distribution, checked_product, draw_probes


class TraceAlongTraining:
    """tr(A_t) at checkpoints t by z_kᵀ A_t z_k (see `hutchinson_trace`), the probes z_k the same for all t.

    With one set of probes the errors of two checkpoints are nearly the same where A_t changes little, so their
    difference, and with it the shape of the curve, is known far better than each value: `change` gives it with
    the standard error of the paired differences. The number of probes is chosen at each checkpoint by `rtol`; a
    checkpoint with more of them has those of the others among its own.

    Args:
        operator: A; it must read the model's parameters at each product, as HessianOperator does, so that
            `measure` is called as training goes on, on the same data throughout.
        rtol: add probes until stderr <= rtol |trace|.
        max_matvecs: the most probes a checkpoint; the estimate then has the larger stderr that it reached.
        chunk_size: probes a product; numbers of probes are multiples of it.
        distribution: "rademacher" (signs; variance never larger) or "gaussian" (Saghir et al. 2024, App. B).
        generator: the probes; its state is read once and not changed.

    Cost of a checkpoint: one product a probe; memory of `chunk_size` vectors.
    """

    def __init__(
        self,
        operator: LinearOperator,
        *,
        rtol: float = 0.05,
        max_matvecs: int = 1000,
        chunk_size: int = 16,
        distribution: Distribution = "rademacher",
        generator: torch.Generator,
    ) -> None:
        if not rtol > 0:
            raise ValueError(f"rtol must be positive, got {rtol}: it is stderr / |trace|, 0.05 for five per cent")
        if chunk_size < 2 or max_matvecs < chunk_size:
            raise ValueError(
                f"need max_matvecs >= chunk_size >= 2, got {max_matvecs} and {chunk_size}: a standard error takes "
                "two probes."
            )
        self.operator = operator
        self.rtol, self.max_matvecs, self.chunk_size = rtol, max_matvecs, chunk_size
        self.distribution: Distribution = distribution
        self._device = generator.device
        self._generator_state = generator.get_state()
        self._forms: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._forms)

    @property
    def estimates(self) -> list[Estimate]:
        """All checkpoints so far, in the order of `measure`."""
        return [Estimate.from_samples(forms, len(forms)) for forms in self._forms]

    def measure(self) -> Estimate:
        """Estimate the trace at the parameters' present values, as a further checkpoint."""
        generator = torch.Generator(self._device)
        generator.set_state(self._generator_state)
        forms = torch.empty(0, dtype=torch.float64)
        while len(forms) + self.chunk_size <= self.max_matvecs:
            probes = draw_probes(
                self.operator, self.chunk_size, distribution=self.distribution, generator=generator
            )
            products = checked_product(self.operator, probes)
            forms = torch.cat([forms, self.operator.inner(probes, products).double().cpu()])
            estimate = Estimate.from_samples(forms, len(forms))
            if estimate.stderr <= self.rtol * abs(estimate.value):
                break
        self._forms.append(forms)
        return estimate

    def change(self, first: int, second: int) -> Estimate:
        """Return trace at checkpoint `second` minus that at `first`, over the probes that both have, paired.

        num_matvecs is 0: nothing is computed for it.
        """
        a, b = self._forms[first], self._forms[second]
        common = min(len(a), len(b))
        return Estimate.from_samples(b[:common] - a[:common], 0)

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` needs to go on: the probes' seed and all quadratic forms."""
        return {
            "generator_state": self._generator_state.clone(),
            "forms": [forms.clone() for forms in self._forms],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()` of an interrupted run, with its probes."""
        self._generator_state = state["generator_state"].clone()
        self._forms = [forms.clone() for forms in state["forms"]]
