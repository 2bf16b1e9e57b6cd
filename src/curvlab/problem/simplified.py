"""Recorded operations with fewer of them: what is computed twice, never used, or the same at every replay."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import Target

_ATEN = torch.ops.aten
_SHAPING = tuple(getattr(_ATEN, name).default for name in ("expand", "view", "_unsafe_view"))
_TURNING = (_ATEN.transpose.int, _ATEN.t.default)
_SCALING = (_ATEN.mul.Scalar, _ATEN.mul.Tensor)
_BY_SHAPE = tuple(getattr(_ATEN, name).default for name in ("ones_like", "zeros_like", "new_zeros", "new_ones"))
_MOST_KEPT = 2**16  # numbers of a tensor that is kept instead of made again


def simplified(record: GraphModule) -> Callable[..., Sequence[Tensor]]:
    """Return a function that gives, of the record's arguments, what the record gives, bit by bit.

    Left out are operations whose result nobody uses, repeated ones, changes of shape that change none, two
    transpositions in a row and products by 1. What depends on no argument is computed here, once; tensors of the
    model that were recorded as constants are not, so that a replay sees them as they are then.
    """
    graph = record.graph
    graph.eliminate_dead_code()
    if all(_is_pure(node) for node in graph.nodes if node.op == "call_function"):
        known: dict[Hashable, Node] = {}
        kept: dict[Node, Tensor] = {}
        returned = set(graph.output_node().all_input_nodes)
        for node in list(graph.nodes):
            same = _same(node) or known.setdefault(_what(node), node)
            if same is not node and node not in returned:
                node.replace_all_uses_with(same)
                graph.erase_node(node)
            elif node not in returned and (value := _value(node, kept)) is not None:
                kept[node] = value
        _as_arguments(record, kept)
        graph.eliminate_dead_code()
    constants = _lifted(record)
    for node in graph.nodes:
        node.meta.clear()
    record.recompile()
    forward = record.forward  # without the hooks of a module's call
    return (lambda *tensors: forward(*tensors, *constants)) if constants else forward


def _is_pure(node: Node) -> bool:
    operation = node.target
    if not isinstance(operation, torch._ops.OpOverload):
        return False
    return not operation._schema.is_mutable and torch.Tag.nondeterministic_seeded not in operation.tags


def _what(node: Node) -> Hashable:
    """Return what tells the node's value from others; of arguments of the record the node itself."""
    if node.op not in ("call_function", "get_attr"):
        return node
    return node.op, node.target, _frozen(node.args), _frozen(node.kwargs)


def _frozen(part: Any) -> Hashable:
    if isinstance(part, list | tuple):
        return tuple(map(_frozen, part))
    if isinstance(part, dict):
        return tuple((name, _frozen(own)) for name, own in sorted(part.items()))
    return part if isinstance(part, Node) else (type(part), repr(part))  # 1, 1.0 and True are not alike, nor -0.0


def _same(node: Node) -> Node | None:
    """Return the node before that has the same value; None where there is none."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return None
    before, operation = node.args[0], node.target
    if operation in _SHAPING and _layout(before) == _layout(node):
        return before
    if operation in _TURNING and before.target == operation:
        turned = {frozenset(each.args[1:]) for each in (before, node)}
        return before.args[0] if len(turned) == 1 else None  # type: ignore[return-value]
    if operation in _SCALING and not isinstance(node.args[1], Node) and node.args[1] == 1:
        return before if _layout(before) == _layout(node) else None
    return None


def _layout(node: Node) -> tuple[Any, ...]:
    value = node.meta["val"]
    return value.shape, value.stride(), value.dtype


def _value(node: Node, kept: dict[Node, Tensor]) -> Tensor | None:
    """Return the node's value where no argument of the record matters; None elsewhere."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
        return None
    inputs = dict.fromkeys(node.all_input_nodes)
    if node.target in _BY_SHAPE:
        given = node.args[0].meta["val"]  # type: ignore[union-attr]
        values = {
            node.args[0]: torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=given.device)
        }
    elif all(each in kept for each in inputs):
        values = {each: kept[each] for each in inputs}
    else:
        return None
    if node.meta["val"].numel() > _MOST_KEPT:
        return None
    arguments, keywords = torch.fx.node.map_arg((node.args, node.kwargs), lambda each: values[each])
    with torch.inference_mode(False), torch.no_grad():
        value: Tensor = node.target(*arguments, **keywords)  # type: ignore[operator]
    return value


def _as_arguments(record: GraphModule, kept: dict[Node, Tensor]) -> None:
    """Replace nodes by attributes with their values."""
    for number, (node, value) in enumerate(kept.items()):
        name = f"_kept{number}"
        record.register_buffer(name, value)
        with record.graph.inserting_before(node):
            attribute = record.graph.get_attr(name)
        node.replace_all_uses_with(attribute)


def _lifted(record: GraphModule) -> list[Tensor]:
    """Make attributes, which are slow to look up, further arguments; return their values."""
    graph, found = record.graph, dict[Target, Node]()
    last = next((n for n in reversed(list(graph.nodes)) if n.op == "placeholder"), None)
    if last is None:
        return []
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        if node.target not in found:
            with graph.inserting_after(last):
                last = found[node.target] = graph.placeholder(f"constant{len(found)}")
        node.replace_all_uses_with(found[node.target])
        graph.erase_node(node)
    return [getattr(record, str(name)) for name in found]
