"""The largest batch that fits a device, found on meta tensors."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable
from typing import Any

from flopmeter.ask.checks import check_callable, check_flags, check_whole
from flopmeter.device.hardware import AnyHardware, load_hardware
from flopmeter.launch.modes import Mode
from flopmeter.meter import FlopMeter
from flopmeter.timing.peak_memory import usable_bytes

MOST_TRIED = 2**20


def largest_batch(
    fn_of_batch: Callable[[int], object],
    hardware: AnyHardware,
    *,
    mode: Mode | None = None,
    allocator: bool = False,
    limit: int = MOST_TRIED,
    **meter_options: Any,
) -> int:
    """The largest batch, at most `limit`, whose memory fits the device; 0 where not even one item does.

    fn_of_batch: runs one step of the program at a batch, on meta tensors. It is called about twice as many
        times as the answer has binary digits, so build the model outside of it. Memory must not fall when the
        batch grows.
    mode: whose memory counts, as of FlopMeter.report: what torch.compile fuses and computes again is not kept.
    allocator: count what PyTorch's caching allocator takes (see Memory.fits).
    meter_options: of FlopMeter.

    Raises HardwareError where the device's memory is unknown, ValueError for a limit below 1, and EmptyProgramError
    where the function runs no op.
    """
    check_callable("largest_batch runs a function of the batch", fn_of_batch)
    check_whole(limit=limit)
    check_flags(allocator=allocator)
    device = load_hardware(hardware)
    usable_bytes(device)  # a device of unknown memory is an error before anything runs

    def fits(batch: int) -> bool:
        with FlopMeter(device, **meter_options) as meter:
            fn_of_batch(batch)
        return meter.report(mode=mode).memory.fits(device, allocator=allocator)

    fitting, too_large = 0, 1
    while too_large <= limit and fits(too_large):
        fitting, too_large = too_large, 2 * too_large
    between = range(fitting + 1, min(too_large, limit + 1))
    return fitting + bisect(between, False, key=lambda batch: not fits(batch))
