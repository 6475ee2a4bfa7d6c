"""flex_attention: blocks against dense masks, FLOPs against SDPA's, the eager way against real tensors on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining.microbatch import _split_block_mask
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
    noop_mask,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import flopmeter
from flopmeter import FlopMeter, Report, on_meta
from flopmeter.costs import kernels_of
from flopmeter.costs.contractions.attention import visible_pairs
from flopmeter.costs.flex_attention import band
from flopmeter.launch.templates import with_templates
from flopmeter.records import BlockCount, Cost, Mask
from flopmeter.report.advice.rewrite import with_ops, with_tensors
from flopmeter.torch_names import private
from flopmeter.torch_names.private import DispatchKey
from flopmeter.trace.handling import is_composite

compiled = torch.compile(flex_attention)


def causal(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def window(size: int):
    return and_masks(causal, lambda b, h, query, key: query - key < size)


def qkv(length: int = 512, *, heads: int = 4, key_heads: int = 4, queries: int | None = None, grad: bool = False):
    shapes = (heads, queries or length), (key_heads, length), (key_heads, length)
    return tuple(
        torch.empty(2, *shape, 64, device="meta", dtype=torch.bfloat16, requires_grad=grad) for shape in shapes
    )


def metered(program, **options) -> FlopMeter:
    """By the rules of costs/flex_attention.py; compiled graphs launch the same: test_compiled_attention.py."""
    options.setdefault("compile", "rules")
    with FlopMeter("h100-sxm5-80gb", **options) as meter:
        program()
    return meter


def flex_costs(meter: FlopMeter) -> list[Cost]:
    return [kernel.cost for kernel in kernels_of(meter.trace) if kernel.cost.name.startswith("flex_attention")]


def blocks_of(mask_mod, length: int, sequences: int | None = None) -> BlockCount:
    def program():
        with torch.no_grad():
            mask = create_block_mask(mask_mod, sequences, None, length, length, device="meta")
            compiled(*qkv(length), block_mask=mask)

    meter = metered(program)
    assert not meter.report().assumptions
    return meter.trace.ops[-1].call.body.blocks


def brute_force(visible: Tensor, size: int = 128) -> tuple[int, int, int]:
    """Blocks with a visible pair, those of them that hide none, and pairs in the first, of a dense mask [B, Q, K]."""
    computed = full = pairs = 0
    for square in visible:
        for rows in square.split(size):
            for block in rows.split(size, dim=1):
                if block.any():
                    computed += 1
                    pairs += block.numel()
                    full += bool(block.all()) and block.shape == (size, size)
    return computed, full, pairs


# --- blocks


@pytest.mark.parametrize("length", [128, 1000, 1024, 4096])
@pytest.mark.parametrize("size", [None, 1, 128, 700])
def test_blocks_of_causal_and_window_masks_are_those_of_the_dense_mask(length, size):
    at = torch.arange(length)
    dense = at[:, None] >= at
    if size is not None:
        dense &= at[:, None] - at < size
    computed, full, pairs = brute_force(dense[None])
    blocks = blocks_of(causal if size is None else window(size), length)
    assert (blocks.computed, blocks.pairs) == (computed, pairs)
    assert blocks.masked_pairs == pairs - full * 128 * 128


@pytest.mark.parametrize("size", [(128, 256), (256, 128)])
@pytest.mark.parametrize(("queries", "keys"), [(512, 1024), (1000, 600)])
def test_blocks_that_are_no_squares_are_counted_by_their_own_rows_and_columns(size, queries, keys):
    def program():
        with torch.no_grad():
            mask = create_block_mask(window(300), None, None, queries, keys, device="meta", BLOCK_SIZE=size)
            compiled(*qkv(keys, queries=queries), block_mask=mask)

    found = metered(program).trace.ops[-1].call.body.blocks
    at = torch.arange(max(queries, keys))
    dense = ((at[:, None] >= at) & (at[:, None] - at < 300))[:queries, :keys]
    blocks = [block for rows in dense.split(size[0]) for block in rows.split(size[1], dim=1)]
    assert found.computed == sum(bool(block.any()) for block in blocks)
    assert found.pairs == sum(block.numel() for block in blocks if block.any())
    mask = band(found, queries, keys)
    far = at[:, None] - at <= (queries if mask.left is None else mask.left)
    near = at - at[:, None] <= (keys if mask.right is None else mask.right)
    in_band = [b for rows in (far & near)[:queries, :keys].split(size[0]) for b in rows.split(size[1], dim=1)]
    assert sum(bool(block.any()) for block in in_band) == found.computed


def test_values_narrower_than_queries_multiply_fewer_columns():
    """Heads of 64, values of 32: 2 x 4 products of 512 x 512 forward; backward three of 64 and two of 32, one a second
    time for the scores of each of both kernels."""

    def program():
        q, k, v = qkv(grad=True)
        compiled(q, k, v[..., :32]).sum().backward()

    forward, *backward = [cost for cost in flex_costs(metered(program)) if cost.macs]
    assert forward.macs == 2 * 4 * 512 * 512 * (64 + 32)
    assert sum(cost.macs for cost in backward) == 2 * 4 * 512 * 512 * (4 * 64 + 3 * 32)


def test_documents_count_the_blocks_that_they_touch():
    """Two sequences with other documents each: the ids are known through on_meta."""
    ids = torch.stack([torch.arange(3000) // 700, (torch.arange(3000) >= 1300).long()])
    dense = (ids[:, :, None] == ids[:, None]) & (torch.arange(3000)[:, None] >= torch.arange(3000))
    known = on_meta(ids)
    blocks = blocks_of(and_masks(causal, lambda b, h, query, key: known[b, query] == known[b, key]), 3000, sequences=2)
    computed, _, pairs = brute_force(dense)
    assert (blocks.squares, blocks.computed, blocks.pairs) == (2, computed, pairs)


@pytest.mark.slow
@pytest.mark.parametrize("length", [16384, 32768])
def test_blocks_of_long_windows_are_those_of_the_closed_form(length):
    """A window of 4,096 keys: 33 blocks a row, fewer in the first 32 rows."""
    rows = length // 128
    assert blocks_of(window(4096), length).computed == sum(min(row + 1, 33) for row in range(rows))


def test_a_mask_made_before_the_meter_is_evaluated():
    mask = create_block_mask(window(300), None, None, 2048, 2048, device="meta")
    at = torch.arange(2048)
    dense = (at[:, None] >= at) & (at[:, None] - at < 300)
    with torch.no_grad():
        (cost,) = flex_costs(metered(lambda: compiled(*qkv(2048), block_mask=mask)))
    _, _, pairs = brute_force(dense[None])
    assert cost.executed_flops == 2 * 8 * pairs * (64 + 64)


def test_blocks_that_the_program_lists_itself_are_counted_from_the_list():
    with FlopMeter("h100-sxm5-80gb") as meter, torch.no_grad():
        number = torch.tensor([[[1, 2, 1, 0]]], dtype=torch.int32, device="meta")
        indices = torch.tensor([[[[0, 3, 2, 1]] * 4]], dtype=torch.int32, device="meta").view(1, 1, 4, 4)
        mask = BlockMask.from_kv_blocks(number, indices, mask_mod=noop_mask, seq_lengths=(512, 512))
        compiled(*qkv(512), block_mask=mask)
    (cost,) = flex_costs(meter)
    assert cost.executed_flops == 2 * 8 * 4 * 128 * 128 * 128  # four blocks of each of 2 x 4 squares


def test_unknown_lists_that_are_narrower_than_the_mask_leave_what_its_function_says():
    """Two places a row for causal blocks of 4 x 4: at each of two calls ten blocks of each of 2 x 4 squares."""
    number, indices = (torch.empty(1, 1, 4, *more, dtype=torch.int32, device="meta") for more in ((), (2,)))
    mask = BlockMask.from_kv_blocks(number, indices, mask_mod=causal, seq_lengths=(512, 512))
    with torch.no_grad():
        meter = metered(lambda: [compiled(*qkv(512), block_mask=mask) for _ in range(2)])
    assert [cost.executed_flops for cost in flex_costs(meter)] == [10 * 8 * 4 * 128 * 128 * 64] * 2


def test_a_program_reads_the_lists_of_blocks_that_torch_makes_on_the_cpu():
    """Rows of blocks before the diagonal are whole, and those on it are cut."""
    lists = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    on_cpu, on_meta = (create_block_mask(causal, None, None, 1024, 1024, device=device) for device in ("cpu", "meta"))
    found = []

    def program():
        compiled(*qkv(1024), block_mask=on_meta)
        found.extend(getattr(on_meta, name).tolist() for name in lists)

    with torch.no_grad():
        metered(program)
    assert found == [getattr(on_cpu, name).tolist() for name in lists]


def test_a_mask_that_reads_unknown_values_counts_every_block_and_says_so():
    ids = torch.empty(2, 1024, dtype=torch.int64, device="meta")
    same = lambda b, h, query, key: ids[b, query] == ids[b, key]  # noqa: E731
    mask = create_block_mask(same, 2, None, 1024, 1024, device="meta")
    with torch.no_grad():
        meter = metered(lambda: compiled(*qkv(1024), block_mask=mask))
    (cost,) = flex_costs(meter)
    assert cost.masked_flops == 0
    assert "every block of a mask_mod that reads values which are not known" in meter.report().assumptions[0]


def test_parts_of_a_mask_are_counted_each_by_its_own_mask_mod():
    """As the stages of a pipeline cut it for their microbatches. By hand, of 8 x 8 blocks of 128: the first sequence is
    one document, whose causal mask has 36; the second is eight of one block; the third one of half of the tokens, and
    one of each other token."""
    ends = torch.zeros(3, 1024, dtype=torch.int64)
    ends[1, ::128] = 1
    ends[2, 512:] = 1
    with FlopMeter("h100-sxm5-80gb") as meter, torch.no_grad():
        number = on_meta(ends).cumsum(1)
        ours = torch.compile(create_block_mask)(
            lambda b, h, query, key: (query >= key) & (number[b, query] == number[b, key]), 3, None, 1024, 1024, "meta"
        )
        for _ in range(2):
            for part in _split_block_mask(ours, 3):
                compiled(*(each[:1] for each in qkv(1024)), block_mask=part)
    rows = [cost.executed_flops // (4 * 4 * 128 * 128 * 64) for cost in flex_costs(meter)]
    of_third = 10 + 512 // 128
    assert rows == [36, 8, of_third] * 2
    assert not meter.report().assumptions


# --- FLOPs and bytes


def both(grad: bool, **sdpa) -> tuple[Report, Report, int]:
    """flex_attention, SDPA, and torch's own count of the second."""

    def run(attend):
        q, k, v = qkv(1024, heads=8, key_heads=2, grad=grad)
        with torch.set_grad_enabled(grad):
            out = attend(q, k, v)
            if grad:
                out.backward(torch.empty_like(out))

    mask = create_block_mask(causal, None, None, 1024, 1024, device="meta") if sdpa else None
    flex = metered(lambda: run(lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=True)), causal="full")
    fused = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **sdpa)  # noqa: E731
    reference = metered(lambda: run(fused))
    with FlopCounterMode(display=False) as counter:
        q, k, v = (tensor.detach() for tensor in qkv(1024, heads=8, key_heads=2))
        F.scaled_dot_product_attention(q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1))
    return flex.report(), reference.report(), counter.get_total_flops()


