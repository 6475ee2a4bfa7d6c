"""The shim of Transformer Engine: its layers launch the kernels that the package's sources launch, with FLOPs of closed
forms and bytes by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformer_engine_support import (
    A100,
    B200,
    BF16,
    H100,
    IN,
    OUT,
    Once,
    T,
    linear,
    moved,
    names,
    once,
    package,
    ran,
    work,
)


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


@pytest.mark.parametrize(("layer", "products"), [("Linear", 2), ("LayerNormLinear", 3)])
def test_a_first_layer_has_no_gradient_of_its_input_unless_a_norm_stands_before_it(layer, products):
    def program():
        te, recipes = package()
        first = getattr(te, layer)(IN, OUT, bias=False, params_dtype=BF16)
        with te.fp8_autocast(fp8_recipe=recipes.DelayedScaling()):
            out = first(torch.zeros(T, IN, device="cuda", dtype=BF16))
        out.backward(torch.empty_like(out))
        assert all(each.grad.shape == each.shape for each in first.parameters())

    assert ran(program).macs == products * T * IN * OUT


def test_a_frozen_weight_has_no_gradient_and_its_gradients_are_cast_without_columns():
    def program():
        te, recipes = package()
        layer, x = linear()(te), torch.zeros(T, IN, device="cuda", dtype=BF16, requires_grad=True)
        layer.weight.requires_grad_(False)
        with te.fp8_autocast(fp8_recipe=recipes.Float8CurrentScaling()):
            out = layer(x)
        out.backward(torch.empty_like(out))

    report = ran(lambda: Once(program)())
    assert report.macs == 2 * T * IN * OUT
    x, weight, gradient = T * IN, OUT * IN, T * OUT
    assert [written for _, written in moved(report, "te_cast")] == [x, 2 * weight, gradient]


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


def test_the_norms_are_those_of_torch_by_shape_and_are_one_kernel_forward():
    def program():
        te, _ = package()
        x = torch.zeros(T, IN, device="cuda", dtype=BF16, requires_grad=True)
        out = te.RMSNorm(IN, params_dtype=BF16)(te.LayerNorm(IN, params_dtype=BF16)(x))
        assert out.shape == F.layer_norm(x, (IN,)).shape
        out.backward(torch.empty_like(out))

    found = names(ran(program))
    assert found.count("te_norm") == found.count("te_norm_backward") == 2
