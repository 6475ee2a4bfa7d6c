"""Tensor parallelism that hides its collectives behind the products next to them (async TP of torch and torchtitan,
`--tp-comm-overlap` of Megatron-LM).

A gathered tensor is multiplied part by part as parts arrive, one from each rank; a scattered one is sent part by part
as they are computed (Wang et al., ASPLOS 2023). Of n parts one is local or is sent last, so that products of n - 1 can
hide what is sent: a pair takes the longer of the products and of the collective with one part of the products. Copy
engines move the parts, so that products keep all SMs. Approximations: parts of products are as fast as the whole;
copies that put gathered parts together stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from flopmeter.records import DEFAULT_STREAM, MOVEMENT, Kernel
from flopmeter.report.report import Report


def hidden_seconds(report: Report, ranks: int) -> list[float]:
    """For each kernel, how much of its wait for collectives of the first `ranks` ranks products can hide."""
    kernels, timings = report.kernels, report.timings
    hidden = [0.0] * len(kernels)
    for number, (kernel, timing) in enumerate(zip(kernels, timings, strict=True)):
        collective = kernel.cost.collective
        if collective is None or collective.ranks != tuple(range(ranks)):
            continue
        beside = {"all_gather": range(number + 1, len(kernels)), "reduce_scatter": range(number - 1, -1, -1)}
        products = _products(kernels, beside.get(collective.kind, range(0)))
        can_hide = sum(timings[each].seconds for each in products) * (ranks - 1) / ranks
        waiter, exposed = number, timing.seconds
        if timing.stream != DEFAULT_STREAM:
            later = range(number + 1, len(kernels))
            waiter = next((n for n in later if timings[n].stream == DEFAULT_STREAM), number)
            exposed = timings[waiter].link_wait_seconds
        hidden[waiter] += max(0.0, min(exposed - hidden[waiter], can_hide))
    return hidden


def _products(kernels: list[Kernel], numbers: Iterable[int]) -> Iterator[int]:
    """The next products, with only copies between them. (What is scattered was made by the product before.)"""
    for number in numbers:
        cost = kernels[number].cost
        if cost.macs:
            yield number
        elif cost.op_class != MOVEMENT:
            return
