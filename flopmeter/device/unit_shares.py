"""What large GEMMs reach on the units of a device: as measured, where its profile says so, else by the law of power."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from flopmeter.device import power
from flopmeter.device.profile_parts import Achieved, DtypeRates
from flopmeter.records.dtypes import DTYPES


class PoweredDevice(Protocol):
    """What the law of power asks of a device; a `Hardware` answers."""

    @property
    def achieved(self) -> Achieved | None: ...
    @property
    def architecture(self) -> str: ...
    @property
    def memory_type(self) -> str: ...
    @property
    def tdp_w(self) -> float | None: ...
    @property
    def limit_watts(self) -> float | None: ...
    @property
    def idle_watts(self) -> float: ...
    @property
    def vector_tflop_per_s(self) -> DtypeRates: ...
    @property
    def matrix_tflop_per_s(self) -> DtypeRates: ...
    @property
    def matrix_fp16_accumulate_tflop_per_s(self) -> DtypeRates: ...


def vector_unit(device: PoweredDevice) -> power.UnitPower:
    """What fp32 reaches on vector units; other types are taken to reach the same shares."""
    known, rates = device.achieved, device.vector_tflop_per_s
    return power.unit(
        rates.get("fp32", next(iter(rates.values()))),
        device.limit_watts,
        device.idle_watts,
        power.VECTOR_PICOJOULES,
        4 * power.byte_picojoules(device.memory_type),
        typical=power.VECTOR_CEILING,
        ceiling=power.VECTOR_CEILING,
        sustained=None if known is None else known.vector,
        measured_limit_w=_measured_limit_w(device),
    )


def matrix_unit(device: PoweredDevice, unit: str, dtype: str, tflop_per_s: float) -> power.UnitPower:
    """The fractions in the profile, else those of fp16 at the clock that this type's power leaves.

    Kernels for narrower types have fp16's tiles and fp16's bytes in a tile, so that at the boost clock none reaches a
    larger share of its peak than fp16, unless it was measured to.
    """
    known, rates = device.achieved, device.matrix_tflop_per_s
    half_rate = max((rates[half] for half in ("fp16", "bf16") if half in rates), default=tflop_per_s)
    law = partial(
        power.unit,
        limit_w=device.limit_watts,
        idle_w=device.idle_watts,
        typical=power.typical_matrix_share(
            device.architecture, is_halved=bool(device.matrix_fp16_accumulate_tflop_per_s)
        ),
        measured_limit_w=_measured_limit_w(device),
    )
    of_byte = power.byte_picojoules(device.memory_type)
    picojoules = power.matrix_picojoules(device.architecture, dtype, tflop_per_s, half_rate)
    of_type = partial(law, tflop_per_s, operand_picojoules=DTYPES[dtype].item_bytes * of_byte)
    if unit == "emulated":
        return of_type(picojoules=picojoules, ceiling=1.0, burst=1.0)._replace(sustained_share=1.0)
    of_half = power.matrix_picojoules(device.architecture, "fp16", half_rate, half_rate)
    half = law(
        half_rate,
        picojoules=of_half,
        operand_picojoules=2 * of_byte,
        ceiling=power.MATRIX_CEILING,
        burst=None if known is None else known.matrix_burst,
        sustained=None if known is None else known.matrix,
    )
    ceiling = min(power.MATRIX_CEILING, half.burst_share)
    if known is not None and dtype in known.matrix_by_dtype:
        return of_type(picojoules=picojoules, ceiling=ceiling, sustained=known.matrix_by_dtype[dtype])
    if dtype in ("fp16", "bf16") or not half.picojoules or picojoules is None or of_half is None:
        return half
    return of_type(picojoules=picojoules * half.picojoules / of_half, ceiling=ceiling, burst=half.burst_share)


def _measured_limit_w(device: PoweredDevice) -> float | None:
    """The power limit under which the fractions were measured."""
    return device.achieved.limit_w if device.achieved is not None and device.achieved.limit_w else device.tdp_w
