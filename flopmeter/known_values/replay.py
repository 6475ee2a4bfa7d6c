"""Replays: a call runs on meta and, where all that it reads is known, once more on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from flopmeter.known_values.assumptions import Assumptions
from flopmeter.known_values.values import (
    MAX_COPIED_ELEMENTS,
    MAX_ELEMENTS,
    MAX_ROUTED_ELEMENTS,
    Values,
    address,
    is_count,
    is_small,
    no_modes,
    spans_storage,
)
from flopmeter.records.memory_format import torch_strides
from flopmeter.records.tensors import tensors_in
from flopmeter.torch_names.operators import aten_overloads as aten

# If the inputs of these ops have the same value everywhere, so has the result, however large they are.
KEEPS_UNIFORM = frozenset((
    aten.any.default, aten.all.default, aten.logical_not.default, aten.bitwise_not.default, aten.logical_or.default,
    aten.logical_and.default, aten.bitwise_or.Tensor, aten.bitwise_and.Tensor, aten.mul.Tensor, aten._to_copy.default,
))  # fmt: skip


# Ops whose results hold what their source holds, as often as a view of it shows it.
COPIES = frozenset((aten.clone.default, aten.repeat.default))
# Ops that write one number everywhere.
FILLS = frozenset((aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default))


class Invocation(NamedTuple):
    """A call as it reached the dispatch mode."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: Sequence[Tensor]
    writes: tuple[tuple[int, str], ...]  # position and name of the arguments that the op writes to
    kernel: Callable[..., Any] | None = None  # what runs on meta in place of the op

    def run(self) -> Any:
        return (self.kernel or self.func)(*self.args, **self.kwargs)

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    def written(self) -> list[Tensor]:
        """The tensors that the op writes to."""
        values = [self.argument(position, name) for position, name in self.writes]
        lists = [value if isinstance(value, (list, tuple)) else [value] for value in values]
        return [tensor for value in lists for tensor in value if isinstance(tensor, Tensor)]


RewrittenCall = tuple[Any, tuple[Any, ...], dict[str, Any]]  # the function, its arguments, and those by name
CallWithResult = tuple[Any, tuple[Any, ...], dict[str, Any], Tensor]
Handler = Callable[["Knowledge", Invocation], Any]
"""Answers a call; see rules.py."""


