"""What a call of a scheduled graph does on the device, for one set of sizes: kernels, the buffers that they allocate,
and those that are freed after them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch

from flopmeter.compiler import flex
from flopmeter.compiler.instructions import instructions
from flopmeter.compiler.known import KnownInGraph, makers_of_lengths
from flopmeter.compiler.library_calls import UNREAD, LibraryCalls, runs_graphs
from flopmeter.compiler.loops import is_inner, reads_again
from flopmeter.compiler.lowering import Lowered
from flopmeter.compiler.mixed_orders import WORKSPACE, ColumnSum, MixedOrders, blocks_of, mixed_orders
from flopmeter.compiler.origins import (
    names_of,
    op_without_node,
    origin_of,
    origin_without_node,
    origins_of,
    own_node,
    uncounted_origin,
)
from flopmeter.compiler.placing import GraphBuffers, Placed, has_memory
from flopmeter.compiler.regions import Bytes, Regions, Sizes, is_needed
from flopmeter.compiler.triton_launches import launch_of
from flopmeter.costs.fused import is_held, name_of
from flopmeter.known_values import DataDependentError
from flopmeter.records import Call, CompiledKernel, Origin, Region, TensorSpec
from flopmeter.records.compiled import KernelKind
from flopmeter.torch_names import compiler as names
from flopmeter.torch_names.operators import aten_overloads
from flopmeter.torch_names.own_operators import own_overloads
from flopmeter.torch_names.private import no_dispatch_modes
from flopmeter.trace.recorder import Recorder

compiled_kernel = own_overloads.compiled_kernel.default
"""The op that stands for a kernel that inductor wrote; `kernel` holds a CompiledKernel."""


class Constant(NamedTuple):
    """A result that is no tensor, the same in each call with these sizes."""

    value: object


KernelCall = tuple[Call, tuple[str, ...], CompiledKernel]
"""A call, its buffers by their numbers in it, and the kernel that runs it."""


class Made(NamedTuple):
    """The buffers of results: new ones, and those that take the memory of a buffer that the step reads for the last
    time."""

    allocated: tuple[Placed, ...]
    taken: tuple[tuple[Placed, str], ...]

    @property
    def names(self) -> set[str]:
        return {placed.buffer for placed in (*self.allocated, *(placed for placed, _ in self.taken))}


class PlanStep(NamedTuple):
    """A kernel, or an allocation without one."""

    made: Made
    call: Call | None
    buffers: tuple[str, ...]  # by their numbers in the call
    kernel: CompiledKernel | None
    frees: tuple[str, ...]
    depends: Any = None  # the FX node, if the call's work depends on values: flex_attention, a grouped product

    @property
    def written(self) -> frozenset[int]:
        """The numbers of the buffers that the call writes."""
        specs = (*(self.call.outputs if self.call else ()), *_specs(self.kernel.writes if self.kernel else ()))
        return frozenset(spec.storage for spec in specs)

    @property
    def main(self) -> Origin | None:
        """The op that stands for the kernel's place in the program: the one with the most FLOPs."""
        origins = self.kernel.origins if self.kernel else ()
        return max(reversed(origins), key=lambda origin: sum(flops for _, flops in origin.flops_by_class), default=None)


class Plan(NamedTuple):
    inputs: tuple[str, ...]
    steps: tuple[PlanStep, ...]
    outputs: tuple[Placed | str | Constant, ...]  # a name: an input that is no tensor, such as a process group
    known: KnownInGraph
    masks: flex.Masks

    @property
    def kernels(self) -> tuple[CompiledKernel, ...]:
        return tuple(step.kernel for step in self.steps if step.kernel is not None)

    @property
    def written(self) -> tuple[CompiledKernel, ...]:
        """The kernels without those that run a single op, since these have rows of their own in a report."""
        calls = ((step.call, step.kernel) for step in self.steps)
        return tuple(kernel for call, kernel in calls if kernel and call and call.func is compiled_kernel)


def plan_of(lowered: Lowered, sizes: Sizes, recorder: Recorder, *, is_backward: bool) -> Plan:
    """The plan of a scheduled graph. `recorder`: the program's, which knows what custom ops run."""
    with names.VIRTUALIZED.value.set_graph_handler(lowered.graph), no_dispatch_modes():
        return _Planner(lowered, sizes, recorder, is_backward).plan()


