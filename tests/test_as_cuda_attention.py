"""Which attention backend CUDA chooses. Expectations are those of the torch 2.13 CUDA build, written out."""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from as_cuda_stream import Stream, bf16, f16, f32, module, ops_of
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flopmeter import FlopMeter, StreamError
from flopmeter.as_cuda import CudaTarget, emulate_cuda
from flopmeter.as_cuda.attention_rules import (
    CUDNN,
    EFFICIENT,
    FLASH,
    RULES,
    SdpaCall,
    choose,
    cudnn_decodes,
    cudnn_head_sizes_to_256,
    has_kernels_of_256,
    rules_for,
)
from flopmeter.torch_names.dispatcher import running_version

HALF, BF16, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
KERNELS = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_safe_softmax": "math",
}
NAMES = {
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "efficient",
    SDPBackend.CUDNN_ATTENTION: "cudnn",
    SDPBackend.MATH: "math",
}
RUNNING = running_version()
DEFAULTS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "enable_gqa": False}
ALL = (50, 60, 70, 75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121)
HOPPER_AND_B200 = (90, 100, 103)
FUSED_HALF = (80, 86, 87, 89, 110, 120, 121)
"""Ampere and later that keep PyTorch's own order: flash, efficient, math."""


def target(sm: int, cudnn_version: int = 92000) -> CudaTarget:
    return CudaTarget(divmod(sm, 10), cudnn_version)


def tensors(
    dtype: torch.dtype = BF16,
    q: tuple[int, ...] = (2, 8, 128, 64),
    k: tuple[int, ...] | None = None,
    v: tuple[int, ...] | None = None,
    grad: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (
        torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad) for shape in (q, k or q, v or k or q)
    )
    return query, key, value


def by_rules(version: tuple[int, int], sm: int, *qkv: Tensor, cudnn_version: int | None = None, **options: Any) -> str:
    """What the rules of a release choose, with the cuDNN that it brings, whichever torch runs."""
    rules = RULES[version]
    q, k, v = qkv
    chosen = (options.get(name, default) for name, default in DEFAULTS.items())
    return NAMES[choose(SdpaCall.of((q, k, v), *chosen, target(sm, cudnn_version or rules.cudnn_version)), rules)]


def backend(sm: int, *qkv: Tensor, cudnn_version: int = 92000, **options: Any) -> str:
    """What runs for `qkv` on `sm`."""
    with emulate_cuda(target(sm, cudnn_version)):
        ran = ops_of(lambda: F.scaled_dot_product_attention(*qkv, **options))
    (chosen,) = {KERNELS[name] for name in ran if name in KERNELS}
    return chosen


def mask(*shape: int, dtype: torch.dtype = torch.bool) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="meta")


MASK = {"attn_mask": mask(2, 1, 128, 128)}
GQA = {"q": (2, 8, 128, 64), "k": (2, 2, 128, 64)}


def size(query: int, value: int | None = None) -> dict[str, tuple[int, ...]]:
    return {"q": (2, 8, 128, query), "v": (2, 8, 128, value or query)}


