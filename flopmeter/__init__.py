"""flopmeter: what a PyTorch program will cost on a GPU, and why, metered without one."""

import sys
import warnings
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

with warnings.catch_warnings():  # torch warns where NumPy is not installed, and nothing here needs it
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    import torch  # noqa: F401

from flopmeter.ask.compare import Comparison, compare
from flopmeter.ask.counting import FlopCount, count
from flopmeter.ask.generation import Generation, time_generation
from flopmeter.ask.largest_batch import largest_batch
from flopmeter.ask.sweep import Sweep, sweep
from flopmeter.costs import UncountedError, register_cost
from flopmeter.device.hardware import Hardware, HardwareError, available_hardware, load_hardware
from flopmeter.known_values import Assumption, DataDependentError, on_meta
from flopmeter.meter import EmptyProgramError, FlopMeter, StreamError
from flopmeter.report.report import Report, Row
from flopmeter.report.wins import Advice, HotSpot
from flopmeter.timing.peak_memory import Memory

if TYPE_CHECKING:
    from flopmeter.ask.delays import Delays
    from flopmeter.ask.pipeline import Pipeline, time_pipeline
    from flopmeter.ask.plan import ParallelPlan, PlanError, Split, SplitRow, plan
    from flopmeter.ask.serve import Serving, ServingError, serving
    from flopmeter.measured import Check, ProfileError, check
    from flopmeter.run import CudaRun, RunReport, cuda

__version__ = "0.1.0"
__all__ = [
    "Advice",
    "Assumption",
    "Check",
    "Comparison",
    "CudaRun",
    "DataDependentError",
    "Delays",
    "EmptyProgramError",
    "FlopCount",
    "FlopMeter",
    "Generation",
    "Hardware",
    "HardwareError",
    "HotSpot",
    "Memory",
    "ParallelPlan",
    "Pipeline",
    "PlanError",
    "ProfileError",
    "Report",
    "Row",
    "Serving",
    "ServingError",
    "RunReport",
    "Split",
    "SplitRow",
    "Sweep",
    "StreamError",
    "UncountedError",
    "available_hardware",
    "check",
    "compare",
    "count",
    "cuda",
    "largest_batch",
    "load_hardware",
    "on_meta",
    "plan",
    "serving",
    "sweep",
    "time_generation",
    "time_pipeline",
    "register_cost",
]


_LATE = {
    **dict.fromkeys(("Check", "ProfileError", "check"), "flopmeter.measured"),
    **dict.fromkeys(("CudaRun", "RunReport", "cuda"), "flopmeter.run"),
    **dict.fromkeys(("Serving", "ServingError", "serving"), "flopmeter.ask.serve"),
    "Delays": "flopmeter.ask.delays",
    **dict.fromkeys(("ParallelPlan", "PlanError", "Split", "SplitRow", "plan"), "flopmeter.ask.plan"),
    **dict.fromkeys(("Pipeline", "time_pipeline"), "flopmeter.ask.pipeline"),  # it imports torch.distributed
}


def __getattr__(name: str) -> Any:
    """Names from modules that metering does not need: the module is imported when its name is first used."""
    if name in _LATE:
        return getattr(import_module(_LATE[name]), name)
    raise AttributeError(f"module 'flopmeter' has no attribute {name!r}")


class _Moved(ModuleType):
    """A module under its old public path. It passes every attribute on to the modules that took its place."""

    def __init__(self, name: str, paths: tuple[str, ...]) -> None:
        super().__init__(name, f"Moved to {' and '.join(paths)}.")
        self._paths = paths

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            for path in self._paths:
                module = import_module(path)
                if hasattr(module, name):
                    return getattr(module, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


# Public paths of modules that have moved into a room, or into two.
for _old, _new in {
    "cluster": ("device.cluster",),
    "hardware": ("device.hardware",),
    "plots": ("report.plots", "ask.sweep_curve"),
    "scaling": ("ask.scaling",),
}.items():
    _paths = tuple(f"{__name__}.{_path}" for _path in _new)
    globals()[_old] = sys.modules[f"{__name__}.{_old}"] = _Moved(f"{__name__}.{_old}", _paths)