@pytest.mark.parametrize("sdpa", [{}, {"is_causal": True}], ids=["full", "causal"])
def test_forward_flops_are_those_of_sdpa(sdpa):
    flex, reference, counted = both(False, **sdpa)
    assert flex.flops == reference.flops == counted


@pytest.mark.parametrize("sdpa", [{}, {"is_causal": True}], ids=["full", "causal"])
def test_training_has_the_model_flops_of_sdpa_and_two_products_more_to_run(sdpa):
    flex, reference, forward = both(True, **sdpa)
    row_sums = 2 * 2 * 8 * 1024 * 64
    assert flex.model_flops - row_sums == reference.model_flops
    assert flex.flops - row_sums == reference.flops + forward  # seven products of the backward pass, not five


def test_the_kernels_of_a_training_step_are_named_by_what_they_do():
    flex, _, _ = both(True)
    names = [kernel.cost.name for kernel in flex.kernels if kernel.cost.name.startswith("flex")]
    assert names == ["flex_attention", "flex_attention_backward: row sums", "flex_attention_backward"]


def test_causal_blocks_execute_more_than_the_visible_pairs_by_the_diagonal():
    flex, _, _ = both(False, is_causal=True)
    squares, blocks = 2 * 8, 1024 // 128
    exact = visible_pairs(1024, 1024)
    hidden_on_diagonal = blocks * 128 * 127 // 2
    assert flex.executed_flops == 2 * squares * (exact + hidden_on_diagonal) * 128


