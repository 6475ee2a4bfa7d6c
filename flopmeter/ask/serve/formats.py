"""Weights and caches in fewer bits: what the kernels of a step read then, and in which type they multiply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from flopmeter.ask.serve.engine import with_one_sort
from flopmeter.device.hardware import Hardware, HardwareError
from flopmeter.launch.grouped_matmul import in_one_kernel
from flopmeter.records import ATTENTION, Cost, GroupedMatmulWork, Kernel, MatmulWork, Region, Trace

HEAD = "lm_head"  # scores the vocabulary; it stays as it is, like embeddings and norms


class WeightFormat(NamedTuple):
    """How the weights of products are kept."""

    bits: float  # of one weight, its share of a scale included
    product: str | None  # the type in which a device multiplies, if it can; None: weights are unpacked in the kernel
    what: str


WEIGHTS = {
    "bf16": WeightFormat(16, None, "as the model has them"),
    "fp8": WeightFormat(8, "fp8", "products in fp8, activations quantised in the kernel before"),
    "int8": WeightFormat(8, "int8", "products in int8, activations quantised in the kernel before"),
    "int4": WeightFormat(4 + 16 / 128, None, "a 16-bit scale for 128 weights, unpacked in the product"),
    "mxfp4": WeightFormat(4 + 8 / 32, None, "an 8-bit scale for 32 weights (OCP MX), unpacked in the product"),
    "nvfp4": WeightFormat(4 + 8 / 16, "fp4", "an 8-bit scale for 16 numbers, products in fp4, activations alike"),
}
KV_BYTES = {"bf16": 2.0, "fp8": 1.0}


def in_formats(kernels: Sequence[Kernel], trace: Trace, device: Hardware, weights: str, kv: str) -> list[Kernel]:
    """The kernels of a step with weights and cache in these formats, the experts of a layer in one kernel. Where a
    device has no products of the type, the weights are unpacked in the product."""
    chosen, known = WEIGHTS[weights], dict[tuple[Cost, tuple[int, ...]], Cost]()
    product = chosen.product if chosen.product and has_product(device, chosen.product) else None

    def changed(kernel: Kernel) -> Kernel:
        cost = kernel.cost
        if cost.op_class == ATTENTION:
            if kv == "bf16":
                return kernel
            key = (cost, (-1,))
            known[key] = known.get(key) or _with_narrow_cache(cost, KV_BYTES[kv] / KV_BYTES["bf16"])
            return kernel._replace(cost=known[key])
        held = weight_storages(kernel, trace)
        if weights == "bf16" or not held:
            return kernel
        storages = tuple(sorted(held))
        known[cost, storages] = known.get((cost, storages)) or _with_narrow_weights(
            cost, held, chosen.bits / 16, product
        )
        return kernel._replace(cost=known[cost, storages])

    return [changed(kernel) for kernel in with_one_sort(in_one_kernel(kernels))]


def has_product(device: Hardware, dtype: str) -> bool:
    try:
        return device.contraction_peak(dtype).unit == "matrix"
    except HardwareError:
        return False


def weight_storages(kernel: Kernel, trace: Trace) -> set[int]:
    """Storages, as the kernel's call numbers them, of the weights that it multiplies by."""
    if not kernel.cost.macs or kernel.op.module.rpartition(".")[2] == HEAD:
        return set()
    return {place for place, number in enumerate(kernel.op.storages) if trace.storages[number].role == "parameters"}


def _with_narrow_weights(cost: Cost, held: set[int], share: float, product: str | None) -> Cost:
    """The call with narrow weights. If the product is in another type, its other operand is in the same format."""

    def read(region: Region) -> Region:
        is_weight = region.spec is not None and region.spec.storage in held
        return region._replace(nbytes=round(region.nbytes * share)) if is_weight or product else region

    work = cost.work
    if product is None and isinstance(work, MatmulWork | GroupedMatmulWork):
        work = work._replace(unpacks_weights=True)
    return replace(cost, reads=tuple(map(read, cost.reads)), dtype=product or cost.dtype, work=work)


def _with_narrow_cache(cost: Cost, share: float) -> Cost:
    """The call with a narrow cache. Attention reads queries first; its other operands are keys and values."""
    query, *cache = cost.reads
    return replace(cost, reads=(query, *(each._replace(nbytes=round(each.nbytes * share)) for each in cache)))


def narrow_bytes(kernels: Sequence[Kernel], trace: Trace, weights: str) -> int:
    """By how much the format makes the weights of a step's products smaller."""
    numbers = {kernel.op.storages[place] for kernel in kernels for place in weight_storages(kernel, trace)}
    return round(sum(trace.storages[number].nbytes for number in numbers) * (1 - WEIGHTS[weights].bits / 16))
