"""Calls and programs whose prices stand in data/prices_of_calls.csv and data/prices_of_programs.csv.

    python tests/recorded_prices.py        # writes both again; `git diff` shows what a change moved

What is recorded is flopmeter's own, so it says nothing of the truth; other tests do. It says which prices a change
moves: none where code is only rewritten, those that it is about where a rule or a constant changes.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import gc
import importlib
import inspect
import itertools
import operator
import re
import sys
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import as_cuda_cases
import distributed_programs
import pytest
import torch
import torch.distributed as dist
from op_samples import inputs_of
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_leaves, tree_map

from flopmeter import FlopMeter, Report, on_meta
from flopmeter.costs import costs_of, kernels_of
from flopmeter.device.hardware import HardwareError, load_hardware
from flopmeter.distributed import world
from flopmeter.launch.modes import MODES
from flopmeter.models import BUILTINS, training_step
from flopmeter.records import Call, Cost, Switches, Trace
from flopmeter.records.work import VectorWork
from flopmeter.timing.kernels import price
from flopmeter.trace.recorder import Recorder

Row = dict[str, str]
Run = Callable[[FlopMeter], None]
DATA = Path(__file__).parent / "data"
CALLS_FILE, PROGRAMS_FILE = DATA / "prices_of_calls.csv", DATA / "prices_of_programs.csv"
TESTS_FILE = DATA / "prices_of_tests.csv"
NEWER_CATEGORIES = ("copies of weights",)  # than what is recorded, which lacks them where they hold nothing
TORCH = "2.13"  # whose streams are recorded
DEVICES = ("p100-pcie-16gb", "v100-sxm2-16gb", "a100-sxm4-80gb", "rtx-4090", "h100-sxm5-80gb", "mi250x")


def figure(value: float) -> str:
    return f"{value:.6g}"


def digest(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def digest_of(lines: Iterable[str]) -> str:
    """Of records as they print themselves: floats with six digits, streams by the order in which they come, since their
    numbers go on from program to program, without addresses, files and their lines."""
    text, streams = "\n".join(lines), {"0": 0}
    text = re.sub(r" at 0x\w+|[^\s\"'(]*\.py:\d+", "", text)
    text = re.sub(r"\bstream=(-?\d+)", lambda found: f"stream={streams.setdefault(found[1], len(streams))}", text)
    return digest(re.sub(r"\d+\.\d+(e[+-]?\d+)?", lambda found: figure(float(found[0])), text))


# --- calls, each by itself


def price_of_calls(calls: Iterable[Call]) -> Row:
    """The work of all kernels of these calls, and how long each device is busy with it."""
    costs = [cost for call in calls for cost in costs_of(call)]
    return {
        "detail": digest_of(map(repr, costs)),
        "kernels": figure(len(costs)),
        "flops": figure(sum(cost.flops for cost in costs)),
        "index operations": figure(sum(c.work.index_operations for c in costs if isinstance(c.work, VectorWork))),
        "bytes read": figure(sum(cost.bytes_read for cost in costs)),
        "bytes written": figure(sum(cost.bytes_written for cost in costs)),
        **{name: figure(sum(_seconds(cost, name) for cost in costs)) for name in DEVICES},
    }


def _seconds(cost: Cost, device: str) -> float:
    """Collectives take their time from a cluster; what a device has no unit for takes none here."""
    if cost.collective is not None:
        return 0.0
    try:
        busy = price(cost, load_hardware(device), Switches(False, False, False)).busy
    except HardwareError:
        return 0.0
    return busy.work_seconds + busy.latency_seconds


@functools.cache
def calls_by_op() -> dict[str, tuple[Call, ...]]:
    from test_costs_one_change import CALLS

    found = defaultdict[str, list[Call]](list)
    for call in CALLS:
        found[str(call.func)].append(call)
    return {name: tuple(calls) for name, calls in sorted(found.items())}


# --- programs, metered

MANY_DEVICES = (*DEVICES, "t4", "l40s", "rtx-5090", "b200-sxm-180gb", "mi300x", "h200-sxm-141gb")
OF_ALL_KINDS = ("v100-sxm2-16gb", "t4", "a100-sxm4-80gb", "rtx-4090", "h100-sxm5-80gb", "b200-sxm-180gb", "mi300x")
IN_THE_ORDER_OF_A_SET = ("meshgrid.variadic_tensors", "meshgrid.list_of_tensors")  # are their samples
WITHOUT_OPS = ("op_db broadcast_shapes", "Muon, plain")  # nothing to report; Muon refuses the vectors
SAMPLED = (torch.float32, torch.complex64, torch.int64)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """What lies in a cycle dies when Python collects garbage, which depends on all that ran before."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def price_of_program(device: str, run: Run) -> Row:
    """What was recorded, launched in each mode, and what one report of it says."""
    meter = FlopMeter(device, compile="rules")  # on the programs of torch.compile
    with warnings.catch_warnings(), no_collection():
        warnings.simplefilter("ignore")
        run(meter)
    report = meter.report()
    row = {
        "device": device,
        "detail": digest_of(detail(report)),
        "ops": figure(len(meter.trace.ops)),
        "stream": digest("\n".join(str(op.call) for op in meter.trace.ops)),
        "flops": figure(report.flops),
        "peak bytes": figure(report.peak_memory_bytes),
        "low": figure(report.seconds_low),
        "high": figure(report.seconds_high),
        "joules": figure(report.joules or 0.0),
        "exposed": figure(report.exposed_seconds),
        "assumed": figure(len(report.assumptions)),
    }
    for mode in MODES:
        launched = report.in_mode(mode)  # of the same kernels, which meter.report would make anew
        row[f"{mode} seconds"] = figure(launched.seconds)
        if mode in ("eager", "compiled"):  # the others replay the same kernels
            row[f"{mode} kernels"] = figure(len(launched.kernels))
            row[f"{mode} read"], row[f"{mode} written"] = figure(launched.bytes_read), figure(launched.bytes_written)
            row[f"{mode} busy"] = figure(launched.kernel_seconds)
    return row


