"""Weights and caches in fewer bits: what the kernels of a step read then, and in which type they multiply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flopmeter.ask.serve.engine import with_newest_attention, with_one_sort
from flopmeter.ask.serve.published import KV_BYTES, NOTHING_KEPT, Quantised
from flopmeter.device.hardware import Hardware, HardwareError
from flopmeter.launch.grouped_matmul import in_one_kernel, is_grouped
from flopmeter.records import ATTENTION, Cost, GroupedMatmulWork, Kernel, MatmulWork, Region, Trace


def in_formats(
    kernels: Sequence[Kernel],
    trace: Trace,
    device: Hardware,
    weights: str,
    kv: str,
    published: Quantised = NOTHING_KEPT,
) -> list[Kernel]:
    """The kernels of a step with weights and cache in these formats, the experts of a layer in one kernel. Where a
    device has no products of the type, the weights are unpacked in the product."""
    as_run = with_newest_attention(with_one_sort(in_one_kernel(kernels)), device)
    chosen, known = published.format_of(weights), dict[tuple[Cost, tuple[int, ...]], Cost]()
    product = chosen.product if chosen.product and has_product(device, chosen.product) else None
    only_experts = _is_for_experts(weights, as_run)

    def changed(kernel: Kernel) -> Kernel:
        cost = kernel.cost
        if cost.op_class == ATTENTION:
            if kv == "bf16":
                return kernel
            key = (cost, (-1,))
            known[key] = known.get(key) or _with_narrow_cache(cost, KV_BYTES[kv] / KV_BYTES["bf16"])
            return kernel._replace(cost=known[key])
        held = _weight_storages(kernel, trace, published, only_experts)
        if weights == "bf16" or not held:
            return kernel
        storages = tuple(sorted(held))
        known[cost, storages] = known.get((cost, storages)) or _with_narrow_weights(
            cost, held, chosen.bits / 16, product
        )
        return kernel._replace(cost=known[cost, storages])

    return [changed(kernel) for kernel in as_run]


def has_product(device: Hardware, dtype: str) -> bool:
    try:
        return device.contraction_peak(dtype).unit == "matrix"
    except HardwareError:
        return False


def _is_for_experts(weights: str, kernels: Sequence[Kernel]) -> bool:
    """Whether the format is only for experts, where a model has any, as MXFP4 is: OpenAI published gpt-oss so, and the
    loaders of transformers (`Mxfp4HfQuantizer`) and vLLM (`Mxfp4Config`) leave other layers as they are."""
    return weights == "mxfp4" and any(map(is_grouped, kernels))


def _weight_storages(kernel: Kernel, trace: Trace, published: Quantised, only_experts: bool) -> set[int]:
    """Storages, as the kernel's call numbers them, of the weights that it multiplies by and that can be narrow."""
    module = kernel.op.module
    if only_experts and not is_grouped(kernel):
        return set()
    if not kernel.cost.macs or published.is_kept(module):
        return set()
    matrices = (spec.storage for spec in kernel.op.call.inputs if len(spec.shape) > 1)  # a bias stays as it is
    return {place for place in matrices if trace.storages[kernel.op.storages[place]].role == "parameters"}


def _with_narrow_weights(cost: Cost, held: set[int], share: float, product: str | None) -> Cost:
    """The cost with narrow weights. If the product is in that type, its other operand is narrow too, but not a bias."""

    def read(region: Region) -> Region:
        spec = region.spec
        is_narrow = spec is not None and len(spec.shape) > 1 and (product or spec.storage in held)
        return region._replace(nbytes=round(region.nbytes * share)) if is_narrow else region

    work = cost.work
    if product is None and isinstance(work, MatmulWork | GroupedMatmulWork):
        work = work._replace(unpacks_weights=True)
    return replace(cost, reads=tuple(map(read, cost.reads)), dtype=product or cost.dtype, work=work)


def _with_narrow_cache(cost: Cost, share: float) -> Cost:
    """The cost with a narrow cache. Attention reads queries first; its other operands are keys and values."""
    query, *cache = cost.reads
    return replace(cost, reads=(query, *(each._replace(nbytes=round(each.nbytes * share)) for each in cache)))


def narrow_bytes(kernels: Sequence[Kernel], trace: Trace, weights: str, published: Quantised) -> int:
    """By how much the format makes the weights of a step's products smaller."""
    only_experts = _is_for_experts(weights, kernels)
    numbers = {
        kernel.op.storages[place]
        for kernel in kernels
        for place in _weight_storages(kernel, trace, published, only_experts)
    }
    return round(
        sum(trace.storages[number].nbytes for number in numbers) * (1 - published.format_of(weights).bits / 16)
    )
