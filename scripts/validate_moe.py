"""One layer of experts (aiconfigurator): the matmul of gate and up, SiLU, the matmul down, the sum over each token's
experts; without routing. Frameworks run the matmuls of all experts in one kernel on every GPU.

The tokens of each expert are those of the benchmark: balanced, or drawn from a power law; of several ranks the one with
most tokens was measured.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from validate_kernels import LEAST_SECONDS, Program, is_held_out, replayed
from validation_rows import Line, Row, roofline_of

from flopmeter import FlopMeter, Hardware, load_hardware, on_meta
from flopmeter.costs import kernels_of
from flopmeter.launch.modes import MODES, launches

# Whose grouped kernel is priced on every device.
WITH_GROUPED_KERNEL = "h100-sxm5-80gb"
SHAPE = ("hidden_size", "inter_size", "topk", "num_experts", "num_tokens", "moe_tp_size", "moe_ep_size")
ALIGNED = 8  # elements of bf16 in 16 bytes, of which torch's grouped kernel wants its rows to be multiples
MOST_OF_ONE_EXPERT = 0.8  # of the tokens, before the draw is scaled (the benchmark's sampling)


def layers(lines: list[Line]) -> dict[str, list[Row]]:
    """A row for each line; `group` is the framework's kernel. Which tokens a rank was given differs between frameworks
    and their versions, so layers that are divided among ranks have a table of their own."""
    tables: dict[str, list[Row]] = {"experts": [], "experts, one of several ranks": []}
    for line in lines:
        if float(line["ms"]) * 1e-3 >= LEAST_SECONDS:
            tables["experts" if line["moe_ep_size"] == "1" else "experts, one of several ranks"].append(_row(line))
    return tables


def _row(line: Line) -> Row:
    device = load_hardware(line["gpu"])
    seconds, low, high, roofline = _layer_seconds(line, device)
    shape = tuple(line[name] for name in SHAPE)
    measured = float(line["ms"]) * 1e-3
    kernel, held_out = line["kernel_source"], is_held_out(*shape)
    return Row(kernel, line["gpu"], measured, seconds, low, high, roofline, held_out=held_out)


def _layer_seconds(line: Line, device: Hardware) -> tuple[float, float, float, float]:
    with torch.inference_mode(), FlopMeter(WITH_GROUPED_KERNEL) as meter:
        layer = _layer(line)
        layer()
        layer()
    kernels = [kernel for kernel in kernels_of(meter.trace, strict=True) if not kernel.cost.link_bytes]
    run = launches(kernels, meter.trace, MODES["eager-cudagraph"])
    second, switches = len(kernels) // 2, meter.trace.switches
    times = replayed(run, device, switches, second)
    return *times, roofline_of((kernel.cost for kernel in kernels[second:]), switches, device)


def _layer(line: Line) -> Program:
    """The benchmark replays one layer: a small one finds its weights in the cache of the time before."""
    hidden, chosen = int(line["hidden_size"]), int(line["topk"])
    width = -(-int(line["inter_size"]) // int(line["moe_tp_size"]) // ALIGNED) * ALIGNED
    gates = 1 if "nongated" in line["kernel_source"] else 2
    lengths = tokens_of_experts(line)
    experts, rows = len(lengths), sum(lengths)
    ends = on_meta(torch.tensor(lengths).cumsum(0).int())
    with torch.device("meta"):
        x = torch.empty(rows, hidden, dtype=torch.bfloat16)
        up = torch.empty(experts, hidden, gates * width, dtype=torch.bfloat16)
        down = torch.empty(experts, width, hidden, dtype=torch.bfloat16)
        tokens = torch.empty(int(line["num_tokens"]), hidden, dtype=torch.bfloat16)
        order = torch.empty(rows, dtype=torch.int64)
        of_experts = torch.empty(chosen, -(-rows // chosen), hidden, dtype=torch.bfloat16)
        others = int(line["num_tokens"]) * chosen - rows  # rows of experts that lie on other ranks
        products = torch.empty(others, gates * width, dtype=torch.bfloat16)
        results = torch.empty(others, hidden, dtype=torch.bfloat16)
        of_all = torch.empty(chosen, int(line["num_tokens"]), hidden, dtype=torch.bfloat16)
    is_triton = "triton" in line["kernel_source"] or "vllm" in line["kernel_source"]

    def run() -> None:
        if not is_triton:  # Triton's kernels gather the rows of an expert themselves
            tokens.index_select(0, order)
        both = F.grouped_mm(x, up, offs=ends)
        if is_triton and others:  # they write zeros for each other row, which the kernels between them work on, too
            products.zero_()
            both = torch.empty(rows + others, gates * width, dtype=torch.bfloat16, device="meta")
        activated = F.relu(both) if gates == 1 else F.glu(both)  # one kernel, as SiLU times the other half is there
        F.grouped_mm(activated[:rows], down, offs=ends)
        if is_triton and others:
            results.zero_()
        (of_all if is_triton else of_experts).sum(0)

    return run


def tokens_of_experts(line: Line) -> Sequence[int]:
    """Of the rank with most tokens, whose experts are next to each other."""
    experts, tokens, chosen = (int(line[name]) for name in ("num_experts", "num_tokens", "topk"))
    ranks, total = int(line["moe_ep_size"]), tokens * chosen
    if line["distribution"] == "balanced":
        counts = _balanced(tokens, experts, chosen)
    else:
        counts = _by_power_law(float(line["distribution"].rpartition("_")[2]), tokens, experts, total)
    of_rank = experts // ranks
    return max((counts[first : first + of_rank] for first in range(0, experts, of_rank)), key=sum)


def _balanced(tokens: int, experts: int, chosen: int) -> list[int]:
    stride = -(-experts // chosen)
    counts = [0] * experts
    for token in range(tokens):
        first = token if tokens >= stride else int(token * stride / tokens)
        for number in range(chosen):
            counts[(first + number * stride) % experts] += 1
    return counts


def _by_power_law(exponent: float, tokens: int, experts: int, total: int) -> list[int]:
    """Drawn by the inverse of the distribution; no expert gets more than all tokens."""
    least, most = (1.0, tokens * MOST_OF_ONE_EXPERT) if total > experts else (0.01, 2.0)
    draw = random.Random(0)
    low, high = least ** (1 - exponent), most ** (1 - exponent)
    drawn = [((high - low) * draw.random() + low) ** (1 / (1 - exponent)) for _ in range(experts)]
    counts = [min(tokens, round(total * each / sum(drawn))) for each in drawn]
    step = 1 if sum(counts) < total else -1
    while sum(counts) != total:
        pick = min if step > 0 else max
        counts[counts.index(pick(counts))] += step
    return counts
