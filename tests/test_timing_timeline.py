"""The launch timeline: the host enqueues, the device follows, some kernels make the host wait."""

from dataclasses import replace

import pytest
import torch

from flopmeter import FlopMeter, available_hardware, load_hardware
from flopmeter.ask.what_if import what_if
from flopmeter.timing import Host
from flopmeter.trace.streams import MetaStream, stream

A100 = load_hardware("a100-sxm4-80gb")
HOST = Host(launch_seconds=10e-6, view_seconds=2e-6, module_call_seconds=0.0)


def metered(program, hardware=A100):
    with torch.inference_mode(), FlopMeter(hardware, host=HOST) as meter:
        program()
    return meter.report()


def meta(*shape):
    return torch.empty(*shape, device="meta")


def test_a_tiny_kernel_starts_when_the_host_has_sent_it():
    x = meta(16)
    report = metered(lambda: [x + 1 for _ in range(3)])
    assert [timing.start_seconds for timing in report.timings] == pytest.approx([10e-6, 20e-6, 30e-6])
    assert [timing.enqueued_seconds for timing in report.timings] == pytest.approx([10e-6, 20e-6, 30e-6])
    assert {timing.regime for timing in report.timings} == {"overhead"}


def test_a_view_delays_the_kernel_after_it():
    x = meta(16, 16)
    report = metered(lambda: x.t() + 1)
    assert report.timings[0].start_seconds == pytest.approx(12e-6)


def test_a_long_kernel_hides_the_launches_behind_it():
    x, small = meta(1 << 28), meta(16)
    report = metered(lambda: (x + 1, small + 1, small + 1))
    first, second, third = report.timings
    assert second.start_seconds == pytest.approx(first.start_seconds + first.seconds)
    assert second.enqueued_seconds == pytest.approx(20e-6)
    assert second.wait_seconds == third.wait_seconds == 0
    assert report.seconds == pytest.approx(third.start_seconds + third.seconds)


def test_on_several_streams_too_a_long_kernel_hides_the_launches_behind_it():
    """That of the other stream waits, too: the blocks of the long one have every SM."""
    x, small = meta(1 << 28), meta(16)

    def program():
        x.add(1), small.add(1)
        with stream(MetaStream()):
            small.add(1)

    first, second, aside = metered(program).timings
    assert [timing.enqueued_seconds for timing in (first, second, aside)] == pytest.approx([10e-6, 20e-6, 30e-6])
    assert second.start_seconds == aside.start_seconds == pytest.approx(first.end_seconds)
    assert second.wait_seconds == 0


def test_item_makes_the_host_wait_for_the_device():
    """Without it the launches hide behind the first kernel; after it they start from an empty queue."""
    x, small = meta(1 << 28), meta(16)

    def program(sync):
        x.add_(1)
        steps = torch.arange(4, device="meta").max()
        if sync:
            assert steps.item() == 3
        return small + 1

    assert metered(lambda: program(sync=True)).timings[-1].wait_seconds == pytest.approx(10e-6)
    assert metered(lambda: program(sync=False)).timings[-1].wait_seconds == 0


def test_a_copy_from_the_host_is_priced_over_pcie_and_waits_unless_told_not_to():
    """PCIe 4, 16 lanes: 32 GB/s one way, of which 88 % are reached."""
    batch = torch.empty(250_000_000)  # 1 GB
    report = metered(lambda: batch.to("meta"))
    (timing,) = report.timings
    assert timing.kernel_class == "host copy"
    assert timing.memory_seconds == pytest.approx(1 / (32 * 0.88), rel=1e-3)
    small = meta(16)
    waiting = metered(lambda: (batch.to("meta"), small + 1)).timings[-1]
    running_ahead = metered(lambda: (batch.to("meta", non_blocking=True), small + 1)).timings[-1]
    assert waiting.wait_seconds == pytest.approx(10e-6)
    assert running_ahead.wait_seconds == 0


def test_half_the_host_time_halves_an_overhead_bound_run_and_leaves_a_busy_one():
    def seconds(size, host):
        x = meta(size)
        with FlopMeter(A100, host=host) as meter:
            for _ in range(100):
                x = x + 1
        return meter.report().seconds

    halved = Host(launch_seconds=HOST.launch_seconds / 2)
    assert seconds(16, halved) == pytest.approx(seconds(16, Host(launch_seconds=HOST.launch_seconds)) / 2, rel=0.02)
    assert seconds(1 << 26, halved) == pytest.approx(seconds(1 << 26, HOST), rel=0.01)


CPU = load_hardware("cpu-xeon-8480plus")


@pytest.mark.parametrize("elements", [16, 1 << 24])
def test_on_a_cpu_dispatch_and_work_add_up_since_one_thread_does_both(elements):
    """On a GPU the launches of long kernels hide behind the kernel before."""
    x = meta(elements)
    report = metered(lambda: [x + 1 for _ in range(10)], CPU)
    assert report.seconds == pytest.approx(10 * HOST.launch_seconds + report.kernel_seconds)
    assert report.idle_seconds == pytest.approx(report.launch_seconds) == pytest.approx(10 * HOST.launch_seconds)
    assert [timing.wait_seconds for timing in report.timings] == pytest.approx([HOST.launch_seconds] * 10)


def test_every_profile_of_a_cpu_says_that_it_is_one_and_no_other_does():
    cpus = {name for name in available_hardware() if load_hardware(name).is_cpu}
    assert cpus == {name for name in available_hardware() if name.startswith("cpu-")}


