"""`flopmeter check`: profiles recorded here, and one in the format of a CUDA run, beside their prediction."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from collections import Counter

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import flopmeter
from flopmeter import FlopMeter, ProfileError, cli, load_hardware
from flopmeter.costs import costs_of

CPU = load_hardware("cpu-epyc-9654")
A100 = load_hardware("a100-sxm4-80gb")


def recorded(program, path, **options):
    with profile(activities=[ProfilerActivity.CPU], **{"record_shapes": True, **options}) as profiler:
        program()
    profiler.export_chrome_trace(str(path))
    return path


def training_step():
    """Returns a step of a small encoder and convolution; its optimizer has its state."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    convolution, norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
    optimizer = torch.optim.SGD([*encoder.parameters(), *convolution.parameters()], lr=0.1)
    x, image = torch.randn(2, 16, 32), torch.randn(2, 3, 12, 12)

    def step():
        loss = encoder(x).square().mean() + torch.cat([norm(convolution(image)).relu() * 2, image], 1).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return step


@pytest.fixture(scope="module")
def step_profile(tmp_path_factory):
    return recorded(training_step(), tmp_path_factory.mktemp("profile") / "step.json")


def test_the_ops_of_a_profile_are_those_that_the_tracer_records_and_cost_the_same(step_profile):
    """Both see one training step, forward, backward and optimizer: one by its profile, one by its dispatches.
    (Where autograd adds gradients up it does so in place, but not under a dispatch mode: add_ and add are one here.)
    """
    step = training_step()
    with FlopMeter(CPU, as_cuda=False) as meter:
        step()
    traced = Counter()
    for op in meter.trace.ops:
        costs = costs_of(op.call)
        if costs:
            traced[op.call.name.rstrip("_"), sum(cost.flops for cost in costs), sum(cost.bytes for cost in costs)] += 1
    found = flopmeter.check(step_profile, CPU)
    checked = Counter()
    for row in found.rows:
        if row.op_class != "views, allocation":
            checked[row.name.rstrip("_"), row.flops // row.calls, row.bytes // row.calls] += row.calls
    assert found.unpriced == ()
    assert checked == traced


def test_a_product_is_told_in_flops_bytes_and_rates(tmp_path):
    """[64, 256] @ [256, 128] three times: 2·64·256·128 FLOP, (64·256 + 256·128 + 64·128)·4 bytes each."""
    a, b = torch.randn(64, 256), torch.randn(256, 128)
    found = flopmeter.check(recorded(lambda: [a @ b for _ in range(3)], tmp_path / "mm.json"), CPU)
    (row,) = found.rows
    assert (row.name, row.calls, row.shapes, row.dtype) == ("mm", 3, "[64,256] [256,128]", "fp32")
    assert row.flops == 3 * 2 * 64 * 256 * 128
    assert row.bytes == 3 * (64 * 256 + 256 * 128 + 64 * 128) * 4
    assert row.flop_per_s == pytest.approx(row.flops / row.measured_seconds)
    assert row.floor_seconds == pytest.approx(max(row.flops / 7.37e12, row.bytes / 460.8e9))
    assert found.mfu == pytest.approx(row.flops / found.span_seconds / 7.37e12)
    assert 0 < row.measured_seconds <= found.busy_seconds <= found.span_seconds


def test_measured_time_is_all_accounted_for(step_profile):
    """Ops do not overlap on one thread, so their times add up to what is covered."""
    found = flopmeter.check(step_profile, CPU)
    assert found.measured_seconds == pytest.approx(found.busy_seconds, rel=1e-6)
    assert sum(row.measured_seconds for row in found.by_class()) == pytest.approx(found.measured_seconds)
    assert 0 < found.idle_share < 1
    won = [row.to_win_seconds for row in found.rows]
    assert won == sorted(won, reverse=True)


def test_what_cannot_be_rebuilt_is_listed_with_its_time_and_the_reason(tmp_path):
    x = torch.randn(64, 64)

    def program():
        x.nonzero()
        x[torch.tensor([1, 2])]
        x.cumsum(0)

    path = recorded(program, tmp_path / "t.json")
    text = path.read_text().replace("aten::cumsum", "nobody_knows::it")  # as an op of a library that is not imported
    path.write_text(text)
    found = flopmeter.check(path, CPU)
    reasons = {row.name: row.reason for row in found.unpriced}
    assert reasons.keys() == {"nonzero", "index", "nobody_knows::it"}
    assert "depends on data" in reasons["nonzero"]
    assert "import the library" in reasons["nobody_knows::it"]
    assert all(row.measured_seconds > 0 for row in found.unpriced)
    assert all(name in found.render() for name in reasons)


def test_of_an_op_that_cannot_be_rebuilt_those_that_it_called_are(tmp_path):
    """A trace leaves out lists of more than 30 tensors; on a CPU `_foreach_add_` calls add_ for each."""
    xs = [torch.ones(100) for _ in range(31)]
    found = flopmeter.check(recorded(lambda: torch._foreach_add_(xs, 1.0), tmp_path / "t.json"), CPU)
    assert "add_" in {row.name for row in found.rows}
    assert sum(row.flops for row in found.rows) == 31 * 100
    (row,) = found.unpriced
    assert (row.name, row.reason) == ("_foreach_add_", "the trace leaves out lists of more than 30 tensors")
    assert 0 < row.measured_seconds < found.measured_seconds
    assert found.measured_seconds == pytest.approx(found.busy_seconds)


def test_a_number_beside_a_tensor_is_no_second_tensor(tmp_path):
    x = torch.randn(1000)
    (row,) = flopmeter.check(recorded(lambda: x * 2.5, tmp_path / "t.json"), CPU).rows
    assert (row.bytes, row.shapes) == (2 * 4000, "[1000]")


def test_the_type_of_tensors_in_a_list_is_an_assumption_that_is_printed(tmp_path):
    x = torch.randn(10, 10, dtype=torch.float64)
    found = flopmeter.check(recorded(lambda: torch.cat([x * x, x]), tmp_path / "t.json"), CPU)
    assert {row.name: row.bytes for row in found.rows}["cat"] == 2 * 2 * 100 * 8
    assert "assumed: the tensors in the lists of cat are float64" in found.render()


# --- a GPU --------------------------------------------------------------------------------------------------------


def cuda_trace(**changes):
    """A run as Kineto writes it (the fields are explained in flopmeter/measured/kineto.py), times in µs.

    0..60: linear [512, 1024] -> 4096 in bf16: addmm launches a kernel of 40 µs that starts at 30;
    60..80: relu, in two kernels of 10 µs, the second joined by its correlation alone, from 80 to 100;
    80..90: a copy from the host of 4 MB that takes 200 µs from 100 to 300; a view, which launches nothing;
    a kernel of 100 µs that no op launched, from 400 to 500.
    """
    bf16, fp32 = "c10::BFloat16", "float"

    def op(number, name, ts, dur, inputs):
        types, dims, strides, concrete = (list(column) for column in zip(*inputs, strict=True))
        args = {"External id": number, "Input type": types, "Input Dims": dims, "Input Strides": strides}
        return event("cpu_op", name, ts, dur, {**args, "Concrete Inputs": concrete}, pid=1)

    def event(category, name, ts, dur, args, pid=0):
        return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": 7, "ts": ts, "dur": dur, "args": args}

    def launch(ts, correlation, number):
        return event("cuda_runtime", "cudaLaunchKernel", ts, 5, {"correlation": correlation, "External id": number}, 1)

    x, weight, bias = (bf16, [512, 1024], [1024, 1], ""), (bf16, [4096, 1024], [1024, 1], ""), (bf16, [4096], [1], "")
    out, one = (bf16, [512, 4096], [4096, 1], ""), ("Scalar", [], [], "1")
    page = (fp32, [1024, 1024], [1024, 1], "")
    events = [
        op(1, "aten::linear", 0, 60, [x, weight, bias]),
        op(2, "aten::t", 2, 4, [weight]),
        op(3, "aten::addmm", 10, 40, [bias, x, (bf16, [1024, 4096], [1, 1024], ""), one, one]),
        op(4, "aten::relu", 60, 20, [out]),
        op(5, "aten::clamp_min", 62, 15, [out, ("Scalar", [], [], "0")]),
        op(6, "aten::copy_", 80, 10, [page, page, ("Scalar", [], [], "False")]),
        launch(20, 101, 3),
        launch(64, 102, 5),
        launch(70, 103, 5),
        launch(82, 104, 6),
        event("kernel", "ampere_bf16_gemm", 30, 40, {"External id": 3, "correlation": 101, "stream": 7}),
        event("kernel", "relu_part", 80, 10, {"External id": 5, "correlation": 102, "stream": 7}),
        event("kernel", "relu_rest", 90, 10, {"correlation": 103, "stream": 7}),
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 100, 200, {"External id": 6, "correlation": 104}),
        event("kernel", "triton_poi_fused_0", 400, 100, {"correlation": 999, "stream": 7}),
    ]
    devices = [{"id": 0, "name": "NVIDIA A100-SXM4-80GB", "totalGlobalMem": 85_000_000_000}]
    return {"schemaVersion": 1, "deviceProperties": devices, "traceEvents": events, **changes}


