"""FlopMeter as a whole: the stages together, the device's stream, another device's price."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flopmeter import DataDependentError, FlopMeter, StreamError, on_meta
from flopmeter.torch_names.dispatcher import COMPARED_VERSIONS, running_version


def attention(dtype=torch.bfloat16):
    q = torch.empty(1, 8, 1024, 64, dtype=dtype, device="meta")
    return F.scaled_dot_product_attention(q, q, q)


def ops(meter):
    return [op.call.name for op in meter.trace.ops]


@pytest.mark.parametrize(
    ("hardware", "op"),
    [
        ("h100-sxm5-80gb", "_scaled_dot_product_cudnn_attention"),
        ("a100-sxm4-80gb", "_scaled_dot_product_flash_attention"),
        ("t4", "_safe_softmax"),  # no bf16 kernel: materialised
        ("mi300x", "_scaled_dot_product_flash_attention"),  # by the stated rule
    ],
)
def test_attention_is_what_the_device_would_run(hardware, op):
    with FlopMeter(hardware) as meter:
        attention()
    assert op in ops(meter)


def test_the_rule_for_other_vendors_is_printed():
    with FlopMeter("mi300x") as meter:
        attention()
    assert "not an NVIDIA device" in meter.report().render()


def test_the_raw_stream_is_that_of_meta():
    with FlopMeter("h100-sxm5-80gb", as_cuda=False) as meter:
        attention()
    assert "bmm" in ops(meter)


def test_a_trace_is_priced_on_every_device_that_would_run_the_same_ops():
    with FlopMeter("a100-sxm4-80gb") as meter:
        attention()
    there = meter.report(hardware="l4")
    with FlopMeter("l4") as own:
        attention()
    assert there.seconds == own.report().seconds > meter.report().seconds


def test_a_trace_is_refused_by_a_device_that_would_run_other_ops():
    with FlopMeter("a100-sxm4-80gb") as meter:
        attention()
    with pytest.raises(StreamError, match=r"scaled_dot_product_attention of bfloat16 \[1, 8, 1024, 64\]: FLASH.*CUDNN"):
        meter.report(hardware="h100-sxm5-80gb")
    with pytest.raises(StreamError, match="MATH"):
        meter.report(hardware="t4")


def test_a_report_that_looks_at_unfused_attention_runs_nothing_in_a_meter_around_it():
    q = torch.empty(1, 8, 64, 512, dtype=torch.bfloat16, device="meta")
    mask = torch.empty(1, 1, 1, 64, dtype=torch.bool, device="meta").expand(1, 8, 64, 64)
    with FlopMeter("t4") as around:
        with FlopMeter("t4") as meter:
            F.scaled_dot_product_attention(q, q, q, mask)
        before = len(around.trace.ops)
        assert "has no fused kernel here" in meter.report().render()
        assert len(around.trace.ops) == before


def test_an_empty_mask_whose_elements_share_memory_can_be_made():
    """As torch.empty_strided makes it of a mask that was expanded."""
    with FlopMeter("t4") as meter:
        mask = torch.empty_strided((4, 4), (0, 1), dtype=torch.bool, device="meta")
        count = mask.fill_(True).sum().item()
    assert count == 16
    assert meter.trace.ops


def test_unfused_attention_moves_many_times_the_bytes_of_fused_attention():
    totals = {}
    for hardware in ("h100-sxm5-80gb", "t4"):
        q = torch.empty(1, 32, 4096, 128, dtype=torch.bfloat16, device="meta")
        k, v = torch.empty(2, 1, 8, 4096, 128, dtype=torch.bfloat16, device="meta")
        with FlopMeter(hardware) as meter:
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        report = meter.report()
        totals[hardware] = report.bytes_read + report.bytes_written
    q_k_v_out = 2 * (2 * 32 + 2 * 8) * 4096 * 128
    log_sum_exp = 4 * 32 * 4096
    assert totals["h100-sxm5-80gb"] == pytest.approx(q_k_v_out + log_sum_exp, rel=0.01)
    assert totals["t4"] > 37 * totals["h100-sxm5-80gb"]
    factor = totals["t4"] / q_k_v_out
    assert f"has no fused kernel here: it moves {factor:.0f}x the bytes of one" in report.render()


def test_autocast_runs_products_in_half_precision_on_meta():
    with torch.device("meta"):
        layer, x = nn.Linear(64, 64), torch.empty(8, 64)
    with FlopMeter() as meter, torch.autocast("cuda", torch.bfloat16):
        layer(x)
    assert meter.report().main_dtype == "bf16"


def test_adamw_over_many_tensors_is_a_handful_of_kernels():
    with torch.device("meta"):
        parameters = [nn.Parameter(torch.empty(64)) for _ in range(300)]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer = torch.optim.AdamW(parameters)
    optimizer.step()  # makes the state
    with FlopMeter() as meter:
        optimizer.step()
    report = meter.report()
    assert len(report.kernels) < 15
    # parameters, gradients and both moments are read, all but the gradients written, at least once
    assert report.bytes_read >= 4 * 300 * 64 * 4
    assert report.bytes_written >= 3 * 300 * 64 * 4


def test_masks_that_are_brought_in_answer_questions():
    mask = torch.tensor([[1, 1, 1, 0]])
    with FlopMeter() as meter:
        known = on_meta(mask)
        lengths = known.sum(-1).tolist()
    assert lengths == [3]
    assert meter.report().assumptions == ()


def test_a_value_that_nobody_knows_is_an_error_with_the_line_that_asked():
    x = torch.empty(3, device="meta")
    with pytest.raises(DataDependentError, match=r"test_meter\.py"), FlopMeter():
        x.sum().item()


def test_an_assumption_is_printed_with_the_line_that_made_it():
    scores = torch.empty(4, 8, device="meta")
    with FlopMeter(routing="balanced") as meter:
        _, experts = scores.topk(2)
        experts.tolist()
    (assumption,) = meter.report().assumptions
    assert 'routing="balanced"' in assumption
    assert "test_meter.py" in assumption
    assert assumption in meter.report().render()


@pytest.mark.parametrize("option", [{"routing": "random"}, {"checks": "fail"}])
def test_unknown_assumptions_are_refused_at_once(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        FlopMeter(**option)


def test_entering_a_meter_inside_itself_changes_nothing():
    x = torch.empty(4, 4, device="meta")
    meter = FlopMeter()
    with meter, meter:
        _ = x @ x
    assert meter.report().flops == 2 * 4**3


def test_of_a_program_on_one_device_only_the_host_is_noted():
    with FlopMeter("h100-sxm5-80gb") as meter:
        torch.empty(4, device="meta").sin()
    *of_torch, note = meter.report().notes
    assert note.startswith("the host: ")
    assert len(of_torch) == (running_version() not in COMPARED_VERSIONS)  # a release without recordings says so


def test_nested_meters_of_one_device_agree():
    with FlopMeter() as outer, FlopMeter() as inner:
        attention()
    assert outer.report().render() == inner.report().render()


def test_cpu_tensors_compute_the_same_inside():
    torch.manual_seed(0)
    layer, x = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0), torch.randn(4, 2, 16)
    outside = layer(x)
    with FlopMeter() as meter:
        inside = layer(x)
    assert torch.equal(outside, inside)
    assert meter.report().flops > 0


def test_llama_under_autocast_and_checkpointing_is_metered_whole():
    from torch.utils.checkpoint import checkpoint

    from flopmeter.models.llama import Llama, LlamaConfig

    config = LlamaConfig(width=256, layers=2, heads=8, kv_heads=2, hidden=512, vocabulary=1000)
    with torch.device("meta"):
        model, tokens = Llama(config), torch.zeros(2, 64, dtype=torch.long)
    with FlopMeter("h100-sxm5-80gb") as meter, torch.autocast("cuda", torch.bfloat16):
        checkpoint(model, tokens, use_reentrant=False).sum().backward()
    report = meter.report()
    assert report.uncounted == []
    assert {row.name for row in report.rows("phase")} == {"forward", "recompute", "backward"}
    fp32_products = [k for k in report.kernels if k.cost.macs and k.cost.dtype == "fp32"]
    assert fp32_products == []
