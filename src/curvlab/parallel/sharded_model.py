"""A model, and the flat vectors of its parameters, cut up over the ranks: each parameter along its first axis.

FSDP2 keeps the parts and gathers a layer at a time. Its forward has neither forward-mode derivatives nor a second
backward, because its hooks put other tensors into the parameters' places; but each rank can move its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from curvlab.ranks import Ranks

# Random numbers drawn at once; a multiple of 16, see `randn`.
_DRAWN_AT_ONCE = 2**20


def shard_parameters(model: nn.Module, *, device: torch.device | str | None = None) -> nn.Module:
    """Cut the parameters of a model up over the ranks, in place, by FSDP2's `fully_shard`; return it.

    The modules of its longest nn.ModuleList (a transformer's layers) become units of their own, the rest is one
    more. Each rank is left with 1/R of every parameter, rows of its first axis, as DTensors; FSDP2 trains and
    saves such a model as usual. Call it after `freeze` and `eval`.

    Args:
        model: a CPU's model may be larger than a device, to which FSDP2 moves it unit by unit.
        device: where the parts are to be; None: where the model is.
    """
    device = next(model.parameters()).device if device is None else torch.device(device)
    mesh = init_device_mesh(device.type, (Ranks.current().size,))
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for layer in max(lists, key=len, default=nn.ModuleList()):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model is under `fully_shard`."""
    return isinstance(model, FSDPModule)


def trained_parameters(model: nn.Module, ranks: Ranks) -> list[nn.Parameter]:
    """Return the parameters that require gradients; a ValueError says how they must be cut up."""
    if not is_sharded(model):
        raise ValueError("the model is not under fully_shard: call curvlab.parallel.shard_parameters(model)")
    _cut_up(model)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trained:
        raise ValueError("no parameter of the model requires gradients: there is nothing to differentiate by")
    for name, parameter in trained.items():
        if not isinstance(parameter, DTensor) or parameter.placements != (Shard(0),):
            raise ValueError(
                f"parameter '{name}' is not cut along its first axis by fully_shard, see shard_parameters"
            )
        if parameter.device_mesh.size() != ranks.size:
            raise ValueError(
                f"parameter '{name}' is cut up over {parameter.device_mesh.size()} ranks, but there are "
                f"{ranks.size}"
            )
        if parameter.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"parameter '{name}' is {parameter.dtype}, which rounds a finite difference away: call "
                "model.float() before the model is cut up"
            )
    return list(trained.values())


