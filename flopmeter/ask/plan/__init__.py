"""How to split a model over many GPUs: `plan`."""

from flopmeter.ask.plan.planning import plan
from flopmeter.ask.plan.rows import ParallelPlan, SplitRow
from flopmeter.ask.plan.splits import PlanError, Split

__all__ = ["ParallelPlan", "PlanError", "Split", "SplitRow", "plan"]