def test_grouped_keys_are_read_once_for_their_group():
    def read(key_heads: int) -> int:
        with torch.no_grad():
            meter = metered(lambda: compiled(*qkv(heads=8, key_heads=key_heads), enable_gqa=True))
        return flex_costs(meter)[0].bytes_read

    assert read(8) - read(2) == 2 * 2 * (8 - 2) * 512 * 64 * 2


def test_alibi_adds_a_multiply_and_an_addition_a_score():
    slopes = torch.empty(4, device="meta")
    alibi = lambda score, b, h, query, key: score + slopes[h] * (key - query)  # noqa: E731
    with torch.no_grad():
        plain, biased = (
            flex_costs(metered(lambda mod=mod: compiled(*qkv(), score_mod=mod)))[0] for mod in (None, alibi)
        )
    assert biased.flops - plain.flops == 2 * 2 * 4 * 512 * 512
    assert biased.bytes_read - plain.bytes_read == 4 * 4


@pytest.mark.parametrize(("train", "passes"), [(False, 1), (True, 2 + 1)])
def test_what_a_mask_multiplies_is_counted_for_the_pairs_of_blocks_that_it_cuts(train, passes):
    """Causal over 512 tokens: of ten blocks of 128 the four on the diagonal, for each of 2 x 4 heads; backward again
    for the gradients of queries and of keys."""
    slanted = lambda b, h, query, key: query * 0.5 >= key * 0.5  # noqa: E731

    def program(mask_mod):
        mask = create_block_mask(mask_mod, None, None, 512, 512, device="meta")
        out = compiled(*qkv(grad=train), block_mask=mask)
        if train:
            out.sum().backward()

    plain, multiplied = (
        sum(cost.flops for cost in flex_costs(metered(lambda mod=mod: program(mod)))) for mod in (causal, slanted)
    )
    assert multiplied - plain == passes * 2 * 4 * 4 * 128**2 * 2