def test_the_host_of_a_profile_sends_the_kernels_unless_the_caller_names_another():
    """100 kernels of next to no work, at 1 ms each as the profile has it, then at 10 µs as the caller has it."""
    slow = A100.replace(host={"launch_seconds": 1e-3, "source": "a slow one"})

    def program():
        for _ in range(100):
            torch.empty(16, device="meta").add_(1)

    with FlopMeter(slow) as meter:
        program()
    assert meter.report().seconds == pytest.approx(0.1, rel=0.01)
    assert meter.report(hardware=A100).seconds < 0.002
    assert what_if(meter.report()).speedup["overhead"] == pytest.approx(2, rel=0.01)
    assert metered(program, slow).seconds == pytest.approx(100 * (HOST.launch_seconds + HOST.view_seconds), rel=0.01)


def test_from_one_node_of_a_graph_to_the_next_the_device_needs_its_time_or_the_kernels_own():
    """A copy's time is that of its bytes: 2·4·n / bandwidth. A kernel takes its time and the floor, 0.2 us here, or 1.2
    us where that is more."""
    quick = replace(A100, kernel_floor_us=0.2)
    for n in (16, 1 << 14, 1 << 17, 1 << 22):
        with torch.inference_mode(), FlopMeter(quick, host=HOST) as meter:
            torch.add(meta(n), 1)
        (timing,) = meter.report(mode="eager-cudagraph").timings
        assert timing.compute_seconds < timing.work_seconds
        assert timing.seconds == pytest.approx(max(timing.work_seconds + 0.2e-6, 1.2e-6), rel=1e-9)


# --- what the host spends ------------------------------------------------------------------------------------------


def enqueued(program, mode="eager", host=None):
    with torch.inference_mode(), FlopMeter(A100, host=host) as meter:
        program()
    return meter.report(mode=mode).launch_seconds


def test_a_call_of_a_library_costs_the_host_more_than_a_kernel_of_torchs_own():
    """Traces of an H100: 24 to 40 µs of the CPU for a matmul, 8 to 12 for an addition, with the profiler's 1 to 2."""
    x, image, filters = meta(64, 64), meta(1, 8, 8, 8), meta(8, 8, 3, 3)
    added = enqueued(lambda: x + x)
    for program in (lambda: x @ x, lambda: torch.conv2d(image, filters)):
        assert 24e-6 - 2e-6 < enqueued(program) < 40e-6
    assert 6e-6 <= added < 12e-6
    heads = meta(1, 4, 64, 64).half()
    attention = enqueued(lambda: torch.nn.functional.scaled_dot_product_attention(heads, heads, heads))
    assert attention > added + 20e-6


def test_in_compiled_code_a_matmul_is_called_as_in_eager_code_and_a_kernel_of_inductors_is_launched():
    host = Host(launch_seconds=10e-6, library_seconds=20e-6, triton_launch_seconds=5e-6)
    x = meta(64, 64)
    a_call = enqueued(lambda: x + x, "compiled", host) - 5e-6
    assert 2e-5 < a_call < 1e-4  # the guards of one tensor
    assert enqueued(lambda: (x @ x) + x, "compiled", host) == pytest.approx(a_call + 30e-6 + 5e-6)
    assert enqueued(lambda: x.kthvalue(3), "compiled", host) == pytest.approx(a_call + 10e-6)  # left to eager PyTorch
    replayed = [enqueued(program, "cudagraph", host) for program in (lambda: x + x, lambda: (x @ x) + x)]
    assert replayed[0] == replayed[1]


@pytest.mark.parametrize(
    ("measured_ms", "counts", "host"),
    [
        # Llama-2-7B decoding on a DGX A100, torch 2.1 (HF optimum-benchmark): 38.7 tokens/s.
        (25.8, {"kernels": 1184, "libraries": 289, "views": 1490, "modules": 422}, Host()),
        # ViT-B/16 and ConvNeXt-L at batch 1 on an A100 in a cloud, torch 2.0.1 (transformers' docs).
        (9.325, {"kernels": 100, "libraries": 98, "views": 450, "modules": 176}, Host(relative_time=1.4)),
        (10.41, {"kernels": 193, "libraries": 113, "views": 298, "modules": 270}, Host(relative_time=1.4)),
    ],
)
def test_published_runs_that_wait_for_the_host_take_what_their_ops_views_and_modules_cost(measured_ms, counts, host):
    ops = counts["kernels"] * host.op_seconds(is_library=False) + counts["libraries"] * host.op_seconds(is_library=True)
    total = ops + host.before_op_seconds(counts["views"], counts["modules"])
    assert total == pytest.approx(measured_ms * 1e-3, rel=0.12)


def test_a_slower_cpu_takes_longer_for_everything():
    x = meta(64, 64)

    def program():
        return torch.nn.Linear(64, 64, device="meta")(x.t()) + 1

    assert enqueued(program, host=Host(relative_time=1.4)) == pytest.approx(1.4 * enqueued(program, host=Host()))


def test_a_run_that_waits_for_the_host_says_what_the_host_was_taken_to_cost():
    x, large = meta(64, 64), meta(1 << 28)
    with FlopMeter(A100, host=Host(relative_time=2.0, source="a laptop")) as meter:
        x + 1
    (note,) = (note for note in meter.report().notes if note.startswith("the host: "))
    assert "13 µs an op, 62 µs more for a library's kernel" in note
    assert note.endswith("(a laptop)")
    with FlopMeter(A100) as meter:
        large + 1
    assert not any(note.startswith("the host: ") for note in meter.report().notes)
