"""Products of one batch with one vector, compiled by torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvlab.curvature.batch import Inputs, shapes
from curvlab.curvature.column_sums import ColumnSums, tangents_of
from curvlab.curvature.model_function import ModelFunction, check_finite

Check = Callable[[Tensor, Tensor], None]  # (outputs, targets)
OutputsOf = Callable[[Sequence[Tensor]], Tensor]
# (outputs_of, parameters, targets, tangents) -> outputs and the product parameter by parameter; traceable.
TracedProduct = Callable[[OutputsOf, Sequence[Tensor], Tensor, Sequence[Tensor]], tuple[Tensor, Sequence[Tensor]]]


class CompiledProduct:
    """Adds a batch's product with one vector, by code that torch.compile made for the batch's shape.

    The first batch of a product decides what is compiled: the last, shorter one runs eagerly, as do batches of
    new shapes after `max_shapes` (samples of different sizes). Compiling takes from seconds (MLP) to minutes
    (ResNet-18) for each shape.

    Args:
        function: the model.
        product: what is compiled.
        check: raises where outputs and targets do not fit each other.
    """

    max_shapes = 4
    backend = "inductor"

    def __init__(self, function: ModelFunction, product: TracedProduct, check: Check) -> None:
        self.function = function
        self._check = check
        self._shapes: set[Any] = set()

        def traced(
            parameters: Sequence[Tensor],
            buffers: Mapping[str, Tensor],
            inputs: Inputs,
            targets: Tensor,
            tangents: Sequence[Tensor],
        ) -> tuple[Tensor, Sequence[Tensor]]:
            def outputs_of(values: Sequence[Tensor]) -> Tensor:
                return function.bare(values, buffers, inputs)

            return product(outputs_of, parameters, targets, tangents)

        # torch.compile counts by code object how often it compiled, and gives up at 8: each model has its own.
        traced.__code__ = traced.__code__.replace()
        # On a CPU, its own choice of layouts makes a ResNet-18 slower than without compiling: 1.5 against 0.9.
        options: dict[str, Any] = {}
        if function.device.type == "cpu" and self.backend == "inductor":
            options["layout_optimization"] = False
        self._compiled = torch.compile(
            traced,
            backend=self.backend,
            options=options,
            fullgraph=True,
            dynamic=False,
        )

    def takes(self, inputs: Inputs, targets: Tensor, *, first: bool) -> bool:
        """Whether batches of this shape are compiled."""
        shape = shapes(inputs, targets)
        if first and shape not in self._shapes and len(self._shapes) < self.max_shapes:
            with torch.no_grad():  # compiling takes long, and says nothing of use about targets that do not fit
                self._check(self.function(self.function.parameters, inputs), targets)
            self._shapes.add(shape)
        return shape in self._shapes

    def add(self, inputs: Inputs, targets: Tensor, vector: Tensor, sums: ColumnSums) -> Tensor:
        """Add the product to the only column of `sums`, and return the outputs."""
        parameters = self.function.parameters
        with self.function.surroundings() as buffers, torch.no_grad():
            try:
                outputs, pieces = self._compiled(
                    parameters, buffers, inputs, targets, tangents_of(vector, parameters)
                )
            except _compile_errors() as error:
                raise RuntimeError(
                    f"torch.compile failed: {_reason(error)}\nPass compile=False: the products are the same."
                ) from error
        check_finite(outputs)
        sums.add([piece[None] for piece in pieces])
        return outputs


def _compile_errors() -> tuple[type[Exception], ...]:
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException  # a second to import

    return FailOnRecompileLimitHit, TorchDynamoException


def _reason(error: Exception) -> str:
    """Return torch's own words without its traces: they name the missing compiler, or what cannot be traced."""
    return str(error).strip().partition("\n\n")[0]