CHOICES: list[tuple[str, tuple[int, ...], str, dict[str, Any], dict[str, Any]]] = [
    ("bf16 before Ampere: no kernel has it", (50, 60, 70, 75), "math", {}, {}),
    ("fp16 before Ampere", (50, 60, 70, 75), "efficient", {"dtype": HALF}, {}),
    ("bf16", FUSED_HALF, "flash", {}, {}),
    ("bf16 where cuDNN comes first", HOPPER_AND_B200, "cudnn", {}, {}),
    ("sm 10.1 is no B200", (101,), "flash", {}, {}),
    ("fp32", ALL, "efficient", {"dtype": SINGLE}, {}),
    ("fp64", ALL, "math", {"dtype": DOUBLE}, {}),
    ("no batch dimension", ALL, "math", {"q": (8, 128, 64)}, {}),
    ("a mask", FUSED_HALF, "efficient", {}, MASK),
    ("a mask and cuDNN", HOPPER_AND_B200, "cudnn", {}, MASK),
    ("a mask of rank 3 is not cuDNN's", HOPPER_AND_B200, "efficient", {}, {"attn_mask": mask(8, 128, 128)}),
    ("causal", FUSED_HALF, "flash", {}, {"is_causal": True}),
    ("grouped heads", FUSED_HALF, "flash", GQA, {"enable_gqa": True, "is_causal": True}),
    ("grouped heads and a mask: K and V are repeated", FUSED_HALF, "math", GQA, {"enable_gqa": True, **MASK}),
    ("grouped heads and a mask and cuDNN", HOPPER_AND_B200, "cudnn", GQA, {"enable_gqa": True, **MASK}),
    ("grouped heads in fp32", ALL, "math", {"dtype": SINGLE, **GQA}, {"enable_gqa": True}),
    ("other groups for values", (80, 89, 120), "math", {**GQA, "v": (2, 4, 128, 64)}, {"enable_gqa": True}),
    ("other groups for values", HOPPER_AND_B200, "cudnn", {**GQA, "v": (2, 4, 128, 64)}, {"enable_gqa": True}),
    ("a dropout rate cuDNN has not", HOPPER_AND_B200, "flash", {}, {"dropout_p": 0.1}),
    ("a dropout rate in sixteenths", HOPPER_AND_B200, "cudnn", {}, {"dropout_p": 0.125}),
    ("one key", (80, 89, 90, 100), "flash", {"q": (2, 8, 1, 64)}, {}),
    ("decoding", (90, 100), "cudnn", {"q": (2, 8, 1, 64), "k": (2, 8, 128, 64)}, {}),
    ("decoding, causal", FUSED_HALF, "efficient", {"q": (2, 8, 1, 64), "k": (2, 8, 128, 64)}, {"is_causal": True}),
    ("decoding, causal", (90,), "cudnn", {"q": (2, 8, 1, 64), "k": (2, 8, 128, 64)}, {"is_causal": True}),
    ("heads of 256", (90,), "cudnn", size(256), {}),
    ("heads of 256 are too large for cuDNN there", (80, 100, 103, 110), "flash", size(256), {}),
    ("heads of 264", (80, 90, 100, 120), "efficient", size(264), {}),
    ("heads of 512", (75,), "efficient", {"dtype": HALF, **size(512)}, {}),
    ("heads of 136", (90,), "cudnn", size(136), {}),
    ("heads of 136", (100,), "flash", size(136), {}),
    ("latent attention's heads", (90, 100, 103), "cudnn", size(192, 128), {}),
    ("latent attention's heads", (80, 89, 120), "efficient", size(192, 128), {}),
    ("heads of 20 are padded", (80, 90, 100), "flash", size(20), {}),
    ("heads of 20", (75,), "math", {"dtype": HALF, **size(20)}, {}),
    ("fp32 heads of 6", (75,), "efficient", {"dtype": SINGLE, **size(6)}, {}),
    ("fp32 heads of 6", (80, 90), "math", {"dtype": SINGLE, **size(6)}, {}),
    ("training, heads of 224", (86, 89, 120, 121), "efficient", size(224), {}),
    ("training, heads of 224", (80,), "flash", size(224), {}),
    ("training, heads of 256", (86, 89, 120, 121), "flash", size(256), {}),
    ("training with dropout, heads of 256", (86, 89, 120, 121), "efficient", size(256), {"dropout_p": 0.1}),
    ("inference, heads of 224", (86, 89, 120, 121), "flash", {"grad": False, **size(224)}, {}),
    ("other values than keys", (80,), "efficient", size(64, 128), {}),
]


@pytest.mark.parametrize(("why", "sms", "expected", "shapes", "options"), CHOICES, ids=[row[0] for row in CHOICES])
def test_the_backend_is_the_one_that_cuda_chooses(
    why: str, sms: tuple[int, ...], expected: str, shapes: dict[str, Any], options: dict[str, Any]
) -> None:
    qkv = tensors(**shapes)
    assert {sm: by_rules((2, 13), sm, *qkv, **options) for sm in sms} == dict.fromkeys(sms, expected)
    if RUNNING == (2, 13):
        assert {sm: backend(sm, *qkv, **options) for sm in sms} == dict.fromkeys(sms, expected)


