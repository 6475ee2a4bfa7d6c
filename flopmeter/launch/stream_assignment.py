"""The stream on which each kernel runs, and the kernels of other streams that it waits for.

A collective runs on the stream that NCCL's process group would use. If the program may wait for it (`async_op=True`),
it runs on a stream of its group, after all that the current stream was given so far; else on the current stream.
Collectives of one group run one after another. A message runs on the stream of its pair of ranks, which serves both
directions; the messages of a batch run as one kernel on the stream of the group.

What torch.compile traces waits for a functional collective at once (`_maybe_wrap_tensor` in torch's
_functional_collectives.py), and inductor keeps that order unless `reorder_for_compute_comm_overlap` is on.

A stream waits for events, at `wait_tensor` and at `Work.wait`. Also, a kernel waits for kernels of other streams that
write what it reads; so waits in C++ (DDP's reducer), which nobody records, take effect where the data is used.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable

from flopmeter.costs.data_movement.communication import group_of, is_message
from flopmeter.costs.traffic import regions
from flopmeter.records import DEFAULT_STREAM, Call, Kernel, Placement, Sync, Trace
from flopmeter.records.collectives import FUNCTIONAL, WAIT_OPS

_AGAIN = -1  # the index of what is computed again


def assign_streams(
    kernels: list[Kernel], trace: Trace, compiled: Collection[int] = frozenset()
) -> list[Placement] | None:
    """The stream of each kernel and what it waits for; None if the program uses one stream and no collectives.
    `compiled`: the numbers of the kernels that count as traced by torch.compile though the program ran eagerly."""
    if not trace.stream_use.streams and not any(kernel.cost.collective for kernel in kernels):
        return None
    return _StreamAssignment(trace, compiled).run(kernels)


class _StreamAssignment:
    """Walks the kernels in the order of their launch, with the events and waits between them."""

    def __init__(self, trace: Trace, compiled: Collection[int]) -> None:
        self._compiled = compiled
        self._ops, self._streams = trace.ops, trace.stream_use.streams
        self._index = {id(op): index for index, op in enumerate(trace.ops)}
        self._syncs = deque(trace.stream_use.syncs)
        self._next = 0  # the first op that was not handled yet
        self._last: dict[int, int] = {}  # stream -> its last kernel
        self._pending: defaultdict[int, set[int]] = defaultdict(set)  # what a stream's next kernel waits for
        self._events: dict[int, set[int]] = {}
        self._collectives: dict[int, int] = {}  # op -> kernel
        self._writers: dict[int, int] = {}  # storage -> the kernel that wrote it last
        self._groups: dict[tuple[int, ...], int] = {}  # ranks -> stream
        self._batches = trace.stream_use.batches
        self._batch, self._left = 0, 0  # number of the current batch, and messages still to come
        self._last_of_group: dict[tuple[int, ...], int] = {}
        self._touched: dict[Call, tuple[frozenset[int], frozenset[int]]] = {}
        self._placements: list[Placement] = []

    def run(self, kernels: list[Kernel]) -> list[Placement]:
        for kernel in kernels:
            # A fused kernel runs when its first op would; it waits for the inputs of all its ops in any case. What
            # backward computes again is no op of the trace: a kernel of nothing else runs on the default stream.
            index = min((self._index[id(op)] for op in kernel.ops if id(op) in self._index), default=_AGAIN)
            self._go_to(index)
            self._assign(kernel, index)
        return self._placements

    def _go_to(self, index: int) -> None:
        """Handle the events and waits up to the op of that index."""
        for passed in range(self._next, index + 1):
            while self._syncs and self._syncs[0].op <= passed:
                self._synchronize(self._syncs.popleft())
            op = self._ops[passed]
            if op.call.func._schema.name in WAIT_OPS:
                self._pending[self._stream(passed)].update(self._writers_of(op.storages))
        self._next = max(self._next, index + 1)

    def _synchronize(self, sync: Sync) -> None:
        if sync.action == "record":
            self._events[sync.subject] = self._given_to(sync.stream)
        elif sync.action == "wait for event":
            self._pending[sync.stream] |= self._events.get(sync.subject, set())
        elif sync.subject in self._collectives:
            self._pending[sync.stream].add(self._collectives[sync.subject])

    def _given_to(self, stream: int) -> set[int]:
        """The kernels that have to end before the stream has done all that it was given so far."""
        last = {self._last[stream]} if stream in self._last else set()
        return self._pending[stream] | last

    def _assign(self, kernel: Kernel, index: int) -> None:
        stream, after = self._stream(index), self._inputs_of(kernel)
        whole, number = kernel.cost.collective, len(self._placements)
        batch = self._batch_of(kernel, index)
        waits_at_once = number in self._compiled and kernel.op.call.func.namespace == FUNCTIONAL
        if whole is not None and _is_async(kernel.op.call) and not waits_at_once:
            after |= self._given_to(stream)
            stream = self._groups.setdefault(_communicator(kernel, batch), -1 - len(self._groups))
        else:
            after |= self._pending.pop(stream, set())
        if whole is not None:
            group = _communicator(kernel, batch)
            after |= {self._last_of_group[group]} if group in self._last_of_group else set()
            self._last_of_group[group] = self._collectives[index] = number
        self._placements.append(Placement(stream, self._latest(after, stream), batch))
        self._last[stream] = number
        for op in kernel.ops:
            self._writers.update((op.storages[local], number) for local in self._touched_by(op.call)[1])

    def _batch_of(self, kernel: Kernel, index: int) -> int | None:
        """The number of the batch that a message is part of."""
        if index in self._batches:
            self._batch, self._left = self._batch + 1, self._batches[index]
        if not self._left or not is_message(kernel.cost):
            return None
        self._left -= 1
        return self._batch

    def _inputs_of(self, kernel: Kernel) -> set[int]:
        storages = (op.storages[local] for op in kernel.ops for local in self._touched_by(op.call)[0])
        return self._writers_of(storages)

    def _writers_of(self, storages: Iterable[int]) -> set[int]:
        return {self._writers[storage] for storage in storages if storage in self._writers}

    def _latest(self, kernels: set[int], stream: int) -> tuple[int, ...]:
        """The last kernel of each other stream is enough, since a stream runs its kernels in order."""
        by_stream = {self._placements[kernel].stream: kernel for kernel in sorted(kernels)}
        by_stream.pop(stream, None)
        return tuple(by_stream.values())

    def _stream(self, index: int) -> int:
        return self._streams.get(index, DEFAULT_STREAM)

    def _touched_by(self, call: Call) -> tuple[frozenset[int], frozenset[int]]:
        """The storages that the call reads and writes, by their numbers in it."""
        touched = self._touched.get(call)
        if touched is None:
            read, written = regions(call)
            touched = frozenset(spec.storage for spec in read), frozenset(spec.storage for spec in written)
            self._touched[call] = touched
        return touched


def _communicator(kernel: Kernel, batch: int | None) -> tuple[int, ...]:
    """The ranks of NCCL's communicator, which has its own stream: the group, or the pair of a single message."""
    assert kernel.cost.collective is not None
    return kernel.cost.collective.ranks if batch is None else group_of(kernel.op.call).ranks


def _is_async(call: Call) -> bool:
    """Whether the program gets a handle to wait for; without one the collective runs on the current stream."""
    return bool(call.get("async_op", True))
