"""Hardware profiles as text: a line for each device, or every field of one device, with a mark at unverified ones."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tabulate import tabulate

from flopmeter.cli.command import Command
from flopmeter.device.hardware import Hardware, HardwareError, available_hardware, load_hardware
from flopmeter.device.schema import plain
from flopmeter.records.dtypes import DTYPES, MATRIX_DTYPES
from flopmeter.report.quantities import figure

SHOWN_DTYPES = [dtype for dtype in MATRIX_DTYPES if DTYPES[dtype].in_torch]
LEGEND = (
    "Dense TFLOP/s of matrix products by input type (int8: TOP/s), on the matrix unit or else the vector units;\n"
    "~ is an emulated type, at the rate that torch reaches. Ridge: FLOP/B in bf16, or else fp16, fp32. `?`: how many\n"
    "figures were not found in a source; name a profile to see which."
)


def hardware_table(names: Iterable[str] = ()) -> str:
    """The named devices (or YAML files) in full; without names, a line for each device that flopmeter knows.

    Raises HardwareError for a name or file that is no profile.
    """
    named = [load_hardware(name) for name in names]
    if named:
        return "\n\n".join(in_full(device) for device in named)
    return overview([load_hardware(name) for name in available_hardware()])


def overview(devices: list[Hardware]) -> str:
    headers = ["name", "year", *SHOWN_DTYPES, "GB", "GB/s", "W", "ridge", "?"]
    rows = [
        [
            device.name,
            device.year,
            *(rate(device, dtype) for dtype in SHOWN_DTYPES),
            entry(device.memory_gb),
            entry(device.memory_bandwidth_gb_per_s),
            entry(device.tdp_w),
            entry(round(device.ridge_point(ridge_dtype(device)))),
            len(device.unverified) or "",
        ]
        for device in devices
    ]
    align = ("left", *["right"] * (len(headers) - 1))
    return f"{tabulate(rows, headers, disable_numparse=True, colalign=align)}\n\n{LEGEND}"


def rate(device: Hardware, dtype: str) -> str:
    """TFLOP/s of a matrix product, empty where there is none."""
    if dtype == "tf32" and dtype not in device.matrix_tflop_per_s:
        return ""  # the profile would answer with fp32, as torch does
    try:
        peak = device.contraction_peak(dtype)
    except HardwareError:
        return ""
    return ("~" if peak.unit == "emulated" else "") + entry(peak.flop_per_s / 1e12)


def ridge_dtype(device: Hardware) -> str:
    return next((dtype for dtype in ("bf16", "fp16") if dtype in device.matrix_tflop_per_s), "fp32")


def entry(value: float | None) -> str:
    return figure(value, digits=4, missing="")


def in_full(device: Hardware) -> str:
    """Every field of a profile, one line each, with a mark at what is unverified."""
    rows = [
        (path, entry(value) if isinstance(value, float) else value, "unverified" * is_unverified(device, path))
        for path, value in flat(plain(device))
        if not path.startswith("unverified")
    ]
    return tabulate(rows, tablefmt="plain", disable_numparse=True, maxcolwidths=[None, 72, None])


def is_unverified(device: Hardware, path: str) -> bool:
    return any(path == known or path.startswith(f"{known}.") for known in device.unverified)


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested mappings, with their dotted path; lists on one line."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from flat(below, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
        for index, below in enumerate(value):
            yield from flat(below, f"{path}[{index}]")
    else:
        yield path, ", ".join(map(str, value)) if isinstance(value, list) else value


def _run(options: argparse.Namespace) -> int:
    print(hardware_table(options.names))
    return 0


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="a name, an alias or a YAML file")


COMMAND = Command(
    _run,
    "The devices that flopmeter knows, or some of them in full",
    "Example: flopmeter hardware h100-sxm5-80gb\n",
    _arguments,
)