KERNELS = "ampere_bf16_gemm", "relu_part"
SQUARE = (4096, 4096), (4096, 4096), (4096,)


@pytest.fixture
def cuda_path(tmp_path):
    path = tmp_path / "cuda.json.gz"
    path.write_bytes(gzip.compress(json.dumps(cuda_trace()).encode()))
    return path


def test_the_kernels_of_a_gpu_are_joined_to_their_ops(cuda_path):
    found = flopmeter.check(cuda_path)
    assert found.hardware.name == "a100-sxm4-80gb"
    rows = {row.name: row for row in found.rows}
    measured = {name: row.measured_seconds for name, row in rows.items()}
    assert measured == pytest.approx({"addmm": 40e-6, "relu": 20e-6, "copy_": 200e-6})
    assert rows["addmm"].flops == 2 * 512 * 1024 * 4096 + 512 * 4096
    assert rows["addmm"].dtype == "bf16"
    assert rows["addmm"].floor_seconds == pytest.approx(2 * 512 * 1024 * 4096 / 312e12, rel=0.05)
    assert rows["relu"].floor_seconds == pytest.approx(2 * 512 * 4096 * 2 / 2039e9)
    assert found.rows[0].name == "copy_"


def with_large_product():
    """`cuda_trace` with [4096, 4096] squared, which feels the power limit."""
    trace = cuda_trace()
    addmm = next(one for one in trace["traceEvents"] if one["name"] == "aten::addmm")
    addmm["args"]["Input Dims"] = [[4096], [4096, 4096], [4096, 4096], [], []]
    addmm["args"]["Input Strides"] = [[1], [4096, 1], [1, 4096], [], []]
    return trace