def test_soft_capping_counts_its_tanh():
    capped = lambda score, b, h, query, key: 30 * torch.tanh(score / 30)  # noqa: E731
    with torch.no_grad():
        (cost,) = flex_costs(metered(lambda: compiled(*qkv(), score_mod=capped)))
    assert cost.transcendentals == 2 * 4 * 512 * 512
    assert dict(cost.flops_by_class)["element-wise"] == 3 * 2 * 4 * 512 * 512


def test_the_gradient_sees_the_mask_of_the_forward_pass_where_keys_are_more_than_queries():
    def program():
        mask = create_block_mask(window(200), None, None, 256, 1024, device="meta")
        compiled(*qkv(1024, queries=256, grad=True), block_mask=mask).sum().backward()

    forward, backward = (cost.work.shape for cost in flex_costs(metered(program)) if cost.macs)
    assert forward == backward._replace(is_backward=False)
    assert forward.mask != Mask()


def test_decoding_reads_the_keys_of_its_window_only():
    """One query at position 4,095: of 32 blocks of keys the last two hold its window of 200."""

    def of_window(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query + 4095 >= key) & (query + 4095 - key < 200)

    def program():
        with torch.no_grad():
            mask = create_block_mask(of_window, None, None, 1, 4096, device="meta")
            compiled(*qkv(4096, queries=1), block_mask=mask)

    (cost,) = flex_costs(metered(program))
    keys_and_values = 2 * 2 * 4 * 256 * 64 * 2
    small = 2 * 4 * 64 * 2 + 4 * (2 + 2 * 32)  # the query; numbers and indices of blocks
    assert cost.bytes_read == keys_and_values + small
    assert cost.work.backend == "flash"  # a template that splits the keys