def detail(report: Report) -> Iterator[str]:
    """All that the stages hand to one another: each kernel in each mode, what memory is held when, what was assumed."""
    for mode in MODES:
        launched = report.in_mode(mode)
        placements = launched.launches.placements or [None] * len(launched.kernels)
        for kernel, timing, place in zip(launched.kernels, launched.timings, placements, strict=True):
            op = kernel.op
            if mode in ("eager", "compiled"):  # the others replay the same kernels
                yield f"{op.module} {op.phase} {kernel.views} {kernel.module_calls} {kernel.cost}"
            yield f"{mode} {timing} {place}"
        yield f"{launched.uncertainty}"
    memory = report.memory
    yield from map(repr, memory.blocks)
    held = {name: nbytes for name, nbytes in memory.at_peak.items() if nbytes or name not in NEWER_CATEGORIES}
    yield f"{held} {memory.reserved_bytes} {memory.steady_peak_bytes} {memory.steady_reserved_bytes}"
    yield from report.assumptions


def forward_and_backward(program: Callable[[], Any]) -> None:
    """Backward where the result needs a gradient."""
    found = [leaf for leaf in tree_leaves(program()) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if found:
        torch.autograd.backward(found, [torch.ones_like(each) for each in found])


def recorded_case(name: str, meter: FlopMeter) -> None:
    program = as_cuda_cases.CASES[name]()
    with meter:
        forward_and_backward(program)


def trained_model(name: str, dtype: torch.dtype, batch: int, meter: FlopMeter) -> None:
    model, inputs = BUILTINS[name](batch=batch, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    with meter:
        training_step(model, inputs, optimizer)


def inference(name: str, batch: int, meter: FlopMeter) -> None:
    model, inputs = BUILTINS[name](batch=batch, dtype=torch.float16)
    with meter, torch.no_grad():
        model(*inputs)


def on_ranks(name: str, size: int, meter: FlopMeter) -> None:
    with world(size, distributed_programs.mesh_shape(name, size), rank=1) as mesh:
        distributed_programs.run(name, mesh, "meta", meter)


def samples_of(entry: Any, meter: FlopMeter) -> None:
    """A few samples of an entry of torch's op_db in each type, spread over all, up to where torch refuses one."""
    torch.manual_seed(0)
    with meter:  # once, since a meter that is entered again forgets what it saw
        for dtype in (each for each in SAMPLED if each in entry.dtypes):
            wants_gradient = entry.supports_autograd and dtype != torch.int64
            samples = list(inputs_of(entry, dtype, requires_grad=wants_gradient))
            for sample in samples[:: max(1, len(samples) // 4)]:
                with contextlib.suppress(Exception):
                    moved = sample.transform(moved_to_meta)
                    forward_and_backward(functools.partial(entry, moved.input, *moved.args, **moved.kwargs))


def moved_to_meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return on_meta(value.detach()).requires_grad_(value.requires_grad)


def inputs_of_module(info: Any, training: bool, meter: FlopMeter) -> None:
    """A few inputs that torch's own tests give a module, spread over all, in fp32 and under autocast."""
    torch.manual_seed(0)
    given = {"device": "cpu", "dtype": torch.float32, "requires_grad": True, "training": training}
    found = info.module_inputs_func(info, **given)
    with meter:
        for inputs, autocast in itertools.product(found[:: max(1, len(found) // 4)], (False, True)):
            with contextlib.suppress(Exception), torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                with torch.device("meta"):
                    module = info.module_cls(*inputs.constructor_input.args, **inputs.constructor_input.kwargs)
                args, kwargs = tree_map(moved_to_meta, (inputs.forward_input.args, inputs.forward_input.kwargs))
                forward_and_backward(functools.partial(module.train(training), *args, **kwargs))


def steps_of_optimizer(info: Any, how: dict[str, Any], meter: FlopMeter) -> None:
    """Two steps with each of the options that torch's own tests give it."""
    with meter:
        for options in info.optim_inputs_func(device="cuda"):
            sizes = ((64, 32), (64,), (1, 300))
            parameters = [torch.nn.Parameter(torch.empty(size, device="meta")) for size in sizes]
            with contextlib.suppress(Exception):
                optimizer = info.optim_cls(parameters, **options.kwargs, **how)
                for parameter in parameters:
                    parameter.grad = torch.empty_like(parameter)
                optimizer.step()
                optimizer.step()


def attention_of_all_sizes(meter: FlopMeter) -> None:
    """Prefill, decoding and more keys than queries; grouped heads, and heads of another size for the values."""
    shapes = ((3, 300, 300), (5, 1, 700), (2, 40, 900), (1, 1, 4000))
    kinds = itertools.product((32, 64, 72, 96, 128, 192, 256), shapes, (torch.float16, torch.float32))
    with meter:
        for size, (batch, queries, keys), dtype in kinds:
            for key_heads, causal, value_size in ((2, False, size), (6, True, 64)):
                q, k, v = (
                    torch.empty(batch, heads, length, each, dtype=dtype, device="meta", requires_grad=True)
                    for heads, length, each in (
                        (6, queries, size),
                        (key_heads, keys, size),
                        (key_heads, keys, value_size),
                    )
                )
                how = {"is_causal": causal, "enable_gqa": key_heads < 6}
                with contextlib.suppress(RuntimeError):
                    forward_and_backward(lambda q=q, k=k, v=v, how=how: scaled_dot_product_attention(q, k, v, **how))


def flex_attention_of_all_sizes(meter: FlopMeter) -> None:
    compiled = torch.compile(flex_attention)
    for size, queries, wants_gradient in itertools.product((64, 128, 256, 320), (1, 300, 1000), (False, True)):
        q, k, v = (
            torch.empty(3, heads, length, size, dtype=torch.bfloat16, device="meta", requires_grad=wants_gradient)
            for heads, length in ((6, queries), (2, 1000), (2, 1000))
        )
        with meter:
            mask = create_block_mask(lambda b, h, q, k: k - q < 260, None, None, queries, 1000, device="meta")
            forward_and_backward(lambda q=q, k=k, v=v, mask=mask: compiled(q, k, v, block_mask=mask, enable_gqa=True))


def products_of_all_sizes(meter: FlopMeter) -> None:
    types = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
    sides = ((1, 4096, 1000), (16, 100, 4100), (300, 2048, 72), (5000, 3000, 520), (8, 8, 100_000), (20_000, 33, 17))
    with meter:
        for dtype, (m, n, k) in itertools.product(types, sides):
            for batch in (1, 7):
                left, right = (torch.empty(batch, *each, dtype=dtype, device="meta") for each in ((m, k), (n, k)))
                torch.bmm(left, right.mT)


def convolutions_of_all_sizes(meter: FlopMeter) -> None:
    kinds = (
        (96, 160, 1, 1),
        (96, 160, 1, 2),
        (64, 128, 3, 1),
        (3, 64, 7, 2),
        (96, 96, 3, 96),
        (96, 96, 5, 96),
        (96, 192, 3, 4),
    )
    formats = (torch.contiguous_format, torch.channels_last)
    types = (torch.float16, torch.bfloat16, torch.float32)
    with meter:
        for (inside, out, kernel, third), layout, dtype in itertools.product(kinds, formats, types):
            for transposed in (False, True):
                groups, stride = (third, 1) if third > 2 else (1, third)
                kind = torch.nn.ConvTranspose2d if transposed else torch.nn.Conv2d
                module = kind(inside, out, kernel, stride, groups=groups, dtype=dtype, device="meta")
                x = torch.empty(9, inside, 28, 36, dtype=dtype, device="meta", requires_grad=True)
                forward_and_backward(functools.partial(module.to(memory_format=layout), x.to(memory_format=layout)))


def collectives_of_all_sizes(size: int, meter: FlopMeter) -> None:
    with world(size, rank=1), meter:
        for elements in (10, 5_000, 300_000, 40_000_000):
            whole, part = (
                torch.empty(each, dtype=torch.bfloat16, device="meta") for each in (size * elements, elements)
            )
            dist.all_reduce(part)
            dist.broadcast(part, 0)
            dist.all_gather_into_tensor(whole, part)
            dist.reduce_scatter_tensor(part, whole)
            dist.all_to_all_single(torch.empty_like(whole), whole)
            first = [0, 3 * elements, *[elements] * (size - 2)][:size]
            dist.all_to_all_single(whole.new_empty(elements * size), whole[: sum(first)], [elements] * size, first)
            dist.send(part, 0)
            dist.recv(whole, 0)
        dist.barrier()


ON_EACH_DEVICE: dict[str, Run] = {
    "attention": attention_of_all_sizes, "flex_attention": flex_attention_of_all_sizes,
    "products": products_of_all_sizes, "convolutions": convolutions_of_all_sizes,
    **{f"collectives of {size}": functools.partial(collectives_of_all_sizes, size) for size in (2, 8)},
}  # fmt: skip


def _models() -> Iterator[tuple[str, str, Run]]:
    devices, dtypes = iter(DEVICES * 10), itertools.cycle((torch.float16, torch.float32))
    for name in ("encoder-layer", "bert-base", "gpt2-124m", "resnet-50", "vit-b-16", "convnext-t", "unet-small"):
        dtype = next(dtypes)
        run = functools.partial(trained_model, name, dtype, 8)
        yield f"{name}, training, {str(dtype).removeprefix('torch.')}", next(devices), run
        for batch in (1, 64):
            yield f"{name}, inference of {batch}", next(devices), functools.partial(inference, name, batch)


@functools.cache
def programs() -> dict[str, tuple[str, Run]]:
    """Name -> device and what to meter. The devices take turns."""
    found: dict[str, tuple[str, Run]] = {name: (device, run) for name, device, run in _models()}
    for place, name in enumerate(as_cuda_cases.CASES):
        device = ("a100-sxm4-80gb", "h100-sxm5-80gb", "rtx-4090")[place % 3]
        found[f"case {name}"] = device, functools.partial(recorded_case, name)
    for name in distributed_programs.PROGRAMS:
        found[f"{name} on 4"] = "h100-sxm5-80gb", functools.partial(on_ranks, name, 4)
    for (name, run), device in itertools.product(ON_EACH_DEVICE.items(), OF_ALL_KINDS):
        found[f"{name} on {device}"] = device, run
    for device in ("a100-sxm4-80gb", "h100-sxm5-80gb", "b200-sxm-180gb"):
        found[f"collectives of 32 on {device}"] = device, functools.partial(collectives_of_all_sizes, 32)
    devices = itertools.cycle(MANY_DEVICES)
    return found | {name: (next(devices), run) for name, run in _of_torchs_tests() if name not in WITHOUT_OPS}


def _of_torchs_tests() -> Iterator[tuple[str, Run]]:
    from torch.testing._internal import common_methods_invocations as databases
    from torch.testing._internal.common_modules import module_db
    from torch.testing._internal.common_optimizers import optim_db

    for database in (name for name in dir(databases) if name.endswith("op_db")):
        for entry in getattr(databases, database):
            name = ".".join(filter(None, (entry.name, entry.variant_test_name)))
            if entry.dtypes & set(SAMPLED) and name not in IN_THE_ORDER_OF_A_SET:
                yield f"op_db {name}", functools.partial(samples_of, entry)
    for info in module_db:
        for training in (True, False):
            name = f"{info.name}, {'training' if training else 'evaluation'}"
            yield name, functools.partial(inputs_of_module, info, training)
    for info in optim_db:
        for how in ("plain", *info.supported_impls):
            chosen = {how: True} if how in ("foreach", "fused") else {"foreach": False} if how == "for-loop" else {}
            yield f"{info.optim_cls.__name__}, {how}", functools.partial(steps_of_optimizer, info, chosen)


# --- what other tests meter

# Their programs reach what torch's own samples do not.
FILES = tuple(
    f"test_{name}"
    for name in (
        "as_cuda_conditions", "as_cuda_linalg", "as_cuda_rnn", "boxes", "collective_values", "contention",
        "costs_attention", "costs_bytes", "costs_composed", "costs_facts", "costs_operands", "costs_regions",
        "dense_operands", "distributed", "distributed_zoo", "expert_loops", "experts", "flex_attention",
        "fusion_layout", "fusion_regions", "grouped", "integer_products", "jagged", "known_floats",
        "known_values_constructors", "memory", "memory_format", "mixed_precision_before_the_meter", "module_paths",
        "recurrent_memory", "sparse_gradients", "sparse_products", "stand_ins", "storages",
        "stream_assignment", "streams_order", "timing_by_hand", "timing_cpu", "trace", "varlen_attention",
    )
)  # fmt: skip


@functools.cache
def tests() -> dict[str, Callable[[], None]]:
    """Name -> a test of these files that needs no fixture, with each of its parameters."""
    modules = (importlib.import_module(file) for file in FILES)
    functions = ((module.__name__, *each) for module in modules for each in sorted(vars(module).items()))
    found = {f"{file}::{name}": cases_of(each) for file, name, each in functions if name.startswith("test_")}
    return {name: functools.partial(run_all, cases) for name, cases in found.items() if cases}


def cases_of(test: Callable[..., None]) -> list[Callable[[], None]]:
    marks = getattr(test, "pytestmark", [])
    if any(mark.name not in ("parametrize", "filterwarnings") for mark in marks):
        return []
    given = [list(_values_of(*mark.args[:2])) for mark in marks if mark.name == "parametrize"]
    cases = [functools.reduce(operator.or_, each, {}) for each in itertools.product(*given)]
    return [
        functools.partial(test, **case) for case in cases if case.keys() == inspect.signature(test).parameters.keys()
    ]


def _values_of(names: str | Iterable[str], values: Iterable[Any]) -> Iterator[dict[str, Any]]:
    names = names.replace(",", " ").split() if isinstance(names, str) else list(names)
    for value in (each.values if isinstance(each, type(pytest.param())) else each for each in values):
        yield dict(zip(names, value if isinstance(value, (tuple, list)) and len(names) > 1 else [value], strict=True))


def run_all(cases: Iterable[Callable[[], None]]) -> None:
    for case in cases:
        case()


def price_of_test(test: Callable[[], None]) -> Row:
    """What it recorded, and the reports of its meters. (A meter records as well.)"""
    lines, left = list[str](), dict[int, FlopMeter]()
    leave_recorder, leave_meter = Recorder.__exit__, FlopMeter.__exit__

    def recorder_left(recorder: Recorder, *error: Any) -> Any:
        lines.extend(recorded_by(recorder.trace))
        return leave_recorder(recorder, *error)

    def meter_left(meter: FlopMeter, *error: Any) -> Any:
        left[id(meter)] = meter
        return leave_meter(meter, *error)

    with (
        mock.patch.object(Recorder, "__exit__", recorder_left), mock.patch.object(FlopMeter, "__exit__", meter_left),
        warnings.catch_warnings(), no_collection(),
    ):  # fmt: skip
        warnings.simplefilter("ignore")
        test()
    for meter in left.values():
        with contextlib.suppress(Exception):  # that the test is about
            lines += detail(meter.report())
    return {"lines": figure(len(lines)), "detail": digest_of(lines)}


def recorded_by(trace: Trace) -> Iterator[str]:
    for op in trace.ops:
        yield f"{op.module} {op.phase} {op.region} {op.storages} {op.call.func} {op.call.inputs} {op.call.outputs}"
    with contextlib.suppress(Exception):
        yield from (str(kernel.cost) for kernel in kernels_of(trace))


# --- the files


def recorded(file: Path) -> dict[str, Row]:
    if not file.exists():
        return {}
    with file.open(newline="", encoding="utf-8") as opened:
        return {row.pop("name"): row for row in csv.DictReader(opened)}


def write(file: Path, rows: dict[str, Row]) -> None:
    with file.open("w", newline="", encoding="utf-8") as opened:
        fields = ("name", *next(iter(rows.values())))
        writer = csv.DictWriter(opened, fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows({"name": name, **row} for name, row in rows.items())


if __name__ == "__main__":
    if not torch.__version__.startswith(TORCH):
        sys.exit(f"prices are recorded with torch {TORCH}, and this is {torch.__version__}")
    write(CALLS_FILE, {name: price_of_calls(calls) for name, calls in calls_by_op().items()})
    write(PROGRAMS_FILE, {name: price_of_program(*program) for name, program in programs().items()})
    by_tests = {name: price_of_test(test) for name, test in tests().items()}
    write(TESTS_FILE, {name: row for name, row in by_tests.items() if row["lines"] != "0"})