class _Planner:
    def __init__(self, lowered: Lowered, sizes: Sizes, recorder: Recorder, is_backward: bool):
        self._lowered, self._sizes, self._recorder, self._is_backward = lowered, sizes, recorder, is_backward
        self._graph, self._ir = lowered.graph, names.IR.owner
        self._buffers = GraphBuffers(self._graph, sizes)
        self._regions = Regions(self._graph, sizes, self._buffers.base)
        self._allocated = {*self._graph.graph_input_names, *self._graph.constants}
        self._libraries = LibraryCalls(lowered.nodes, sizes, self._buffers)

    def plan(self) -> Plan:
        made = [(node, tuple(self._steps(node))) for node in self._lowered.nodes]
        steps = tuple(step for _, of_node in made for step in of_node)
        masked = {
            step.depends: flex.splits_keys(node.get_template_node())
            for node, of_node in made
            for step in of_node
            if step.depends is not None and flex.is_flex(step.depends)
        }
        outputs = tuple(map(self._output, self._graph.graph_outputs))
        known = KnownInGraph(self._graph.graph, self._sizes, flex.mask_reads(masked))
        return Plan(tuple(self._graph.graph_input_names), steps, outputs, known, flex.Masks(masked, self._sizes))

    def _steps(self, node: Any) -> Iterator[PlanStep]:
        mixed = mixed_orders(node)
        if mixed is None:
            yield self._step(node)
            return
        made, frees = self._made(node), self._freed_after(node)
        call, buffers, kernel, workspace = self._rows_and_columns(node, mixed)
        yield PlanStep(Made((*made.allocated, workspace), made.taken), call, buffers, kernel, ())
        sums = [step for number, each in enumerate(mixed.along_columns) for step in self._sum(each, workspace, number)]
        yield from sums[:-1]
        yield sums[-1]._replace(frees=(*sums[-1].frees, *frees, workspace.buffer))

    def _freed_after(self, node: Any) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(self._buffers.base, node.last_usage)))

    def _step(self, node: Any) -> PlanStep:
        made = self._made(node)
        frees = (*self._freed_after(node), *(each for each in made.names if each.endswith(UNREAD)))
        if isinstance(node.node, self._ir.DeviceCopy) and _is_host(node):  # what the program reads there is not known
            raise DataDependentError("aten._to_copy.default")
        is_free = isinstance(node, names.NOP_NODE.value) or isinstance(
            node.node, (self._ir.MultiOutput, self._ir.TMADescriptor)
        )
        is_loop = isinstance(node, names.EXTERN_NODE.value) and runs_graphs(node.node)
        if is_free or (_is_host(node) and not is_loop):  # a loop's counter is on the host
            return PlanStep(made, None, (), None, frees)
        fx = flex.flex_node(node.get_template_node()) if node.is_template() else None
        if fx is not None:
            return PlanStep(made, *self._attention(node, fx), frees, fx)
        launched, depends = self._launched(node), None
        if launched is not None:
            call, buffers, kernel = launched
        elif isinstance(node, names.EXTERN_NODE.value):
            call, buffers, kernel = self._library(node)
            fx = own_node(node.node)
            depends = fx if fx is not None and makers_of_lengths(fx) else None
        else:
            kind: KernelKind = "template" if node.is_template() else "triton"
            origins = origins_of(node.get_nodes(), self._sizes, self._is_backward, self._libraries.nodes)
            biases = self._libraries.biases(node, is_backward=self._is_backward)
            call, buffers, kernel = self._written(node, kind, (*biases, *origins))
        return PlanStep(made, call, buffers, kernel, frees, depends)

    def _written(self, node: Any, kind: KernelKind, origins: tuple[Origin, ...]) -> KernelCall:
        """A kernel that inductor writes: what it reads and writes, and its origins."""
        numbers: dict[str, int] = {}
        reads, writes = (self._touched(part, numbers) for part in self._regions.of(node))
        rows, reduced = self._shape_of(node)
        name = name_of([origin.op for origin in origins] or names_of(node)) or kind
        again, inner = reads_again(node, rows * reduced, self._sizes), is_inner(node)
        held = is_held(reduced, is_inner=inner)
        run = instructions(node.get_nodes(), reduced, self._sizes, is_inner=inner, held=held)
        loops = (max(reduced, 1), rows, inner, again, run)
        cached_bytes = self._regions.cached_bytes(node)
        kernel = CompiledKernel(name, kind, reads, writes, origins, self._lowered.bytes_of[node], *loops, cached_bytes)
        return _call_of(kernel), tuple(numbers), kernel

    def _rows_and_columns(self, node: Any, mixed: MixedOrders) -> tuple[Call, tuple[str, ...], CompiledKernel, Placed]:
        """A kernel that reduces rows and sums columns, and its workspace."""
        numbers: dict[str, int] = {}
        rows, columns = self._shape_of(node.node1)
        shape = len(mixed.along_columns), blocks_of(rows, self._lowered.sm_count), columns
        stride = shape[1] * columns, columns, 1
        workspace = Placed(mixed.name_of_workspace, shape, stride, 0, WORKSPACE, "meta")
        read, written = self._regions.of(node, mixed.parts)
        kept = [(name, nbytes) for name, nbytes in written if name not in mixed.partial]
        reads, writes = self._touched(read, numbers), self._touched(kept, numbers)
        writes = (*writes, *_in_full([workspace.spec(numbers)]))
        origins = origins_of(mixed.parts, self._sizes, self._is_backward, self._libraries.nodes)
        name = name_of([origin.op for origin in origins] or names_of(node))
        sums = [each.part for each in mixed.along_columns]
        run = instructions(mixed.parts, columns, self._sizes, is_inner=True, held=True, column_sums=sums)
        nbytes = self._lowered.bytes_of[node]
        kernel = CompiledKernel(name, "triton", reads, writes, origins, nbytes, columns, rows, True, False, run)
        return _call_of(kernel), tuple(numbers), kernel, workspace

    def _sum(self, column_sum: ColumnSum, workspace: Placed, number: int) -> Iterator[PlanStep]:
        """The sum of what the blocks have added up, and its cast where the result has another type."""
        _, blocks, columns = workspace.shape
        whole = self._buffers.whole(self._buffers.base(column_sum.result.get_name()))
        self._allocated.add(whole.buffer)
        result = whole._replace(shape=(columns,), stride=(1,))
        of_sum = workspace._replace(shape=(blocks, columns), stride=(columns, 1), offset=number * blocks * columns)
        summed = result._replace(buffer=f"{whole.buffer}.sum", dtype=WORKSPACE)
        *_, origin = (None, *origins_of([column_sum.part], self._sizes, self._is_backward))
        if whole.dtype == WORKSPACE:
            yield self._apart(aten_overloads.sum.dim_IntList, ([0],), of_sum, result, origin)
            return
        yield self._apart(aten_overloads.sum.dim_IntList, ([0],), of_sum, summed, origin)
        cast = self._apart(aten_overloads._to_copy.default, (), summed, result, origin)
        yield cast._replace(frees=(summed.buffer,))

    def _apart(self, op: Any, more: tuple[Any, ...], read: Placed, made: Placed, of: Origin | None) -> PlanStep:
        """A kernel of torch's own that inductor's code calls. `of`: where in the program it belongs."""
        numbers: dict[str, int] = {}
        source, result = read.spec(numbers), made.spec(numbers)
        options = {} if more else {"dtype": made.dtype}
        call = Call(op, (source, *more), options, (source,), (result,))
        origin = origin_without_node(call)
        if of is not None:
            origin = origin._replace(module=of.module, source=of.source, path=of.path)
        nbytes = source.nbytes + result.nbytes
        kernel = CompiledKernel(call.name, "library", _in_full([source]), _in_full([result]), (origin,), nbytes)
        return PlanStep(Made((made,), ()), call, tuple(numbers), kernel, ())

    def _shape_of(self, node: Any) -> tuple[int, int]:
        """How many rows a kernel reduces, of how many elements each."""
        group = getattr(node, "group", None)
        rows, reduced = map(self._sizes, group[1]) if group and len(group[1]) == 2 else (1, 1)
        return rows, reduced

    def _touched(self, part: Bytes, numbers: dict[str, int]) -> tuple[Region, ...]:
        return tuple(Region(self._buffers.whole(name).spec(numbers), nbytes) for name, nbytes in part)

    def _attention(self, node: Any, fx: Any) -> KernelCall:
        """flex_attention, in a template of inductor's, with what fuses into its end."""
        numbers: dict[str, int] = {}
        template, parts = node.get_template_node(), node.get_nodes()

        def spec(ir: Any, held: Any = None) -> TensorSpec:
            placed = self._buffers.of(ir)
            if held is not None:  # in the template for few queries their heads are in groups
                placed = self._buffers.like(held.meta["val"], placed.buffer)._replace(offset=placed.offset)
            return placed.spec(numbers)

        tensors = flex.TemplateTensors.of(fx, template)
        attended = map(spec, tensors.read, (*fx.args[:3], *(None for _ in tensors.read[3:])))
        there = ([spec(ir) for ir in part if prod(map(self._sizes, ir.get_size()))] for part in tensors[1:])
        call = flex.call_of(fx, flex.TemplateTensors(list(attended), *there))
        after = [part for part in parts if part.node is not template]
        read, written = (self._touched(part, numbers) for part in self._regions.of(node, after))
        own = {buffer.get_name(): buffer for buffer in node.get_outputs()}[template.get_name()]
        inner = () if is_needed(own, node) else (spec(template),)  # what no one reads but the kernel itself
        origins = (
            origin_of(fx, call, is_backward=self._is_backward),
            *origins_of(after, self._sizes, self._is_backward, {fx}),
        )
        kernel = CompiledKernel(
            name_of([origin.op for origin in origins]),
            "template",
            (*_in_full(call.inputs), *read),
            (*_in_full(each for each in call.outputs if each not in inner), *written),
            origins,
            self._lowered.bytes_of[node],
        )
        inputs, outputs = (*call.inputs, *_specs(read)), (*call.outputs, *_specs(written))
        return replace(call, kwargs={"kernel": kernel}, inputs=inputs, outputs=outputs), tuple(numbers), kernel

    def _launched(self, node: Any) -> KernelCall | None:
        """The launch of a Triton kernel of the program's; None for anything else."""
        operation = node.node
        if not isinstance(operation, self._ir.UserDefinedTritonKernel):
            return None
        numbers: dict[str, int] = {}

        def argument(value: Any) -> Any:
            laid = self._buffers.laid(value) if isinstance(value, self._ir.IRNode) else None
            if laid is not None:
                return laid.spec(numbers)
            return self._sizes(value) if _is_symbolic(value) else value

        described = {name: each for name, each in operation.kwargs.items() if isinstance(each, self._ir.TMADescriptor)}
        tiles = {name: [self._sizes(size) for size in each.block_shape] for name, each in described.items()}
        given = operation.kwargs | {name: each.tensor for name, each in described.items()}
        arguments = {name: argument(value) for name, value in given.items()}
        nbytes = self._lowered.bytes_of[node]
        made = launch_of(
            operation, arguments, tiles, self._sizes, self._recorder, nbytes, is_backward=self._is_backward
        )
        return None if made is None else (made[0], tuple(numbers), made[1])

    def _library(self, node: Any) -> KernelCall:
        fx = own_node(node.node)
        op = op_without_node(node.node) if fx is None else None
        if isinstance(node.node, self._ir.DeviceCopy):
            op, fx = aten_overloads._to_copy.default, None
        if op is not None:
            call, buffers = self._libraries.call_without_node(node.node, op)
            origin = origin_without_node(call)
        elif fx is None or fx.target.namespace == "prims":  # an op of inductor's own
            origins = () if runs_graphs(node.node) else origins_of(node.get_nodes(), self._sizes, self._is_backward)
            origins = origins or (uncounted_origin(node.node),)
            return self._written(node, "library", origins)
        else:
            call, buffers = self._libraries.call(node.node, fx)
            call = self._recorder.with_implementation(call)
            origin = origin_of(fx, call, is_backward=self._is_backward)
        reads, writes = map(_in_full, (call.inputs, call.outputs))
        nbytes = self._lowered.bytes_of[node]
        return call, buffers, CompiledKernel(call.name, "library", reads, writes, (origin,), nbytes)

    def _made(self, node: Any) -> Made:
        sources, placed = self._lowered.memory_taken, tuple(self._new_buffers(node))
        taken = tuple((each, self._buffers.base(sources[each.buffer])) for each in placed if each.buffer in sources)
        return Made(tuple(each for each in placed if each.buffer not in sources), taken)

    def _new_buffers(self, node: Any) -> Iterator[Placed]:
        """Buffers that the node makes; for a part of a larger buffer, the larger one. A result that only the same
        kernel of loops reads stays in its registers."""
        if isinstance(node.node, self._ir.MultiOutput):
            return
        is_loops = all(isinstance(part, names.LOOPS_NODE.value) for part in node.get_nodes())
        mixed = mixed_orders(node)
        outputs = node.get_outputs() if mixed is None else mixed.outputs
        made = [
            buffer.node for buffer in outputs if has_memory(buffer.node) and (not is_loops or is_needed(buffer, node))
        ]
        for buffer in (*made, *self._libraries.parts_of(node.node)):
            base = self._buffers.base(buffer.get_name())
            if base not in self._allocated:
                self._allocated.add(base)
                yield self._buffers.whole(base)
        yield from self._libraries.unread(node.node)

    def _output(self, ir: Any) -> Placed | str | Constant:
        if isinstance(ir, self._ir.ShapeAsConstantBuffer):
            return Constant(self._sizes(ir.expr))
        if isinstance(ir, self._ir.NoneAsConstantBuffer):
            return Constant(None)
        is_input = ir.get_name() in self._graph.graph_inputs
        return self._buffers.laid(ir) or (ir.get_name() if is_input else Constant(ir.value))


def _call_of(kernel: CompiledKernel) -> Call:
    read, written = map(_specs, (kernel.reads, kernel.writes))
    return Call(compiled_kernel, (read, written), {"kernel": kernel}, read, written)


def _in_full(specs: Iterable[TensorSpec]) -> tuple[Region, ...]:
    """Each of the tensors as a whole."""
    return tuple(Region(spec, spec.nbytes) for spec in dict.fromkeys(specs))


def _specs(regions: Iterable[Region]) -> tuple[TensorSpec, ...]:
    return tuple(region.spec for region in regions if region.spec)


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, torch.SymInt) or hasattr(value, "free_symbols")


def _is_host(node: Any) -> bool:
    device = node.get_device()
    return device is not None and device.type == "cpu"
