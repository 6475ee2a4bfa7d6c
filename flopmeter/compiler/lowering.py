"""Takes one graph of AOTAutograd through inductor's passes, lowerings and Scheduler: everything that inductor does
before it writes code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule

from flopmeter.compiler.constants import constants_there, put_on_device
from flopmeter.compiler.in_place import memory_taken
from flopmeter.compiler.mixed_orders import as_launched
from flopmeter.compiler.posing import CUDA, pose
from flopmeter.torch_names import compiler as names
from flopmeter.torch_names.private import no_dispatch_modes


@dataclass(frozen=True, eq=False)
class Lowered:
    """A scheduled graph: `graph` is inductor's GraphLowering, `nodes` are the kernels of its scheduler, in order."""

    graph: Any
    nodes: Sequence[Any]
    bytes_of: Mapping[Any, int]  # read and written by each node, by the scheduler's own estimate
    user_outputs: frozenset[int]  # results that go to the program; the others are kept for the backward pass
    memory_taken: Mapping[str, str]  # by a buffer: the one whose memory it takes
    sm_count: int  # of the device that it is scheduled for


def copied(module: GraphModule) -> GraphModule:
    """The graph, with the same parameters and values."""
    copy = torch.fx.Graph()
    copy.output(copy.graph_copy(module.graph, {}))
    return GraphModule(module, copy)


def inline_regions(module: Any) -> bool:
    """Inlines the calls of nested_compile_region in a graph of Dynamo's; whether there are any. Inductor would lower
    them as graphs of their own, whose values do not pose, and whose kernels no plan would see."""
    found = False
    for part in module.modules():
        graph = getattr(part, "graph", None)
        for node in graph.nodes if graph is not None else ():
            if isinstance(node.target, HigherOrderOperator) and node.target.name() == "invoke_subgraph":
                node.target, found = _call_region, True
        if graph is not None and found:
            part.recompile()
    return found


def _call_region(body: Callable[..., Any], _name: str, *operands: Any) -> Any:
    return body(*operands)


_OPTIONS_OF_NEWER_TORCH = ("get_decomp_fn",)  # since 2.12 or 2.13


def lower(module: Any, given: Sequence[Any], options: dict[str, Any]) -> Lowered:
    """Schedule a graph whose nodes have fake values. Must run inside `posing`.

    `given`: the arguments as torch has them. Those of a backward graph lie as the forward graph left them, which is
    another layout than the values of its nodes have where inductor turned images to channels-last.
    `options`: those that compile_fx passes on to what compiles one graph. As `_InProcessFxCompile.codegen_and_compile`
    does in torch/_inductor/compile_fx.py, up to the code.
    """
    is_inference, is_backward = options.get("is_inference", False), options.get("is_backward", False)
    virtualized = names.VIRTUALIZED.value
    with no_dispatch_modes(), virtualized.set_debug_handler(names.DEBUG_CONTEXT.value()), torch.no_grad():
        pose(module)
        put_on_device(module)
        values = (node.meta["val"] for node in module.graph.nodes if node.op == "placeholder")
        inputs = [_lying_as(other, value) for value, other in zip(values, given, strict=True)]
        shapes = module.shape_env or names.SHAPE_ENV_OF.value(inputs)
        names.VIEW_TO_RESHAPE.value(module)
        fake_mode = names.FAKE_TENSOR_PROP.value(module, inputs)
        names.NOTE_STRIDES.value(module)
        with virtualized.set_fake_mode(fake_mode), names.PADDING_OFF.value(inputs):
            names.POST_PASSES.value(module, is_inference=is_inference)
            graph = names.GRAPH_LOWERING.value(
                module,
                example_inputs=inputs,
                shape_env=shapes,
                is_inference=is_inference,
                is_backward=is_backward,
                **{name: options[name] for name in _OPTIONS_OF_NEWER_TORCH if name in options},
            )
            graph.constant_name = constants_there(graph, fake_mode)
            graph.freeze_runtime_asserts()
            with virtualized.set_graph_handler(graph), virtualized.set_extern_kernel_nodes([]):
                graph.run(*inputs)
                _tell_strides(graph)
                graph._update_scheduler()
                nodes = list(as_launched(graph.scheduler.nodes))
                outputs = frozenset(module.graph.output_node().meta.get("user_visible_output_idxs", ()))
                nbytes = {node: node.get_read_write_buffers_sizes() for node in nodes}
                taken = memory_taken(graph, nodes)
                sm_count = names.DEVICE_PROPERTIES.value(CUDA).multi_processor_count
                return Lowered(graph, nodes, nbytes, outputs, taken, sm_count)


def _lying_as(other: Any, value: Any) -> Any:
    """The value with the strides of the other tensor."""
    if not isinstance(value, torch.Tensor) or value.stride() == other.stride():
        return value
    return value.as_strided(value.shape, other.stride(), value.storage_offset())


def _tell_strides(graph: Any) -> None:
    """Tells torch how the results lie: those that a backward graph takes are passed to it with these strides."""
    tracing = names.TRACING_CONTEXT.value()
    if tracing is None or tracing.output_strides is None:
        return
    for result in graph.graph_outputs or ():
        is_tensor = isinstance(result, names.IR.value) and result.has_tensor_output()
        strides = result.get_layout().stride if is_tensor else [""]
        is_known = all(str(stride).isdigit() for stride in strides)  # none follows from a size that may change
        tracing.output_strides.append(tuple(map(int, strides)) if is_known else None)
