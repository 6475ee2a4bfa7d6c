"""FLOPs, parameters and output shapes of a model in one line, as a whole and module by module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from flopmeter.ask.checks import check_whole
from flopmeter.known_values import on_meta
from flopmeter.meter import DEFAULT_HARDWARE, FlopMeter
from flopmeter.report.quantities import UNKNOWN, scale, with_prefix
from flopmeter.report.report import Report
from flopmeter.report.tables import ColumnOf, Document, Shown, table_of


class ModuleCount(NamedTuple):
    """One module, with all modules inside of it, in one forward pass."""

    name: str  # the path in the model; '' is the model itself
    kind: str  # the class
    output: tuple[tuple[int, ...], ...] | None  # shapes at its first call; None: it was not called
    parameters: int  # each once, however often it is shared
    flops: int | None  # None: neither it nor what is inside of it was called

    @property
    def depth(self) -> int:
        return len(self.name.split(".")) if self.name else 0


@dataclass(frozen=True, repr=False)
class FlopCount(Shown):
    """What one forward pass does. Printed it is one line; `render()` adds a table of the modules."""

    flops: int  # a multiply-add is 2
    macs: int  # of products and attention
    bytes: int  # read and written
    parameters: int
    modules: tuple[ModuleCount, ...]  # the model and those below, in the order in which they were defined

    def __str__(self) -> str:
        return (
            f"{with_prefix(self.flops, 'FLOP')}, {with_prefix(self.macs, 'MAC')}, {with_prefix(self.bytes, 'B')} moved,"
            f" {with_prefix(self.parameters, 'parameters')}"
        )

    __repr__ = __str__

    def down_to(self, depth: int) -> FlopCount:
        """This table without modules deeper than `depth` (0: only the model)."""
        check_whole(least=0, depth=depth)
        kept = tuple(each for each in self.modules if each.depth <= depth)
        return FlopCount(self.flops, self.macs, self.bytes, self.parameters, kept)

    def _document(self) -> Document:
        per_unit, unit = min((1e6, "MFLOP"), scale((row.flops or 0 for row in self.modules), "FLOP"))
        digits = 2 if per_unit > 1 else 0
        columns: list[ColumnOf[ModuleCount]] = [
            ColumnOf("module", _indented, str, "<"),
            ColumnOf("class", lambda row: row.kind, str, "<"),
            ColumnOf("output", _shapes, str, "<"),
            ColumnOf("parameters", lambda row: row.parameters, "{:,}".format),
            ColumnOf(
                unit,
                lambda row: row.flops,
                lambda flops: UNKNOWN if flops is None else f"{flops / per_unit:,.{digits}f}",
            ),
        ]
        records = [each._asdict() for each in self.modules]
        totals = {"flops": self.flops, "macs": self.macs, "bytes": self.bytes, "parameters": self.parameters}
        tables = [table_of(columns, self.modules)] if self.modules else []
        return Document("count", str(self), tables, [], {**totals, "modules": records}, records)


def count(model: Callable[..., Any], *inputs: Any, **options: Any) -> FlopCount:
    """FLOPs, multiply-adds, bytes and parameters of one forward pass, and those of each module.

    model: a module, or any function of tensors. It and its inputs may be on any device: a copy on meta runs.
    options: keyword arguments of the model.

    Raises TypeError for what cannot be called, and EmptyProgramError where the model runs no op.
    """
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise TypeError(f"count runs a module, and {model.__name__} is its class: make one, {model.__name__}(...)")
    if not callable(model):
        raise TypeError(f"count runs a module or a function of tensors, not {model!r}: count(model, x)")
    twin, inputs, options = on_meta((model, inputs, options))
    outputs: dict[str, tuple[tuple[int, ...], ...]] = {}
    watched = dict(twin.named_modules()) if isinstance(twin, nn.Module) else {}
    with ExitStack() as undo:
        for name, module in watched.items():
            undo.enter_context(module.register_forward_hook(_noting(outputs, name)))
        with FlopMeter(DEFAULT_HARDWARE) as meter, torch.no_grad():
            twin(*inputs, **options)
    report = meter.report()
    return FlopCount(
        flops=report.flops,
        macs=report.macs,
        bytes=report.bytes_read + report.bytes_written,
        parameters=_parameters(twin) if isinstance(twin, nn.Module) else 0,
        modules=tuple(_modules(watched, outputs, report)),
    )


def _noting(outputs: dict[str, tuple[tuple[int, ...], ...]], name: str) -> Callable[..., None]:
    def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
        shapes = tuple(tuple(leaf.shape) for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        outputs.setdefault(name, shapes)

    return note


def _modules(
    watched: dict[str, nn.Module], outputs: dict[str, tuple[tuple[int, ...], ...]], report: Report
) -> Iterator[ModuleCount]:
    flops = {row.name: row.flops for row in report.rows("module")}
    for name, module in watched.items():
        path = ".".join(filter(None, (type(watched[""]).__name__, name)))
        ran = flops.get(path, 0 if name in outputs else None)
        yield ModuleCount(name, type(module).__name__, outputs.get(name), _parameters(module), ran)


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())  # torch lists a shared one once


def _indented(row: ModuleCount) -> str:
    return "  " * row.depth + (row.name.rpartition(".")[2] or "(the model)")


def _shapes(row: ModuleCount) -> str:
    if row.output is None:  # a list of modules is not called, only the modules in it
        return UNKNOWN if row.flops is not None else "not called"
    return ", ".join(str(list(shape)) for shape in row.output) or UNKNOWN