def large_product_in_a_report(clocks):
    """Seconds."""
    x, weight, bias = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in SQUARE)
    with torch.inference_mode(), FlopMeter(A100, clocks=clocks) as meter:
        torch.addmm(bias, x, weight.t())
    (timing,) = meter.report().timings
    return timing.seconds


def predicted_addmm(found):
    return next(row.predicted_seconds for row in found.rows if row.name == "addmm")


@pytest.mark.parametrize("clocks", ["sustained", "burst"])
def test_a_kernel_is_predicted_as_in_a_report(tmp_path, clocks):
    """All of it: also the time in which a product waits for its first loads and last stores."""
    path = tmp_path / "t.json"
    path.write_text(json.dumps(with_large_product()))
    found = flopmeter.check(path, clocks=clocks)
    assert predicted_addmm(found) == pytest.approx(large_product_in_a_report(clocks))
    assert found.clocks == clocks
    assert "as asked" in found.render()


def test_a_profile_is_priced_at_the_clocks_that_its_matmuls_come_nearer_to(tmp_path):
    """A trace does not tell whether the device had run for seconds before it. Other kernels have no say."""
    trace = with_large_product()
    addmm, relu = (next(one for one in trace["traceEvents"] if one["name"] == name) for name in KERNELS)
    path = tmp_path / "t.json"
    seconds = {clocks: large_product_in_a_report(clocks) for clocks in ("sustained", "burst")}
    assert seconds["burst"] < 0.95 * seconds["sustained"]
    for clocks, beside, relu["dur"] in (("burst", 1.01, 40), ("sustained", 0.99, 1), ("sustained", 1.5, 1)):
        addmm["dur"] = 1e6 * beside * seconds[clocks]
        path.write_text(json.dumps(trace))
        found = flopmeter.check(path)
        assert (found.clocks, predicted_addmm(found)) == (clocks, pytest.approx(seconds[clocks]))
        assert f"to which the matmuls come nearer: {1 / beside:.2f} of their measured time" in found.render()
        assert json.loads(found.render("json"))["clocks"] == clocks


