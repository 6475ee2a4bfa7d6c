"""Pairs that look alike, of which one is easily taken for the other: each by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from flopmeter import FlopMeter, load_hardware, on_meta
from flopmeter.costs import kernels_of
from flopmeter.distributed import world
from flopmeter.known_values.messages import ALL, NotSentYet, Route, Ticket
from flopmeter.records import ATTENTION, UNCOUNTED, Cost, Region
from flopmeter.timing import attention_kernels
from flopmeter.timing.attention_kernels import AttentionKernel

aten = torch.ops.aten
A100, H100 = "a100-sxm4-80gb", "h100-sxm5-80gb"


def meta(*shape: int, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", **options)


def costs_of(program: Any, device: str = H100, **options: Any) -> list[Cost]:
    with FlopMeter(device, **options) as meter:
        program()
    return [kernel.cost for kernel in kernels_of(meter.trace)]


def test_an_observer_averages_into_the_running_range_and_then_fits_scale_and_zero_point() -> None:
    channels, on = 4, meta(1, dtype=torch.int64)
    low, high, scale = (meta(channels) for _ in range(3))
    zero = meta(channels, dtype=torch.int32)
    with FlopMeter(H100) as meter:
        torch.fused_moving_avg_obs_fake_quant(
            meta(4, 6), on, on, low, high, scale, zero, 0.01, -128, 127, 0, True, False
        )
    _, averaged, fitted = kernels_of(meter.trace)[:3]
    call = averaged.op.call

    def of(*names: str) -> list[int]:
        return [call.argument(name).storage for name in names]

    def in_use(regions: tuple[Region, ...]) -> list[int]:
        return [region.spec.storage for region in regions if region.spec is not None]

    assert in_use(averaged.cost.writes) == of("running_min", "running_max")
    assert in_use(fitted.cost.writes) == of("scale", "zero_point")
    assert in_use(fitted.cost.reads) == of("running_min", "running_max", "fake_quant_on")


@pytest.mark.parametrize(
    ("route", "told"),
    [
        (Route((0, 1, 2), 0, ALL), "tensor 3 from rank 0 to all"),
        (Route((0, 1, 2), 0, 2), "tensor 3 from rank 0 to rank 2"),
        (Route((0, 1, 2), 1, 0, has_objects=True), "objects 3 from rank 1 to rank 0"),
    ],
)
def test_a_message_that_is_waited_for_is_told_with_its_sender_and_receiver(route: Route, told: str) -> None:
    assert str(NotSentYet(Ticket(route, 2))) == told


def test_a_score_may_take_what_it_captured_by_keyword() -> None:
    def costs(by_keyword: bool) -> list[tuple[str, int, int, int]]:
        learned = meta(requires_grad=True)
        q, k, v = (meta(2, 4, 128, 64, requires_grad=True) for _ in range(3))

        def added(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return torch.add(score, other=learned) if by_keyword else torch.add(score, learned)

        made = costs_of(
            lambda: torch.compile(flex_attention)(q, k, v, score_mod=added).sum().backward(), compile="rules"
        )
        assert learned.grad is not None
        return [(cost.name, cost.flops, cost.bytes_read, cost.bytes_written) for cost in made]

    assert costs(by_keyword=True) == costs(by_keyword=False)


def test_attention_into_a_tensor_that_is_there_writes_it_and_a_number_a_row() -> None:
    import torch.nn.attention.varlen  # the op exists once it is imported

    if not hasattr(torch.ops.torch_attn, "_varlen_attn_out"):
        pytest.skip("this torch has no such op")
    out, q, k, v = (meta(64, 4, 64, dtype=torch.bfloat16) for _ in range(4))
    starts = meta(3, dtype=torch.int32)
    (cost,) = costs_of(lambda: torch.ops.torch_attn._varlen_attn_out(out, q, k, v, starts, starts, 32, 32))
    assert cost.bytes_written == 64 * 4 * 64 * 2 + 64 * 4 * 4


def test_efficient_attention_over_packed_sequences_pairs_queries_with_their_own_keys() -> None:
    """3 queries and 50 keys, 4 queries and 20 keys: 230 pairs, 4 FLOP for each place of a head."""
    starts = [on_meta(torch.tensor([0, *accumulate(each)], dtype=torch.int32)) for each in ((3, 4), (50, 20))]
    q, k, v = (meta(1, tokens, 4, 64, dtype=torch.bfloat16) for tokens in (7, 70, 70))
    cost, *_ = costs_of(lambda: aten._efficient_attention_forward(q, k, v, None, *starts, 4, 50, 0.0, 0))
    assert cost.flops == 230 * 4 * 4 * 64


def test_of_keys_that_a_cache_holds_efficient_attention_meets_those_in_use() -> None:
    starts = [on_meta(torch.tensor(each, dtype=torch.int32)) for each in ([0, 1, 2], [0, 64, 128])]
    used = on_meta(torch.tensor([5, 9], dtype=torch.int32))
    q, k, v = (meta(1, tokens, 4, 64, dtype=torch.bfloat16) for tokens in (2, 128, 128))
    cost, *_ = costs_of(lambda: aten._efficient_attention_forward(q, k, v, None, *starts, 1, 64, 0.0, 0, seqlen_k=used))
    assert cost.flops == (5 + 9) * 4 * 4 * 64


@pytest.mark.parametrize(("root", "assumed"), [(1, 0), (0, 1)])
def test_what_a_functional_broadcast_sends_from_here_is_certain(root: int, assumed: int) -> None:
    with world(4, rank=1), FlopMeter(H100) as meter:
        assert dist.group.WORLD is not None
        name = dist.group.WORLD.group_name
        sent = torch.ops._c10d_functional.broadcast(torch.tensor([7, 8], device="meta"), root, name)
        assert torch.ops._c10d_functional.wait_tensor(sent).tolist() == [7, 8]
    assert len(meter.report().assumptions) == assumed


TILES = {name: kernel for name, kernel in vars(attention_kernels).items() if isinstance(kernel, AttentionKernel)}


@pytest.mark.parametrize("name", TILES)
def test_tiles_of_attention_are_whole_fragments_for_ever_longer_heads(name: str) -> None:
    """(largest head, queries, keys): mma has 16 rows and 8 columns."""
    kernel = TILES[name]
    for tiles in (kernel.tiles, kernel.window_tiles, *kernel.tiles_on.values(), *kernel.causal_tiles_on.values()):
        for head, rows, columns in tiles:
            assert head % 8 == 0
            assert rows % 16 == 0
            assert columns % 8 == 0
        assert all(one[0] < other[0] for one, other in pairwise(tiles))


def test_a_causal_kernel_of_hopper_takes_128_keys_at_a_time_where_heads_are_short() -> None:
    """192 x 192 without a mask (tile_size.h of FlashAttention-3's hopper folder, for heads of 64)."""
    tiles = attention_kernels.FLASH_3.causal_tiles_on[9, 0]
    assert next(tile for tile in tiles if tile[0] >= 64)[1:] == (192, 128)


ROW_BY_ROW: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: torch.layer_norm(x, (6,)),
    "rms_norm": lambda x: torch.rms_norm(x, (6,)),
    "group_norm": lambda x: torch.group_norm(x, 2),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(0),
    "var": lambda x: x.var(0),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=0),
    "logsumexp": lambda x: x.logsumexp(-1),
    "prod": lambda x: x.prod(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "gelu": F.gelu,
    "silu": F.silu,
    "softplus": F.softplus,
    "exp": torch.exp,
    "pow": lambda x: x**3,
    "addcmul": lambda x: torch.addcmul(x, x, x),
    "lerp": lambda x: torch.lerp(x, x, 0.3),
    "mse_loss": lambda x: F.mse_loss(x, x),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x),
    "huber_loss": lambda x: F.huber_loss(x, x),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, x),
    "kl_div": lambda x: F.kl_div(x, x, reduction="sum"),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x),
    "cdist": lambda x: torch.cdist(x, x),
    "glu": F.glu,
    "renorm": lambda x: x.renorm(2, 0, 1.0),
    "dist": lambda x: torch.dist(x, x),
    "logaddexp": lambda x: torch.logaddexp(x, x),
}


