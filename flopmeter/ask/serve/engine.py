"""How the kernels of serving engines (vLLM, SGLang, TensorRT-LLM) differ from those of transformers, in the same model.

Projections of one input are one product; one kernel sorts tokens by their experts; attention is of the flash-attention
library's newest generation for the device; and a step ends with the next token.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flopmeter.costs import make_cost
from flopmeter.device.hardware import Hardware
from flopmeter.launch.grouped_matmul import is_grouped
from flopmeter.records import SORTING, AttentionBackend, AttentionWork, Kernel
from flopmeter.records.dtypes import name_of
from flopmeter.torch_names.operators import aten

FLASH_3_CAPABILITIES = (9, 10)  # majors
PACKED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))
"""Children of one module that read the same input: `qkv_proj`, `gate_up_proj` and `fused_qkv_a_proj` of vLLM."""


class _Joined:
    """Weights of linear layers of one input, one after another in memory. Where layers are tied, so are these."""

    def __init__(self, own: Sequence[nn.Parameter]):
        self.own = own  # kept, so that no other parameter gets the id of one of them
        self.sizes = [len(weight) for weight in own]
        self.whole = own[0].new_empty(sum(self.sizes), own[0].shape[1])
        self.parts = [nn.Parameter(part, requires_grad=False) for part in self.whole.split(self.sizes)]


class _Packed:
    """Linear layers whose weights lie one after another, so that one product gives the outputs of all."""

    def __init__(self, layers: Sequence[nn.Linear], joined: _Joined):
        self._sizes, self._weight = joined.sizes, joined.whole
        self._bias = None if layers[0].bias is None else self._weight.new_empty(sum(self._sizes))
        self._input: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}
        for place, (layer, weight) in enumerate(zip(layers, joined.parts, strict=True)):
            layer.weight = weight
            setattr(layer, "forward", functools.partial(self._output, place))  # noqa: B010

    def _output(self, place: int, x: Tensor) -> Tensor:
        """The output of one of the joined layers. Nothing is held once each of them has taken its own."""
        if self._input is not x or place not in self._outputs:
            together = nn.functional.linear(x, self._weight, self._bias)
            self._input, self._outputs = x, dict(enumerate(together.split(self._sizes, dim=-1)))
        out = self._outputs.pop(place)
        if not self._outputs:
            self._input = None
        return out


def pack(model: Any) -> None:
    """Packs the projections of each module of the model that engines pack."""
    known: dict[tuple[int, ...], _Joined] = {}  # by the ids of the weights
    for module in list(model.modules()):
        for names in PACKED:
            layers: list[Any] = [getattr(module, name, None) for name in names]
            if all(type(layer) is nn.Linear for layer in layers) and len({layer.bias is None for layer in layers}) == 1:
                own = [layer.weight for layer in layers]
                key = tuple(map(id, own))
                if key not in known:
                    known[key] = _Joined(own)
                _Packed(layers, known[key])


def choose_tokens(logits: Tensor) -> None:
    """The most likely token of each row, of logits in fp32 as engines keep them."""
    logits.float().argmax(-1)


def with_newest_attention(kernels: Sequence[Kernel], device: Hardware) -> list[Kernel]:
    """The kernels of a step, with the device's attention over a paged cache: FlashAttention-3 or -4 on Hopper and
    data-centre Blackwell, elsewhere FlashAttention-2, which has one kernel for such a cache."""
    capability = device.compute_capability
    if capability is None:
        return list(kernels)
    backend: AttentionBackend = "flash_3" if capability[0] in FLASH_3_CAPABILITIES else "paged"

    def in_pages(work: AttentionWork) -> AttentionWork:
        return work._replace(backend=backend, shape=work.shape._replace(is_packed=True))

    return [
        kernel._replace(cost=replace(kernel.cost, work=in_pages(kernel.cost.work)))
        if kernel.op.packet is aten._flash_attention_forward and isinstance(kernel.cost.work, AttentionWork)
        else kernel
        for kernel in kernels
    ]


def with_one_sort(kernels: Sequence[Kernel]) -> list[Kernel]:
    """The kernels of a step as engines route the tokens of a layer of experts: one picks experts from the scores (as
    vLLM's `topk_softmax` and `grouped_topk`); two sort the tokens by experts, of which there are few: one counts, one
    places (`moe_align_block_size`). transformers takes some ten, with torch's general sorts."""
    experts = {kernel.op.module for kernel in kernels if is_grouped(kernel)}
    kept: list[Kernel] = []
    for kernel in kernels:
        if kernel.op.module not in experts or _is_of_data(kernel):
            kept.append(kernel)
        elif kernel.op.packet is aten.sort and kept[-1].op is not kernel.op:
            kept = [*_with_one_choice(kept, kernel.op.module.rpartition(".")[0]), _in_passes(kernel, 2)]
    return kept


def _in_passes(kernel: Kernel, kernels: int) -> Kernel:
    """In place of one of torch's sorts: that many kernels, which together read the input and write the result once."""
    return kernel._replace(cost=make_cost(kernel.op.call, SORTING, access="stream", kernels=kernels))


def _is_of_data(kernel: Kernel) -> bool:
    """Whether the kernel works on the contents of tokens, not only on their places."""
    return any(spec.dtype.is_floating_point for spec in kernel.op.call.outputs)


def _with_one_choice(kernels: list[Kernel], layer: str) -> list[Kernel]:
    """Of the small kernels after the product that gives the scores, keeps only the `topk` that picks the experts: the
    last one, where others have picked groups of experts before."""
    start = len(kernels)
    while start and not kernels[start - 1].cost.macs and kernels[start - 1].op.module.startswith(layer):
        start -= 1
    if not start:
        return kernels
    scores = kernels[start - 1].op.call.outputs[0].numel
    chosen = next((kernel for kernel in reversed(kernels[start:]) if kernel.op.packet is aten.topk), None)
    return [
        *_with_scores_uncast(kernels[:start]),
        *(
            _in_passes(kernel, 1) if kernel is chosen else kernel
            for kernel in kernels[start:]
            if kernel is chosen or any(spec.numel > scores for spec in kernel.op.call.outputs)
        ),
    ]


def _with_scores_uncast(kernels: list[Kernel]) -> list[Kernel]:
    """The last kernel multiplies by the weights of the router. Some models of transformers cast weights and tokens to
    fp32 each time; engines multiply them as they are (SGLang's MoEGate), and add in fp32.
    """
    product, start = kernels[-1], len(kernels) - 1
    while start and _is_cast(kernels[start - 1]) and kernels[start - 1].op.module == product.op.module:
        start -= 1
    if start == len(kernels) - 1:
        return kernels
    uncast = kernels[start].op.call.inputs[0].dtype
    reads = tuple(
        read._replace(nbytes=read.nbytes * uncast.itemsize // torch.float32.itemsize) for read in product.cost.reads
    )
    return [*kernels[:start], product._replace(cost=replace(product.cost, reads=reads, dtype=name_of(uncast)))]


def _is_cast(kernel: Kernel) -> bool:
    """Whether the kernel is a cast to fp32."""
    return kernel.op.packet is aten._to_copy and kernel.op.call.outputs[0].dtype is torch.float32