class Knowledge:
    """The values that are known, what is assumed, and what the rules of ops are made of."""

    def __init__(self, assume: Assumptions):
        self.assume = assume
        self.values = Values()
        self._most_elements = MAX_ROUTED_ELEMENTS if assume.routing else MAX_ELEMENTS
        self.generator = torch.Generator("cpu").manual_seed(0)
        self.on_new: Callable[[Tensor], object] = lambda tensor: None  # called for meta tensors made without an op
        self.on_numbers: Callable[[Tensor], object] = lambda tensor: None  # and for those of the host made of numbers
        # The call that the last `run` made instead of the given one; None if it made that one.
        self.ran: RewrittenCall | None = None
        # Those that CUDA, but not meta, runs before it, with their results.
        self.before: list[CallWithResult] = []
        self.as_compared: WeakIdKeyDictionary = WeakIdKeyDictionary()  # unknown conditions, and what stand-ins answer
        # Storages of the host that are full of stand-ins, and what to call if they come back without being read.
        self.sent_unknown: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.masks_in_parts: dict[Any, Any] = {}  # BlockMasks that were evaluated: see trace/flex_blocks.py
        # `Call.groups` of the last `run`; None without groups, or if not known.
        self.groups: tuple[int, ...] | None = None

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """The values of these tensors are unknown from now on."""
        for tensor in tensors:
            self.values.forget(tensor)

    def knows_all(self, tensors: Iterable[Tensor]) -> bool:
        return all(self.values.knows(tensor) for tensor in tensors)

    def replay(self, call: Invocation) -> Any:
        """Run the op on meta and, if all its inputs are known and small, on their values too."""
        self._ready_to_write(list(call.written()), call.func in FILLS)
        knows = self.knows_all(call.tensors)
        result = call.run()
        outputs = list(tensors_in(result))
        if knows and all(map(_can_be_read, call.tensors)) and all(map(self.is_small, outputs)):
            self._replay_on_cpu(call, outputs)
        elif knows and call.func in COPIES and _can_be_read(result):
            self._copy_later(call, result)
        elif not knows and self._counts(call, outputs):
            self._replay_on_cpu(call, outputs)
            for tensor in (*call.written(), *outputs):
                self.values.mark_as_stand_in(tensor)
        elif knows and call.func in KEEPS_UNIFORM and all(map(self.values.is_uniform, call.tensors)):
            with no_modes():
                ones = [self.values.read(tensor).flatten()[0] for tensor in call.tensors]
                self.set_all(result, call.func(*ones, *call.args[len(ones) :], **self.real(call.kwargs)))
        else:
            self.forget(call.written())
        return result

    def _copy_later(self, call: Invocation, result: Tensor) -> None:
        """A large copy of what takes little memory is made when it is first read, from what the source holds now."""
        source = self.values.read(call.tensors[0])
        if source.untyped_storage().nbytes() > MAX_ELEMENTS * source.element_size():
            return
        with no_modes():
            memory = source.untyped_storage().clone()
            held = torch.empty(0, dtype=source.dtype, device="cpu").set_(
                memory, source.storage_offset(), source.size(), source.stride()
            )

        def copy(blank: Tensor) -> Tensor:
            with no_modes():
                return blank.copy_(call.func(held, *call.args[1:], **self.real(call.kwargs)))

        self.values.defer(result, copy)

    def _ready_to_write(self, written: list[Tensor], fills: bool) -> None:
        """Prepares a tensor whose value is kept as one number for a write to a part of it: the number becomes one for
        each element, or is forgotten. (The many states of an optimizer that are written at once would take memory.)"""
        for tensor in filter(self.values.is_uniform, written):
            if fills and spans_storage(tensor):
                continue
            if len(written) == 1:
                self.values.keep_each(tensor)
            else:
                self.values.forget(tensor)

    def _counts(self, call: Invocation, outputs: list[Tensor]) -> bool:
        """Whether the call computes integers from integers that have stand-ins. Then it can compute with these: one
        more than an unknown count is one more than its stand-in."""
        return (
            self.assume.stands_in
            and all(
                is_count(tensor) and (self.values.has_stand_in(tensor) or self.values.knows(tensor))
                for tensor in call.tensors
            )
            and all(map(is_count, outputs))
        )

    def run_unknown(self, call: Invocation) -> Any:
        """Run the op on meta. Its result, and what it writes to, are unknown afterwards."""
        self.forget(call.written())
        return call.run()

    def answer(self, call: Invocation) -> Any:
        """The result on the CPU; every tensor must be known."""
        with no_modes():
            return call.func(*self.real(call.args), **self.real(call.kwargs))

    def rewritten(self, call: Invocation, func: Any, args: tuple[Any, ...]) -> Invocation:
        """A call that runs in place of the given one and is recorded instead of it."""
        self.ran = (func, args, call.kwargs)
        return call._replace(func=func, args=args, tensors=list(tensors_in(args)), kernel=None)

    def lift(self, result: Any, *, is_known: bool = True) -> Any:
        """Meta twins of the CPU tensors in a result, whose values are known unless they stand for unknown ones."""
        if isinstance(result, Tensor):
            with no_modes():
                twin = torch.empty_strided(result.size(), torch_strides(result), dtype=result.dtype, device="meta")
                if is_known:
                    self.set(twin, result)
            return twin
        if isinstance(result, (list, tuple)):
            return type(result)([self.lift(item, is_known=is_known) for item in result])
        return result

    def is_small(self, tensor: Tensor) -> bool:
        """Whether a value of the tensor's dtype and size is worth keeping."""
        return is_small(tensor, self._most_elements)

    def set(self, tensor: Tensor, value: Tensor) -> None:
        """A meta tensor that spans its storage has this value, if it is worth keeping."""
        if self.is_small(tensor):
            self.values.write(tensor, value)

    def set_all(self, tensor: Tensor, value: Tensor | int) -> None:
        """A meta tensor that spans its storage has this value everywhere, whatever its size."""
        one = torch.as_tensor(value, device="cpu")
        if self.is_small(tensor):
            self.values.write(tensor, one.to(tensor.dtype).expand(tensor.shape).contiguous())
        else:
            self.values.spread(tensor, one)

    def _replay_on_cpu(self, call: Invocation, outputs: list[Tensor]) -> None:
        try:
            results = list(tensors_in(self.answer(call)))
        except Exception:  # any op may lack a CPU kernel for its dtypes; then its result is unknown
            self.forget(call.written())
            return
        for tensor in call.written():
            self.values.note_write(tensor)
        with no_modes():
            inputs = {address(self.values.read(tensor)) for tensor in call.tensors}
            for output, result in zip(outputs, results, strict=True):
                if output.is_meta and (place := address(output)) and place not in self.values.cells:
                    self.set(output, result.clone() if address(result) in inputs else result)

    def real(self, argument: Any, read: Callable[[Tensor], Tensor] | None = None) -> Any:
        """The argument as the CPU sees it: values for meta tensors, cpu for the meta device. `read` gives the value of
        a tensor; without it all must be known."""
        if isinstance(argument, Tensor):
            return read(argument) if read else self.values.read(argument)
        if isinstance(argument, (list, tuple)):
            return type(argument)([self.real(item, read) for item in argument])
        if isinstance(argument, dict):
            return {name: self.real(item, read) for name, item in argument.items()}
        return _CPU if isinstance(argument, torch.device) else argument


def _can_be_read(tensor: Tensor) -> bool:
    """Whether the tensor is worth an op on the CPU: one that is small itself, or a copy of one."""
    return not tensor.is_complex() and tensor.numel() <= MAX_COPIED_ELEMENTS


_CPU = torch.device("cpu")
