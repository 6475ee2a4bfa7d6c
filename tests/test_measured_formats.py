"""`flopmeter check`: traces of older profilers, of guests of a hypervisor, ones that begin amid a run, and
arguments that are told in an uncommon way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import flopmeter
from flopmeter.measured.kineto import DeviceEvent, OpEvent, OpInputs, Span
from flopmeter.measured.rebuild import NotRebuilt, arguments_of

TRACES = Path(__file__).parent.parent / "validation" / "traces"
MODERN_ONLY = ("Input Strides", "Concrete Inputs")


def event(category, name, ts, dur, pid=1, **args):
    args = {name.replace("_", " ").capitalize(): value for name, value in args.items()}
    named = {"Input dims": "Input Dims", "External id": "External id", "Correlation": "correlation"}
    return {
        "ph": "X", "cat": category, "name": name, "pid": pid, "tid": 7, "ts": ts, "dur": dur,
        "args": {named.get(name, name): value for name, value in args.items()},
    }  # fmt: skip


def old_op(number, name, ts, dur, inputs):
    types, dims = (list(column) for column in zip(*inputs, strict=True))
    return event("cpu_op", name, ts, dur, external_id=number, input_type=types, input_dims=dims)


def launched(correlation, sent, name, ts, dur, category="kernel"):
    """A call of the driver and what it launched, as older Kinetos wrote them: neither names its op."""
    numbers = {"external_id": correlation, "correlation": correlation}
    return [
        event("cuda_runtime", "cudaLaunchKernel", sent, 5, **numbers),
        event(category, name, ts, dur, pid=0, **numbers),
    ]


SCALAR, NOTHING = ("Scalar", []), ("", [])


def old_events():
    """Whole µs, no strides, no values: a linear [512, 1024] -> 4096 in fp32 whose kernel takes 400 µs, a sum over its
    rows of 30 µs and a cat of 50 µs. The numbers of ops are those of driver's calls that other ops made."""
    x, weight, bias, out = (("float", dims) for dims in ([512, 1024], [4096, 1024], [4096], [512, 4096]))
    return [
        old_op(101, "aten::linear", 0, 60, [x, weight, bias]),
        old_op(102, "aten::t", 2, 4, [weight]),
        old_op(103, "aten::addmm", 10, 40, [bias, x, ("float", [1024, 4096]), SCALAR, SCALAR]),
        old_op(104, "aten::sum", 60, 20, [out, NOTHING, SCALAR, NOTHING]),
        old_op(105, "aten::cat", 80, 20, [("TensorList", []), SCALAR]),
        *launched(101, 20, "volta_sgemm", 100, 400),
        *launched(102, 65, "reduce_kernel", 500, 30),
        *launched(103, 90, "CatArrayBatchedCopy", 530, 50),
    ]


def checked(tmp_path, events, device="Tesla V100-SXM2-16GB", hardware=None):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"deviceProperties": [{"id": 0, "name": device}], "traceEvents": events}))
    return flopmeter.check(path, hardware)


def test_a_trace_of_an_older_profiler_is_read(tmp_path):
    """Without strides and values, and with driver's calls that do not name their op."""
    found = checked(tmp_path, old_events())
    rows = {row.name: row for row in found.rows}
    assert {name: row.measured_seconds for name, row in rows.items()} == pytest.approx({"addmm": 400e-6, "sum": 30e-6})
    assert rows["addmm"].flops == 2 * 512 * 1024 * 4096 + 512 * 4096
    assert rows["addmm"].bytes == 4 * (512 * 1024 + 1024 * 4096 + 4096 + 512 * 4096)
    assert rows["sum"].flops == 512 * 4096


def test_what_is_assumed_of_an_older_trace_is_told(tmp_path):
    shown = checked(tmp_path, old_events()).render()
    assert "assumed: tensors are contiguous" in shown
    assert "assumed: numbers, and lists of them, are the defaults" in shown


def test_of_lists_in_an_older_trace_nothing_is_known(tmp_path):
    (row,) = checked(tmp_path, old_events()).unpriced
    assert (row.name, row.measured_seconds) == ("cat", pytest.approx(50e-6))
    assert row.reason == "the trace leaves out tensors in lists"


def test_a_type_that_an_older_trace_does_not_tell_is_not_made_up(tmp_path):
    """`_to_copy` to an untold type is not priced; the copy that it calls tells both."""
    x, half = ("float", [1024, 1024]), ("c10::Half", [1024, 1024])
    events = [
        old_op(1, "aten::_to_copy", 0, 60, [x, SCALAR, SCALAR, NOTHING, NOTHING, SCALAR, NOTHING]),
        old_op(2, "aten::copy_", 10, 40, [half, x, SCALAR]),
        *launched(901, 20, "elementwise_kernel", 30, 40),
    ]
    (row,) = checked(tmp_path, events).rows
    assert (row.name, row.bytes) == ("copy_", 1024 * 1024 * (4 + 2))