def test_clocks_that_there_are_not_are_refused(cuda_path):
    with pytest.raises(ValueError, match="must be one of sustained, burst, not 'boost'"):
        flopmeter.check(cuda_path, clocks="boost")


def test_a_copy_from_the_host_is_held_against_the_link(cuda_path):
    """4 MiB at the 32 GB/s that PCIe 4 has one way; memory would take a hundredth of the time."""
    (copy,) = (row for row in flopmeter.check(cuda_path).rows if row.name == "copy_")
    assert copy.floor_seconds == pytest.approx(4 * 2**20 / 32e9)
    assert copy.predicted_seconds > copy.floor_seconds


def test_the_share_of_the_time_that_a_gpu_idles(cuda_path):
    """Of 500 µs it runs 40 + 20 + 200 + 100; the host is in ops from 0 to 90."""
    found = flopmeter.check(cuda_path)
    assert found.span_seconds == pytest.approx(500e-6)
    assert found.busy_seconds == pytest.approx(360e-6)
    assert found.idle_share == pytest.approx(0.28)
    assert found.host_seconds == pytest.approx(90e-6)
    assert found.mfu == pytest.approx((2 * 512 * 1024 * 4096 + 512 * 4096) / (500e-6 * 312e12))


def test_a_kernel_that_no_op_launched_is_listed(cuda_path):
    found = flopmeter.check(cuda_path)
    (row,) = found.unpriced
    assert (row.name, row.calls, row.measured_seconds) == ("triton_poi_fused_0", 1, pytest.approx(100e-6))
    assert found.measured_seconds == pytest.approx(found.busy_seconds)
    assert "1 ops launched nothing" in found.render()


def test_calls_beside_another_stream_are_told_from_those_alone(tmp_path):
    """A copy on a stream of its own that begins during relu's second kernel leaves the product alone. On another
    device, or once relu has ended, it is beside nothing."""
    trace = cuda_trace()
    copy = next(one for one in trace["traceEvents"] if one["cat"] == "gpu_memcpy")
    alone = {}
    for stream, device, start in ((14, 0, 95), (14, 0, 100), (14, 1, 95), (7, 0, 95)):
        for one in trace["traceEvents"]:
            one["args"] |= {"device": 0} if one["cat"] == "kernel" else {}
        copy["args"] |= {"stream": stream, "device": device}
        copy["ts"] = start
        path = tmp_path / "t.json"
        path.write_text(json.dumps(trace))
        found = flopmeter.check(path)
        alone[stream, device, start] = found.alone_measured_seconds, "another stream" in found.render()
    assert alone.pop((14, 0, 95)) == (pytest.approx(40e-6), True)
    assert all(others == (pytest.approx(260e-6), False) for others in alone.values())


