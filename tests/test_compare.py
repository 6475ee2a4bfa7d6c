"""Comparing devices, and what would change the verdict: claims 2 and 6 of Horace He's article among others."""

import csv
import io
import json

import pytest
import torch

from flopmeter import FlopMeter, HardwareError, load_hardware
from flopmeter.ask.compare import compare
from flopmeter.ask.what_if import improved, what_if
from flopmeter.timing import Host

A100, H100, T4 = "a100-sxm4-80gb", "h100-sxm5-80gb", "t4"


def half(*shape):
    return torch.empty(*shape, dtype=torch.float16, device="meta")


def products():
    """Compute-bound on every device."""
    half(16384, 16384) @ half(16384, 16384)


def activations():
    """Memory-bound on every device: 2^30 halves, read and written."""
    half(1 << 30).relu()


def small_ops():
    """Overhead-bound on every device."""
    x = half(16)
    for _ in range(100):
        x = x + 1


def what_if_of(program, hardware=A100):
    with FlopMeter(hardware) as meter:
        program()
    return what_if(meter.report()).speedup


def test_more_flop_per_s_help_a_compute_bound_run_and_nothing_else_does():
    speedup = what_if_of(products)
    assert speedup["compute"] > 1.8
    assert speedup["memory"] == pytest.approx(1, abs=0.05)
    assert speedup["overhead"] == pytest.approx(1, abs=0.01)


def test_more_bandwidth_helps_a_memory_bound_run_and_nothing_else_does():
    speedup = what_if_of(activations)
    assert speedup["memory"] > 1.9
    assert speedup["compute"] == pytest.approx(1, abs=0.01)
    assert speedup["overhead"] == pytest.approx(1, abs=0.01)


def test_a_faster_host_helps_an_overhead_bound_run_and_nothing_else_does():
    speedup = what_if_of(small_ops)
    assert speedup["overhead"] > 1.9
    assert speedup["compute"] == pytest.approx(1, abs=0.01)
    assert speedup["memory"] == pytest.approx(1, abs=0.01)


def test_a_busy_device_that_the_host_paces_is_told_from_one_that_is_short_of_bandwidth():
    """Kernels of 0.9 launches each keep the device busy for 90 % of the time, and only a faster host would help."""
    tensor = half(1 << 22)

    def paced():
        for _ in range(50):
            tensor.relu()

    with FlopMeter(A100) as meter:
        paced()
    kernel_seconds = meter.report().kernel_seconds / 50
    comparison = compare(paced, [A100], host=Host(launch_seconds=kernel_seconds / 0.9))
    (row,) = comparison.rows
    assert row.regime == "memory"
    assert row.what_if.speedup["memory"] < 1.05 < row.what_if.speedup["overhead"]
    assert "memory-bound, yet host speed would help most" in str(comparison)
    assert "yet" not in str(compare(activations, [A100]))


def test_the_verdict_turns_where_the_boundary_says_and_not_before():
    with FlopMeter(A100) as meter:
        products()
    report = meter.report()
    boundary = what_if(report).boundary
    assert report.regime == "compute"
    assert boundary.regime == "memory"
    assert improved(report, "compute", 0.97 * boundary.times).regime == "compute"
    assert improved(report, "compute", boundary.times).regime == "memory"


def test_a_faster_host_calls_a_graph_faster_too():
    """A graph replay is one host call, in no Host's figures."""
    (row,) = compare(small_ops, [A100], "cudagraph").rows
    assert row.regime == "overhead"
    assert row.what_if.speedup["overhead"] > 1.5


def test_the_host_of_the_meter_is_the_one_that_gets_faster():
    slow = Host(launch_seconds=1e-3)
    row = compare(small_ops, [A100], host=slow).rows[0]
    assert row.seconds > 0.1
    assert row.what_if.speedup["overhead"] == pytest.approx(2, rel=0.01)


def test_each_row_agrees_with_a_meter_of_its_own():
    comparison = compare(products, [A100, H100, T4])
    for row in comparison.rows:
        with FlopMeter(row.hardware) as meter:
            products()
        assert row.seconds == meter.report().seconds
        assert row.peak_memory_bytes == meter.report().memory.steady_peak_bytes


def test_the_program_runs_again_only_where_a_device_would_run_other_ops():
    """A product is the same op everywhere; fused attention is another kernel on compute capability 7.0."""

    def attention():
        q = half(2, 8, 512, 64)
        torch.nn.functional.scaled_dot_product_attention(q, q, q)

    runs = []
    devices = [A100, "a100-sxm4-40gb", "v100-sxm2-16gb", "v100-pcie-16gb"]
    compare(lambda: runs.append(products()), devices)
    assert len(runs) == 1
    compare(lambda: runs.append(attention()), devices)
    assert len(runs) == 1 + 2


def test_the_fastest_device_comes_first():
    assert [row.hardware for row in compare(products, [T4, H100, A100]).rows] == [H100, A100, T4]


def test_sorting_by_cost_puts_the_cheapest_first_and_those_without_a_price_last():
    rows = compare(products, [H100, A100, T4], prices={H100: 2000.0, T4: 0.35}, sort="cost").rows
    assert [row.hardware for row in rows] == [T4, H100, A100]
    assert rows[-1].dollars_per_step is None


