"""How far off a prediction may be: the error that validation found for each class of kernel, and how errors add up.

80 to 90 % of the measurements that a class was validated on lie in its band (scripts/validate.py makes the tables). On
other devices the band is wider. A class without any measurement is marked extrapolated.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt
from typing import NamedTuple

from flopmeter.device.hardware import Hardware
from flopmeter.records import (
    COMMUNICATION,
    ELEMENTWISE,
    INDEXING,
    MOVEMENT,
    NORMALIZATION,
    RANDOM,
    REDUCTION,
    SORTING,
    Timing,
)

NEUSIGHT = ("p4", "p100-pcie-16gb", "v100-pcie-32gb", "t4", "a100-pcie-40gb")
TIMM = ("rtx-3090", "rtx-4090")
NCCL_TESTS = ("a100-sxm4-80gb", "h100-sxm5-80gb", "h200-sxm-141gb")  # and the L40S; but hosts with PCIe differ more
AICONFIGURATOR = ("a100-sxm4-80gb", "h100-sxm5-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "l40s")

ATTENTION = ("a100-sxm4-80gb", "h100-sxm5-80gb", "h200-sxm-141gb", "l40s")  # in the same database
PROFILES = ("h100-sxm5-80gb", "h200-sxm-141gb")  # our own, torch 2.11, 2026-11: validation/traces


class Band(NamedTuple):
    """The measured time lies between (1 - below) and (1 + above) of the predicted one."""

    below: float
    above: float
    devices: tuple[str, ...] = ()  # the devices that the class was validated on

    def holds(self, measured: float, predicted: float) -> bool:
        return (1 - self.below) * predicted <= measured <= (1 + self.above) * predicted


# By class of kernel, as `Timing.kernel_class` names it. fp32: from single operators (NeuSight). fp16: from whole image
# models, whose error is divided among their classes; `fused` from their compiled runs. bf16 and fp8: GEMMs from 2 µs
# to 30 ms, and layers of experts, of aiconfigurator's database (of which the B200's half is not at hand). Attention in
# bf16: long kernels of FlashAttention-2 and -3; frameworks' wrappers differ by 1.2 to 1.5 on one shape. In profiles a
# kernel counts by its time: a short one often finds in the L2 cache what a comparison of single calls does not know.
# `scripts/validate.py --traces validation/traces` prints them by class.
BANDS: dict[str, Band] = {
    "product, fp32 on vector units": Band(0.13, 0.22, NEUSIGHT + PROFILES),
    "small product, fp32 on vector units": Band(0.18, 0.50, NEUSIGHT + PROFILES),
    "batched product, fp32 on vector units": Band(0.25, 0.48, NEUSIGHT),
    "convolution, fp32 on vector units": Band(0.35, 1.20, NEUSIGHT),
    "product, fp16": Band(0.15, 0.15, TIMM + AICONFIGURATOR),
    "product, bf16": Band(0.14, 0.22, AICONFIGURATOR),
    "small product, fp16": Band(0.15, 0.18, AICONFIGURATOR),
    "small product, bf16": Band(0.15, 0.18, AICONFIGURATOR),
    "product, fp8": Band(0.18, 0.42, AICONFIGURATOR),
    "small product, fp8": Band(0.15, 0.30, PROFILES),
    "grouped product, bf16": Band(0.20, 0.60, AICONFIGURATOR),
    "batched product, fp16": Band(0.25, 0.35, TIMM),
    "batched product, bf16": Band(0.12, 0.12, PROFILES),
    "convolution, fp16": Band(0.15, 0.18, TIMM + PROFILES),
    "convolution, bf16": Band(0.15, 0.30, PROFILES),
    "convolution, tf32": Band(0.30, 0.20, PROFILES),
    "grouped convolution, fp16": Band(0.30, 0.45, TIMM),
    "grouped convolution, bf16": Band(0.10, 0.30, PROFILES),
    "depthwise convolution, fp16": Band(0.25, 0.35, TIMM),
    "depthwise convolution, bf16": Band(0.12, 0.40, PROFILES),
    "attention, fp16": Band(0.25, 0.45, TIMM + ATTENTION),
    "attention, bf16": Band(0.25, 0.45, ATTENTION),
    "attention backward, bf16": Band(0.12, 0.12, PROFILES),
    ELEMENTWISE: Band(0.10, 0.15, NEUSIGHT + TIMM + PROFILES),
    NORMALIZATION: Band(0.13, 0.27, NEUSIGHT + TIMM + PROFILES),
    MOVEMENT: Band(0.12, 0.15, TIMM + PROFILES),
    REDUCTION: Band(0.25, 0.35, TIMM + PROFILES),
    INDEXING: Band(0.15, 0.25, PROFILES),
    RANDOM: Band(0.15, 0.30, PROFILES),
    SORTING: Band(0.25, 0.75, PROFILES),
    "strided copy": Band(0.25, 0.35, TIMM + PROFILES),
    "pooling": Band(0.30, 0.45, TIMM + PROFILES),
    "fused": Band(0.20, 0.20, ("rtx-4090",)),
    COMMUNICATION: Band(0.13, 0.18, NCCL_TESTS),
}
BETWEEN_NODES = "communication between nodes"  # there are no measurements of it
# The host's time: thirteen programs within 13 % once the CPU is known; CPUs differ by a factor of two.
HOST_BAND = Band(0.35, 0.60)
# Classes without any measurement.
UNVALIDATED = {"host copy": Band(0.20, 1.00)}
UNVALIDATED_DEFAULT = Band(0.35, 0.60)

# How many times wider the band is on a device that the class was not validated on. 1.5 is how much the error of one of
# NeuSight's five devices grows if the constants are fitted without it. For other vendors the same increase is added
# once more.
OTHER_DEVICE = 1.5
OTHER_VENDOR = 2.0

# Correlation between the errors of two classes of kernels in a run. All kernels of one class have the same error
# (correlation 1), since one constant is wrong for all of them. Between classes it is one half, since they share the
# device's bandwidth and clock.
CLASS_CORRELATION = 0.5


def band(kernel_class: str, hardware: Hardware) -> Band:
    """The band of one class on one device; `devices` is empty where it is extrapolated."""
    known = BANDS.get(kernel_class)
    if known is None:
        known = UNVALIDATED.get(kernel_class) or _like(kernel_class)
    if hardware.name in known.devices:
        return known
    factor = OTHER_DEVICE if hardware.vendor == "nvidia" else OTHER_VENDOR
    return Band(min(0.8, known.below * factor), known.above * factor, known.devices)


def _like(kernel_class: str) -> Band:
    """The widest band of the same kind of kernel in other dtypes; not validated on any device."""
    kind = kernel_class.partition(",")[0]
    same = [entry for name, entry in BANDS.items() if name.partition(",")[0] == kind]
    if not same:
        return UNVALIDATED_DEFAULT
    return Band(max(entry.below for entry in same), max(entry.above for entry in same))


class Uncertainty(NamedTuple):
    """Bounds of a run in seconds, and which of its kernel classes were validated where."""

    low: float
    high: float
    validated: tuple[str, ...]  # classes that were validated on this device
    transferred: tuple[str, ...]  # validated on others
    extrapolated: tuple[str, ...]  # never validated


def uncertainty(timings: Iterable[Timing], seconds: float, hardware: Hardware) -> Uncertainty:
    """The band of a run that is predicted to take `seconds`.

    Each class contributes its time in the run times its band; time spent waiting for the host contributes with the
    host's band. The contributions add up as errors with a correlation of CLASS_CORRELATION between any two.
    """
    shares: dict[str, float] = {}
    for timing in timings:
        shares[timing.kernel_class] = shares.get(timing.kernel_class, 0.0) + timing.seconds
    idle = max(0.0, seconds - sum(shares.values()))
    bands = {name: band(name, hardware) for name in shares}
    below = [share * bands[name].below for name, share in shares.items()] + [idle * HOST_BAND.below]
    above = [share * bands[name].above for name, share in shares.items()] + [idle * HOST_BAND.above]
    by_devices = {name: entry.devices for name, entry in bands.items()}
    return Uncertainty(
        seconds - _together(below),
        seconds + _together(above),
        tuple(name for name, devices in by_devices.items() if hardware.name in devices),
        tuple(name for name, devices in by_devices.items() if devices and hardware.name not in devices),
        tuple(name for name, devices in by_devices.items() if not devices),
    )


def _together(errors: list[float]) -> float:
    independent = sum(error**2 for error in errors)
    return sqrt(CLASS_CORRELATION * sum(errors) ** 2 + (1 - CLASS_CORRELATION) * independent)