def test_the_sums_of_rows_read_the_result_and_its_gradient_and_write_a_number_a_row():
    """The gradient of the statistics, if there is one, is read too."""

    def moved(of_statistics: bool) -> tuple[int, int, int]:
        def program():
            out, aux = compiled(*qkv(grad=True), return_aux=AuxRequest(lse=True))
            results = [out, aux.lse] if of_statistics else [out]
            torch.autograd.backward(results, [torch.empty_like(each) for each in results])

        _, sums, _ = flex_costs(metered(program))
        return sums.bytes_read, sums.bytes_written, sums.flops

    rows, elements = 2 * 4 * 512, 2 * 4 * 512 * 64
    assert moved(False) == (2 * 2 * elements, 4 * rows, 2 * elements)
    assert moved(True) == (2 * 2 * elements + 4 * rows, 4 * rows, 2 * elements + 2 * rows)


def test_statistics_are_written_if_they_are_asked_for():
    def written(**options) -> int:
        with torch.no_grad():
            return flex_costs(metered(lambda: compiled(*qkv(), **options)))[0].bytes_written

    rows = 2 * 4 * 512 * 4
    assert written(return_aux=AuxRequest(lse=True)) - written() == rows
    assert written(return_aux=AuxRequest(lse=True, max_scores=True)) - written() == 2 * rows


# --- the eager way


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if isinstance(func, torch._ops.HigherOrderOperator):
            with self:
                return func.py_kernels[DispatchKey.CompositeExplicitAutograd](*args, **(kwargs or {}))
        if is_composite(func):  # whole, because the function of autograd is above
            with self:
                return func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def from_scores(names: list[str]) -> list[str]:
    """Ops after the block mask, without those that are no kernel and differ between constants on meta and on a CPU."""
    start = names.index("unsqueeze")
    return [name for name in names[start:] if name not in ("lift_fresh", "detach", "detach_")]


def test_outside_of_torch_compile_the_ops_are_those_of_torchs_own_eager_way(monkeypatch):
    """On real tensors on the CPU: no patch of flopmeter's is active there."""
    score_mod = lambda score, b, h, query, key: score * 2 + (query - key)  # noqa: E731
    monkeypatch.setattr(private.FLEX_UNCOMPILED.owner, private.FLEX_UNCOMPILED.attribute, True)
    real = tuple(torch.randn(2, 4, 64, 16) for _ in range(3))
    with torch.no_grad(), Ops() as ops:
        flex_attention(*real, score_mod)
    monkeypatch.undo()
    with torch.no_grad():
        meter = metered(lambda: flex_attention(*(tensor.to("meta") for tensor in real), score_mod))
    # q, k and v are sent, and -inf, which is made of a number.
    calls = [op.call for op in meter.trace.ops]
    names = [each.name for each in calls if each.name != "_to_copy" or "cpu" not in [x.device for x in each.inputs]]
    assert from_scores(names) == from_scores(ops.names)
    assert any("outside of torch.compile" in note for note in meter.report().notes)


def training(attend, **options) -> FlopMeter:
    bias = torch.nn.Parameter(torch.empty(4, device="meta"))

    def program():
        mask = create_block_mask(causal, None, None, 1024, 1024, device="meta")
        q, k, v = qkv(1024, grad=True)
        out = attend(q, k, v, score_mod=lambda s, b, h, query, key: s + bias[h], block_mask=mask)
        out.sum().backward()
        assert q.grad.shape == q.shape
        assert bias.grad.shape == bias.shape

    return metered(program, **options)


