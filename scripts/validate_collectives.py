"""Collectives of NCCL within a node, by nccl-tests (ai-dynamo/aiconfigurator): collectives.csv.

`message_size` times the size of the type is the size that nccl-tests print: of the tensor after an all-gather, before a
reduce-scatter. (512 MB of 8 H100 in 1.4 ms are 335 GB/s of each GPU's 450; were it the part of one rank, it would be
2.7 TB/s.) The times are out of place, of 60 to 100 launches after one another, by one process that drives all GPUs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from validate_kernels import LEAST_SECONDS, is_held_out
from validation_rows import Line, Row

from flopmeter import FlopMeter, load_hardware
from flopmeter.device.cluster import cluster_of
from flopmeter.distributed import world
from flopmeter.records import CollectiveKind
from flopmeter.records.collectives import COLLECTIVES
from flopmeter.timing.bands import band

DTYPES = {"half": torch.float16, "int8": torch.int8}


Run = Callable[[Tensor, Tensor], object]
# The kind, the call, and whether a rank's input and its output are a part of the size (or the whole).
OPS: dict[str, tuple[CollectiveKind, Run, bool, bool]] = {
    "all_gather": ("all_gather", lambda part, whole: dist.all_gather_into_tensor(whole, part), True, False),
    "reduce_scatter": ("reduce_scatter", lambda whole, part: dist.reduce_scatter_tensor(part, whole), False, True),
    "all_reduce": ("all_reduce", lambda whole, _: dist.all_reduce(whole), False, False),
    "alltoall": ("all_to_all", lambda sent, received: dist.all_to_all_single(received, sent), False, False),
}


def collectives(lines: list[Line]) -> dict[str, list[Row]]:
    return {"NCCL": [_row(line) for line in lines if float(line["ms"]) * 1e-3 >= LEAST_SECONDS]}


def _row(line: Line) -> Row:
    """The roofline: the bytes on the wire at the link's datasheet rate."""
    kind, run, sends_part, gets_part = OPS[line["op_name"]]
    ranks, dtype = int(line["num_gpus"]), DTYPES[line["nccl_dtype"]]
    device = load_hardware(line["gpu"])
    count = int(line["message_size"])
    with world(ranks):
        sent, received = (
            torch.empty(count // ranks if is_part else count, dtype=dtype, device="meta")
            for is_part in (sends_part, gets_part)
        )
        with FlopMeter(device) as meter, warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer names of the same collectives
            run(sent, received)
    (timing,) = meter.report().timings
    width = band(timing.kernel_class, device)
    nbytes = count * dtype.itemsize
    wire_bytes = next(iter(COLLECTIVES[kind].wire.values()))(ranks) * nbytes
    return Row(
        group=kind,
        gpu=line["gpu"],
        measured=float(line["ms"]) * 1e-3,
        predicted=timing.seconds,
        low=timing.seconds * (1 - width.below),
        high=timing.seconds * (1 + width.above),
        roofline=wire_bytes / cluster_of(device).intra.bandwidth_bytes_per_s,
        held_out=is_held_out(kind, ranks, nbytes),
    )