CHANGES: list[tuple[str, tuple[int, int], int, str, str, dict[str, Any], dict[str, Any]]] = [
    ("dropout of a rate in no sixteenths", (2, 12), 90, "cudnn", "flash", {}, {"dropout_p": 0.1}),
    ("a batch larger than a grid", (2, 13), 90, "cudnn", "flash", {"q": (65536, 1, 4, 64)}, {}),
    ("grouped heads in fp32", (2, 14), 80, "math", "efficient", {"dtype": SINGLE, **GQA}, {"enable_gqa": True}),
    ("grouped heads and a mask", (2, 14), 80, "math", "efficient", GQA, {"enable_gqa": True, **MASK}),
    ("one key head, not asked for", (2, 14), 80, "math", "flash", {"k": (2, 1, 128, 64)}, {}),
    ("one key head on cuDNN", (2, 14), 90, "math", "cudnn", {"k": (2, 1, 128, 64)}, {}),
    ("one key head in fp32", (2, 14), 75, "math", "efficient", {"dtype": SINGLE, "k": (2, 1, 128, 64)}, {}),
    ("training, heads of 192", (2, 14), 90, "cudnn", "flash", size(192), {}),
    ("inference, heads of 256 on a B200", (2, 14), 100, "flash", "cudnn", {"grad": False, **size(256)}, {}),
    ("sm 10.1", (2, 14), 101, "flash", "cudnn", {}, {}),
    ("decoding where cuDNN 9.24 fails", (2, 14), 100, "cudnn", "flash", {"q": (2, 8, 1, 64), "k": (2, 8, 128, 64)}, {}),
    ("decoding with cuDNN 9.26", (2, 15), 100, "flash", "cudnn", {"q": (2, 8, 1, 64), "k": (2, 8, 128, 64)}, {}),
    ("a batch larger than a grid", (2, 15), 80, "flash", "efficient", {"q": (65536, 1, 4, 64)}, {}),
]
"""What a release chooses otherwise than the one before it; each checked in the CUDA builds of the two."""


@pytest.mark.parametrize(("why", "since", "sm", "before", "after", "shapes", "options"), CHANGES)
def test_a_release_chooses_by_its_own_rules(
    why: str, since: tuple[int, int], sm: int, before: str, after: str, shapes: dict[str, Any], options: dict[str, Any]
) -> None:
    qkv = tensors(**shapes)
    assert by_rules((since[0], since[1] - 1), sm, *qkv, **options) == before
    assert by_rules(since, sm, *qkv, **options) == after


def test_an_unaligned_view_is_efficient_up_to_torch_2_12() -> None:
    odd = f32(1 + 2 * 8 * 128 * 64)[1:].view(2, 8, 128, 64)
    assert by_rules((2, 12), 80, odd, odd, odd) == "efficient"
    assert by_rules((2, 13), 80, odd, odd, odd) == "math"


# --- the random calls that torch 2.15 was recorded with ------------------------------------------------------------


