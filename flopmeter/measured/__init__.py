"""Measured time beside predicted time, and measurements of this machine.

kineto.py reads a trace of torch.profiler, rebuild.py turns its ops into calls again, comparison.py prices the calls,
result.py shows both times; calibration.py measures this machine; suite/ measures kernels and programs of its own there.
"""

from flopmeter.measured.calibration import CLOCKS, Clock, DeviceType, as_yaml, calibrate
from flopmeter.measured.comparison import check
from flopmeter.measured.kineto import ProfileError
from flopmeter.measured.result import Check, CheckRow

__all__ = ["CLOCKS", "Check", "CheckRow", "Clock", "DeviceType", "ProfileError", "as_yaml", "calibrate", "check"]
