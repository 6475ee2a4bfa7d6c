"""The shim of Transformer Engine: its layers launch the kernels that the package's sources launch, with FLOPs of closed
forms and bytes by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flopmeter
from flopmeter import HardwareError
from flopmeter.run.session import Wishes

A100, H100, B200 = "a100-sxm4-80gb", "h100-sxm5-80gb", "b200-sxm-180gb"
T, IN, OUT = 512, 256, 384  # tokens, features
BF16 = torch.bfloat16


def ran(program, hardware=H100, **options):
    """The report of all that the program ran."""
    with flopmeter.cuda(hardware, wishes=Wishes(shims=("transformer_engine",)), **options) as device:
        program()
    return device.report().step


def names(report) -> list[str]:
    """Kernels in order, without those that make inputs."""
    found = (kernel.cost.name.rpartition("::")[2] for kernel in report.kernels)
    return [name for name in found if name not in ("zeros", "ones", "randn", "normal_", "empty", "fill_", "zero_")]


def work(report) -> list[tuple[str, int, int, int]]:
    """Products in any order (torch takes the weight's gradient first), each with FLOPs and bytes."""
    costs = sorted(
        (kernel.cost for kernel in report.kernels if "mm" in kernel.cost.name), key=lambda cost: cost.bytes_read
    )
    return [(cost.name, cost.flops, cost.bytes_read, cost.bytes_written) for cost in costs]


def moved(report, name: str) -> list[tuple[int, int]]:
    """Bytes read and written by each kernel of that name."""
    costs = [kernel.cost for kernel in report.kernels if kernel.cost.name.rpartition("::")[2] == name]
    return [(cost.bytes_read, cost.bytes_written) for cost in costs]


def package():
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    return te, recipe


def once(layer_of, recipe=None, x_of=lambda: torch.zeros(T, IN, device="cuda", dtype=BF16, requires_grad=True), **call):
    """Forward and backward of a layer, once."""

    def program():
        te, recipes = package()
        layer, x = layer_of(te), x_of()
        chosen = None if recipe is None else getattr(recipes, recipe)()
        with te.fp8_autocast(enabled=chosen is not None, fp8_recipe=chosen):
            out = layer(x, **call)
        gradient = torch.empty_like(out)
        out.backward(gradient)
        assert x.grad.shape == x.shape
        assert all(each.grad.shape == each.shape for each in layer.parameters())

    return program


def linear(bias=False, **options):
    return lambda te: te.Linear(IN, OUT, bias=bias, params_dtype=BF16, **{"init_method": nn.init.zeros_, **options})


def test_a_linear_layer_in_bf16_runs_what_torchs_runs_and_adds_up_its_bias_in_the_product():
    def torchs(bias):
        def program():
            layer = nn.Linear(IN, OUT, bias=bias, device="meta", dtype=BF16).to_empty(device="cuda")
            x = torch.zeros(T, IN, device="cuda", dtype=BF16, requires_grad=True)
            out = layer(x)
            out.backward(torch.empty_like(out))

        return program

    assert work(ran(once(linear()))) == work(ran(torchs(False)))
    own, usual = ran(once(linear(bias=True))), ran(torchs(True))
    assert names(own) == ["addmm", "mm", "te_gemm_bias_gradient"]
    assert "sum" in names(usual)
    assert own.macs == usual.macs == 3 * T * IN * OUT


@pytest.mark.parametrize("hardware", [H100, B200])
def test_delayed_scaling_casts_each_tensor_once_and_on_hopper_writes_columns_beside_rows(hardware):
    """Input, weight and gradient are cast by one kernel each, and each pass ends with the largest values of
    all layers in one tensor, and one kernel that makes scales."""
    report = ran(once(linear(), "DelayedScaling"), hardware)
    update = ["cat", "te_update_scales"]
    assert names(report) == [
        "te_cast",
        "te_cast",
        "_scaled_mm",
        *update,
        "te_cast",
        "_scaled_mm",
        "_scaled_mm",
        *update,
    ]
    copies = 2 if hardware == H100 else 1
    scale = 4
    assert moved(report, "te_cast") == [(2 * n + scale, copies * n) for n in (T * IN, OUT * IN, T * OUT)]
    assert {kernel.cost.dtype for kernel in report.kernels if kernel.cost.name == "_scaled_mm"} == {"fp8"}
    assert report.macs == 3 * T * IN * OUT


def test_a_new_scale_costs_two_more_reads_of_nothing_but_the_tensor():
    """Current scaling: the largest value by a kernel that reads all, and one that makes the scale, before each cast."""
    report = ran(once(linear(), "Float8CurrentScaling"))
    cast = ["te_largest", "te_scale", "te_cast"]
    assert names(report) == [*cast, *cast, "_scaled_mm", *cast, "_scaled_mm", "_scaled_mm"]
    assert moved(report, "te_largest") == [(2 * n, 4) for n in (T * IN, OUT * IN, T * OUT)]


def test_scales_of_blocks_are_a_byte_for_32_elements_in_mxfp8_and_4_bytes_for_128_on_hopper():
    """Both directions have scales of their own. Weights on Hopper have one for 128 x 128."""
    mx = ran(once(linear(), "MXFP8BlockScaling"), B200)
    assert moved(mx, "te_cast_blocks") == [(2 * n, 2 * (n + n // 32)) for n in (T * IN, OUT * IN, T * OUT)]
    assert names(mx).count("te_swizzle") == 2 * 3  # of both operands of each product
    blocks = ran(once(linear(), "Float8BlockScaling"))
    n = OUT * IN
    of_rows = [(2 * n, 2 * (n + 4 * n // 128)) for n in (T * IN, T * OUT)]
    assert moved(blocks, "te_cast_blocks") == [of_rows[0], (2 * n, 2 * (n + 4 * n // 128**2)), of_rows[1]]
    assert blocks.macs == mx.macs == 3 * T * IN * OUT


def test_nvfp4_writes_half_a_byte_an_element_and_a_byte_for_16():
    """Columns of input and gradient have a kernel of their own, which mixes them; a weight is cast both ways by one."""
    report = ran(once(linear(), "NVFP4BlockScaling"), B200)
    one = [(2 * n, n // 2 + n // 16) for n in (T * IN, T * OUT)]
    n = OUT * IN
    assert moved(report, "te_cast_blocks") == [one[0], one[0], (2 * n, 2 * (n // 2 + n // 16)), one[1], one[1]]
    assert {kernel.cost.dtype for kernel in report.kernels if kernel.cost.name == "_scaled_mm"} == {"fp4"}
    assert report.macs == 3 * T * IN * OUT


def test_weights_are_cast_for_the_first_microbatch_alone_if_the_program_says_which_it_is():
    def program(tells):
        te, recipes = package()
        layer = linear()(te)
        for at in range(3):
            x = torch.zeros(T, IN, device="cuda", dtype=BF16, requires_grad=True)
            with te.fp8_autocast(fp8_recipe=recipes.DelayedScaling()):
                out = layer(x, is_first_microbatch=at == 0 if tells else None)
            out.backward(torch.empty_like(out))

    for tells, casts in ((True, 2), (False, 3)):  # of the last one: input and gradient, and the weight
        report = ran(lambda tells=tells: program(tells))
        assert names(report).count("te_cast") == casts
        assert names(report).count("_scaled_mm") == 3


@pytest.mark.parametrize("recipe", [None, "DelayedScaling", "Float8CurrentScaling"])
def test_a_norm_before_a_product_writes_fp8_only_where_the_scale_is_known(recipe):
    """Delayed scaling: a byte an element, and the columns by a transpose. Else bf16, with the largest value for a new
    scale."""
    report = ran(once(lambda te: te.LayerNormLinear(IN, OUT, bias=False, params_dtype=BF16), recipe))
    statistics, n = 2 * 4 * T, T * IN
    ((_, written),) = moved(report, "te_norm")
    assert written == {None: 2 * n, "DelayedScaling": n, "Float8CurrentScaling": 2 * n + 4}[recipe] + statistics
    assert moved(report, "te_transpose") == ([(n, n)] if recipe == "DelayedScaling" else [])
    assert names(report).count("te_norm_backward") == 1
    assert report.macs == 3 * T * IN * OUT


@pytest.mark.parametrize(
    ("activation", "recipe", "between"),
    [
        ("gelu", None, ["te_gemm_gelu", "addmm", "te_gemm_gelu_gradient"]),
        ("relu", None, ["addmm", "te_activation", "addmm", "mm", "te_activation_gradient"]),
        (
            "gelu",
            "DelayedScaling",
            ["_scaled_mm", "te_activation", "_scaled_mm", "_scaled_mm", "te_activation_gradient"],
        ),
        ("swiglu", None, ["addmm", "te_activation", "addmm", "mm", "te_activation_gradient"]),
    ],
)
def test_an_mlp_has_six_products_and_gelu_in_bf16_is_in_their_epilogues(activation, recipe, between):
    width, both = 1024, 2 if activation == "swiglu" else 1
    report = ran(once(lambda te: te.LayerNormMLP(IN, width, activation=activation, params_dtype=BF16), recipe))
    assert report.macs == 3 * T * IN * width * (1 + both)
    assert [name for name in names(report) if name in between][: len(between)] == between


def test_a_transformer_layer_has_12_h_h_weights_which_each_token_meets_six_times():
    """And attention with two products forward and five backward. 4 h h of projections and 8 h h of the MLP; biases of 9
    h, two norms of 2 h each."""
    h, length, batch, heads = 256, 128, 4, 4

    def program():
        te, _ = package()
        layer = te.TransformerLayer(h, 4 * h, heads, params_dtype=BF16, hidden_dropout=0.0, attention_dropout=0.0)
        assert sum(each.numel() for each in layer.parameters()) == 12 * h * h + 13 * h
        x = torch.zeros(length, batch, h, device="cuda", dtype=BF16, requires_grad=True)
        out = layer(x)
        assert out.shape == x.shape
        out.backward(torch.empty_like(out))

    report = ran(program)
    assert report.macs == 3 * 12 * h * h * length * batch + 7 * batch * length**2 * h
    assert "cat" not in names(report)  # gradients of q, k and v are written beside each other


@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_groups_of_heads_gates_rotary_embeddings_and_a_decoder_have_the_shapes_of_their_definition(form):
    h, heads, groups = 256, 4, 2
    lengths, batch = (96, 128), 2

    def tokens(length):
        shape = (length, batch, h) if form == "sbhd" else (batch, length, h)
        return torch.zeros(shape, device="cuda", dtype=BF16, requires_grad=True)

    def program():
        te, _ = package()
        options = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False, "num_gqa_groups": groups}
        layer = te.TransformerLayer(
            h, 2 * h, heads, params_dtype=BF16, layer_type="decoder", attn_input_format=form, **options
        )
        keys = h * groups // heads
        attention = h * (h + 2 * keys) + h * h
        assert sum(each.numel() for each in layer.parameters()) == 2 * attention + 3 * h * 2 * h + 3 * h
        angles = te.RotaryPositionEmbedding(h // heads)(lengths[0])
        out = layer(tokens(lengths[0]), encoder_output=tokens(lengths[1]), rotary_pos_emb=angles)
        assert out.shape == tokens(lengths[0]).shape
        out.backward(torch.empty_like(out))

    report = ran(program)
    weights = (h * h * 2 + 2 * h * h * groups // heads, h * h * 2, 2 * h * h * groups // heads, 3 * h * 2 * h)
    products = sum(3 * size * batch * length for size, length in zip(weights, (96, 96, 128, 96), strict=True))
    assert report.macs == products + 7 * batch * 96 * (96 + 128) * h
    assert names(report).count("te_rotary") == 2 * 2  # of q and k, each way


def test_the_products_of_layers_in_fp8_shorten_a_large_layer_by_a_third_to_two_fifths():
    """What NVIDIA's documents and papers tell of H100s: 1.2 to 1.7 times as fast, with casts and attention in bf16."""
    h = 4096

    def program(recipe):
        te, recipes = package()
        layer = te.TransformerLayer(h, 4 * h, 32, params_dtype=BF16, hidden_dropout=0.0, attention_dropout=0.0)
        x = torch.zeros(2048, 4, h, device="cuda", dtype=BF16, requires_grad=True)
        with te.fp8_autocast(enabled=recipe, fp8_recipe=recipes.DelayedScaling()):
            out = layer(x)
        out.backward(torch.empty_like(out))

    slow, fast = (sum(t.seconds for t in ran(lambda r=r: program(r)).timings) for r in (False, True))
    assert 1.2 < slow / fast < 1.7


def test_a_program_that_ends_in_the_middle_leaves_no_scales_to_the_next():
    """The first one ends between the gradients of two layers, of which one waits for the update of its scales."""

    def ends(gradient):
        raise RuntimeError("in the middle")

    def program(hook):
        te, recipes = package()
        x = torch.zeros(T, IN, device="cuda", dtype=BF16, requires_grad=True)
        with te.fp8_autocast(fp8_recipe=recipes.DelayedScaling()):
            between = te.Linear(IN, IN, params_dtype=BF16)(x)
            between.register_hook(hook)
            out = te.Linear(IN, IN, params_dtype=BF16)(between)
        out.backward(torch.empty_like(out))

    def update():
        return moved(ran(lambda: program(lambda gradient: None)), "te_update_scales")

    alone = update()
    with pytest.raises(RuntimeError, match="in the middle"):
        ran(lambda: program(ends))
    assert update() == alone


def split(recipe, sequence, bias=False):
    """A column parallel layer and a row parallel one, of two ranks."""

    def program():
        import torch.distributed as dist

        te, recipes = package()
        dist.init_process_group("nccl")
        options = {"tp_group": dist.group.WORLD, "sequence_parallel": sequence, "params_dtype": BF16, "bias": bias}
        first = te.Linear(IN, 2 * OUT, parallel_mode="column", **options)
        second = te.Linear(2 * OUT, IN, parallel_mode="row", **options)
        assert first.weight.shape == (OUT, IN)
        assert second.weight.shape == (IN, OUT)
        x = torch.zeros(T // 2 if sequence else T, IN, device="cuda", dtype=BF16, requires_grad=True)
        chosen = None if recipe is None else getattr(recipes, recipe)()
        with te.fp8_autocast(enabled=chosen is not None, fp8_recipe=chosen):
            out = second(first(x))
        assert out.shape == x.shape
        out.backward(torch.empty_like(out))

    return program


def collectives(report) -> list[tuple[str, int]]:
    """Their kinds, and the bytes that they write, without those of a few numbers."""
    found = [(kernel.cost.collective, kernel.cost) for kernel in report.kernels if kernel.cost.collective]
    return [(collective.kind, cost.bytes_written) for collective, cost in found if cost.bytes_written > 64]


def test_split_layers_have_the_products_of_one_layer_over_all_ranks_and_the_collectives_of_megatron():
    whole, part = 2 * T * IN, 2 * T // 2 * IN
    report = ran(split(None, sequence=False), gpus=2)
    assert 2 * report.macs == 3 * 2 * T * IN * 2 * OUT
    assert collectives(report) == [("all_reduce", whole), ("all_reduce", whole)]
    report = ran(split(None, sequence=True), gpus=2)
    assert 2 * report.macs == 3 * 2 * T * IN * 2 * OUT
    forward = [("all_gather", whole), ("reduce_scatter", part)]
    backward = [("all_gather", whole), ("all_gather", whole), ("reduce_scatter", part)]
    assert collectives(report) == [*forward, *backward]


@pytest.mark.parametrize("recipe", [None, "DelayedScaling"])
def test_a_split_transformer_layer_has_half_of_the_work_and_twice_the_collectives(recipe):
    """Forward a gather and a sum for attention and for the MLP; backward each with one gather more."""
    h, length, batch, heads = 256, 128, 4, 4

    def program():
        import torch.distributed as dist

        te, recipes = package()
        dist.init_process_group("nccl")
        layer = te.TransformerLayer(
            h, 4 * h, heads, params_dtype=BF16, hidden_dropout=0.0, attention_dropout=0.0, set_parallel_mode=True,
            sequence_parallel=True, tp_group=dist.group.WORLD, fuse_qkv_params=True,
        )  # fmt: skip
        x = torch.zeros(length // 2, batch, h, device="cuda", dtype=BF16, requires_grad=True)
        with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipes.DelayedScaling()):
            out = layer(x)
        assert out.shape == x.shape
        out.backward(torch.empty_like(out))

    report = ran(program, gpus=2)
    assert 2 * report.macs == 3 * 12 * h * h * length * batch + 7 * batch * length**2 * h
    kinds = [kind for kind, _ in collectives(report)]
    assert kinds == ["all_gather", "reduce_scatter"] * 2 + ["all_gather", "all_gather", "reduce_scatter"] * 2


@pytest.mark.parametrize("recipe", ["DelayedScaling", "Float8CurrentScaling"])
def test_tensors_in_fp8_are_gathered_as_bytes_and_columns_are_made_after_it(recipe):
    """Sums over ranks stay in bf16. What was gathered is transposed: the gradient, and the input for its weight."""
    report = ran(split(recipe, sequence=True), gpus=2)
    whole, part = 2 * T * IN, 2 * T // 2 * IN
    kinds = ["all_gather", "reduce_scatter", "all_gather", "all_gather", "reduce_scatter"]
    sizes = [whole // 2, part, whole // 2, whole // 2, part]
    assert collectives(report) == list(zip(kinds, sizes, strict=True))
    assert moved(report, "te_transpose") == [(T * IN, T * IN)] * 2
    assert 2 * report.macs == 3 * 2 * T * IN * 2 * OUT


def test_finer_scales_travel_with_the_rows_and_the_columns_that_they_belong_to():
    report = ran(split("MXFP8BlockScaling", sequence=True), B200, gpus=2)
    n = T * IN
    gathers = [size for kind, size in collectives(report) if kind == "all_gather"]
    assert gathers == [n, n // 32] * 4  # rows of input and gradient forth and back, columns of both
    assert 2 * report.macs == 3 * 2 * T * IN * 2 * OUT


def test_a_gradient_is_added_to_the_fp32_one_that_the_program_keeps():
    """8 bytes an element beside what the product reads and writes anyway; autograd gets nothing."""

    def program(recipe):
        te, recipes = package()
        layer = te.Linear(IN, OUT, bias=False, params_dtype=BF16, fuse_wgrad_accumulation=True)
        layer.weight.main_grad = torch.zeros(OUT, IN, device="cuda")
        with te.fp8_autocast(enabled=recipe, fp8_recipe=recipes.DelayedScaling()):
            out = layer(torch.zeros(T, IN, device="cuda", dtype=BF16, requires_grad=True))
        out.backward(torch.empty_like(out))
        assert layer.weight.grad is None

    for recipe, size in ((False, 2), (True, 1)):
        report = ran(lambda recipe=recipe: program(recipe))
        scales = 2 * 4 if recipe else 0
        assert moved(report, "te_gemm_into") == [(size * T * (IN + OUT) + 4 * IN * OUT + scales, 4 * IN * OUT)]
        assert report.macs == 3 * T * IN * OUT


@pytest.mark.parametrize(("hardware", "library"), [(H100, "cudnn"), (B200, "cudnn"), (A100, "flash")])
def test_attention_is_cudnns_on_hopper_and_later_and_flash_attention_before(hardware, library):
    def program():
        te, _ = package()
        attend = te.DotProductAttention(4, 64)
        q, k, v = (torch.zeros(128, 2, 4, 64, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3))
        out = attend(q, k, v)
        assert out.shape == (128, 2, 4 * 64)
        assert out.is_contiguous()
        out.backward(torch.empty_like(out))

    report = ran(program, hardware)
    assert {kernel.cost.work.backend for kernel in report.kernels if "attention" in kernel.cost.name} == {library}
    assert report.macs == 7 * 2 * 4 * 128 * 128 * 64


def test_packed_sequences_cost_their_own_squares_and_any_other_mask_kernels_of_its_own():
    lengths, heads, size = (32, 96), 4, 64

    def packed():
        te, _ = package()
        starts = torch.tensor([0, 32, 128], dtype=torch.int32, device="cuda")
        q, k, v = (torch.zeros(128, heads, size, device="cuda", dtype=BF16) for _ in range(3))
        attend = te.DotProductAttention(heads, size, qkv_format="thd", attn_mask_type="padding_causal")
        assert attend(q, k, v, cu_seqlens_q=starts, cu_seqlens_kv=starts).shape == (128, heads * size)

    assert ran(packed).macs == 2 * heads * sum(length**2 for length in lengths) * size

    def masked():
        te, _ = package()
        q, k, v = (torch.zeros(2, 128, heads, size, device="cuda", dtype=BF16) for _ in range(3))
        mask = torch.zeros(2, 1, 128, 128, dtype=torch.bool, device="cuda")
        attend = te.DotProductAttention(heads, size, qkv_format="bshd", attn_mask_type="arbitrary")
        assert attend(q, k, v, mask).shape == (2, 128, heads * size)

    report = ran(masked)
    assert report.macs == 2 * 2 * heads * 128**2 * size
    assert not any("te_attention" in name for name in names(report))


@pytest.mark.parametrize("recipe", [None, "Float8CurrentScaling"])
def test_experts_have_a_product_each_and_together_those_of_one_layer(recipe):
    rows = [128, 0, 256, 128]
    report = ran(once(lambda te: te.GroupedLinear(4, IN, OUT, bias=False, params_dtype=BF16), recipe, m_splits=rows))
    assert report.macs == 3 * T * IN * OUT
    assert names(report).count("te_grouped_gemm") == 2 * 3  # forward and backward, of those that have rows
    byte = 2 if recipe is None else 1
    read = [byte * (m * IN + IN * OUT) + (8 if recipe else 0) for m in rows if m]
    assert moved(report, "te_grouped_gemm")[:3] == [
        (each, 2 * m * OUT) for each, m in zip(read, [m for m in rows if m], strict=True)
    ]


def test_tokens_go_to_their_experts_and_back_by_one_kernel_each():
    tokens, experts, top = 64, 4, 2

    def program():
        te, _ = package()
        x = torch.zeros(tokens, IN, device="cuda", dtype=BF16, requires_grad=True)
        routing = torch.zeros(tokens, experts, dtype=torch.bool, device="cuda")
        weights = torch.zeros(tokens, experts, device="cuda", requires_grad=True)
        moved_rows, row_map = te.moe_permute(x, routing, tokens * top)
        assert moved_rows.shape == (tokens * top, IN)
        back = te.moe_unpermute(moved_rows, row_map, weights, x.shape)
        assert back.shape == x.shape
        back.backward(torch.empty_like(back))
        assert x.grad.shape == x.shape
        assert weights.grad.shape == weights.shape

    report = ran(program)
    n, table = 2 * tokens * IN, 4 * tokens * experts
    assert names(report) == ["te_row_map", "te_permute", "te_unpermute", "te_unpermute_backward", "te_unpermute"]
    assert moved(report, "te_permute") == [(n + table, top * n)]
    assert moved(report, "te_unpermute") == [(top * n + 2 * table, n), (top * n + table, n)]


@pytest.mark.parametrize("masters", [False, True])
def test_adam_keeps_fp32_states_of_bf16_weights_and_moves_each_once(masters):
    """Bytes read: gradient 2, moments 8, and weight 2 or master 4; written: weight 2, moments 8, master 4."""

    def program():
        te, _ = package()
        weight = nn.Parameter(torch.zeros(1000, device="cuda", dtype=BF16))
        optimizer = te.optimizers.FusedAdam([weight], master_weights=masters)
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        assert {each.dtype for each in optimizer.state[weight].values()} == {torch.float32}

    read, written = (2 + 8 + 4, 2 + 8 + 4) if masters else (2 + 8 + 2, 2 + 8)
    assert moved(ran(program), "te_adam") == [(1000 * read, 1000 * written)]


def test_adam_over_fp32_weights_takes_as_long_as_torchs_fused_one():
    def step(optimizer_of):
        weights = [nn.Parameter(torch.zeros(3_000_000, device="cuda")) for _ in range(3)]
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        optimizer_of(weights).step()

    own = ran(lambda: step(lambda weights: package()[0].optimizers.FusedAdam(weights, weight_decay=0.1)))
    torchs = ran(lambda: step(lambda weights: torch.optim.AdamW(weights, weight_decay=0.1, fused=True)))
    seconds = [
        next(row.seconds for row in report.rows("op") if name in row.name)
        for report, name in ((own, "te_adam"), (torchs, "_fused_adamw_"))
    ]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.01)


@pytest.mark.parametrize("first", [None, True])
def test_what_is_computed_again_in_the_backward_pass_is_in_fp8_again(first):
    """Both runs cast the input, and the weight too unless its first cast, which has the gradient's columns, is kept."""

    def program():
        te, recipes = package()
        layer = linear()(te)
        x = torch.zeros(T, IN, device="cuda", dtype=BF16, requires_grad=True)
        firsts = iter((first, None if first is None else False))
        with te.fp8_autocast(fp8_recipe=recipes.Float8CurrentScaling()):
            out = te.checkpoint(lambda x: layer(x, is_first_microbatch=next(firsts)), x)
        out.backward(torch.empty_like(out))

    report = ran(program)
    assert names(report).count("_scaled_mm") == 4
    assert names(report).count("te_cast") == (4 if first else 5)
    assert report.macs == 4 * T * IN * OUT


def test_a_weight_that_was_cast_without_columns_gets_them_by_a_transpose():
    """As after an evaluation within the microbatches."""

    def program():
        te, recipes = package()
        layer = linear()(te)
        x = torch.zeros(T, IN, device="cuda", dtype=BF16, requires_grad=True)
        with te.fp8_autocast(fp8_recipe=recipes.Float8CurrentScaling()):
            with torch.no_grad():
                layer(x, is_first_microbatch=True)
            out = layer(x, is_first_microbatch=False)
        out.backward(torch.empty_like(out))

    report = ran(lambda: Once(program)())
    assert moved(report, "te_transpose") == [(OUT * IN, OUT * IN)]


class Once(nn.Module):
    """A program as one call of a module, which is then the step of the report."""

    def __init__(self, program):
        super().__init__()
        self.program, self.weight = program, nn.Parameter(torch.zeros(1, device="cuda"))

    def forward(self):
        self.program()


def test_cross_entropy_reads_the_logits_for_their_sums_and_leaves_the_gradient_in_them():
    rows, words = 64, 1024

    def program():
        te, _ = package()
        logits = torch.zeros(4, 16, words, device="cuda", dtype=BF16, requires_grad=True)
        loss = te.parallel_cross_entropy(logits, torch.zeros(4, 16, dtype=torch.long, device="cuda"))
        assert loss.shape == (4, 16)
        loss.backward(torch.empty_like(loss))
        assert logits.grad.shape == logits.shape

    report = ran(program)
    n = 2 * rows * words
    assert names(report) == ["te_softmax_sums", "te_cross_entropy", "te_scale_rows"]
    assert moved(report, "te_softmax_sums") == [(n + 8 * rows, 3 * 4 * rows)]
    assert moved(report, "te_scale_rows") == [(n + 4 * rows, n)]


def test_layers_take_a_type_from_autocast_and_cast_weights_that_are_wider():
    def program():
        te, _ = package()
        layer = te.Linear(IN, OUT, bias=False)
        with torch.autocast("cuda", BF16):
            out = layer(torch.zeros(T, IN, device="cuda", requires_grad=True))
        assert out.dtype is BF16
        out.backward(torch.empty_like(out))
        assert layer.weight.grad.dtype is torch.float32

    report = ran(program)
    assert report.macs == 3 * T * IN * OUT
    assert {kernel.cost.dtype for kernel in report.kernels if kernel.cost.name == "mm"} == {"bf16"}


@pytest.mark.parametrize("recipe", [None, "DelayedScaling"])
def test_a_script_of_its_layers_has_six_flop_a_weight_and_token_in_each_precision(recipe):
    """Of its layers and its head, not of its table of words; attention 3.5 times its two products."""
    program = Path(__file__).parent / "programs" / "transformer_engine_train.py"
    command = [
        "-m",
        "flopmeter",
        "run",
        "--hardware",
        H100,
        "--shim",
        "transformer_engine",
        "--format",
        "json",
        program,
    ]
    options = ["--recipe", recipe] if recipe else []
    done = subprocess.run([sys.executable, *map(str, command), *options], capture_output=True, text=True, check=True)
    flops = {row["name"]: row["flops"] for row in json.loads(done.stderr)["rows"]["class"]}
    words, width, length, batch, layers = 1024, 256, 128, 4, 2
    weights = layers * 12 * width**2 + words * width
    assert flops["tensor contraction"] == 6 * weights * length * batch
    assert flops["attention (fused)"] == layers * 14 * batch * length**2 * width


def test_what_is_not_there_says_so_by_name():
    def program():
        te, recipes = package()
        refused = {
            "fp8_model_init": lambda: te.fp8_model_init().__enter__(),
            "ub_overlap_ag": lambda: te.Linear(IN, OUT, ub_overlap_ag=True),
            "attention in fp8": lambda: te.fp8_autocast(fp8_recipe=recipes.DelayedScaling(fp8_dpa=True)).__enter__(),
            "delay_wgrad_compute": lambda: te.Linear(IN, OUT, delay_wgrad_compute=True),
            "softmax_type": lambda: te.DotProductAttention(4, 64, softmax_type="learnable"),
            "Sequential": lambda: te.ops.Sequential(),
        }
        for said, use in refused.items():
            with pytest.raises(NotImplementedError, match=f"shim of transformer_engine.*{said}"):
                use()
        with pytest.raises(ImportError, match="no 'make_graphed_callables'"):
            te.make_graphed_callables  # noqa: B018
        torch.ones(1, device="cuda")

    ran(program)


def test_a_device_that_has_no_fp8_or_no_scales_of_blocks_refuses_it():
    with pytest.raises(RuntimeError, match=r"fp8 needs compute capability 8\.9, this device has 8\.0"):
        ran(once(linear(), "DelayedScaling"), A100)
    with pytest.raises(HardwareError, match="MX scales"):
        ran(once(linear(), "MXFP8BlockScaling"))


def test_programs_are_told_what_the_device_has_as_accelerate_asks():
    def program():
        from transformer_engine.pytorch import fp8

        asked = fp8.check_fp8_support, fp8.check_mxfp8_support, fp8.check_nvfp4_support
        assert [has for has, _ in (ask() for ask in asked)] == [True, False, False]
        assert fp8.check_mxfp8_support()[1] == "MXFP8 needs compute capability 10.0, this device has 9.0"
        torch.ones(1, device="cuda")

    ran(program)


def test_the_norms_are_those_of_torch_by_shape_and_are_one_kernel_forward():
    def program():
        te, _ = package()
        x = torch.zeros(T, IN, device="cuda", dtype=BF16, requires_grad=True)
        out = te.RMSNorm(IN, params_dtype=BF16)(te.LayerNorm(IN, params_dtype=BF16)(x))
        assert out.shape == F.layer_norm(x, (IN,)).shape
        out.backward(torch.empty_like(out))

    found = names(ran(program))
    assert found.count("te_norm") == found.count("te_norm_backward") == 2