@dataclass(frozen=True)
class Recorded:
    """A row of data/sdpa_calls_2.15.csv.gz: what the CUDA build's own rules chose for random arguments."""

    row: dict[str, str]

    def size(self, name: str) -> int:
        return int(self.row[name])

    def is_on(self, name: str) -> bool:
        return self.row[name] == "True"

    def tensor(self, heads: int, length: int, size: int) -> Tensor:
        batch, dtype = self.size("batch"), getattr(torch, self.row["dtype"])
        make = partial(torch.empty, dtype=dtype, device="meta")
        layouts: dict[str, Callable[[], Tensor]] = {
            "c": lambda: make(batch, heads, length, size),
            "t": lambda: make(batch, length, heads, size).transpose(1, 2),
            "rev": lambda: make(batch, heads, size, length).transpose(2, 3),
            "off": lambda: make(8 + batch * heads * length * size)[8:].view(batch, heads, length, size),
            "odd": lambda: make(3 + batch * heads * length * size)[3:].view(batch, heads, length, size),
        }
        return layouts[self.row["layout"]]().requires_grad_(self.is_on("requires_grad"))

    def mask(self) -> Tensor | None:
        batch, heads, queries, keys = (self.size(name) for name in ("batch", "heads", "q_len", "kv_len"))
        dtype = getattr(torch, self.row["dtype"])
        shapes: dict[str, Callable[[], Tensor | None]] = {
            "": lambda: None,
            "b2": lambda: mask(queries, keys),
            "b4": lambda: mask(batch, 1, queries, keys),
            "f2": lambda: mask(queries, keys, dtype=dtype),
            "f4": lambda: mask(batch, heads, queries, keys, dtype=dtype),
            "fg": lambda: mask(queries, keys, dtype=dtype).requires_grad_(),
            "1": lambda: mask(1, 1, 1, keys, dtype=dtype),
            "3": lambda: mask(heads, queries, keys, dtype=dtype),
            "bad": lambda: mask(keys, queries, dtype=dtype).t(),
        }
        return shapes[self.row["mask"]]()

    def call(self, target: CudaTarget) -> SdpaCall:
        query = self.tensor(self.size("heads"), self.size("q_len"), self.size("head_dim"))
        key = self.tensor(self.size("kv_heads"), self.size("kv_len"), self.size("head_dim"))
        value = self.tensor(self.size("v_heads"), self.size("kv_len"), self.size("v_head_dim"))
        options = float(self.row["dropout_p"]), self.is_on("is_causal"), self.is_on("enable_gqa")
        return SdpaCall.of((query, key, value), self.mask(), *options, target)


@pytest.mark.parametrize("sm", [75, 80, 90])
def test_2000_random_calls_choose_what_the_cuda_build_of_torch_2_15_chose(sm: int) -> None:
    """Whichever torch runs: the rules are data. Under those of 2.13 a tenth comes out otherwise on sm 9.0."""
    with gzip.open(Path(__file__).parent / "data" / "sdpa_calls_2.15.csv.gz", "rt") as file:
        rows = [Recorded(row) for row in csv.DictReader(file) if row["sm"] == str(sm)]
    assert len(rows) == 2000
    calls = [row.call(target(sm, cudnn_version=92600)) for row in rows]
    chosen = [NAMES[choose(call, RULES[2, 15])] for call in calls]
    assert chosen == [row.row["backend"] for row in rows]
    before = [NAMES[choose(call, RULES[2, 13])] for call in calls]
    assert sum(old != new for old, new in zip(before, chosen, strict=True)) > 50


def test_an_old_cudnn_is_not_preferred() -> None:
    assert backend(90, *tensors(), cudnn_version=91500) == "flash"
    assert backend(90, *tensors(), cudnn_version=91501) == "cudnn"


@pytest.mark.parametrize(("sm", "last_without"), [(90, 92200), (100, 92200), (107, 92500)])
def test_heads_of_256_need_a_cudnn_after_9_22_and_on_sm_10_7_one_after_9_25(sm: int, last_without: int) -> None:
    qkv = tensors(q=(2, 8, 128, 256), grad=False)
    calls = [SdpaCall.of(qkv, *DEFAULTS.values(), target(sm, last_without + more)) for more in (0, 1)]
    assert [has_kernels_of_256(call.target) for call in calls] == [False, True]
    assert [cudnn_head_sizes_to_256(call) for call in calls] == [False, True]


def test_the_environment_can_put_cudnn_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert backend(90, *tensors()) == "flash"


def test_a_mask_that_learns_is_not_cudnns() -> None:
    learned = mask(128, 128, dtype=BF16).requires_grad_()
    assert backend(90, *tensors(), attn_mask=learned) == "efficient"


def test_deterministic_algorithms_keep_cudnn_out() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert backend(90, *tensors()) == "flash"
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert backend(90, *tensors()) == "cudnn"
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_transposed_last_dimension_is_for_math() -> None:
    _, k, v = tensors()
    transposed = bf16(2, 8, 64, 128).transpose(2, 3)
    assert backend(80, transposed, k, v) == "math"