def test_a_call_to_a_device_does_not_stop_the_check(tmp_path):
    """aten::to has overloads that no dispatcher knows, beside those that take what the trace tells."""
    x = {"input_type": ["float", "", "Scalar"], "input_dims": [[8], [], []]}
    to = event("cpu_op", "aten::to", 0, 60, external_id=1, **x)
    to["args"] |= {"Input Strides": [[1], [], []], "Concrete Inputs": ["", "", "'cuda:0'"]}
    copied = old_op(2, "aten::copy_", 10, 40, [("float", [8]), ("float", [8]), SCALAR])
    found = checked(tmp_path, [to, copied, *launched(901, 20, "Memcpy HtoD", 30, 40, "gpu_memcpy")])
    assert [row.name for row in found.rows] == ["copy_"]


def test_a_kernel_that_was_sent_before_the_profile_began_is_left_out_and_told(tmp_path):
    """Of the step before a device may still run kernels (a third of the device's time in a trace of one step)."""
    early = event("kernel", "early", -900, 1000, pid=0, correlation=7)
    stray = launched(999, 5000, "triton_poi_fused_0", 6000, 10)
    lost = event("kernel", "lost", 6100, 10, pid=0, correlation=1200)
    found = checked(tmp_path, [*old_events(), early, *stray, lost])
    reasons = {row.name: row.reason for row in found.unpriced}
    assert "early" not in reasons
    assert "left out: 1 kernels, 1 ms, that were sent before the profile began" in found.notes
    assert found.span_seconds == pytest.approx(6110e-6)
    assert reasons["lost"] == "the trace holds no call that launched it"
    assert reasons["triton_poi_fused_0"].startswith("launched outside of any op")


def test_kernels_that_a_node_of_autograd_launched_itself_are_listed(tmp_path):
    """A replayed graph inside of a compiled function: no op is there to be priced."""
    node = old_op(1, "CompiledFunctionBackward", 0, 100, [("float", [8])])
    events = [node, *launched(901, 20, "volta_sgemm", 30, 40), *launched(902, 30, "volta_sgemm", 80, 50)]
    (row,) = checked(tmp_path, events).unpriced
    assert (row.name, row.measured_seconds) == ("CompiledFunctionBackward", pytest.approx(90e-6))
    assert row.reason.startswith("launched outside of any op")


def test_an_older_trace_tells_what_a_cat_joined_by_its_gradient(tmp_path):
    """Three parts of [1024, 8], [1024, 8] and [1024, 8] fp32: 96 KiB are read and 96 KiB written."""
    cat = old_op(1, "aten::cat", 0, 20, [("TensorList", []), SCALAR])
    narrow = [old_op(10 + i, "aten::narrow", 101 + i, 1, [("float", [1024, 24]), *[SCALAR] * 3]) for i in range(3)]
    node = old_op(2, "CatBackward0", 100, 50, [("float", [1024, 24])])
    for one in (cat, node):
        one["args"]["Sequence number"] = 77
    found = checked(tmp_path, [cat, node, *narrow, *launched(901, 5, "CatArrayBatchedCopy", 30, 40)])
    (row,) = found.rows
    assert (row.name, row.bytes) == ("cat", 2 * 1024 * 24 * 4)
    assert row.shapes == "[1024,8] [1024,8] [1024,8]"


def test_an_older_trace_tells_the_normalized_shape_by_the_weight(tmp_path):
    x, weight, mean = ("float", [1024, 512]), ("float", [512]), ("float", [1024, 1])
    events = [
        old_op(1, "aten::native_layer_norm", 0, 20, [x, NOTHING, weight, weight, SCALAR]),
        old_op(2, "aten::native_layer_norm_backward", 30, 20, [x, x, NOTHING, mean, mean, weight, weight, NOTHING]),
        *launched(901, 5, "vectorized_layer_norm_kernel", 30, 14),
        *launched(902, 35, "layer_norm_grad_input_kernel", 50, 15),
    ]
    rows = {row.name: row.bytes for row in checked(tmp_path, events).rows}
    of_x, of_weight, of_rows = 4 * 1024 * 512, 4 * 512, 4 * 1024
    assert rows["native_layer_norm"] == 2 * of_x + 2 * of_weight + 2 * of_rows  # x, y; weight, bias; mean, rstd
    assert rows["native_layer_norm_backward"] >= 3 * of_x