def test_a_compiled_report_of_an_eager_program_has_the_fused_kernels_and_no_matrix_of_scores():
    eager, fused = training(flex_attention), training(compiled)
    report = eager.report(mode="compiled")
    kernels = [kernel.cost for kernel in report.launches.kernels if kernel.cost.name.startswith("flex_attention")]

    def facts(cost: Cost):
        return cost.name, cost.flops, cost.masked_flops, cost.bytes_read, cost.bytes_written

    assert list(map(facts, kernels)) == list(map(facts, flex_costs(fused)))
    scores = 2 * 4 * 1024 * 1024 * 4
    assert eager.report().peak_memory_bytes > 2 * scores
    assert report.peak_memory_bytes < scores
    assert report.seconds < eager.report().seconds


def test_what_comes_after_an_eager_flex_attention_keeps_its_place_where_one_kernel_stands_for_it():
    q, k, v = qkv()
    model = torch.nn.Identity()

    def program():
        q.sin()
        flex_attention(q, k, v)
        model(q.relu())
        q.exp()

    trace = metered(program).trace
    names = [op.call.name for op in trace.ops]
    trace.stream_use.batches[names.index("exp")] = 2  # as if two messages went together from here on
    short = with_templates(trace)
    fewer = [op.call.name for op in short.ops]
    assert len(fewer) < len(names)
    assert short.stream_use.batches == {fewer.index("exp"): 2}
    assert [end.op for end in short.forward_ends] == [fewer.index("exp")], "the module's call ends before it"
    assert [op.call.name for op in with_templates(with_ops(trace, [0])).ops] == fewer[1:], "as where advice drops an op"
    wide = with_tensors(trace, lambda spec, _: spec._replace(dtype=torch.float32))
    assert {spec.dtype for op in with_templates(wide).ops for spec in op.inputs} == {torch.float32}


def test_no_op_of_a_strict_run_is_uncounted():
    assert not training(flex_attention, strict=True).report().uncounted
    assert not training(compiled, strict=True).report().uncounted


def test_autocast_casts_what_goes_in():
    def program():
        q, k, v = (torch.empty(1, 2, 256, 64, device="meta") for _ in range(3))
        with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
            assert compiled(q, k, v).dtype is torch.bfloat16

    (cost,) = flex_costs(metered(program))
    assert cost.dtype == "bf16"


def test_nothing_is_left_behind():
    operator = private.FLEX_OPERATOR.value
    before = dict(operator.py_kernels), private.FLEX_UNCOMPILED.value, private.FLEX_VALIDATE.value
    training(flex_attention)
    assert (dict(operator.py_kernels), private.FLEX_UNCOMPILED.value, private.FLEX_VALIDATE.value) == before
    with pytest.raises(ValueError, match="only supported on CUDA"):
        flex_attention(*qkv())


# --- the band that stands for a mask in the time model


@pytest.mark.parametrize("size", [1, 129, 1000, 5000])
def test_the_band_of_a_window_has_its_blocks(size):
    mask = band(blocks_of(window(size), 2048), 2048, 2048)
    assert mask.right == 0
    again = window(2048 if mask.left is None else mask.left + 1)
    assert blocks_of(again, 2048).computed == blocks_of(window(size), 2048).computed


def test_a_mask_that_hides_nothing_is_no_band():
    assert band(blocks_of(noop_mask, 512), 512, 512) == Mask()


def test_a_window_takes_less_time_than_the_causal_mask():
    def seconds(mask_mod) -> float:
        def program():
            with torch.no_grad():
                mask = create_block_mask(mask_mod, None, None, 8192, 8192, device="meta")
                compiled(*qkv(8192), block_mask=mask)

        report = metered(program).report()
        (row,) = (row for row in report.rows("op") if row.name == "flex_attention")
        return row.seconds

    assert 0.1 < seconds(window(1024)) / seconds(causal) < 0.4  # 9 of 32.5 blocks in a row


@pytest.mark.parametrize("with_gradients", [False, True])
def test_forward_writes_the_output_and_where_gradients_are_on_a_number_for_each_row(with_gradients):
    """torch asks whether gradients are on, not whether a tensor needs one (torch/nn/attention/flex_attention.py)."""
    with torch.set_grad_enabled(with_gradients):
        (cost,) = flex_costs(metered(lambda: compiled(*qkv())))
    rows = 2 * 4 * 512
    assert cost.bytes_written == rows * 64 * 2 + with_gradients * rows * 4


