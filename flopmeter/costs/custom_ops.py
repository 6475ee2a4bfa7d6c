"""What a report says of custom ops that are counted, or not, by what their Python implementation runs."""

from __future__ import annotations

from collections.abc import Iterable

from flopmeter.costs.lookup import by_implementation, find_rule
from flopmeter.records import UNCOUNTED, Kernel, OpsBody


def implementation_assumptions(kernels: Iterable[Kernel]) -> list[str]:
    """Which ops cost what their implementation runs on meta tensors: on a GPU it may go another way."""
    calls = {kernel.op.call for kernel in kernels if isinstance(kernel.op.call.body, OpsBody)}
    names = sorted({call.name for call in calls if find_rule(call) is by_implementation})
    return [f"custom ops launch what their Python runs on meta tensors: {', '.join(names)}"] if names else []


def uncounted_implementations(kernels: Iterable[Kernel]) -> list[str]:
    """Why ops are not counted though they are implemented in Python."""
    calls = {kernel.op.call for kernel in kernels if kernel.cost.op_class == UNCOUNTED}
    errors = {(call.name, call.body.error) for call in calls if isinstance(call.body, OpsBody) and call.body.error}
    return [f"uncounted: {name}, whose Python stops at tensors without values: {why}" for name, why in sorted(errors)]