def test_a_collective_says_that_its_ranks_are_not_told(tmp_path):
    reduced = old_op(1, "c10d::allreduce_", 0, 60, [("TensorList", []), NOTHING, SCALAR, SCALAR])
    (row,) = checked(tmp_path, [reduced, *launched(901, 20, "ncclKernel_AllReduce", 30, 40)]).unpriced
    assert row.reason == "a collective: the trace does not tell of which ranks"


@pytest.mark.parametrize("device", ["AMD Instinct MI300X VF", "AMD Instinct MI300X"])
def test_a_guest_of_a_hypervisor_has_the_whole_device(tmp_path, device):
    assert checked(tmp_path, old_events(), device).hardware.name == "mi300x"


def test_a_composite_that_launched_a_kernel_itself_is_an_op(tmp_path):
    """Of rms_norm torch has a kernel on GPUs and makes it of other ops elsewhere: x is read and y is written."""
    x, weight = ("float", [1024, 512]), ("float", [512])
    norm = old_op(1, "aten::_fused_rms_norm", 0, 20, [x, ("ScalarList", []), weight, NOTHING])
    norm["args"] |= {"Input Strides": [[512, 1], [], [1], []], "Concrete Inputs": ["", "[512]", "", ""]}
    (row,) = checked(tmp_path, [norm, *launched(901, 5, "vectorized_layer_norm_kernel", 30, 14)]).rows
    assert (row.name, row.bytes) == ("_fused_rms_norm", 4 * (2 * 1024 * 512 + 512 + 1024))  # and 1/rms of each row


@pytest.mark.parametrize(("ranks", "listed", "gigabytes_per_s"), [(1, 2, 16), (2, 2, 8), (8, 8, 8), (2, 1, 16)])
def test_ranks_share_the_link_from_their_switch_to_the_host(tmp_path, ranks, listed, gigabytes_per_s):
    """Two V100s of a DGX-1 have one PCIe 3.0 x16 to the CPU: 16 GB/s one way. (2 ranks on 2 hosts have one each.)"""
    x = ("float", [1024, 1024])
    document = {
        "deviceProperties": [{"id": number, "name": "Tesla V100-SXM2-16GB"} for number in range(listed)],
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": ranks},
        "traceEvents": [
            old_op(1, "aten::copy_", 0, 60, [x, x, SCALAR]),
            *launched(901, 20, "Memcpy HtoD (Pinned -> Device)", 30, 600, "gpu_memcpy"),
        ],
    }
    (tmp_path / "trace.json").write_text(json.dumps(document))
    found = flopmeter.check(tmp_path / "trace.json")
    assert found.rows[0].floor_seconds == pytest.approx(4 * 2**20 / (gigabytes_per_s * 1e9))
    assert any("over a link that their devices share" in note for note in found.notes) == (gigabytes_per_s == 8)


def test_the_backward_of_fused_attention_is_priced_though_its_lengths_are_no_tensors():
    """cuDNN's and FlashAttention's for sequences of one length; random numbers' seeds are of 64 bits without a sign."""
    found = flopmeter.check(TRACES / "h200_kernels_attention.json.gz")
    for name in ("_scaled_dot_product_cudnn_attention_backward", "_scaled_dot_product_flash_attention_backward"):
        rows = [row for row in found.rows if row.name == name]
        measured = sum(row.measured_seconds for row in rows)
        assert sum(row.predicted_seconds for row in rows) == pytest.approx(measured, rel=0.15)
    assert not found.unpriced


def test_an_index_that_repeats_is_an_argument_like_any_other():
    """The types of tokens in BERT are one row for all sequences."""
    dims, strides = ((16, 512, 1024), (16, 512), (), (), ()), ((524288, 1024, 1), (0, 1), (), (), ())
    told = OpInputs(("float", "long int", *("Scalar",) * 3), dims, strides, ("", "", "2", "-1", "False"))
    call = arguments_of(OpEvent("aten::embedding_dense_backward", Span(0, 1), told), torch.float32)
    assert call.args[1].stride() == (0, 1)
    assert call.args[1].untyped_storage().nbytes() == 512 * 8
    assert call.args[2:] == (2, -1, False)


def test_what_autograd_keeps_of_a_tensor_that_an_op_overwrites_is_a_copy_of_its_own():
    """silu_ in training: its kernel and a copy, 78 and 74 µs of 152 for 57.8 million elements on an H100."""
    rows = flopmeter.check(TRACES / "h100_efficientnet_b0_nhwc_train.json.gz").rows
    times = {row.name: row for row in rows if row.shapes == "[128,144,56,56]" and row.name in ("silu_", "clone")}
    assert set(times) == {"silu_", "clone"}
    for row in times.values():
        assert row.measured_seconds / row.calls == pytest.approx(76e-6, rel=0.05)
        assert row.predicted_seconds == pytest.approx(row.measured_seconds, rel=0.15)