def test_time_in_which_an_op_runs_on_two_streams_counts_once(tmp_path):
    """As cuDNN runs groups of a convolution: relu's second kernel, on a stream of its own, begins 4 us before its first
    has ended and ends 6 us after it."""
    trace = cuda_trace()
    rest = next(one for one in trace["traceEvents"] if one["name"] == "relu_rest")
    rest["ts"], rest["args"]["stream"] = 86, 14
    path = tmp_path / "t.json"
    path.write_text(json.dumps(trace))
    (relu,) = (row for row in flopmeter.check(path).rows if row.name == "relu")
    assert relu.measured_seconds == pytest.approx(16e-6)


def test_tf32_is_told_by_the_name_of_the_kernel(tmp_path):
    """[4096, 4096] squared in fp32: at 156 TFLOP/s in TF32, at 19.5 without."""
    trace = cuda_trace()
    addmm, kernel = trace["traceEvents"][2], trace["traceEvents"][10]
    dims, strides = [[4096], [4096, 4096], [4096, 4096], [], []], [[1], [4096, 1], [4096, 1], [], []]
    addmm["args"] |= {"Input type": [*["float"] * 3, "Scalar", "Scalar"], "Input Dims": dims, "Input Strides": strides}
    floors = {}
    tensor_cores = "cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_256x128_32x3_nt_align4>"
    for name in ("ampere_sgemm_128x64_nn", "sm80_xmma_gemm_f32f32_tf32f32_f32_nn", tensor_cores):
        kernel["name"] = name
        path = tmp_path / "t.json"
        path.write_text(json.dumps(trace))
        floors[name] = next(row.floor_seconds for row in flopmeter.check(path).rows if row.name == "addmm")
    plain, *tf32 = floors.values()
    assert plain == pytest.approx(2 * 4096**3 / 19.5e12, rel=0.01)
    assert tf32 == pytest.approx([2 * 4096**3 / 156e12] * 2, rel=0.03)


