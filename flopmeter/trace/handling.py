"""How the recorder treats each op: passes it on, decomposes it, asks known values about it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from flopmeter.known_values import KnownValues
from flopmeter.known_values.rules import rule_of
from flopmeter.torch_names.operators import NAMESPACES_OF_TORCH, aten
from flopmeter.torch_names.private import has_kernel
from flopmeter.trace.implementations import key_of_parts
from flopmeter.trace.process_groups import NAMESPACES

_RESIZING = (aten.resize_, aten.resize_as_, aten.resize)
FRESH = (aten.lift_fresh, aten.lift_fresh_copy)  # they take the storage that torch.tensor(...) just made
_HOST_NAMESPACES = ("prim", "profiler")  # questions about metadata; no kernel anywhere
_WRAPPERS = ("_c10d_functional::_wrap_tensor_autograd",)  # returns its argument as a tensor subclass


class Handling(NamedTuple):
    """How the recorder treats an op; found once for each op."""

    is_host: bool = False  # pass through unrecorded
    is_composite: bool = False  # arrives undecomposed under inference_mode
    shape_depends_on_data: bool = False  # the inputs' geometry does not determine the outputs'
    changes_storages: bool = False  # resizes a storage that it was passed, or was passed a new one
    asks_values: bool = False  # known values may answer it whatever it is passed
    is_collective: bool = False  # is passed process groups and returns handles
    is_foreach: bool = False  # does the same at each place of its lists
    looks_up: bool = False  # may be passed the ids of a batch of texts
    has_parts: bool = False  # the ops that a function in Python runs are recorded instead


def is_composite(func: OpOverload) -> bool:
    """Whether the op is made of others above autograd: a dispatch mode sees these, and as a rule not the op."""
    name = func.name()
    return has_kernel(name, "CompositeImplicitAutograd") and not (has_kernel(name, "CPU") or has_kernel(name, "Meta"))


def _handling(func: Any) -> Handling:
    # A higher-order op is no OpOverload: its body is traced op by op.
    if not isinstance(func, OpOverload) or func.namespace in _HOST_NAMESPACES or func.name() in _WRAPPERS:
        return Handling(is_host=True)
    by_data = torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags
    by_data = by_data or func.namespace not in NAMESPACES_OF_TORCH  # their sizes may depend on data without that tag
    has_out = any(argument.is_out for argument in func._schema.arguments)
    return Handling(
        is_composite=is_composite(func),
        shape_depends_on_data=by_data,
        changes_storages=has_out or func.overloadpacket in (*_RESIZING, *FRESH),
        is_collective=func.namespace in NAMESPACES,
        is_foreach=func._schema.name.startswith("aten::_foreach_"),
        looks_up=func.overloadpacket is aten.embedding,
        has_parts=key_of_parts(func) is not None,
    )


class Handlings(dict[Any, Handling]):
    """How each op is treated, found when it comes first."""

    def __init__(self, values: KnownValues | None):
        super().__init__()
        self._values = values

    def __missing__(self, func: Any) -> Handling:
        handling = _handling(func)
        if self._values is not None:
            handling = handling._replace(asks_values=rule_of(func, self._values.assume).always)
        self[func] = handling
        return handling
