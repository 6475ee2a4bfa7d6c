"""The rows of a report: what a group of kernels has in total, and how kernels can be grouped."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

from flopmeter.records import OP_CLASSES, Cost, Kernel, Regime, TensorSpec, Timing

By = Literal["class", "op", "module", "phase", "kernel"]
"""What callers write: the keys of `GROUPINGS`."""


class Row(NamedTuple):
    """Totals of a group of kernels."""

    name: str
    calls: int
    flops: int
    bytes_read: int
    bytes_written: int
    seconds: float  # device time
    regime: Regime  # of the largest share of `seconds`
    joules: float | None = None  # with its share of the idle power, by time; None if the device's power is unknown

    @property
    def intensity(self) -> float:
        """FLOP per byte moved."""
        moved = self.bytes_read + self.bytes_written
        return self.flops / moved if moved else 0.0

    @property
    def flop_per_s(self) -> float:
        return self.flops / self.seconds if self.seconds else 0.0


class RowTotals:
    """Adds up kernels for one row."""

    def __init__(self) -> None:
        self.calls = self.flops = self.bytes_read = self.bytes_written = 0
        self.joules = 0.0
        self.seconds_by_regime: dict[Regime, float] = dict.fromkeys(get_args(Regime), 0.0)

    def add(self, cost: Cost, timing: Timing) -> None:
        self.calls += 1
        self.bytes_read += cost.bytes_read
        self.bytes_written += cost.bytes_written
        self.joules += timing.joules
        self.seconds_by_regime[timing.regime] += timing.seconds

    def row(self, name: str, idle_watts: float | None) -> Row:
        """The row. `idle_watts` are added for each second of device time."""
        by_regime = self.seconds_by_regime
        regime = max(by_regime, key=by_regime.__getitem__)
        seconds = sum(by_regime.values())
        joules = None if idle_watts is None else self.joules + idle_watts * seconds
        return Row(name, self.calls, self.flops, self.bytes_read, self.bytes_written, seconds, regime, joules)


def _kernel(kernel: Kernel) -> tuple[str]:
    """The name of a kernel's row: the op, its class where it launches several kernels, and the shapes that it reads."""
    cost = kernel.cost
    return (f"{cost.name} ({cost.op_class}) {shapes_of(kernel.op.call.inputs)} {cost.dtype}",)


def shapes_of(specs: Sequence[TensorSpec]) -> str:
    """The shapes of the first four: '[8,64] [64,64] …'."""
    return " ".join(str(list(spec.shape)).replace(" ", "") for spec in specs[:4]) + " …" * (len(specs) > 4)


OUTSIDE = "(outside of modules)"


def as_one_layer(module: str) -> str:
    """The path with a star for each number, so that all layers of a list have one: `GPT2.blocks.3.mlp` is
    `GPT2.blocks.*.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", module) or OUTSIDE


def _ancestors(kernel: Kernel) -> tuple[str, ...]:
    """The modules that the kernel runs in, the outermost first."""
    parts = kernel.op.module.split(".") if kernel.op.module else [OUTSIDE]
    return tuple(".".join(parts[: level + 1]) for level in range(len(parts)))


def _as_tree(rows: list[Row]) -> list[Row]:
    """The rows with parents before their children, siblings in order of appearance."""
    order = {row.name: place for place, row in enumerate(rows)}

    def key(row: Row) -> list[int]:
        parts = row.name.split(".")
        return [order[".".join(parts[: level + 1])] for level in range(len(parts))]

    return sorted(rows, key=key)


def _longest_first(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: -row.seconds)


class Grouping(NamedTuple):
    """The names of the rows that a kernel is part of, and the order of the rows."""

    names: Callable[[Kernel], tuple[str, ...]]
    order: Callable[[list[Row]], list[Row]] = list  # as they appear
    splits_flops: bool = False  # among the classes of one kernel


GROUPINGS: dict[By, Grouping] = {
    "class": Grouping(
        lambda kernel: (kernel.cost.op_class,),
        lambda rows: sorted(rows, key=lambda row: OP_CLASSES.index(row.name)),
        splits_flops=True,
    ),
    "op": Grouping(lambda kernel: (kernel.cost.name,), _longest_first),
    "module": Grouping(_ancestors, _as_tree),
    "phase": Grouping(lambda kernel: (kernel.op.phase,)),
    "kernel": Grouping(_kernel, _longest_first),
}
