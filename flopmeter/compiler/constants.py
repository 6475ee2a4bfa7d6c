"""Tensors that a traced program makes of numbers, `torch.tensor([1, 2], device=...)` and `x[[1, 2]]`: constants of its
graph.

Inductor writes small constants into its kernels, so their numbers matter; on meta they would be lost. So they are made
on the CPU and moved to the device. When the graph is lowered, the move is removed, and the constant poses as a tensor
of the device.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Proxy

from flopmeter.compiler.posing import CUDA, META
from flopmeter.torch_names.around import around
from flopmeter.torch_names.operators import Overloads, Packets
from flopmeter.torch_names.operators import aten_overloads as aten

_LIFTS = (aten.lift_fresh_copy.default, aten.clone.default)  # between a constant and what uses it
_SUBSCRIPTS = (operator.getitem, operator.setitem)
_MOVE = Overloads(Packets("prims")).device_put.default


@around
def around_create_proxy(
    plain: Callable[..., Any], tracer: Any, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **more: Any
) -> Any:
    """The function that puts a call into Dynamo's graph."""
    moved = _MOVED.get(_own(target)) if kind == "call_function" and kwargs.get("device") == META else None
    if kind == "call_function" and target in _SUBSCRIPTS and _is_on_meta(args[0]):
        put = functools.partial(plain, tracer, "call_function", _MOVED[_own(torch.tensor)], kwargs={"device": META})
        args = (args[0], _with_places(args[1], put), *args[2:])
    return plain(tracer, kind, moved or target, args, kwargs, *rest, **more)


def _is_on_meta(traced: Any) -> bool:
    example = traced.node.meta.get("example_value") if isinstance(traced, Proxy) else None
    return isinstance(example, torch.Tensor) and example.device == META


def _with_places(index: Any, put: Callable[..., Any]) -> Any:
    """The index with a tensor in place of each list of numbers, of which torch would make one on meta itself."""
    if isinstance(index, tuple):
        return tuple(_with_places(each, put) for each in index)
    is_list = isinstance(index, list) and bool(index) and all(type(number) is int for number in index)
    return put(args=(index,)) if is_list else index


@around
def _moved(make: Callable[..., torch.Tensor], *args: Any, device: torch.device, **kwargs: Any) -> torch.Tensor:
    return make(*args, **kwargs).to(device)


def _own(function: Any) -> Any:
    """torch's own function, where meters have put others around it."""
    return inspect.unwrap(function) if callable(function) else function


_MOVED = {make: _moved(make) for make in map(_own, (torch.tensor, torch.as_tensor))}


def put_on_device(module: Any) -> None:
    """Constants that a posing graph moves to the device count as being there from the start."""
    graph = module.graph
    for move in graph.find_nodes(op="call_function", target=_MOVE):
        lift = move.args[0]
        held = lift.args[0] if lift.target in _LIFTS else lift
        if held.op != "get_attr" or move.meta["val"].device != CUDA:
            continue
        name = f"{held.target}_there"
        setattr(module, name, _there(getattr(module, held.target), move.meta["val"].fake_mode))
        with graph.inserting_before(move):
            there = graph.create_node("get_attr", name)
        there.meta = {**move.meta, "val": getattr(module, name)}
        move.replace_all_uses_with(there)
        for node in (move, lift, held):
            if not node.users:
                graph.erase_node(node)
    module.recompile()


def constants_there(graph: Any, mode: Any) -> Callable[[str, torch.device | None], str]:
    """Takes the place of a graph's `constant_name`, which copies a constant to the device that a kernel needs it on."""
    plain = graph.constant_name

    def constant_name(name: str, device: torch.device | None) -> str:
        constant = graph.constants[name]
        if device is None or device.type != CUDA.type or constant.device.type == CUDA.type:
            return str(plain(name, device))
        there = f"{name}_there"
        graph.constants.setdefault(there, _there(constant, mode))
        return there

    return constant_name


def _there(constant: torch.Tensor, mode: Any) -> Any:
    """The constant's twin on the device, which tells inductor its numbers."""
    with mode:
        twin: Any = torch.empty_strided(constant.shape, constant.stride(), dtype=constant.dtype, device=CUDA)
    twin.item, twin.tolist = constant.item, constant.tolist
    return twin
