"""Process groups and handles of collectives, as a trace records them: plain records instead of objects of C++."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._ops import OpOverload

from flopmeter.records import RankGroup
from flopmeter.records.collectives import GROUP_ARGUMENTS
from flopmeter.torch_names.private import resolve_group

NAMESPACES = tuple(GROUP_ARGUMENTS)  # of ops that a process group runs


class ProcessGroups:
    """Knows the record of each process group, and the op behind each handle that the program may wait for."""

    def __init__(self) -> None:
        self._groups: dict[Any, RankGroup] = {}
        # Handle of a collective -> index of its op. A handle may hold the results, so it must not be kept alive here.
        # Only the last one is kept alive: its op has not returned yet, so the program does not hold it yet.
        self._works: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._last_work: Any = None

    def clear(self) -> None:
        self._groups.clear()
        self._works.clear()
        self._last_work = None

    def plain_args(self, func: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments, with a record for each process group and None for other objects of C++."""
        names = (argument.name for argument in func._schema.arguments)
        return tuple(self._plain(name, value) for name, value in zip(names, args, strict=False))

    def plain_kwargs(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """plain_args for keyword arguments."""
        return {name: self._plain(name, value) for name, value in kwargs.items()}

    def note_work(self, result: Any, op: int) -> None:
        """Remember the handle that a c10d op returned."""
        handle = result[-1] if isinstance(result, (tuple, list)) and result else result
        if isinstance(handle, torch.ScriptObject):
            self._last_work = torch.distributed.Work.unbox(handle)
            self._works[self._last_work] = op

    def op_of(self, work: Any) -> int | None:
        """The index of the op that returned the handle; None if that op ran before the trace."""
        return self._works.get(work)

    def _plain(self, name: str, value: Any) -> Any:
        if name in GROUP_ARGUMENTS.values():
            return self._group(value)
        return None if isinstance(value, torch.ScriptObject) else value

    def _group(self, value: Any) -> RankGroup:
        value = _process_group(value)
        if value not in self._groups:
            self._groups[value] = _record(value)
        return self._groups[value]


def with_groups(func: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a call in a graph, with a record for each process group."""
    if func.namespace not in NAMESPACES:
        return args
    names = (argument.name for argument in func._schema.arguments)
    is_group = (name in GROUP_ARGUMENTS.values() for name in names)
    return tuple(_record(_process_group(value)) if is_ else value for is_, value in zip(is_group, args, strict=False))


def _process_group(value: Any) -> Any:
    """The group, by its name or by what stands for it in an op's arguments and in a graph."""
    value = getattr(value, "real_obj", value)  # a graph holds a stand-in
    if isinstance(value, str):
        return resolve_group(value)
    return torch.distributed.ProcessGroup.unbox(value) if isinstance(value, torch.ScriptObject) else value


def _record(group: Any) -> RankGroup:
    per_node = getattr(getattr(torch, "meta", None), "gpus_per_node", None)  # distributed/meta.py
    return RankGroup(tuple(torch.distributed.get_process_group_ranks(group)), group.rank(), per_node)


def without_handles(result: Any) -> Any:
    """The result of a c10d op with None for handles, so that only tensors are left."""
    if isinstance(result, (tuple, list)):
        return [without_handles(item) for item in result]
    return None if isinstance(result, torch.ScriptObject) else result
