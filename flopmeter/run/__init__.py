"""Scripts as they are: a device named cuda, what torch.cuda answers, the steps of a program, shims of libraries."""

from flopmeter.run.notebook import CudaRun, cuda
from flopmeter.run.report import NothingRanError, RunReport

__all__ = ["CudaRun", "NothingRanError", "RunReport", "cuda"]
