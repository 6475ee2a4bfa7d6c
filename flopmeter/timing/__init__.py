"""How long each kernel takes on a device, when it starts, and how sure the prediction is.

constants.py has every number that does not belong to one device. kernels.py prices a kernel: products.py one that
multiplies matrices (by matmul.py, convolution.py or attention.py), vector_work.py any other (by bandwidth.py).
timeline.py says when the host launches each kernel and when the device runs it; concurrency.py and contention.py what
runs at the same time, and what that takes; energy.py at which clock, and what it draws; bands.py how far off a
prediction may be; peak_memory.py and allocator.py how much memory the program needs.
"""

from flopmeter.device.hardware import Host
from flopmeter.timing.bands import Uncertainty, uncertainty
from flopmeter.timing.concurrency import HangError
from flopmeter.timing.energy import PowerLaws, RankRun, TimedRun, time_run, time_runs
from flopmeter.timing.host import host_seconds, host_steps
from flopmeter.timing.timeline import KernelPrices, Launched, LaunchPrices, time_kernels

__all__ = [
    "HangError",
    "Host",
    "KernelPrices",
    "LaunchPrices",
    "Launched",
    "PowerLaws",
    "RankRun",
    "TimedRun",
    "Uncertainty",
    "host_seconds",
    "host_steps",
    "time_kernels",
    "time_run",
    "time_runs",
    "uncertainty",
]
