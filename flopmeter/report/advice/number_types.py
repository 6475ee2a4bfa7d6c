"""Types of numbers that the device computes faster."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator

import torch

from flopmeter.costs.contractions.rnn import launched_steps
from flopmeter.device.hardware import Hardware, HardwareError, Unit
from flopmeter.records import Kernel, TensorSpec, Trace
from flopmeter.records.dtypes import name_of
from flopmeter.report.advice.autocast import FOURIER, autocast
from flopmeter.report.advice.chosen_kernels import with_chosen_kernels
from flopmeter.report.advice.remedies import Proposal, priced, remedy
from flopmeter.report.advice.rewrite import statistics_of, with_tensors
from flopmeter.report.quantities import with_prefix
from flopmeter.report.report import Report


@remedy
def tf32(report: Report, trace: Trace) -> Iterator[Proposal]:
    """fp32 products that matrix units could run."""
    device, switches = report.hardware, report.switches
    if report.main_dtype not in ("fp32", "tf32") or "tf32" not in device.matrix_tflop_per_s:
        return
    asked = ["torch.set_float32_matmul_precision('high')"] * (not switches.matmul_tf32)
    asked += ["torch.backends.cudnn.allow_tf32 = True"] * (not switches.cudnn_tf32)
    then = dataclasses.replace(trace, switches=switches._replace(matmul_tf32=True, cudnn_tf32=True))
    yield Proposal(
        "fp32 products run on vector units", f"TF32: {' and '.join(asked)}", priced(report, then),
        lambda kernel: kernel.cost.macs > 0 and switches.matmul_dtype(kernel.cost) == "fp32", "fp32 products",
    )  # fmt: skip


@remedy
def narrower_numbers(report: Report, trace: Trace) -> Iterator[Proposal]:
    """The whole program in fp64, as data of NumPy are; in fp32; or in a 16-bit type without matrix units (bf16 before
    Ampere) where the device is faster in another."""
    types = _wide_and_narrow(report)
    if types is None:
        return
    wide, narrow = types
    name = str(narrow).removeprefix("torch.")
    transforms = sorted({op.call.name for op in trace.ops} & FOURIER)
    if narrow is not torch.float32 and transforms:
        yield from _autocast_alone(
            report, trace, narrow, f"{transforms[0]} has no {name}, so its input stays {name_of(wide)}"
        )
        return

    kept = set[int]() if narrow is torch.float32 else set[int]().union(*map(statistics_of, trace.ops))

    def narrowed(spec: TensorSpec, is_kept: object) -> TensorSpec:
        is_wide = spec.dtype == wide and spec.device != "cpu" and not is_kept
        return spec._replace(dtype=narrow) if is_wide else spec

    reasons = [f"twice the bytes of {name}"] * (wide is not torch.bfloat16)
    reasons += ["no matrix units for it"] * (_unit(report, wide) != "matrix" == _unit(report, narrow))
    beside = ", and data made by NumPy too" if wide is torch.float64 else ""
    if wide is torch.float32:
        beside = _or_autocast(report, trace, narrow)
    then = with_chosen_kernels(with_tensors(trace, narrowed, kept.__contains__, {wide: narrow}), report.hardware)
    yield Proposal(
        f"weights and data are {name_of(wide)}: {', and '.join(reasons) or f'{name} is faster'}",
        f"{name}: model.to(torch.{name}){beside}", priced(report, then),
    )  # fmt: skip


@remedy
def recurrent_layers_in_fp16(report: Report, trace: Trace) -> Iterator[Proposal]:
    """Layers in fp32 whose steps cuDNN launches one by one, and for which it has a kernel of all steps in fp16, the
    type of recurrent layers under autocast whatever its own (aten/src/ATen/autocast_mode.cpp)."""

    def in_steps(kernel: Kernel) -> bool:
        return launched_steps(kernel.cost.work, report.hardware) > 0

    launched = sum(map(in_steps, report.kernels))
    if not launched or report.main_dtype not in ("fp32", "tf32"):
        return
    cast = autocast(trace, torch.float16)
    then = None if cast is None else priced(report, cast)
    if then is not None and sum(map(in_steps, then.kernels)) < launched:
        yield Proposal(
            "cuDNN launches each of their steps",
            "torch.autocast, under which recurrent layers run in float16: one kernel then runs all steps, with the"
            " weights on the chip", then, in_steps, "recurrent layers",
        )  # fmt: skip


def _wide_and_narrow(report: Report) -> tuple[torch.dtype, torch.dtype] | None:
    """The type of the whole program, and a narrower or a faster one; None if there is none."""
    fp32 = torch.float32
    wide = {"fp64": torch.float64, "fp32": fp32, "tf32": fp32, "bf16": torch.bfloat16}.get(report.main_dtype)
    narrow = fp32 if wide is torch.float64 else narrow_type(report.hardware)
    if narrow is None or wide is None or narrow is wide or not any(kernel.cost.macs for kernel in report.kernels):
        return None
    if wide is fp32 and type_of_others(report) is not None:  # then the program is narrow, and some of it is not
        return None
    has_units = wide is torch.bfloat16 and _unit(report, wide) == "matrix"
    return None if has_units else (wide, narrow)


def _unit(report: Report, dtype: torch.dtype) -> Unit:
    """The unit that runs products of the type, as tf32 where the program allows that."""
    name = name_of(dtype)
    is_tf32 = name == "fp32" and report.main_dtype == "tf32"
    return report.hardware.contraction_peak("tf32" if is_tf32 else name).unit


def _autocast_alone(report: Report, trace: Trace, dtype: torch.dtype, but: str) -> Iterator[Proposal]:
    """For a program whose weights can be narrowed and some of whose ops cannot."""
    then = autocast(trace, dtype)
    if then is not None:
        yield Proposal(
            "products are in fp32, without matrix units",
            f"torch.autocast in {str(dtype).removeprefix('torch.')} around the products ({but})",
            priced(report, with_chosen_kernels(then, report.hardware)),
        )  # fmt: skip


def _or_autocast(report: Report, trace: Trace, dtype: torch.dtype) -> str:
    """What a program in fp32 can do in place of narrowing its weights, and what the run then takes."""
    said, then = ", or torch.autocast where weights have to stay fp32", autocast(trace, dtype)
    if then is None:
        return said
    seconds = priced(report, with_chosen_kernels(then, report.hardware)).seconds
    return f"{said} (then {with_prefix(seconds, 's')})"


LEAST_OTHERS = 0.1  # of a program's multiply-adds in 16 bits make those in fp32 exceptions


def type_of_others(report: Report) -> torch.dtype | None:
    """The 16-bit type of a program in which some products are in fp32; None if it has none, or hardly any."""
    macs = Counter[str]()
    for kernel in report.kernels:
        macs[kernel.cost.dtype] += kernel.cost.macs
    name, most = max(((name, macs[name]) for name in ("bf16", "fp16")), key=lambda pair: pair[1])
    is_mixed = most >= LEAST_OTHERS * macs.total() and most > 0
    return {"bf16": torch.bfloat16, "fp16": torch.float16}[name] if is_mixed else None


def narrow_type(device: Hardware) -> torch.dtype | None:
    """The 16-bit type for which the device has matrix units; else fp16, but not on a CPU, for which torch has few
    kernels in it."""
    units: dict[torch.dtype, Unit] = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        with contextlib.suppress(HardwareError):
            units[dtype] = device.contraction_peak(name).unit
    on_matrix_units = [dtype for dtype, unit in units.items() if unit == "matrix"]
    without = [] if device.is_cpu else [dtype for dtype in units if dtype is torch.float16]
    return next(iter(on_matrix_units + without), None)
