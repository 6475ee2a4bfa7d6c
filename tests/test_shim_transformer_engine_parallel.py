"""The shim of Transformer Engine: layers over several GPUs, experts, optimizers, whole programs; what is not there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
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
    collectives,
    linear,
    moved,
    names,
    once,
    package,
    ran,
)

from flopmeter import HardwareError


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
