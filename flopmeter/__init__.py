"""flopmeter: what a PyTorch program will cost on a GPU, and why, metered without one."""

import sys
import warnings
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flopmeter.ask.compare import Comparison, compare
    from flopmeter.ask.counting import FlopCount, count
    from flopmeter.ask.delays import Delays
    from flopmeter.ask.generation import Generation, time_generation
    from flopmeter.ask.largest_batch import largest_batch
    from flopmeter.ask.pipeline import Pipeline, time_pipeline
    from flopmeter.ask.plan import ParallelPlan, PlanError, Split, SplitRow, plan
    from flopmeter.ask.serve import Serving, ServingError, serving
    from flopmeter.ask.sweep import Sweep, sweep
    from flopmeter.costs import UncountedError, register_cost
    from flopmeter.device.hardware import Hardware, HardwareError, available_hardware, load_hardware
    from flopmeter.known_values import Assumption, DataDependentError, on_meta
    from flopmeter.measured import Check, ProfileError, check
    from flopmeter.meter import EmptyProgramError, FlopMeter, StreamError
    from flopmeter.report.report import Report
    from flopmeter.report.rows import Row
    from flopmeter.report.wins import Advice, HotSpot
    from flopmeter.run import CudaRun, RunReport, cuda
    from flopmeter.timing.peak_memory import Memory

__version__ = "0.1.0"
__all__ = [
    "Advice", "Assumption", "Check", "Comparison", "CudaRun", "DataDependentError", "Delays", "EmptyProgramError",
    "FlopCount", "FlopMeter", "Generation", "Hardware", "HardwareError", "HotSpot", "Memory", "ParallelPlan",
    "Pipeline", "PlanError", "ProfileError", "Report", "Row", "RunReport", "Serving", "ServingError", "Split",
    "SplitRow", "StreamError", "Sweep", "UncountedError", "available_hardware", "check", "compare", "count", "cuda",
    "largest_batch", "load_hardware", "on_meta", "plan", "register_cost", "serving", "sweep", "time_generation",
    "time_pipeline",
]  # fmt: skip

warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch's, and nothing here needs NumPy

_HOMES = {
    "flopmeter.ask.compare": ("Comparison", "compare"),
    "flopmeter.ask.counting": ("FlopCount", "count"),
    "flopmeter.ask.delays": ("Delays",),
    "flopmeter.ask.generation": ("Generation", "time_generation"),
    "flopmeter.ask.largest_batch": ("largest_batch",),
    "flopmeter.ask.pipeline": ("Pipeline", "time_pipeline"),
    "flopmeter.ask.plan": ("ParallelPlan", "PlanError", "Split", "SplitRow", "plan"),
    "flopmeter.ask.serve": ("Serving", "ServingError", "serving"),
    "flopmeter.ask.sweep": ("Sweep", "sweep"),
    "flopmeter.costs": ("UncountedError", "register_cost"),
    "flopmeter.device.hardware": ("Hardware", "HardwareError", "available_hardware", "load_hardware"),
    "flopmeter.known_values": ("Assumption", "DataDependentError", "on_meta"),
    "flopmeter.measured": ("Check", "ProfileError", "check"),
    "flopmeter.meter": ("EmptyProgramError", "FlopMeter", "StreamError"),
    "flopmeter.report.report": ("Report",),
    "flopmeter.report.rows": ("Row",),
    "flopmeter.report.wins": ("Advice", "HotSpot"),
    "flopmeter.run": ("CudaRun", "RunReport", "cuda"),
    "flopmeter.timing.peak_memory": ("Memory",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """A public name: its module is imported, and torch with it, when the name is first used."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'flopmeter' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
    return value


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


# Public paths of modules that have moved into a package, or into two.
for _old, _new in {
    "cluster": ("device.cluster",),
    "hardware": ("device.hardware",),
    "plots": ("report.plots", "ask.sweep_curve"),
    "scaling": ("ask.scaling",),
}.items():
    _paths = tuple(f"{__name__}.{_path}" for _path in _new)
    globals()[_old] = sys.modules[f"{__name__}.{_old}"] = _Moved(f"{__name__}.{_old}", _paths)
