"""The report: rows and totals of the timed kernels, and what draws them."""

from flopmeter.report import advice, chrome_trace, formats, speed_up  # noqa: F401  (they enter themselves in drawers.py)
from flopmeter.report.report import Report
from flopmeter.report.rows import By, Row

__all__ = ["By", "Report", "Row"]