@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_numbers_that_lie_in_memory_once_are_computed_with_as_often_as_the_tensor_has_them(name: str) -> None:
    """As many FLOPs on a row that is expanded as on rows that all differ."""
    row, rows = meta(1, 6).expand(8, 6), meta(8, 6)
    program = ROW_BY_ROW[name]
    expanded, dense = costs_of(lambda: program(row)), costs_of(lambda: program(rows))
    assert sum(cost.flops for cost in expanded) == sum(cost.flops for cost in dense) > 0
    assert sum(cost.transcendentals for cost in expanded) == sum(cost.transcendentals for cost in dense)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("network", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_cudnn_takes_recurrent_networks_in_all_of_its_types(network: type, dtype: torch.dtype) -> None:
    """CUDNN_TENSOR_DTYPES of torch.backends.cudnn: half, float and double."""
    layer = network(8, 8, device="meta", dtype=dtype)
    names = [cost.name for cost in costs_of(lambda: layer(meta(3, 2, 8, dtype=dtype)), "t4")]
    assert "_cudnn_rnn" in names


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])
@pytest.mark.parametrize("device", ["t4", "a100-sxm4-80gb", "l40s", "h100-sxm5-80gb", "b200-sxm-180gb", "mi300x"])
@pytest.mark.parametrize("queries", [1, 64])
def test_no_attention_reads_its_keys_faster_than_memory_gives_them(
    device: str, backend: SDPBackend, queries: int
) -> None:
    """4 GiB of keys and values, more than any cache holds, at the bandwidth of the datasheet."""
    q, k, v = (meta(64, 32, tokens, 128, dtype=torch.float16) for tokens in (queries, 4096, 4096))
    with torch.inference_mode(), sdpa_kernel([backend, SDPBackend.MATH]), FlopMeter(device) as meter:
        F.scaled_dot_product_attention(q, k, v)
    for kernel, timing in zip(kernels_of(meter.trace), meter.report().timings, strict=True):
        if kernel.cost.op_class == ATTENTION:
            assert timing.seconds >= 2 * 64 * 32 * 4096 * 128 * 2 / load_hardware(device).bandwidth_bytes_per_s


