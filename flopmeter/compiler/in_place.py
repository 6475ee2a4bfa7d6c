"""Which results of a scheduled graph take the memory of a buffer that the same kernel reads for the last time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from flopmeter.compiler.regions import is_needed
from flopmeter.torch_names import compiler as names


def memory_taken(graph: Any, nodes: Sequence[Any]) -> dict[str, str]:
    """By the name of a result, the buffer whose memory it takes: another result, or a tensor that the forward graph
    has kept and nobody else will read (AOTAutograd's donated buffers).

    The scheduler decides this while it writes a kernel: it asks the code that it writes to which buffers are free.
    Here it is asked kernel by kernel, in their order, as `Scheduler._codegen` in torch/_inductor/scheduler.py does.
    Must run with the graph as the compiler's own.
    """
    taken: dict[str, str] = {}
    with _writing(graph) as wrapper:
        for node in nodes:
            taken_here = {} if node.is_template() else _taken_in(node)
            taken |= dict(_outside(node, taken_here))
            wrapper.freed.update(taken_here.values())
            graph.scheduler.completed_operations.update(node.get_operation_names())
    return taken


def _taken_in(node: Any) -> dict[str, str]:
    """The same of one kernel."""
    told = _Told()
    with names.VIRTUALIZED.value.set_kernel_handler(told):
        for part in node.get_nodes():
            part.decide_inplace_update()
    return told.inplace_update_buffers


def _outside(node: Any, taken: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The part of `taken` about results that leave the kernel, with the buffer that their memory comes from in the end:
    values inside may hand memory on."""
    inside = {buffer.get_name() for buffer in node.get_outputs() if not is_needed(buffer, node)}
    for result in taken.keys() - inside:
        source: str | None = taken[result]
        while source is not None and source in inside:
            source = taken.get(source)
        if source is not None:
            yield result, source


class _Told:
    """Notes what the scheduler says about a kernel that it writes; the arguments' names do not matter here."""

    def __init__(self) -> None:
        self.inplace_update_buffers: dict[str, str] = {}
        self.args = self

    def make_inplace(self, input_name: str, output_name: str) -> None:
        pass


@contextmanager
def _writing(graph: Any) -> Iterator[Any]:
    """The code around the kernels, as far as it knows which buffers are free. Nothing is written."""
    code = names.WRAPPER_CODE.value
    wrapper, before = code.__new__(code), graph.wrapper_code
    wrapper.freed = set()
    graph.wrapper_code = wrapper
    try:
        yield wrapper
    finally:
        graph.wrapper_code = before
