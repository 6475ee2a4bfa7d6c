"""`torch.ops.prims`, in which torch's reference implementations are written: each costs what the op of aten costs."""

from __future__ import annotations

from dataclasses import replace

from torch._ops import OpOverload

from flopmeter.records import Call
from flopmeter.torch_names.operators import aten

_OTHER_NAMES = {
    "convert_element_type": "_to_copy", "device_put": "_to_copy", "copy_to": "copy_", "iota": "arange", "rev": "flip",
    "erf_inv": "erfinv",
}  # fmt: skip
# Overloads that take the arguments of the prim.
_OVERLOADS = ("Tensor", "Tensor_Tensor", "self", "dim_IntList", "default")


def as_aten(call: Call) -> Call | None:
    """The same call of the aten op; None for other ops, and for prims without such an op."""
    if call.func.namespace != "prims":
        return None
    name = call.func.overloadpacket.__name__
    packets = aten.present(_OTHER_NAMES.get(name, name))
    found = (getattr(packet, each) for packet in packets for each in _OVERLOADS if hasattr(packet, each))
    overload: OpOverload | None = next(found, None)
    return None if overload is None else replace(call, func=overload)
