"""From our operators to SciPy's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator as ScipyLinearOperator

if TYPE_CHECKING:
    from curvlab.linalg.operator import LinearOperator


def scipy_operator(operator: LinearOperator) -> ScipyLinearOperator:
    """Return an operator for `scipy.sparse.linalg` that multiplies NumPy arrays of the same dtype."""
    if operator.dtype == torch.bfloat16:
        raise TypeError(
            "NumPy has no bfloat16: build the operator on the model in single precision, model.float(), "
            "to use it with SciPy."
        )
    numpy_dtype = torch.empty(0, dtype=operator.dtype).numpy().dtype

    def apply(vectors: np.ndarray) -> np.ndarray:
        as_tensor = torch.from_numpy(np.ascontiguousarray(vectors, dtype=numpy_dtype)).to(operator.device)
        return (operator @ as_tensor).detach().cpu().numpy()

    def apply_vector(vector: np.ndarray) -> np.ndarray:  # scipy passes (P,) or (P, 1)
        return apply(vector.reshape(-1))

    return ScipyLinearOperator(
        shape=operator.shape,
        matvec=apply_vector,
        rmatvec=apply_vector,
        matmat=apply,
        rmatmat=apply,
        dtype=numpy_dtype,
    )