def test_an_ampere_kernel_on_an_h100_is_told_by_its_name(tmp_path):
    """[4096, 4096] squared in bf16 by `mma` takes no less than at .63 of 989 TFLOP/s; what could be won is the same."""
    trace = cuda_trace(deviceProperties=[{"id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85_000_000_000}])
    addmm, kernel = trace["traceEvents"][2], trace["traceEvents"][10]
    addmm["args"]["Input Dims"] = [[4096], [4096, 4096], [4096, 4096], [], []]
    addmm["args"]["Input Strides"] = [[1], [4096, 1], [4096, 1], [], []]
    rows, notes = {}, {}
    for name in (
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n",
        "cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_64x3_tn",
    ):
        kernel["name"] = name
        path = tmp_path / "t.json"
        path.write_text(json.dumps(trace))
        found = flopmeter.check(path)
        rows[name] = next(row for row in found.rows if row.name == "addmm")
        notes[name] = ["Ampere's instructions" in found.render(), "the tile that their names tell" in found.render()]
    newer, older = rows.values()
    least = 2 * 4096**3 / (0.63 * 989.4e12)
    assert newer.predicted_seconds < least < older.predicted_seconds
    assert newer.floor_seconds == older.floor_seconds
    assert list(notes.values()) == [[False, False], [True, True]]


# --- formats, errors, the command ----------------------------------------------------------------------------------


def test_csv_and_json_hold_every_row_in_si_units(cuda_path):
    found = flopmeter.check(cuda_path)
    rows = list(csv.DictReader(io.StringIO(found.render("csv"))))
    assert [row["name"] for row in rows] == ["copy_", "addmm", "relu", "triton_poi_fused_0"]
    assert float(rows[1]["measured_seconds"]) == pytest.approx(40e-6)
    data = json.loads(found.render("json"))
    assert (data["kind"], data["hardware"], data["idle_share"]) == ("check", "a100-sxm4-80gb", pytest.approx(0.28))
    assert [row["name"] for row in data["ops"]] == ["copy_", "addmm", "relu"]
    assert [row["name"] for row in data["unpriced"]] == ["triton_poi_fused_0"]
    assert [row["name"] for row in data["classes"]] == ["tensor contraction", "element-wise", "data movement"]


@pytest.mark.parametrize("format", ["text", "markdown"])
def test_a_reader_sees_classes_ops_and_what_is_not_predicted(cuda_path, format):
    shown = flopmeter.check(cuda_path).render(format)
    for part in ("tensor contraction", "addmm", "[4096] [512,1024] [1024,4096] bf16", "triton_poi", "device idle 28 %"):
        assert part in shown


def test_a_profile_without_shapes_is_one_error(tmp_path):
    path = recorded(lambda: torch.ones(3) + 1, tmp_path / "t.json", record_shapes=False)
    with pytest.raises(ProfileError, match=r"recorded without shapes: use .*record_shapes=True"):
        flopmeter.check(path, CPU)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", r"is no JSON .*: give a trace that torch.profiler wrote with export_chrome_trace\(\)"),
        (b"\x1f\x8b broken", "is no JSON"),
        (b"\xff\xfe", "is no JSON"),
        (b"[]", "is no trace of torch.profiler"),
        (b'{"traceEvents": 5}', "is no trace of torch.profiler"),
        (b'{"traceEvents": [5, {"ph": "X"}, {"ph": "X", "ts": 0, "dur": "1", "name": "a"}]}', "holds no ops"),
    ],
)
def test_a_file_that_is_no_profile_is_one_error(tmp_path, content, expected):
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=expected):
        flopmeter.check(path, CPU)


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_profile_is_read_or_is_one_error(tmp_path, seed):
    """Three values of the CUDA trace, picked at random, become something else."""
    chance = random.Random(seed)
    trace = cuda_trace()
    for _ in range(3):
        place, key = chance.choice(list(places(trace)))
        place[key] = chance.choice([None, -1, 10**30, float("nan"), 0.5, "", "x", [], [[1]], {}, {"a": []}, True])
    path = tmp_path / "t.json"
    path.write_text(json.dumps(trace))
    try:
        found = flopmeter.check(path, A100)
    except ProfileError:
        return
    assert found.render("text")
    assert json.loads(found.render("json"))
    assert found.render("csv")


def places(value):
    """Every place in nested mappings and lists, as (mapping or list, key)."""
    if isinstance(value, (dict, list)):
        for key, below in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield value, key
            yield from places(below)


def test_the_hardware_must_be_known_and_of_the_kind_that_ran(cuda_path, step_profile, tmp_path):
    with pytest.raises(ProfileError, match="recorded on a CPU and does not name it: give the hardware"):
        flopmeter.check(step_profile)
    with pytest.raises(ProfileError, match="recorded on a CPU, but a100-sxm4-80gb is none"):
        flopmeter.check(step_profile, A100)
    with pytest.raises(ProfileError, match="recorded on a GPU, but cpu-epyc-9654 is a CPU"):
        flopmeter.check(cuda_path, CPU)
    unknown = tmp_path / "t.json"
    unknown.write_text(json.dumps(cuda_trace(deviceProperties=[{"name": "Quantum 9000"}])))
    with pytest.raises(flopmeter.HardwareError, match="no hardware is named 'Quantum 9000'"):
        flopmeter.check(unknown)
    unknown.write_text(json.dumps(cuda_trace(deviceProperties=[])))
    with pytest.raises(ProfileError, match="does not name its device"):
        flopmeter.check(unknown)
    assert flopmeter.check(unknown, "h100-sxm5-80gb").hardware.name == "h100-sxm5-80gb"


def test_the_command_prints_the_check_and_tells_errors_in_one_line(cuda_path, tmp_path, capsys):
    assert cli.main(["check", str(cuda_path), "--format", "csv"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == flopmeter.check(cuda_path).render("csv").rstrip("\n")
    assert cli.main(["check", str(tmp_path / "none.json")]) == 2
    assert capsys.readouterr().err == f"flopmeter: {tmp_path}/none.json cannot be read (No such file or directory)\n"
