"""Where the tensors of a scheduled graph lie: in which buffer, and how they are laid out there."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flopmeter.compiler.regions import Sizes
from flopmeter.records import TensorSpec
from flopmeter.torch_names import compiler as names


class Placed(NamedTuple):
    """A tensor as inductor lays it out. `buffer` names the allocation, which the graph makes or is passed."""

    buffer: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: str

    def spec(self, numbers: dict[str, int]) -> TensorSpec:
        """The tensor's spec in a call. `numbers`: those of its buffers so far; this tensor's buffer is added."""
        number = numbers.setdefault(self.buffer, len(numbers))
        return TensorSpec(self.shape, self.stride, self.dtype, number, self.offset, self.device)


class GraphBuffers:
    """The buffers of a graph of inductor's, for one set of sizes."""

    def __init__(self, graph: Any, sizes: Sizes) -> None:
        self._graph, self._scheduler, self._sizes = graph, graph.scheduler, sizes
        self._ir = names.IR.owner

    def base(self, name: str) -> str:
        """The buffer whose memory the buffer of that name has."""
        while True:
            real = self._scheduler.mutation_real_name.get(name)
            if real is not None and real != name:
                name = real
                continue
            layout = getattr(self._graph.name_to_buffer.get(name), "layout", None)
            if isinstance(layout, self._ir.NonOwningLayout):
                name = layout.view.get_name()
            elif isinstance(layout, self._ir.MutationLayoutSHOULDREMOVE):
                name = layout.get_buffer().get_name()
            else:
                return name

    def whole(self, name: str) -> Placed:
        """The whole buffer of that name."""
        if name in self._graph.constants:
            return self.like(self._graph.constants[name], name)
        held = self._graph.graph_inputs.get(name)
        return self._by_layout(name, (self._graph.name_to_buffer[name] if held is None else held).get_layout())

    def base_of(self, ir: Any) -> Placed:
        """The whole buffer in whose memory an argument or a result lies."""
        return self.whole(self.base(ir.get_name()))

    def laid(self, ir: Any) -> Placed | None:
        """An argument, which is a buffer or a view of one; None where inductor gives it no layout."""
        try:
            return self._by_layout(self.base(ir.get_name()), ir.get_layout())
        except (AttributeError, NotImplementedError):
            return None

    def of(self, ir: Any) -> Placed:
        """An argument, or the whole of its buffer where inductor gives it no layout."""
        return self.laid(ir) or self.base_of(ir)

    def like(self, tensor: torch.Tensor, name: str) -> Placed:
        """A buffer of that name, laid out as a tensor that was traced."""
        shape, stride = (tuple(map(self._sizes, part)) for part in (tensor.shape, tensor.stride()))
        offset = self._sizes(tensor.storage_offset())
        return Placed(name, shape, stride, offset, tensor.dtype, _device(tensor.device))

    def _by_layout(self, name: str, layout: Any) -> Placed:
        shape, stride = (tuple(map(self._sizes, part)) for part in (layout.size, layout.stride))
        return Placed(name, shape, stride, self._sizes(layout.offset), layout.dtype, _device(layout.device))


def has_memory(buffer: Any) -> bool:
    """Whether it is memory of its own, not a name for what was written to another buffer."""
    layout, ir = buffer.get_output_spec(), names.IR.owner
    return isinstance(layout, ir.Layout) and not isinstance(layout, ir.MutationLayoutSHOULDREMOVE)


def _device(device: torch.device) -> str:
    return "meta" if device.type == "cuda" else device.type