def test_an_empty_sequence_and_a_batch_too_large_for_a_grid_fall_through() -> None:
    with emulate_cuda(target(90)):  # torch's math path returns zeros at once
        ran = ops_of(lambda: F.scaled_dot_product_attention(*tensors(q=(2, 8, 0, 64))))
    assert not any("_scaled_dot_product" in name for name in ran)
    assert by_rules((2, 13), 90, *tensors(q=(65536, 1, 4, 64))) == "flash"


def test_an_unaligned_view_is_not_efficient_since_ampere() -> None:
    q, k, v = tensors(dtype=SINGLE)
    odd = f32(1 + q.numel())[1:].view(q.shape)
    assert by_rules((2, 13), 80, odd, k, v) == "math"
    assert by_rules((2, 13), 75, odd, k, v) == "efficient"


# --- the user's choice ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sm", "allowed", "expected"),
    [
        (90, SDPBackend.MATH, "math"),
        (90, SDPBackend.FLASH_ATTENTION, "flash"),
        (90, SDPBackend.EFFICIENT_ATTENTION, "efficient"),
        (80, SDPBackend.CUDNN_ATTENTION, "cudnn"),  # last in the order, after math, but the only one left
        (80, [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], "efficient"),
    ],
)
def test_sdpa_kernel_is_respected(sm: int, allowed: Any, expected: str) -> None:
    with sdpa_kernel(allowed):
        assert backend(sm, *tensors()) == expected


def test_the_users_order_is_respected() -> None:
    order = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    with sdpa_kernel(order, set_priority=True):
        assert backend(90, *tensors()) == "efficient"
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert backend(80, *tensors()) == "cudnn"
        assert backend(80, *tensors(), dropout_p=0.1) == ("cudnn" if RUNNING < (2, 12) else "flash")


@pytest.mark.parametrize("version", [91101, 91300, 91399])
def test_a_cudnn_with_wrong_dropout_is_passed_over(version: int) -> None:
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert backend(90, *tensors(), cudnn_version=version, dropout_p=0.5) == "flash"
        for right in (91002, 91400):
            assert backend(90, *tensors(), cudnn_version=right, dropout_p=0.5) == "cudnn"


def test_disabling_every_backend_that_could_run_is_torchs_error() -> None:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="No available kernel"):
        backend(80, *tensors(), **MASK)
    with sdpa_kernel([]), pytest.raises(RuntimeError, match="No viable backend"):
        backend(80, *tensors())


def test_wrong_arguments_are_torchs_error() -> None:
    q, k, _ = tensors()
    with emulate_cuda(target(90)), pytest.raises(RuntimeError, match="same dtype"):
        F.scaled_dot_product_attention(q, k, f32(2, 8, 128, 64))


# --- the ops around it ---------------------------------------------------------------------------------------------