class CutVectors:
    """Flat vectors of P numbers, of which rank r holds P_r: the r-th piece of each parameter.

    A parameter is cut along axis 0 as FSDP2 and `torch.chunk` do: ceil(d / R) rows each, the last ranks fewer.

    Args:
        shapes: of the whole parameters, each of at least one axis.
        ranks: who holds the pieces.

    Attributes:
        sizes: numbers of each whole parameter.
        num_own: P_r.
        slices: each piece's place in this rank's part of a vector.
        places: the same pieces' places in the whole vector.
        cuts: and in the flattened parameters.
    """

    def __init__(self, shapes: Sequence[torch.Size], ranks: Ranks) -> None:
        self.ranks, self._shapes = ranks, tuple(shapes)
        self.sizes = [shape.numel() for shape in shapes]
        self.cuts = self._cuts_of(ranks.rank)
        self.places = self._places_of(ranks.rank)
        ends = list(accumulate(place.stop - place.start for place in self.places))
        self.num_own = ends[-1]
        self.slices = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    def _cuts_of(self, rank: int) -> list[slice]:
        found = []
        for shape in self._shapes:
            each = -(-shape[0] // self.ranks.size) * shape[1:].numel()
            found.append(slice(*(min(shape.numel(), number * each) for number in (rank, rank + 1))))
        return found

    def _places_of(self, rank: int) -> list[slice]:
        starts = [0, *accumulate(self.sizes)]
        cuts = self._cuts_of(rank)
        return [slice(start + cut.start, start + cut.stop) for start, cut in zip(starts, cuts, strict=False)]

    def own_part(self, vectors: Tensor) -> Tensor:
        """Return this rank's part of whole vectors, (P,) or (P, K)."""
        return torch.cat([vectors[place] for place in self.places])

    def whole(self, vectors: Tensor) -> Tensor:
        """Return vectors of which every rank gives its part, (P_r,) or (P_r, K), whole on every rank."""
        whole = vectors.new_empty(sum(self.sizes), *vectors.shape[1:])
        for rank, part in enumerate(self.ranks.gather(vectors.cpu())):
            places = self._places_of(rank)
            pieces = part.split([place.stop - place.start for place in places])
            for place, piece in zip(places, pieces, strict=True):
                whole[place] = piece.to(whole)
        return whole

    def randn(self, num_columns: int, generator: torch.Generator | None, like: Tensor) -> Tensor:
        """Return this rank's part of the normals that `LinearOperator.randn` draws for one process, (P_r, K).

        All ranks draw all of them, some at a time. On a CPU torch.randn fills blocks of 16 numbers in their order,
        the last block anew where it is not whole, so that drawing in multiples of 16 gives the numbers of one
        call.
        """
        source, size = generator.device if generator is not None else torch.device("cpu"), sum(self.sizes)
        own = torch.empty(num_columns, self.num_own, dtype=like.dtype, device=like.device)
        start, total = 0, num_columns * size
        while start < total:
            # The last call takes what is left with it: alone it could be too short to be filled in the same way.
            stop = total if total - start < 2 * _DRAWN_AT_ONCE else start + _DRAWN_AT_ONCE
            drawn = torch.randn(stop - start, generator=generator, dtype=like.dtype, device=source)
            for column in range(start // size, -(-stop // size)):
                origin = column * size
                for place, target in zip(self.places, self.slices, strict=True):
                    low, high = max(place.start, start - origin), min(place.stop, stop - origin)
                    if low < high:
                        at = target.start + low - place.start
                        own[column, at : at + high - low] = drawn[low + origin - start : high + origin - start]
            start = stop
        return own.T.contiguous()


class MovedParameters:
    """A model's parameters while they are moved and gradients are taken; then all is as before, to the last bit.

    Args:
        model: see `trained_parameters`.
        cut: how vectors are cut up.

    Attributes:
        origin: this rank's part of each trained parameter, θ.
    """

    def __init__(self, model: nn.Module, cut: CutVectors) -> None:
        self._model, self._cut = model, cut

    def __enter__(self) -> Self:
        self._held = trained_parameters(self._model, self._cut.ranks)
        self._gradients = [parameter.grad for parameter in self._held]
        self.origin = [_local(parameter).clone() for parameter in self._held]
        for parameter in self._held:
            parameter.grad = None
        return self

    def __exit__(self, *error: object) -> None:
        self.move(None, None)
        for parameter, gradient in zip(self._held, self._gradients, strict=True):
            parameter.grad = gradient

    def move(self, vector: Tensor | None, delta: Tensor | None) -> None:
        """Set the parameters to θ + δv; to θ without a δ."""
        _cut_up(self._model)
        with torch.no_grad():
            for held, origin, place in zip(self._held, self.origin, self._cut.slices, strict=True):
                moved = (
                    origin if vector is None or delta is None else origin + delta * vector[place].view_as(origin)
                )
                _local(held).copy_(moved)

    def pull_back(self, outputs: Tensor, cotangent: Tensor, row: Tensor) -> None:
        """Add the gradient of <outputs, cotangent>, summed over the ranks, to this rank's part of a vector."""
        outputs.backward(cotangent)
        for parameter, place in zip(self._held, self._cut.slices, strict=True):
            if parameter.grad is not None:
                row[place] += self._cut.ranks.size * _local(parameter.grad).reshape(-1)  # FSDP2 takes the mean
                parameter.grad = None


def _cut_up(model: nn.Module) -> None:
    """Let go of whole parameters that FSDP2 still holds after a forward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part."""
    return cast("DTensor", tensor.detach()).to_local()
