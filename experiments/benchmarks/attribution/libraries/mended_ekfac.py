"""dattri's EK-FAC, put right. Nothing of this repository is imported: see networks.py."""

# mypy: disable-error-code="import-not-found"
# dattri is installed elsewhere.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def mended(attributor: Any) -> Any:
    """Return dattri 0.3.0's EK-FAC with two steps put right, for layers with biases.

    Q_S V Q_Aᵀ becomes Q_Sᵀ V Q_A, of eigenvectors in columns; biases, each layer's behind its weights, stay whole.
    """
    from dattri.func import fisher

    # Replaced in this process, which measures one method; a repeated call finds it replaced.
    estimated = getattr(fisher.estimate_eigenvector, "shipped", fisher.estimate_eigenvector)

    def turned(found: Any) -> Any:
        return {name: (a.T, s.T) for name, (a, s) in estimated(found).items()}

    turned.shipped = estimated  # type: ignore[attr-defined]
    fisher.estimate_eigenvector = turned

    class Mended(attributor):
        def transform_test_rep(self, ckpt_idx: int, test_rep: Tensor) -> Tensor:
            found = []
            for name in self.module_name:
                shape, (q_a, q_s) = self.name_to_module[name].weight.shape, self.cached_q[name]
                sizes = [shape.numel(), shape[0], test_rep.shape[1] - shape.numel() - shape[0]]
                weight, bias, test_rep = test_rep.split(sizes, dim=1)
                v = torch.cat([weight.reshape(-1, *shape), bias[:, :, None]], dim=2)
                inverse = q_s.T @ ((q_s @ v @ q_a.T) / (self.cached_lambdas[name] + self.damping)) @ q_a
                found += [inverse[:, :, :-1].flatten(1), inverse[:, :, -1]]
            return torch.cat(found, dim=1)

    return Mended