def test_of_overloads_that_take_the_same_arguments_the_one_is_called_that_converts_none():
    """std(x, [1], True, False): whether to correct, or by how much."""
    told = OpInputs(("float", "ScalarList", *("Scalar",) * 2), ((4, 8), (), (), ()), ((8, 1), (), (), ()),
                    ("", "[1]", "True", "False"))  # fmt: skip
    call = arguments_of(OpEvent("aten::std", Span(0, 1), told), torch.float32)
    assert (call.func, call.conversions) == (torch.ops.aten.std.dim, 0)


def test_a_number_that_decides_about_the_work_is_not_made_up(tmp_path):
    """An older trace tells no numbers: of a sum along a dimension any will do, of the k largest none."""
    x = ("float", [1024, 512])
    events = [
        old_op(1, "aten::topk", 0, 20, [x, *[SCALAR] * 4]),
        old_op(2, "aten::cumsum", 30, 20, [x, SCALAR, NOTHING]),
        *launched(901, 5, "radix", 30, 14),
        *launched(902, 35, "scan", 50, 15),
    ]
    found = checked(tmp_path, events)
    assert [(row.name, row.bytes) for row in found.rows] == [("cumsum", 2 * 4 * 1024 * 512)]
    assert [(row.name, row.reason) for row in found.unpriced] == [
        ("topk", "no overload takes what the trace tells of the arguments")
    ]


def test_a_kernel_is_of_the_op_that_it_names_also_where_the_call_names_another(tmp_path):
    x = ("float", [1024])
    events = [
        old_op(1, "aten::exp", 0, 20, [x]),
        old_op(2, "aten::relu", 30, 20, [x]),
        event("cuda_runtime", "cudaLaunchKernel", 35, 5, external_id=2, correlation=9),
        event("kernel", "some_kernel", 50, 15, pid=0, external_id=1, correlation=9),
    ]
    assert [row.name for row in checked(tmp_path, events).rows] == ["exp"]


def test_numbers_are_read_as_python_writes_them_and_tensors_as_far_as_they_reach():
    """Two rows of 3, each seen five times."""
    told = OpInputs(("float", "Scalar"), ((2, 5, 3), ()), ((3, 0, 1), ()), ("", "-inf"))
    call = arguments_of(OpEvent("aten::clamp_min", Span(0, 1), told), torch.float32)
    assert call.args[1] == float("-inf")
    assert call.args[0].untyped_storage().nbytes() == 4 * 2 * 3
    unknown = told._replace(concrete=("", "nobody knows"))
    with pytest.raises(NotRebuilt, match="no overload takes"):
        arguments_of(OpEvent("aten::clamp_min", Span(0, 1), unknown), torch.float32)


JOINS = "void at::native::CatArrayBatchedCopy_vectorized<at::native::OpaqueType<{}u>, unsigned int, 3, 128>(char*)"
MULTIPLIES = "void at::native::multi_tensor_apply_kernel<at::native::BinaryOpScalarFunctor<{}, 1, 1, 0>, float>(int)"


@pytest.mark.parametrize(
    ("op", "others", "kernel", "dtype"),
    [
        ("aten::cat", [("Scalar", (), (), "0")], JOINS.format(2), torch.bfloat16),  # or any of two bytes
        ("aten::cat", [("Scalar", (), (), "0")], JOINS.format(4), torch.float32),
        ("aten::_foreach_mul_", [("Scalar", (), (), "2.")], MULTIPLIES.format("c10::Half"), torch.float16),
        ("aten::_foreach_mul_", [("Scalar", (), (), "2.")], MULTIPLIES.format("float"), torch.float32),
        ("aten::cat", [("Scalar", (), (), "0")], "a_kernel_of_another_library", torch.float64),
    ],
)
def test_the_names_of_kernels_tell_the_type_of_tensors_in_lists(op, others, kernel, dtype):
    """Else it is the one that the trace has most of, which the report says."""
    types, dims, strides, concrete = zip(("TensorList", ((4, 8), (4, 8)), ((8, 1), (8, 1)), ""), *others, strict=True)
    launched = [DeviceEvent(kernel, False, Span(0, 1))]
    event = OpEvent(op, Span(0, 1), OpInputs(types, dims, strides, concrete), launched=launched)
    call = arguments_of(event, torch.float64)
    assert {tensor.dtype for tensor in call.args[0]} == {dtype}
    assert call.assumes_dtype == (dtype is torch.float64)


def test_joins_of_16_bits_take_the_measured_time_among_ops_of_32():
    rows = [row for row in flopmeter.check(TRACES / "h100_kernels_pointwise.json.gz").rows if row.name == "cat"]
    assert len(rows) == 3
    for row in rows:
        assert row.predicted_seconds == pytest.approx(row.measured_seconds, rel=0.07)
