"""Weights and caches in fewer bits: what the kernels of a step read then, and in which type they multiply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from flopmeter.ask.serve.engine import with_newest_attention, with_one_sort
from flopmeter.device.hardware import Hardware, HardwareError
from flopmeter.launch.grouped_matmul import in_one_kernel, is_grouped
from flopmeter.records import ATTENTION, Cost, GroupedMatmulWork, Kernel, MatmulWork, Region, Trace

HEAD = "lm_head"  # scores the vocabulary; it stays as it is, like embeddings and norms
_LEFT_OUT = ("modules_to_not_convert", "ignored_layers", "ignore")  # of a quantization_config: module names, with stars
_OF_METHODS = {"mxfp4": "mxfp4", "fp8": "fp8", "fbgemm_fp8": "fp8", "gptq": "int4", "awq": "int4"}


class WeightFormat(NamedTuple):
    """How the weights of products are kept."""

    bits: float  # of one weight, its share of a scale included
    product: str | None  # the type in which a device multiplies, if it can; None: weights are unpacked in the kernel
    what: str


def in_groups(size: int, *, has_zeros: bool = False) -> WeightFormat:
    """4 bits, and for each group of that many weights a scale, perhaps with a zero point of 4 bits (GPTQ, AWQ)."""
    scale = "a 16-bit scale and a zero point" if has_zeros else "a 16-bit scale"
    bits = 4 + (16 + 4 * has_zeros) / size
    return WeightFormat(bits, None, f"{scale} for {size} weights, unpacked in the product")


WEIGHTS = {
    "bf16": WeightFormat(16, None, "as the model has them"),
    "fp8": WeightFormat(8, "fp8", "products in fp8, activations quantised in the kernel before"),
    "int8": WeightFormat(8, "int8", "products in int8, activations quantised in the kernel before"),
    "int4": in_groups(128),
    "mxfp4": WeightFormat(4 + 8 / 32, None, "an 8-bit scale for 32 weights (OCP MX), unpacked in the product"),
    "nvfp4": WeightFormat(4 + 8 / 16, "fp4", "an 8-bit scale for 16 numbers, products in fp4, activations alike"),
}


class Quantised(NamedTuple):
    """What a config says of the weights that were published with it."""

    weights: str | None  # of WEIGHTS; None: it says nothing, or something else
    kept: tuple[str, ...]  # modules whose weights are as they were
    form: WeightFormat | None = None  # if it says more of it than WEIGHTS has

    def format_of(self, weights: str) -> WeightFormat:
        return self.form if self.form is not None and weights == self.weights else WEIGHTS[weights]

    def is_kept(self, module: str) -> bool:
        """Whether the module of this path, which begins with the model's class, or one around it is among them."""
        parts = module.split(".")[1:]
        paths = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        return any(fnmatchcase(path, each) for path in paths for each in self.kept)


def quantised(config: Any) -> Quantised:
    """What the `quantization_config` of a config of transformers says."""
    own = getattr(config, "quantization_config", None) or {}
    facts = own if isinstance(own, dict) else own.to_dict()
    kept = next((facts[name] for name in _LEFT_OUT if facts.get(name)), ())
    weights, group = _OF_METHODS.get(str(facts.get("quant_method"))), facts.get("group_size") or 0
    if weights == "int4" and facts.get("bits", 4) != 4:
        weights = None
    has_zeros = facts.get("zero_point") or facts.get("sym") is False
    form = in_groups(group, has_zeros=bool(has_zeros)) if weights == "int4" and group > 0 else None
    return Quantised(weights, tuple(name.replace("language_model.", "") for name in kept), form)


KV_BYTES = {"bf16": 2.0, "fp8": 1.0}


NOTHING_KEPT = Quantised(None, ())


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
    if not kernel.cost.macs or module.rpartition(".")[2] == HEAD or published.is_kept(module):
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
