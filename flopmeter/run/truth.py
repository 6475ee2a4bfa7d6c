"""Whether a tensor really is on meta while torch says that it is on the device named cuda, and which code is told."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from flopmeter.torch_names.private import ABOVE_DISPATCHER, BELOW_DISPATCHER, function_mode_count, no_function_modes

_TOLD_THE_TRUTH = ("flopmeter.", *BELOW_DISPATCHER)
_PROPERTIES = ("device", "is_cuda", "is_meta")
_tensor: Any = torch.Tensor


def _true(own: Callable[..., Any]) -> Callable[..., Any]:
    """A getter or setter of torch's own. A function mode would look it up by name, and find ours."""

    def call(*args: Any) -> Any:
        if not function_mode_count():
            return own(*args)
        with no_function_modes():
            return own(*args)

    return call


true_device, true_get_device = _true(_tensor.device.__get__), _true(_tensor.get_device)
true_is_meta, true_is_cuda = _true(_tensor.is_meta.__get__), _true(_tensor.is_cuda.__get__)
true_mesh_type: Any = getattr(vars(DeviceMesh).get("device_type"), "fget", None)  # None: no property in this torch
true_data, set_true_data = _true(_tensor.data.__get__), _true(_tensor.data.__set__)


def asked_from_below() -> bool:
    """Whether the code that asks for a property of a tensor runs below the dispatcher. A subclass may pass the question
    on, by a property of its own of that name (torchvision's TVTensor)."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name in _PROPERTIES and _is_of_a_tensor(frame):
        frame = frame.f_back
    return frame is not None and _is_below(frame)


def _is_of_a_tensor(frame: FrameType) -> bool:
    return isinstance(frame.f_locals.get("self"), torch.Tensor)


def wrapped_from_below() -> bool:
    """Whether the caller of the caller runs below the dispatcher. A function of the program may stand in for torch's,
    as in DeepSpeed's zero.Init: torch.ones on meta calls torch.empty."""
    caller = sys._getframe(2).f_back
    return caller is not None and _is_below(caller)


def _is_below(frame: FrameType) -> bool:
    name: Any = frame.f_globals.get("__name__", "")
    return name.startswith(_TOLD_THE_TRUTH) and not name.startswith(ABOVE_DISPATCHER)
