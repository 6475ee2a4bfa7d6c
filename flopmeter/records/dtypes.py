"""The number types: one entry each in `DTYPES`, with what holds for a type everywhere.

What hardware or a library does with a type stands with them: energy in device/power.py, grouped matmuls in
launch/grouped_matmul.py, sums in a switch in records/collectives.py, formats of weights in ask/serve/published.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

Units = tuple[Literal["matrix", "vector"], ...]
_MATRIX: Units = ("matrix",)
_BOTH: Units = ("matrix", "vector")


@dataclass(frozen=True, slots=True)
class Dtype:
    """A number type, under the name that profiles, costs and reports use."""

    name: str
    item_bytes: float  # of one element; fp4 has half a byte
    # The types in which torch stores it, each with its names in C++, as torch's profiler writes them.
    in_torch: Mapping[torch.dtype, tuple[str, ...]] = field(default_factory=dict)
    units: Units = ()  # the units for which a profile may give a rate in this type
    opmath: str = ""  # the type that torch does element-wise work in; "": this one
    real: str = ""  # for complex numbers the type of the two parts, whose rates hold; "": not complex
    ttir: str = ""  # how its names begin in Triton's intermediate language
    is_switch: bool = False  # no tensor has this type: matmuls of another type use it if a setting of torch allows that

    @property
    def is_float(self) -> bool:
        """Whether models can be kept in this type: torch has matmuls and element-wise work in it."""
        return self.units == _BOTH and any(dtype.is_floating_point for dtype in self.in_torch)


_ENTRIES = (
    Dtype("fp64", 8, {torch.float64: ("double",)}, _BOTH, ttir="f64"),
    Dtype("fp32", 4, {torch.float32: ("float",)}, _BOTH, ttir="f32"),
    Dtype("tf32", 4, {torch.float32: ()}, _MATRIX, opmath="fp32", ttir="tf32", is_switch=True),
    Dtype("fp16", 2, {torch.float16: ("c10::Half",)}, _BOTH, opmath="fp32", ttir="f16"),
    Dtype("bf16", 2, {torch.bfloat16: ("c10::BFloat16",)}, _BOTH, opmath="fp32", ttir="bf16"),
    Dtype(
        "fp8",
        1,
        {
            torch.float8_e4m3fn: ("c10::Float8_e4m3fn",),
            torch.float8_e5m2: ("c10::Float8_e5m2",),
            torch.float8_e4m3fnuz: (),
            torch.float8_e5m2fnuz: (),
            torch.float8_e8m0fnu: (),
        },
        _MATRIX,
        opmath="fp32",
        ttir="f8",
    ),
    Dtype("fp6", 0.75, units=_MATRIX, opmath="fp32"),  # no type of torch's
    Dtype("fp4", 0.5, {torch.float4_e2m1fn_x2: ()}, _MATRIX, opmath="fp32"),  # torch packs two in a byte
    # The vector units of parts without a matrix unit have dp4a.
    Dtype("int8", 1, {torch.int8: ("signed char",), torch.uint8: ("unsigned char",)}, _BOTH, ttir="i8"),
    Dtype("int4", 0.5, units=_MATRIX),  # no type of torch's
    Dtype("int16", 2, {torch.int16: ("short", "short int")}),
    Dtype("int32", 4, {torch.int32: ("int",)}),
    Dtype("int64", 8, {torch.int64: ("long int", "long", "long long"), torch.uint64: ("long unsigned int",)}),
    Dtype("bool", 1, {torch.bool: ("bool",)}),
    Dtype("complex32", 4, {torch.complex32: ()}, real="fp16"),
    Dtype("complex64", 8, {torch.complex64: ("c10::complex<float>",)}, real="fp32"),
    Dtype("complex128", 16, {torch.complex128: ("c10::complex<double>",)}, real="fp64"),
)
DTYPES: dict[str, Dtype] = {entry.name: entry for entry in _ENTRIES}

MATRIX_DTYPES = tuple(entry.name for entry in _ENTRIES if "matrix" in entry.units)
VECTOR_DTYPES = tuple(entry.name for entry in _ENTRIES if "vector" in entry.units)
FLOATS = {entry.name: next(iter(entry.in_torch)) for entry in _ENTRIES if entry.is_float}
"""The types that a model can be kept in, with torch's."""
NARROW_FLOATS = tuple(name for name in FLOATS if DTYPES[name].opmath)
"""The types that torch.autocast takes."""
CPP_NAMES = {name: dtype for entry in _ENTRIES for dtype, names in entry.in_torch.items() for name in names}
"""Names in C++, and the types of torch that they mean."""

_NAMES = {dtype: entry.real or entry.name for entry in _ENTRIES if not entry.is_switch for dtype in entry.in_torch}


def name_of(dtype: torch.dtype) -> str:
    """The type that costs give for numbers of `dtype`; for complex numbers, the type of their parts."""
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def item_bytes_of(name: str) -> float:
    """Bytes of an element of a type. A type without an entry here has its name from torch; nothing computes in it."""
    if name in DTYPES:
        return DTYPES[name].item_bytes
    dtype: torch.dtype = getattr(torch, name)
    return dtype.itemsize


def opmath_of(name: str) -> str:
    """The type in which torch does element-wise work with numbers of this type."""
    return (DTYPES[name].opmath if name in DTYPES else "") or name
