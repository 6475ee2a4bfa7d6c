"""Calls and programs whose prices stand in data/prices_of_calls.csv and data/prices_of_programs.csv.

    python tests/recorded_prices.py        # writes both again; `git diff` shows what a change moved

What is recorded is flopmeter's own, so it says nothing of the truth; other tests do. It says which prices a change
moves: none where code is only rewritten, those that it is about where a rule or a constant changes.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import itertools
import sys
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import as_cuda_cases
import distributed_programs
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from flopmeter import FlopMeter, on_meta
from flopmeter.costs import costs_of
from flopmeter.device import HardwareError, load_hardware
from flopmeter.distributed import world
from flopmeter.launch.modes import MODES
from flopmeter.models import BUILTINS, training_step
from flopmeter.records import Call, Cost, Switches
from flopmeter.records.work import VectorWork
from flopmeter.timing.kernels import price

Row = dict[str, str]
Run = Callable[[FlopMeter], None]
DATA = Path(__file__).parent / "data"
CALLS_FILE, PROGRAMS_FILE = DATA / "prices_of_calls.csv", DATA / "prices_of_programs.csv"
TORCH = "2.13"  # whose streams are recorded
DEVICES = ("p100-pcie-16gb", "v100-sxm2-16gb", "a100-sxm4-80gb", "rtx-4090", "h100-sxm5-80gb", "mi250x")


def figure(value: float) -> str:
    return f"{value:.6g}"


def digest(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


# --- calls, each by itself


def price_of_calls(calls: Iterable[Call]) -> Row:
    """The work of all kernels of these calls, and how long each device is busy with it."""
    costs = [cost for call in calls for cost in costs_of(call)]
    return {
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
IN_THE_ORDER_OF_A_SET = ("meshgrid.variadic_tensors", "meshgrid.list_of_tensors")  # are their samples
WITHOUT_OPS = ("op_db broadcast_shapes", "Muon, plain")  # nothing to report; Muon refuses the vectors
SAMPLED = (torch.float32, torch.complex64, torch.int64)


def price_of_program(device: str, run: Run) -> Row:
    """What was recorded, launched in each mode, and what one report of it says."""
    meter = FlopMeter(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(meter)
    report = meter.report()
    row = {
        "device": device,
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
    """A few samples of an entry of torch's op_db in each type, spread over all; what torch refuses leaves no trace."""
    torch.manual_seed(0)
    for dtype in (each for each in SAMPLED if each in entry.dtypes):
        wants_gradient = entry.supports_autograd and dtype != torch.int64
        samples = list(entry.sample_inputs("cpu", dtype, requires_grad=wants_gradient))
        for sample in samples[:: max(1, len(samples) // 8)]:
            with meter, contextlib.suppress(Exception):
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
    for inputs in found[:: max(1, len(found) // 4)]:
        for autocast in (False, True):
            with meter, contextlib.suppress(Exception), torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                with torch.device("meta"):
                    module = info.module_cls(*inputs.constructor_input.args, **inputs.constructor_input.kwargs)
                args, kwargs = tree_map(moved_to_meta, (inputs.forward_input.args, inputs.forward_input.kwargs))
                forward_and_backward(functools.partial(module.train(training), *args, **kwargs))


def steps_of_optimizer(info: Any, how: dict[str, Any], meter: FlopMeter) -> None:
    """Two steps with each of the options that torch's own tests give it."""
    for options in info.optim_inputs_func(device="cuda"):
        sizes = ((64, 32), (64,), (1, 300))
        parameters = [torch.nn.Parameter(torch.empty(size, device="meta")) for size in sizes]
        with meter, contextlib.suppress(Exception):
            optimizer = info.optim_cls(parameters, **options.kwargs, **how)
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
            optimizer.step()
            optimizer.step()


def _models() -> Iterator[tuple[str, str, Run]]:
    devices = iter(DEVICES * 10)
    for name in ("encoder-layer", "bert-base", "gpt2-124m", "resnet-50", "vit-b-16", "convnext-t", "unet-small"):
        for dtype in (torch.float32, torch.float16):
            run = functools.partial(trained_model, name, dtype, 8)
            yield f"{name}, training, {str(dtype).removeprefix('torch.')}", next(devices), run
        for batch in (1, 64):
            yield f"{name}, inference of {batch}", next(devices), functools.partial(inference, name, batch)


@functools.cache
def programs() -> dict[str, tuple[str, Run]]:
    """Name -> device and what to meter. The devices take turns."""
    found = {name: (device, run) for name, device, run in _models()}
    for place, name in enumerate(as_cuda_cases.CASES):
        device = ("a100-sxm4-80gb", "h100-sxm5-80gb", "rtx-4090")[place % 3]
        found[f"case {name}"] = device, functools.partial(recorded_case, name)
    for name in distributed_programs.PROGRAMS:
        found[f"{name} on 4"] = "h100-sxm5-80gb", functools.partial(on_ranks, name, 4)
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
