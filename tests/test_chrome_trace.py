"""The predicted timeline as a Chrome trace: by the rules of the format, by torch's own readers, and by counting."""

import copy
import gzip
import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch._functorch.benchmark_utils import compute_utilization
from torch._inductor.analysis.profile_analysis import JsonProfile

from flopmeter import FlopMeter
from flopmeter.models import BUILTINS, training_step
from flopmeter.report.chrome_trace import save_together

FIELDS = {
    "M": {"name", "pid", "args"},
    "X": {"name", "cat", "ts", "dur", "pid", "tid", "args"},
    "s": {"name", "cat", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"},
    "C": {"name", "pid", "ts", "args"},
}
MODES = ("eager", "compiled", "cudagraph", "eager-cudagraph")


def breaches(events):
    """What in the events breaks the rules of the format, as texts: fields, order, nesting, arrows, counters."""
    found = [f"{event} lacks a field" for event in events if not FIELDS[event["ph"]] <= set(event)]
    if found:
        return found
    found += [f"{event} has a negative time" for event in events if event.get("ts", 0) < 0 or event.get("dur", 0) < 0]
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    found += [f"track {track} has no name" for track in tracks if track not in named]
    for track in tracks.values():
        found += _overlaps(track)
    return found + _loose_arrows(events, tracks) + _bad_counters(events)


def _overlaps(track):
    found, around = [], []
    for before, after in pairwise(track):
        if after["ts"] < before["ts"]:
            found.append(f"{after['name']} comes late in the file")
    for event in track:
        while around and end(around[-1]) <= event["ts"]:
            around.pop()
        if around and end(event) > end(around[-1]):
            found.append(f"{event['name']} ends after {around[-1]['name']}, in which it began")
        around.append(event)
    return found


def _loose_arrows(events, tracks):
    tails = {event["id"]: event for event in events if event["ph"] == "s"}
    heads = {event["id"]: event for event in events if event["ph"] == "f"}
    found = [f"arrow {id} has one end" for id in tails.keys() ^ heads.keys()]
    if sum(event["ph"] in "sf" for event in events) != len(tails) + len(heads):
        found.append("two arrows have one id")
    starts = {place: {event["ts"] for event in track} for place, track in tracks.items()}
    for id in tails.keys() & heads.keys():
        if tails[id]["ts"] > heads[id]["ts"]:
            found.append(f"arrow {id} leads back in time")
        for event in (tails[id], heads[id]):
            if event["ts"] not in starts.get((event["pid"], event["tid"]), ()):
                found.append(f"arrow {id} begins or ends in no slice")
    return found


def _bad_counters(events):
    counters = [event for event in events if event["ph"] == "C"]
    found = [f"{c} counts no number" for c in counters if not all(isinstance(n, int) for n in c["args"].values())]
    times = [counter["ts"] for counter in counters]
    return found + ([] if times == sorted(times) else ["the counter goes back in time"])


def end(event):
    """In µs, to the whole nanosecond: what is added up in floats is off by less."""
    return round(event["ts"] + event["dur"], 3)


def read(report, path):
    report.save_trace(path)
    return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def of_category(events, category):
    return [event for event in events if event.get("cat") == category]


@pytest.fixture(scope="module")
def meter():
    model, inputs = BUILTINS["gpt2-124m"](batch=2)
    optimizer = torch.optim.AdamW(model.parameters())
    with FlopMeter("h100-sxm5-80gb") as metered:
        training_step(model, inputs, optimizer)
    return metered


@pytest.fixture(scope="module")
def reports(meter):
    return {mode: meter.report(mode=mode) for mode in MODES}


@pytest.mark.parametrize("mode", MODES)
def test_a_trace_keeps_the_rules_of_the_format(reports, mode, tmp_path):
    assert breaches(read(reports[mode], tmp_path / "trace.json")) == []


@pytest.mark.parametrize(
    ("spoil", "breach"),
    [
        (lambda events: first(events, "X").pop("dur"), "lacks a field"),
        (lambda events: first(events, "X").update(dur=-1.0), "negative time"),
        (lambda events: first(events, "X").update(tid=99), "has no name"),
        (lambda events: of_category(events, "cpu_op")[0].update(dur=1e9), "ends after"),
        (lambda events: events.reverse(), "comes late"),
        (lambda events: events.remove(first(events, "s")), "has one end"),
        (lambda events: first(events, "s").update(ts=1e9), "leads back in time"),
        (lambda events: first(events, "f").update(tid=1), "in no slice"),
        (lambda events: first(events, "C").update(ts=1e9), "goes back in time"),
        (lambda events: first(events, "C")["args"].update(inputs="1 GB"), "counts no number"),
    ],
)
def test_a_spoiled_trace_is_noticed(reports, tmp_path, spoil, breach):
    events = copy.deepcopy(read(reports["eager"], tmp_path / "trace.json"))
    spoil(events)
    assert any(breach in text for text in breaches(events))


def test_of_runs_in_one_trace_the_processes_of_the_first_stand_above_those_of_the_next(reports, tmp_path):
    together = {"one": reports["eager"], "two": reports["compiled"], "three": reports["eager"]}
    save_together(together, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    places = {event["pid"]: event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"}
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert len({*places.values()}) == len(places) == 6
    runs = [names[pid].partition(":")[0] for pid in sorted(places, key=places.__getitem__)]
    assert runs == ["one", "one", "two", "two", "three", "three"]


def first(events, phase):
    return next(event for event in events if event["ph"] == phase)


@pytest.mark.parametrize("mode", MODES)
def test_the_kernels_of_the_trace_are_those_of_the_report(reports, mode, tmp_path):
    report = reports[mode]
    events = read(report, tmp_path / "trace.json")
    kernels = of_category(events, "kernel")
    assert [kernel["name"] for kernel in kernels] == [kernel.cost.name for kernel in report.kernels]
    assert sum(kernel["args"]["flops"] for kernel in kernels) == report.flops
    assert sum(kernel["args"]["bytes read"] for kernel in kernels) == report.bytes_read
    assert sum(kernel["dur"] for kernel in kernels) == pytest.approx(report.kernel_seconds * 1e6, rel=1e-3)
    assert max(map(end, [*kernels, *of_category(events, "cpu_op")])) == pytest.approx(report.seconds * 1e6)
    assert sum(event["ph"] == "s" for event in events) == len(kernels)


@pytest.mark.parametrize("mode", MODES)
def test_launches_take_the_time_of_the_host(reports, mode, tmp_path):
    launches = of_category(read(reports[mode], tmp_path / "trace.json"), "cpu_op")
    assert sum(launch["dur"] for launch in launches) == pytest.approx(reports[mode].launch_seconds * 1e6)


def test_a_kernel_starts_after_its_launch_has_ended(reports, tmp_path):
    events = read(reports["eager"], tmp_path / "trace.json")
    launches = {launch["args"]["External id"]: launch for launch in of_category(events, "cpu_op")}
    for kernel in of_category(events, "kernel"):
        assert kernel["ts"] >= end(launches[kernel["args"]["External id"]])


def test_modules_are_nested_as_the_model_calls_them(reports, tmp_path):
    scopes = of_category(read(reports["eager"], tmp_path / "trace.json"), "user_annotation")
    assert [scope["name"] for scope in scopes if not scope["args"]] == ["forward", "backward", "optimizer"]
    (model, *_) = (scope for scope in scopes if scope["name"] == "GPT2")
    blocks = [scope for scope in scopes if scope["name"].startswith("blocks.") and end(scope) <= end(model)]
    assert [block["name"] for block in blocks] == [f"blocks.{number}" for number in range(12)]
    assert blocks[7]["args"] == {"module": "GPT2.blocks.7"}
    inside = [s["name"] for s in scopes if blocks[7]["ts"] <= s["ts"] and end(s) <= end(blocks[7])]
    assert {"attention", "qkv", "out"} <= set(inside)


def test_a_replayed_graph_is_one_launch_with_an_arrow_to_each_kernel(reports, tmp_path):
    report = reports["eager-cudagraph"]
    events = read(report, tmp_path / "trace.json")
    replays = [launch for launch in of_category(events, "cpu_op") if launch["name"].startswith("replay")]
    graphs = {graph for graph in report.launches.graphs if graph is not None}
    assert len(replays) == len(graphs) > 0
    arrows = [event for event in events if event["ph"] == "s" and event["ts"] == replays[0]["ts"]]
    assert len(arrows) == report.launches.graphs.count(0)


def test_the_memory_counter_reaches_the_peak_and_only_changes_are_written(reports, tmp_path):
    counts = [event["args"] for event in read(reports["eager"], tmp_path / "trace.json") if event["ph"] == "C"]
    assert max(sum(count.values()) for count in counts) == reports["eager"].peak_memory_bytes
    assert all(before != after for before, after in pairwise(counts))


def test_each_stream_is_a_track(reports, tmp_path):
    """Every fifth kernel on a stream of its own, as if it were a collective."""
    report = reports["eager"]
    timings = [
        timing._replace(stream=1, is_collective=True) if number % 5 == 0 else timing
        for number, timing in enumerate(report.timings)
    ]
    events = read(replace(report, timings=timings), tmp_path / "trace.json")
    assert breaches(events) == []
    titles = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 0]
    assert titles == ["kernels", "communication"]
    on_second = [event for event in of_category(events, "kernel") if event["tid"] == 8]
    assert len(on_second) == len(timings[::5])


def test_the_host_is_seen_to_wait_for_a_value(tmp_path):
    with FlopMeter("a100-sxm4-80gb") as meter:
        assert torch.arange(4, device="meta").max().item() == 3
    events = read(meter.report(), tmp_path / "trace.json")
    (wait,) = of_category(events, "cuda_runtime")
    assert end(wait) == end(of_category(events, "kernel")[-1])
    assert breaches(events) == []


def test_a_run_without_kernels_is_an_empty_trace(tmp_path):
    with FlopMeter() as meter:
        torch.empty(4, device="meta")
    assert {event["ph"] for event in read(meter.report(), tmp_path / "trace.json")} == {"M"}


def test_a_path_that_ends_in_gz_is_compressed_and_always_the_same(reports, tmp_path):
    reports["eager"].save_trace(tmp_path / "trace.json.gz")
    reports["eager"].save_trace(str(tmp_path / "again.json.gz"))
    packed = (tmp_path / "trace.json.gz").read_bytes()
    assert packed == (tmp_path / "again.json.gz").read_bytes()
    assert json.loads(gzip.decompress(packed))["traceEvents"] == read(reports["eager"], tmp_path / "trace.json")


def test_torch_reads_the_utilization_that_the_report_has(reports, tmp_path):
    """`compute_utilization` reads traces of torch.profiler: the union of the kernels' times over the wall-clock."""
    for mode, report in reports.items():
        report.save_trace(tmp_path / f"{mode}.json")
        busy, _ = compute_utilization(str(tmp_path / f"{mode}.json"), report.seconds)
        assert busy == pytest.approx(report.kernel_seconds / report.seconds, rel=1e-3)


def test_torch_opens_the_trace_as_a_profile(reports, tmp_path):
    path = tmp_path / "trace.json"
    reports["eager"].save_trace(path)
    profile = JsonProfile(str(path), dtype="bfloat16")
    profile.augment_trace()  # finds for each kernel the op that launched it
    assert [device.name for device in profile._devices.values()] == [reports["eager"].hardware.title]
    kernels = [event for event in profile.data["traceEvents"] if event.get("cat") == "kernel"]
    assert len(kernels) == len(reports["eager"].kernels)
    assert all("kernel_flop" in kernel["args"] for kernel in kernels)
    assert reports["eager"].hardware.title in profile.report()


def test_torch_finds_nothing_wrong_with_the_trace(reports, tmp_path):
    validator = pytest.importorskip("torch.profiler._trace_validator", reason="this torch has no trace validator")
    path = tmp_path / "trace.json.gz"
    reports["eager"].save_trace(path)
    assert validator.validate_trace(str(path)) == (True, [])
