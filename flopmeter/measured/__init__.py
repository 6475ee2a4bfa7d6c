"""What was measured: a profile beside its prediction.

kineto.py reads a trace, rebuild.py makes calls of its ops again, comparison.py prices them, result.py shows it;
calibration.py measures this machine.
"""

from flopmeter.measured.calibration import CLOCKS, Clock, Device, as_yaml, calibrate
from flopmeter.measured.comparison import check
from flopmeter.measured.kineto import ProfileError
from flopmeter.measured.result import Check, CheckRow, UnpricedRow

__all__ = [
    "CLOCKS",
    "Check",
    "CheckRow",
    "Clock",
    "Device",
    "ProfileError",
    "UnpricedRow",
    "as_yaml",
    "calibrate",
    "check",
]