class Calls(Stream):
    """Keeps the arguments of fused attention ops."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_scaled_dot_product" in str(func):
            self.arguments.append((args, kwargs))
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_padding_the_head_does_not_change_the_scale() -> None:
    with emulate_cuda(target(80)), Calls() as calls:
        output = F.scaled_dot_product_attention(*tensors(**size(20)))
    ((args, kwargs),) = calls.arguments
    assert args[0].shape == (2, 8, 128, 24)
    assert kwargs["scale"] == pytest.approx(1 / math.sqrt(20))
    assert output.shape == (2, 8, 128, 20)


def test_the_kernel_sees_the_small_keys_of_grouped_heads() -> None:
    with emulate_cuda(target(80)), Calls() as calls:
        F.scaled_dot_product_attention(*tensors(**GQA), enable_gqa=True)
    ((args, _),) = calls.arguments
    assert args[1].shape == (2, 2, 128, 64)


def test_an_expanded_mask_is_not_copied_but_an_odd_one_is_padded() -> None:
    with emulate_cuda(target(80)):
        aligned = ops_of(lambda: F.scaled_dot_product_attention(*tensors(), attn_mask=mask(2, 1, 128, 128, dtype=BF16)))
        qkv = tensors(q=(2, 8, 77, 64))
        odd = ops_of(lambda: F.scaled_dot_product_attention(*qkv, attn_mask=mask(2, 1, 77, 77, dtype=BF16)))
    assert "constant_pad_nd" not in aligned
    assert "constant_pad_nd" in odd


@pytest.mark.parametrize(("grad", "saved"), [(True, True), (False, False)])
def test_the_log_sum_exp_is_kept_for_the_backward_only(grad: bool, saved: bool) -> None:
    with emulate_cuda(target(90)), Calls() as calls:
        F.scaled_dot_product_attention(*tensors(grad=grad))
    ((args, _),) = calls.arguments
    assert args[4] is saved


@pytest.mark.parametrize(("sm", "dtype"), [(80, BF16), (90, BF16), (75, HALF), (75, BF16)])
def test_the_backward_is_the_chosen_kernels(sm: int, dtype: torch.dtype) -> None:
    qkv = tensors(dtype=dtype)
    with emulate_cuda(target(sm)):
        with Stream() as forward:
            output = F.scaled_dot_product_attention(*qkv)
        with Stream() as backward:
            output.backward(torch.empty_like(output))
    chosen = next(name for name in forward.names if name in KERNELS)
    expected = "bmm" if KERNELS[chosen] == "math" else f"{chosen}_backward"
    assert expected in backward.names
    assert all(tensor.grad is not None and tensor.grad.shape == tensor.shape for tensor in qkv)


def test_attention_is_chosen_inside_modules_and_transforms() -> None:
    layer = module(lambda: nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dtype=BF16))
    x, q = bf16(2, 9, 64), bf16(3, 2, 4, 16, 64, grad=False)

    def attend(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q)

    def loss(q: Tensor) -> Tensor:
        return attend(q).sum()

    with emulate_cuda(target(80)):
        assert "_scaled_dot_product_flash_attention" in ops_of(lambda: layer(x))
        assert "_scaled_dot_product_flash_attention" in ops_of(lambda: torch.vmap(attend)(q))
        assert "_scaled_dot_product_flash_attention_backward" in ops_of(lambda: torch.func.grad(loss)(q[0]))
        assert "_scaled_dot_product_flash_attention_backward" in ops_of(lambda: torch.vmap(torch.func.grad(loss))(q))


def test_half_precision_on_a_t4_runs_math_in_fp32() -> None:
    """Head size 20 is no multiple of 8: the products run in fp32 on fp32 copies."""
    with emulate_cuda(target(75)), Stream() as stream:
        F.scaled_dot_product_attention(*(f16(2, 8, 128, 20) for _ in range(3)))
    assert stream.ops.count("bmm.default:float32") == 2


@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("spread", [0, 1, 2])
def test_no_fused_kernel_takes_a_head_with_gaps(sm: int, spread: int) -> None:
    """`check_last_dim_stride_equals_1` of torch's sdp_utils: for queries, keys and values."""
    qkv = list(tensors())
    assert backend(sm, *qkv) != "math"
    qkv[spread] = torch.empty(2, 8, 128, 128, dtype=BF16, device="meta")[..., ::2]
    assert backend(sm, *qkv) == "math"


# --- the table -----------------------------------------------------------------------------------------------------


def test_every_rule_decides_some_call() -> None:
    """A rule that no call turns on is a rule that nobody checked."""
    tables = [rules.of(backend) for rules in RULES.values() for backend in (FLASH, EFFICIENT, CUDNN)]
    decided = {rule: 0 for table in tables for rule in table}
    everything = [({}, {}, 80)] + [(shapes, options, sm) for _, sms, _, shapes, options in CHOICES for sm in sms]
    everything += [(shapes, options, sm) for _, _, sm, _, _, shapes, options in CHANGES]
    for shapes, options, sm in everything:
        q, k, v = tensors(**shapes)
        chosen = (options.get(name, default) for name, default in DEFAULTS.items())
        call = SdpaCall.of((q, k, v), *chosen, target(sm, cudnn_version=92400))
        for table in tables:
            for rule in table:
                if not rule(call):
                    decided[rule] += 1
                    break
    undecided = {rule.__name__ for rule, count in decided.items() if not count}
    assert undecided == DECIDED_ELSEWHERE


