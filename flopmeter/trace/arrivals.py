"""Calls as they arrive: which of them are alike, so that one record serves for all of these."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import Parameter

from flopmeter.records import BEFORE, Call, FlexBody, TritonBody
from flopmeter.records.memory_format import torch_strides
from flopmeter.trace.handling import Handling
from flopmeter.trace.process_groups import ProcessGroups
from flopmeter.trace.result_cache import ResultMaker
from flopmeter.trace.storages import Storages
from flopmeter.trace.tensor_specs import hashable, unstrided_spec


class KnownCall(NamedTuple):
    """The record of a call, and how to make its result without running it."""

    call: Call
    make_result: ResultMaker | None
    counts: bool  # its results have few integers, for which something stands in where the program may read unknowns


class Arrival:
    """A call as it arrives: its tensors in order, the addresses of their storages, and their numbers in this call."""

    __slots__ = (
        "addresses", "args", "body", "func", "groups", "handling", "key", "known", "kwargs", "numbers", "plain_args",
        "plain_kwargs", "tensors",
    )  # fmt: skip
    key: Any  # what tells calls of different cost apart
    known: KnownCall | None

    def __init__(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], handling: Handling):
        self.func, self.args, self.kwargs, self.handling = func, args, kwargs, handling
        self.plain_args, self.plain_kwargs = args, kwargs  # for the record
        self.tensors: list[Tensor] = []  # of the arguments
        self.addresses: list[int] = []
        self.numbers: dict[int, int] = {}  # trace-wide number -> number in the call
        self.groups: tuple[int, ...] | None = None
        self.body: FlexBody | TritonBody | None = None


class Arrivals:
    """Makes a key of each call, by which it finds what is known of calls like it.

    `storages` numbers storages; `has_host`: what the program computes on the CPU costs the same at any place in memory.
    """

    def __init__(self, storages: Storages, groups: ProcessGroups, has_host: bool) -> None:
        self._number, self._note_role = storages.number, storages.note_number
        self._groups, self._has_host = groups, has_host
        self._known: dict[Any, KnownCall] = {}

    def meet(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], handling: Handling) -> Arrival:
        arrival = Arrival(func, args, kwargs, handling)
        if handling.is_collective:
            arrival.plain_args = args = self._groups.plain_args(func, args)
            arrival.plain_kwargs = kwargs = self._groups.plain_kwargs(kwargs)
        key: list[Any] = [func, torch.get_default_dtype()]  # the quotient of integers is a float of that type
        self._describe(args, arrival, BEFORE, key)
        if kwargs:
            key += kwargs
            self._describe(kwargs.values(), arrival, BEFORE, key)
        self.look_up(arrival, tuple(key))
        return arrival

    def look_up(self, arrival: Arrival, key: Any) -> None:
        """Give the call this key, and what is known of calls with it."""
        try:
            known = self._known.get(key)
        except (TypeError, NotImplementedError):  # some sizes are symbols; a TorchBind object cannot be compared
            key = hashable(key, arrival.func)
            known = self._known.get(key)
        arrival.key, arrival.known = key, known

    def learn(self, arrival: Arrival, known: KnownCall) -> None:
        self._known[arrival.key] = known

    def forget(self) -> None:
        """The keys are as large as the calls."""
        self._known.clear()

    def describe_result(self, arrival: Arrival, result: Any, born: int) -> None:
        """Number the storages of the result, which the op with number `born` made. Where its shape depends on data, it
        is part of the key."""
        arguments = len(arrival.tensors)
        described: list[Any] = []
        self._describe((result,), arrival, born, described)
        del arrival.tensors[arguments:]
        if arrival.handling.shape_depends_on_data:
            self.look_up(arrival, (arrival.key, *described))

    def _describe(self, values: Iterable[Any], arrival: Arrival, born: int, key: list[Any]) -> None:
        """Add arguments or results to the key: geometry for tensors, the value for all else. Tensors are collected
        and their storages numbered; a storage that is first seen as an argument existed BEFORE the trace.

        This runs for every op, so it is one loop without helper functions.
        """
        tensors, addresses, numbers = arrival.tensors, arrival.addresses, arrival.numbers
        for value in values:
            if isinstance(value, Tensor):
                tensors.append(value)
                number = self._number(value, born, addresses)
                local = numbers.setdefault(number, len(numbers))
                if type(value) is Parameter:  # of a module that never runs too, such as an average of weights
                    self._note_role(number, "parameters")
                if value.layout is torch.strided and not value.is_nested:
                    offset = 0 if self._has_host and value.is_cpu else value.storage_offset()
                    key.append((value.shape, torch_strides(value), value.dtype, local, offset, value.device))
                else:
                    key.append((value.layout, unstrided_spec(value, local)))
            elif isinstance(value, (list, tuple)):
                key.append(len(value))
                self._describe(value, arrival, born, key)
            elif isinstance(value, (bool, float, complex)):  # 1, 1.0, 1+0j and True hash alike, but make other dtypes
                key.append((type(value), value))
            else:
                key.append(value)
