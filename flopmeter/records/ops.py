"""What ran: calls of operators, and ops, which are calls with their storages, module and phase."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch._ops import OpOverload, OpOverloadPacket

from flopmeter.records.bodies import FlexBody, TritonBody
from flopmeter.records.compiled import CompiledKernel
from flopmeter.records.tensors import TensorSpec

Phase = Literal["forward", "backward", "recompute", "optimizer"]
_NO_ARGUMENT = object()

AVERAGES = ("running_mean", "running_var")  # arguments of batch norms


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One aten call, its tensors replaced by their specs and its lists by tuples; compared by identity."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: tuple[TensorSpec, ...]  # every tensor argument in order, duplicates kept
    outputs: tuple[TensorSpec, ...]
    # Lengths that are data, if they are known: those of the groups of a grouped matmul; the queries, then the keys, of
    # each sequence that attention takes packed.
    groups: tuple[int, ...] | None = None
    body: FlexBody | TritonBody | OpsBody | None = None  # of a kernel, or an op, that belongs to this program

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the name of the op: torch's op objects cannot be sent to another process."""
        name = (self.func.namespace, self.func.overloadpacket.__name__, self.func._overloadname)
        return _call_of, (name, self.args, self.kwargs, self.inputs, self.outputs, self.groups, self.body)

    def argument(self, name: str) -> Any:
        """The argument that the op's schema calls `name`: the value that was passed, or the schema's default."""
        value = self.get(name, _NO_ARGUMENT)
        if value is _NO_ARGUMENT:
            raise KeyError(f"{self.func} has no argument '{name}'")
        return value

    def get(self, name: str, default: Any = None) -> Any:
        """The same; `default` where the schema has no such argument."""
        if name in self.kwargs:
            return self.kwargs[name]
        for position, argument in enumerate(self.func._schema.arguments):
            if argument.name == name:
                return self.args[position] if position < len(self.args) else argument.default_value
        return default

    @property
    def name(self) -> str:
        """`addmm` for aten ops, `namespace::op` for others; the name of a kernel that inductor wrote."""
        kernel = self.kwargs.get("kernel")
        if isinstance(kernel, CompiledKernel):
            return kernel.name
        name = self.func.overloadpacket.__name__
        return name if self.func.namespace == "aten" else f"{self.func.namespace}::{name}"


def _call_of(name: tuple[str, str, str], *fields: Any) -> Call:
    return Call(operator.attrgetter(".".join(name))(torch.ops), *fields)


class Op(NamedTuple):
    """One call in the run of a program."""

    call: Call
    storages: tuple[int, ...]  # the number in the trace of each storage of the call
    module: str  # dotted path from the outermost module's class name; '' outside of modules
    phase: Phase
    source: str | None  # 'file:line' of the caller, where the trace was asked for it
    region: int | None = None  # number of the call of a torch.compile'd function that ran eagerly, or of a replay
    graph: int | None = None  # number of the call of a compiled graph that launched it

    @property
    def is_replayed(self) -> bool:
        """Whether a CUDA graph that the program captured ran it again: replays have regions below 0."""
        return self.region is not None and self.region < 0

    @property
    def packet(self) -> OpOverloadPacket:
        """The operator, whichever of its overloads was called."""
        return self.call.func.overloadpacket

    @property
    def reads(self) -> set[int]:
        """The storages of its inputs."""
        return {self.storages[spec.storage] for spec in self.call.inputs}

    @property
    def makes(self) -> set[int]:
        """The storages of its results; those of a view, and of an op in place, are among those that it reads."""
        return {self.storages[spec.storage] for spec in self.call.outputs}

    @property
    def written(self) -> tuple[TensorSpec, ...]:
        """The tensors that it writes in place."""
        arguments = self.call.func._schema.arguments
        given = (self.call.get(each.name) for each in arguments if each.alias_info and each.alias_info.is_write)
        lists = ((value,) if isinstance(value, TensorSpec) else value or () for value in given)
        return tuple(spec._replace(storage=self.storages[spec.storage]) for specs in lists for spec in specs)

    @property
    def averages(self) -> set[int]:
        """The storages of the averages over batches that it updates, as batch norms do in training. Their schemas do
        not say so."""
        call = self.call
        given = [spec for name in AVERAGES if (spec := call.get(name)) is not None]
        is_updating = call.get("training", default=not call.name.endswith("backward"))
        return {self.storages[spec.storage] for spec in given} if is_updating else set()

    @property
    def fills(self) -> set[int]:
        """The storages that it makes or writes to; a view does neither."""
        return (self.makes - self.reads).union(spec.storage for spec in self.written)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return tuple(spec._replace(storage=self.storages[spec.storage]) for spec in self.call.inputs)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return tuple(spec._replace(storage=self.storages[spec.storage]) for spec in self.call.outputs)


class OpsBody(NamedTuple):
    """The ops that the Python implementation of a custom op runs."""

    ops: tuple[Op, ...]  # storages have the numbers of the custom op's call; those of the implementation's own are -1
    error: str = ""  # why there are none: what the implementation raised on meta tensors

    def on(self, numbers: Mapping[int, int], times: int) -> OpsBody:
        """With these numbers of storages in place of its own, and run so many times: what it would run on larger
        tensors is not known."""
        ops = (op._replace(storages=tuple(numbers.get(each, each) for each in op.storages)) for op in self.ops)
        return self._replace(ops=tuple(ops) * times)


@dataclass(frozen=True, slots=True)
class RankGroup:
    """A process group in the arguments of a call."""

    ranks: tuple[int, ...]  # global
    rank: int  # the index of this rank among them
    gpus_per_node: int | None = None  # of the world, if it was stated