def test_the_gradient_of_what_a_score_captured_is_added_into_zeros():
    rows, width, picked = 100, 4, 3
    indices, values = torch.zeros(picked, dtype=torch.int64), torch.empty(picked, width, device="meta")
    meter = metered(lambda: torch.ops.flex_lib.zeros_and_scatter([rows, width], [indices.to("meta")], values))
    zeros, added = (kernel.cost for kernel in kernels_of(meter.trace)[-2:])
    assert (zeros.bytes_read, zeros.bytes_written) == (0, rows * width * 4)
    named = picked * width * 4  # the values, and the places that they are added to
    assert (added.flops, added.bytes_read, added.bytes_written) == (picked * width, picked * 8 + 2 * named, named)


def test_flex_attention_outside_of_torch_compile_is_advised_to_be_compiled_first():
    """To the time that the program takes so. What torch casts on its way is no line of the program's to change."""

    def attending(attend):
        tensors = [torch.empty(2, 8, 4096, 64, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in "qkv"]
        with FlopMeter("h100-sxm5-80gb", source=True) as meter:
            attend(*tensors, score_mod=lambda score, b, h, q, k: score + (q - k)).sum().backward()
        return meter.report()

    first, *others = attending(flex_attention).advice
    assert first.remedy == "torch.compile(flex_attention), which is one kernel"
    assert abs(first.run_seconds_then / attending(compiled).seconds - 1) < 0.11
    assert not [each for each in others if "there too" in each.remedy]


def test_a_step_of_flex_attention_whose_tensors_outlive_it_is_advised_too():
    """What the last step made is freed after two calls of another module."""

    class Attending(nn.Linear):
        def forward(self, x):
            return super().forward(flex_attention(x, x, x))

    with flopmeter.cuda("h100-sxm5-80gb") as device, torch.no_grad():
        model = Attending(64, 64, device="cuda", dtype=torch.bfloat16)
        decoder = nn.Linear(64, 64, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(1, 8, 2048, 64, device="cuda", dtype=torch.bfloat16)
        for _ in range(4):
            made = model(x)
        decoded = decoder(decoder(made))
        del made, x, decoded
    assert device.report().step.advice[0].remedy == "torch.compile(flex_attention), which is one kernel"


def test_a_function_of_torchs_that_a_program_compiles_is_told_by_the_programs_line():
    tensors = [torch.empty(2, 8, 1024, 64, dtype=torch.bfloat16, device="meta") for _ in "qkv"]
    with FlopMeter("h100-sxm5-80gb", source=True) as meter:
        compiled(*tensors)
    (op,) = (op for op in meter.trace.ops if op.call.name == "flex_attention")
    assert __file__ in op.source


def test_mfu_is_told_without_what_masks_hide_where_that_is_much():
    """Documents of 128 tokens leave a block of 128 x 128 in each row of 16."""
    q, k, v = qkv(2048)
    documents = create_block_mask(lambda b, h, query, key: query // 128 == key // 128, None, None, 2048, 2048, "meta")
    hidden = metered(lambda: compiled(q, k, v, block_mask=documents)).report()
    assert hidden.visible_mfu == pytest.approx(hidden.mfu / 16)
    assert f"MFU {hidden.mfu:.1%}".replace("%", " %") + " (" in str(hidden)
    assert f"({hidden.visible_mfu:.1%}".replace("%", " %") + " without what masks hide)" in str(hidden)
    assert "without what masks hide" in hidden.render("html")
    seen = metered(lambda: compiled(q, k, v), causal="exact").report()
    assert seen.visible_mfu == seen.mfu
    assert "without what masks hide" not in str(seen)


def test_mfu_without_what_masks_hide_is_that_of_attention_counted_where_visible():
    def step() -> None:
        F.scaled_dot_product_attention(*qkv(1024, grad=True), is_causal=True).sum().backward()

    full, exact = (metered(step, causal=causal).report() for causal in ("full", "exact"))
    assert full.mfu > 1.9 * exact.mfu
    assert full.visible_mfu == pytest.approx(exact.mfu)
