"""Programs that run on two devices at once by mistake: a model left on the CPU and inputs on meta, or the reverse.

torch refuses most such calls with an error that names no tensor. Convolutions, embeddings and attention run on meta
even if their weights are on the CPU. On a GPU all such calls fail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch._ops import OpOverload

from flopmeter.records import Call
from flopmeter.torch_names.operators import aten

# These ops may take tensors of two devices: they copy between them, or make a tensor with the shape of another one.
_BRIDGES = (
    aten._to_copy, aten.copy_, aten.copy, aten._foreach_copy_, aten.empty_like, aten.zeros_like, aten.ones_like,
    aten.full_like, aten.rand_like, aten.randn_like, aten.new_empty, aten.new_empty_strided, aten.new_zeros,
    aten.new_ones, aten.new_full,
)  # fmt: skip
_LISTED = 6  # an error names at most this many tensors


class MixedDevicesError(RuntimeError):
    """The program mixes tensors on different devices where a GPU would refuse it, or runs on two accelerators."""


def explain(func: OpOverload, tensors: Sequence[Tensor], model: nn.Module | None) -> MixedDevicesError | None:
    """An error that says what is wrong, if the arguments of a call are on several devices. `model` is the outermost
    module that runs. A tensor without dimensions may be on the CPU in any call."""
    kinds = list(dict.fromkeys(str(tensor.device) for tensor in tensors if tensor.dim()))
    if len(kinds) < 2:
        return None
    named = () if model is None else (*model.named_parameters(), *model.named_buffers())
    left = [name for name, tensor in named if not tensor.is_meta]
    if left:
        what = f"Of {type(model).__name__}, these are not on meta: {_listed(left)}. Move the model: model.to('meta')"
    else:
        strays = [f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in tensors if not t.is_meta]
        what = (
            f"Of its arguments, these are not on meta: {_listed(strays)}. Bring inputs in with flopmeter.on_meta(...)"
        )
    return MixedDevicesError(f"{func} mixes tensors on {' and '.join(kinds)}. {what}")


def check(call: Call, tensors: Sequence[Tensor], model: nn.Module | None) -> None:
    """Raise MixedDevicesError for floats on the CPU in an op on meta: torch accepts that on meta and refuses it on a
    GPU. Integers may be on the CPU; some ops want their lengths and indices there."""
    if call.func.overloadpacket in _BRIDGES or len({spec.device for spec in call.inputs}) < 2:
        return
    if any(spec.device == "cpu" and spec.is_floating and spec.shape for spec in call.inputs):
        error = explain(call.func, tensors, model)
        if error is not None:
            raise error


def touched(known: Mapping[str, None], call: Call) -> dict[str, None]:
    """The devices of the program including this call, in order of first use.

    Raises MixedDevicesError for a second accelerator: only the ops of one device would be priced.
    """
    is_bridge = call.func.overloadpacket in _BRIDGES
    specs = call.outputs if is_bridge and call.outputs else (*call.inputs, *call.outputs)
    devices = dict.fromkeys((*known, *(spec.device for spec in specs)))
    kinds = [kind for kind in devices if kind != "cpu"]
    if len(kinds) > 1:
        raise MixedDevicesError(
            f"{call.func} runs on {kinds[-1]} in a program that runs on {kinds[0]}, and a meter meters one device: "
            "put all of the program on meta (flopmeter.on_meta(...), model.to('meta')), or all on the other"
        )
    return devices


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
