"""A model whose parameters are cut up over the ranks (FSDP2), differentiated layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from curvlab.parallel.sharded.calls import Recording, call_along, call_recorded, dual_level, duals
from curvlab.parallel.sharded.layout import ShardLayout
from curvlab.parallel.sharded.unit import Unit
from curvlab.problem.batch import Inputs
from curvlab.problem.function_check import check_mode, without_padding
from curvlab.problem.model_function import check_finite, plain_attention
from curvlab.ranks import Ranks


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


class ShardedModel:
    """h(x; theta) of a model under `fully_shard`, with vectors cut up as the parameters are.

    FSDP2's own forward gives neither forward-mode derivatives nor a second backward, because its hooks put other
    tensors into the parameters' places. So the hooks are set aside while this object works on the model, and each
    unit's parameters are gathered here: before its forward, and again before its backward, which repeats the
    forward from the unit's inputs. At rest, and while other units work, a rank holds its part alone.

    All ranks make the same calls: gathering is collective.

    Args:
        model: in eval mode, under `fully_shard` (see `shard_parameters`) with a one-dimensional mesh of all ranks,
            whose units are not nested but in the model itself.
        ranks: the process group's.

    Attributes:
        layout: of this rank's part of a vector.
        dtype: of the trainable parameters.
        device: where they are.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        check_mode(model)
        self.model, self.ranks = model, ranks
        units: dict[str, Any] = {
            n: module for n, module in model.named_modules() if isinstance(module, FSDPModule)
        }
        if "" not in units:
            raise ValueError("the model is not under fully_shard: call curvlab.parallel.shard_parameters(model)")
        for unit in units.values():
            unit.reshard()
        owners = {name: _owner(name, units) for name, _ in model.named_parameters()}
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        if not trained:
            raise ValueError("no parameter of the model requires gradients: there is nothing to differentiate by")
        held = dict(model.named_parameters())
        for name, parameter in held.items():
            _check_cut(name, parameter, ranks)
        self.layout = ShardLayout([held[name].shape for name in trained], ranks)
        self.dtype, self.device = held[trained[0]].dtype, held[trained[0]].device
        everything = ShardLayout([parameter.shape for parameter in held.values()], ranks)
        pieces = dict(zip(held, everything.pieces, strict=True))
        places = dict(zip(trained, self.layout.slices, strict=True))
        found = {}
        for owner, module in units.items():
            names = [name for name in held if owners[name] == owner]
            prefix = f"{owner}." if owner else ""
            found[owner] = Unit(
                module=module,
                names=tuple(name.removeprefix(prefix) for name in names),
                pieces=tuple(pieces[name] for name in names),
                places=tuple(places.get(name) for name in names),
                ranks=ranks,
            )
        self.root = found.pop("")
        self.units = tuple(found.values())

    def values(self) -> Tensor:
        """Return this rank's part of the trainable parameters, (P_r,)."""
        held: list[Any] = [p.detach() for p in self.model.parameters() if p.requires_grad]
        return torch.cat([parameter.to_local().reshape(-1) for parameter in held])

    def push_forward(self, inputs: Inputs, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and their derivative along a vector (P_r,), without graph. Cost: 2F, F a forward."""

        def call(unit: Unit, *arguments: Any, **keywords: Any) -> Any:
            return call_along(unit, vector, arguments, keywords)

        with torch.no_grad(), forward_ad.dual_level():
            root = duals(self.root, self.root.parameters(), self.root.tangents(vector))
            pair = forward_ad.unpack_dual(self._outputs(inputs, root, call))
        check_finite(pair.primal)
        return pair.primal, torch.zeros_like(pair.primal) if pair.tangent is None else pair.tangent

    def record(self, inputs: Inputs, vector: Tensor | None = None) -> Recorded:
        """Return the outputs, and with a vector (P_r,) their derivative along it, with a way back.

        Cost: 1F, with a vector 2F.
        """
        recording = Recording(vector)

        def call(unit: Unit, *arguments: Any, **keywords: Any) -> Any:
            return call_recorded(unit, recording, arguments, keywords)

        with torch.enable_grad(), dual_level(needed=vector is not None):
            root = self.root.parameters()
            leaves = [root[index].requires_grad_() for index in self.root.trained]
            if vector is not None:
                root = duals(self.root, root, self.root.tangents(vector))
            outputs = self._outputs(inputs, root, call)
            graphs = (outputs,) if vector is None else tuple(forward_ad.unpack_dual(outputs))
        check_finite(graphs[0].detach())
        return Recorded(self.root, recording, leaves, graphs)

    def _outputs(self, inputs: Inputs, root: Sequence[Tensor], call: Callable[..., Any]) -> Tensor:
        keywords: dict[str, Any] = {"use_cache": False} if hasattr(_config(self.model), "use_cache") else {}
        arguments: tuple[Inputs, ...] = (inputs,)
        if isinstance(inputs, Mapping):
            arguments, keywords = (), keywords | dict(inputs)
        with self.set_up(), _replaced_forwards(self.units, call):
            outputs = self.root.run(root, arguments, keywords)
        return outputs if isinstance(outputs, Tensor) else outputs.logits

    @contextmanager
    def set_up(self) -> Iterator[None]:
        """Set FSDP2's hooks aside, and take kernels that have all derivatives; a backward needs it, too."""
        with ExitStack() as stack:
            for module in (self.root.module, *(unit.module for unit in self.units)):
                stack.enter_context(_without_hooks(module))
            stack.enter_context(plain_attention())
            stack.enter_context(without_padding(self.model))
            yield


@dataclass(frozen=True)
class Recorded:
    """Outputs, and perhaps their derivative, with the way back to the parameters.

    Attributes:
        root: unit whose parameters are gathered as long as this lives.
        recording: of the other units' calls.
        leaves: the root's trained parameters.
        graphs: outputs and derivative with their graph.
    """

    root: Unit
    recording: Recording
    leaves: list[Tensor]
    graphs: tuple[Tensor, ...]

    @property
    def values(self) -> tuple[Tensor, ...]:
        """Outputs and derivative without graph."""
        return tuple(graph.detach() for graph in self.graphs)

    def pull_back(self, *cotangents: Tensor, row: Tensor, keep: bool = False) -> None:
        """Add the gradient of sum <values, cotangents>, summed over ranks, to this rank's row, (P_r,).

        Cost: 3F, a forward included, for outputs alone; else about 6F.
        """
        self.recording.row = row
        sources = [*self.leaves, self.recording.anchor]
        found = torch.autograd.grad(self.graphs, sources, cotangents, retain_graph=keep, allow_unused=True)
        self.root.add_gradients(found[:-1], row)


def _config(model: nn.Module) -> object:
    return getattr(model, "config", None)


def _owner(name: str, units: Mapping[str, object]) -> str:
    """Return the name of the innermost unit that holds a parameter."""
    return max((unit for unit in units if not unit or name.startswith(f"{unit}.")), key=len)


def _check_cut(name: str, parameter: Tensor, ranks: Ranks) -> None:
    if not isinstance(parameter, DTensor) or parameter.placements != (Shard(0),):
        raise ValueError(
            f"parameter '{name}' is not cut along its first axis by fully_shard, see shard_parameters"
        )
    if parameter.device_mesh.size() != ranks.size:
        raise ValueError(
            f"parameter '{name}' is cut up over {parameter.device_mesh.size()} ranks, but there are {ranks.size}"
        )


@contextmanager
def _replaced_forwards(units: Sequence[Unit], call: Callable[..., Any]) -> Iterator[None]:
    for unit in units:
        vars(unit.module)["forward"] = partial(call, unit)
    try:
        yield
    finally:
        for unit in units:
            vars(unit.module).pop("forward", None)


@contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    """Take FSDP2's hooks, and no others, from a module meanwhile."""
    kept: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        kept.append((hooks, dict(hooks)))
        for key, hook in kept[-1][1].items():
            if (getattr(hook, "__module__", None) or "").startswith("torch.distributed.fsdp"):
                del hooks[key]
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.clear()
            hooks.update(before)
