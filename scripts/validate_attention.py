"""Measured attention: attention.csv of aiconfigurator, kernels of FlashAttention-2 and -3 as frameworks call them.

FlashAttention-2 (A100, L40S) is priced as torch's flash kernel, over vLLM's paged cache as `flopmeter serve` prices it,
and so is FlashAttention-3 (H100, H200). A benchmark repeats one call, so its inputs are in the L2 cache where they fit.
A row is what a framework's wrapper takes: it also writes the new keys and values into the paged cache, and some launch
a kernel that plans the splits. So each row is compared with the attention alone and, in a second table, with these two
kernels priced too: in prefill with as many key heads as query heads the first of them takes a fifth of the time.
"""

from __future__ import annotations

import torch
from validate_kernels import LEAST_SECONDS, Program, kernel_row
from validation_rows import Line, Row

from flopmeter.ask.serve.engine import with_newest_attention

aten = torch.ops.aten

FLASH_2 = ("flash_attention", "vllm_flash_attn", "vllm_flash_attn_fa2", "vllm_vit_flash_attn_fa2")
FLASH_3 = ("fa3", "flash_attention", "vllm_flash_attn", "vllm_flash_attn_fa3", "vllm_vit_flash_attn_fa3")
PAGED = ("vllm_flash_attn", "vllm_flash_attn_fa2")
FAMILY = {"a100-sxm4-80gb": FLASH_2, "l40s": FLASH_2, "h100-sxm5-80gb": FLASH_3, "h200-sxm-141gb": FLASH_3}
LONG_SECONDS = {"context": 100e-6, "encoder": 100e-6, "generation": 50e-6}
NAMES = {"context": "prefill", "encoder": "without a mask", "generation": "decoding"}
MOST_HEAD_DIM = 256  # of both libraries


def attentions(lines: list[Line]) -> dict[str, list[Row]]:
    """Rows by phase, long ones and short ones; those whose window is unknown stand apart."""
    tables: dict[str, list[Row]] = {}
    for line in lines:
        measured = float(line["ms"]) * 1e-3
        if measured < LEAST_SECONDS or not _is_of_family(line):
            continue
        run = program_of(line)
        row = _row(line, run)
        phase = line["phase"]
        least = f"at least {LONG_SECONDS[phase] * 1e6:.0f} µs"
        kind = "shorter" if measured < LONG_SECONDS[phase] else least
        if float(line["window_size"]):
            kind = f"with a window, {kind}"
        elif _is_mislabelled(line):
            kind = "with a window that is not in the row"
        tables.setdefault(f"attention, {NAMES[phase]}, {kind}", []).append(row)
        if phase != "encoder" and not _is_mislabelled(line):
            whole = _row(line, wrapper_of(line))
            tables.setdefault(f"attention, {NAMES[phase]}, {kind}, with cache and plan", []).append(whole)
    return dict(sorted(tables.items()))


def _row(line: Line, run: Program) -> Row:
    as_served = FAMILY[line["gpu"]] is FLASH_3 or line["kernel_source"] in PAGED
    as_run = with_newest_attention if as_served else None
    return kernel_row(line["kernel_source"], line, run, _shape_of(line), before=run, as_run=as_run)


def _is_of_family(line: Line) -> bool:
    return line["kernel_source"] in FAMILY[line["gpu"]] and int(line["head_dim"]) <= MOST_HEAD_DIM


def _is_mislabelled(line: Line) -> bool:
    """Rows on L40S that say that there is no window, and reach up to 80 TB/s and 4,500 TFLOP/s. The time of decoding
    does not grow with the keys, as if the window were short."""
    is_affected = (line["gpu"], line["kernel_source"]) == ("l40s", "flash_attention") and line["head_dim"] in (
        "64",
        "192",
    )
    return is_affected and not float(line["window_size"])


def _shape_of(line: Line) -> tuple[int, ...]:
    names = ("batch_size", "isl", "step", "num_heads", "num_key_value_heads", "head_dim", "window_size")
    return tuple(int(float(line[name])) for name in names)


def program_of(line: Line) -> Program:
    """One call of the kernel: `isl` new tokens, or one over `step` cached ones."""
    batch, new, cached, heads, key_heads, head_dim, window = _shape_of(line)
    keys = cached + 1 if line["phase"] == "generation" else new
    if line["phase"] == "generation" and line["kernel_source"] == "flash_attention" and window:
        keys, window = min(keys, window), 0  # this library lets heads share blocks under a window too; torch does not
    is_causal = line["phase"] == "context"

    def tensor(count: int, length: int) -> torch.Tensor:
        return torch.empty(batch, length, count, head_dim, dtype=torch.bfloat16, device="meta")

    q, k = tensor(heads, new), tensor(key_heads or heads, keys)
    v = torch.empty_like(k)
    left = window - 1 if window else -1
    return lambda: aten._flash_attention_forward(
        q, k, v, None, None, new, keys, 0.0, is_causal, False,
        window_size_left=left, window_size_right=0 if is_causal or window else -1,
    )  # fmt: skip


def wrapper_of(line: Line) -> Program:
    """That kernel, after new keys and values were written into the cache and the splits were planned."""
    attend = program_of(line)
    batch, new, _, heads, key_heads, head_dim, _ = _shape_of(line)
    fresh = torch.empty(2, batch * new, key_heads or heads, head_dim, dtype=torch.bfloat16, device="meta")
    cache, plan = torch.empty_like(fresh), torch.empty(batch, dtype=torch.int32, device="meta")

    def run() -> object:
        cache.copy_(fresh)
        plan.zero_()
        return attend()

    return run
