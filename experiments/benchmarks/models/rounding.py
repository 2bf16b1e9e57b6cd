"""Errors of products in low precision."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from curvlab.curvature import GaussNewtonOperator, HessianOperator
from curvlab.linalg import flatten
from experiments.benchmarks.models.cases import Case, Inputs, build_case

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MATRICES = {"Gauss-Newton": GaussNewtonOperator, "Hessian": HessianOperator}


def rounding_errors(
    settings: Mapping[str, Any], *, num_vectors: int, generator: torch.Generator, device: torch.device
) -> list[dict[str, Any]]:
    """Return a row for each matrix, precision and cut into batches: its own error, and that of converting."""
    case = build_case(settings, generator, device)
    weights = flatten(case.parameters).detach()
    # Of the weights' norm, so that tangents are about as large as activations. Of norm √P they overflow in fp16.
    scale = float(weights.norm()) / len(weights) ** 0.5
    vectors = scale * torch.randn(case.num_parameters, num_vectors, generator=generator).to(device)
    rows = []
    for matrix in MATRICES:
        exact = _product(matrix, case, vectors, torch.float64, size=len(case.targets))
        for precision, dtype in PRECISIONS.items():
            rounded = _rounded(case, dtype)
            own = _product(matrix, rounded, vectors.to(dtype), torch.float64, size=len(case.targets))
            for size in (len(case.targets), 1) if matrix == "Gauss-Newton" else (len(case.targets),):
                row = {"matrix": matrix, "precision": precision, "batches": len(case.targets) // size}
                try:
                    found = _product(matrix, rounded, vectors.to(dtype), dtype, size=size).double()
                    status = "done" if bool(found.isfinite().all()) else "not finite"
                    row |= {"status": status, "error": _error(found, own), "error_converted": _error(found, exact)}
                except (NotImplementedError, RuntimeError, ValueError) as reason:
                    row |= {"status": f"failed: {str(reason).splitlines()[0][:120]}"}
                rows.append(row)
    return rows


def _product(matrix: str, case: Case, vectors: Tensor, dtype: torch.dtype, *, size: int) -> Tensor:
    model = copy.deepcopy(case.model).to(dtype)
    data = (_cast(case.inputs, dtype), case.targets)
    op = MATRICES[matrix](model, nn.CrossEntropyLoss(), data, batch_size=size, columns="loop")
    return op @ vectors.to(dtype)


def _rounded(case: Case, dtype: torch.dtype) -> Case:
    """Round weights and inputs to `dtype`; higher precisions hold the same numbers."""
    return Case(copy.deepcopy(case.model).to(dtype), _cast(case.inputs, dtype), case.targets)


def _cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return inputs.to(dtype) if isinstance(inputs, Tensor) else inputs  # mappings hold ids and masks


def _error(found: Tensor, expected: Tensor) -> float:
    return float(torch.linalg.matrix_norm(found - expected) / torch.linalg.matrix_norm(expected))