CHANGES_NO_NUMBERS = {"requires_grad_", "share_memory_", "apply_", "map_", "map2_", "resize_", "resize_as_", "rename_"}
IN_PLACE = [
    name
    for name in dir(Tensor)
    if name.endswith("_") and name[0] != "_" and hasattr(Tensor, name[:-1]) and name not in CHANGES_NO_NUMBERS
]


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_an_op_in_place_computes_what_it_computes_into_a_new_tensor(name: str, dtype: torch.dtype) -> None:
    def run(device: str, method: str, arguments: tuple[Any, ...]) -> None:
        x = torch.ones(4, 4, dtype=dtype, device=device)
        getattr(x, method)(*(torch.ones_like(x) if each is Tensor else each for each in arguments))

    ways: list[tuple[Any, ...]] = [(), (Tensor,), (Tensor, Tensor), (2,), (1, 2), (0, [1], Tensor), (0.5, 0.7)]
    for arguments in ways:
        try:
            run("cpu", name, arguments)
            run("cpu", name[:-1], arguments)
        except (RuntimeError, TypeError, IndexError, ValueError):
            continue
        alone, into = (costs_of(partial(run, "meta", method, arguments)) for method in (name, name[:-1]))
        for count in ("flops", "transcendentals"):
            assert sum(getattr(cost, count) for cost in alone) == sum(getattr(cost, count) for cost in into)
        assert any(cost.op_class == UNCOUNTED for cost in alone) == any(cost.op_class == UNCOUNTED for cost in into)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_eigenvalues_alone_are_asked_for_without_their_vectors(dtype: torch.dtype) -> None:
    names = [cost.name for cost in costs_of(lambda: torch.linalg.eigvals(meta(6, 6, dtype=dtype)))]
    assert "_linalg_eigvals" in names
    assert "linalg_eig" not in names