def test_cost_is_price_times_time():
    (row,) = compare(small_ops, [A100], prices={A100: 3.6}, items=100, unit="tokens").rows
    assert row.dollars_per_step == pytest.approx(row.seconds * 0.001)  # $3.6 an hour is 0.1 cents a second
    assert row.dollars_per_million_items == pytest.approx(row.dollars_per_step * 1e4)  # 1e6 / 100 steps
    assert row.items_per_s == pytest.approx(100 / row.seconds)


def test_a_price_may_be_given_under_an_alias():
    alias = load_hardware(A100).aliases[0]
    assert compare(products, [A100], prices={alias: 1.0}).rows[0].dollars_per_hour == 1.0


def test_what_does_not_fit_is_said():
    def too_much():
        half(1 << 34).add_(1)  # 34 GB

    fits = {row.hardware: row.fits for row in compare(too_much, [A100, "rtx-4090", "cpu-epyc-9654"]).rows}
    assert fits == {A100: True, "rtx-4090": False, "cpu-epyc-9654": None}


def test_busy_and_idle_shares_make_up_the_wall_clock():
    for row in compare(small_ops, [A100, T4]).rows:
        assert row.busy_share + row.idle_share == pytest.approx(1)


def test_a_device_without_the_data_type_is_left_out_and_says_why():
    def fp8_product():
        a = torch.empty(256, 256, dtype=torch.float8_e4m3fn, device="meta")
        one = torch.empty((), device="meta")
        torch._scaled_mm(a, a.t(), one, one, out_dtype=torch.bfloat16)

    comparison = compare(fp8_product, [H100, "v100-sxm2-16gb"])
    assert [row.hardware for row in comparison.rows] == [H100]
    assert "fp8" in comparison.unable["v100-sxm2-16gb"]
    assert "fp8" in str(comparison)
    none_able = compare(fp8_product, ["v100-sxm2-16gb", "t4"])
    assert none_able.title == "no device of the list can run this program"
    assert (none_able.rows, none_able.unable.keys()) == ((), {"v100-sxm2-16gb", "t4"})


def test_the_stream_assumed_of_a_device_that_is_not_nvidias_is_noted():
    assert "MI300X is not an NVIDIA device" in str(compare(products, [A100, "mi300x"]))
    assert "NVIDIA device" not in str(compare(products, [A100, "mi300x"], as_cuda=False))


def test_unknown_devices_orders_items_prices_and_formats_are_refused():
    with pytest.raises(HardwareError, match="h100-sxm5-80gb"):
        compare(products, ["h100"])
    with pytest.raises(ValueError, match="seconds, cost"):
        compare(products, [A100], sort="price")
    with pytest.raises(ValueError, match="positive number of tokens"):
        compare(products, [A100], items=0, unit="tokens")
    with pytest.raises(ValueError, match="dollars per hour"):
        compare(products, [A100], prices={A100: float("nan")})
    with pytest.raises(ValueError, match="at least one device"):
        compare(products, [])
    with pytest.raises(ValueError, match="text, markdown, csv, json"):
        compare(products, [A100]).render("pdf")


def test_a_program_that_runs_nothing_is_refused():
    with pytest.raises(ValueError, match="ran no op"):
        compare(lambda: None, [A100])


def test_the_text_has_no_columns_for_what_nobody_gave():
    bare, priced = compare(products, [A100]), compare(products, [A100], prices={A100: 1.0}, items=7, unit="tokens")
    assert "$" not in str(bare)
    assert "items/s" not in str(bare)
    assert "tokens/s" in str(priced)
    assert "$/M tokens" in str(priced)


def test_csv_and_json_hold_the_same_unrounded_figures():
    comparison = compare(products, [A100, H100], prices={A100: 1.0})
    document = json.loads(comparison.render("json"))
    assert (document["schema_version"], document["kind"]) == (1, "comparison")
    from_csv = list(csv.DictReader(io.StringIO(comparison.render("csv"))))
    for row, in_json, in_csv in zip(comparison.rows, document["rows"], from_csv, strict=True):
        assert row.seconds == in_json["seconds"] == float(in_csv["seconds"])
        assert row.hardware == in_json["hardware"] == in_csv["hardware"]


def test_markdown_is_a_table_with_a_row_for_each_device():
    lines = compare(products, [A100, H100]).render("markdown").splitlines()
    assert sum(line.startswith((f"| {A100}", f"| {H100}")) for line in lines) == 4


def test_the_title_says_how_much_a_step_works_on():
    assert compare(products, ["l4"], items=8192, unit="tokens").title.endswith(" · 8,192 tokens a step")
    assert "step" not in compare(products, ["l4"]).title


def test_a_notebook_shows_the_tables_and_escapes_what_they_hold():
    shown = compare(products, ["l4", "v100-sxm2-16gb"], items=1, unit="<b>")._repr_html_()
    assert shown.count("<table>") == 2
    assert shown.count("<tr>") == 2 * (1 + 2)
    assert "&lt;b&gt;/s" in shown
    assert "<b>/s" not in shown