DECIDED_ELSEWHERE = {"aligned_offsets", "heads_equal_or_dividing_or_one"}
"""Turned on by tests of their own, or by calls that torch refuses for every backend (heads)."""


@pytest.mark.parametrize(
    ("version", "row"),
    [((2, 10), (2, 11)), ((2, 13), (2, 13)), ((2, 14), (2, 14)), ((2, 99), (2, 15)), ((3, 0), (2, 15))],
)
def test_a_version_without_rules_takes_the_nearest(version: tuple[int, int], row: tuple[int, int]) -> None:
    assert rules_for(version) is RULES[row]


@pytest.mark.skipif(RUNNING < (2, 14), reason="before it, keys and values are repeated for the math kernel")
def test_grouped_heads_in_fp32_read_the_small_keys_and_values() -> None:
    """q and out 4 MiB, k and v 1 MiB each; two products of 1024 x 1024 x 64 for each of 2 x 8 query heads."""
    q, k, v = tensors(SINGLE, (2, 8, 1024, 64), (2, 2, 1024, 64), grad=False)
    with FlopMeter("a100-sxm4-80gb") as meter:
        F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    (kernel,) = meter.report().kernels
    assert kernel.cost.name == "_scaled_dot_product_efficient_attention"
    assert kernel.cost.bytes_read == 6 * 2**20
    assert kernel.cost.flops == 2 * 2 * 2 * 8 * 1024 * 1024 * 64
    key = k.requires_grad_()
    with emulate_cuda(target(80)):
        F.scaled_dot_product_attention(q, key, v, enable_gqa=True).sum().backward()
    assert key.grad is not None
    assert key.grad.shape == key.shape


def test_cudnn_is_not_asked_for_a_single_query_on_blackwell_where_its_version_fails():
    """torch 2.14 brings cuDNN 9.24, which fails there."""
    one, two = (tensors(BF16, q=(2, 8, length, 64), k=(2, 8, 64, 64), grad=False) for length in (1, 2))
    assert [by_rules((2, 14), sm, *one) for sm in (90, 100)] == ["cudnn", "flash"]
    assert [by_rules((2, 14), sm, *two) for sm in (90, 100)] == ["cudnn", "cudnn"]
    decodes = [cudnn_decodes(SdpaCall.of(one, *DEFAULTS.values(), target(sm, 92400))) for sm in (90, 100, 110, 120)]
    assert decodes == [True, False, False, True]


@pytest.mark.parametrize("rank", [2, 3])
def test_torch_2_15_gives_tokens_without_a_batch_a_batch_of_one(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setattr("flopmeter.torch_names.dispatcher.running_version", lambda: (2, 15))
    q, k, v = tensors(BF16, (8, 128, 64), (8, 32, 64))
    added = mask(*(8, 128, 32)[-rank:], dtype=BF16)
    with FlopMeter("a100-sxm4-80gb") as meter:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=added)
        out.sum().backward()
    calls = [op.call for op in meter.trace.ops if "efficient_attention" in op.call.name]
    assert out.shape == (8, 128, 64)
    assert [[spec.shape for spec in call.inputs[:4]] for call in calls[:1]] == [
        [(1, 8, 128, 64), (1, 8, 32, 64), (1, 8, 32, 64), (1, 8, 128, 32)]
    ]
    assert (q.grad is not None, q.grad.shape) == (True, q.shape)


def test_no_report_is_made_for_a_device_without_the_kernel_that_was_asked_for() -> None:
    with FlopMeter("a100-sxm4-80gb") as meter, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        F.scaled_dot_product_attention(*tensors(HALF))
    assert meter.report(hardware="h100-sxm5-80gb").flops
    with pytest.raises(StreamError, match=r"v100-sxm2-32gb would run other ops .* FLASH_ATTENTION here, none there"):
        meter.report(hardware="v100-sxm2-32gb")
