"""One kernel of several ops, as inductor writes it: its name, its class and its FLOPs.

Which ops share a kernel, and which bytes it moves, says torch's own compiler (flopmeter/compiler/plan.py) or, for the
trace of an eager run, the rules of flopmeter/launch/fusion.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flopmeter.records import CONTRACTION, ELEMENTWISE, NORMALIZATION, REDUCTION

MOST_NAMES = 6  # of ops, in a kernel's name
# Inductor holds rows of up to so many elements in registers (should_use_persistent_reduction in
# torch/_inductor/choices.py); longer ones are read again by what follows their reduction in the kernel.
HELD_ROW_ELEMENTS = 1024


def name_of(ops: Iterable[str]) -> str:
    """'softmax', or 'fused(mul, softmax)', each op once."""
    names = list(dict.fromkeys(ops))
    if len(names) < 2:
        return "".join(names)
    more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return f"fused({', '.join(names[:MOST_NAMES] + more)})"


def slowest_class(classes: Sequence[str]) -> str | None:
    """The class that slows the kernel most; None if it only moves, gathers or draws random numbers."""
    return next((name for name in (CONTRACTION, NORMALIZATION, REDUCTION, ELEMENTWISE) if name in classes), None)


def flops_of(op_class: str, parts: Iterable[Iterable[tuple[str, int]]]) -> tuple[tuple[str, int], ...]:
    """FLOPs keep the classes of their ops. Those of the kernel's own class come first, even if there are none."""
    flops = {op_class: 0}
    for name, count in (item for part in parts for item in part):
        flops[name] = flops.get(name, 0) + count
    return tuple((name, count) for name, count in flops.items() if count or name == op_class)
