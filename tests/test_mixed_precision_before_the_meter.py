"""Mixed precision that a script sets up before it enters a meter: it computes as on a GPU, and outside as before."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flopmeter import FlopMeter

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
pytestmark = pytest.mark.filterwarnings("ignore:.*CUDA is not available", "ignore:`torch.cuda.amp:FutureWarning")


def on_meta(make: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return make()


@pytest.fixture
def layer() -> nn.Linear:
    return on_meta(lambda: nn.Linear(8, 8))


@pytest.fixture
def x() -> Tensor:
    return on_meta(lambda: torch.empty(4, 8))


def notes(meter: FlopMeter) -> str:
    return "\n".join(meter.report().notes)


def ops(meter: FlopMeter) -> list[tuple[str, torch.dtype]]:
    return [(op.call.name, op.call.outputs[0].dtype) for op in meter.trace.ops]


# --- torch.autocast("cuda") ----------------------------------------------------------------------------------------


def test_a_context_made_before_the_meter_computes_in_bf16(layer: nn.Linear, x: Tensor) -> None:
    ctx = torch.amp.autocast(device_type="cuda", dtype=BF16)  # nanoGPT's
    for _ in range(2):
        with FlopMeter("h100-sxm5-80gb") as meter:
            with ctx:
                assert layer(x).dtype == BF16
            assert layer(x).dtype == FP32
    assert "autocast" not in notes(meter)


def test_a_training_step_is_the_one_whose_context_is_made_inside(layer: nn.Linear, x: Tensor) -> None:
    def step(ctx: Any) -> None:
        layer.zero_grad()
        with ctx:
            loss = layer(x).square().sum()
        loss.backward()

    before = torch.autocast("cuda", dtype=BF16)
    with FlopMeter() as meter:
        step(before)
    with FlopMeter() as inside:
        step(torch.autocast("cuda", dtype=BF16))
    assert ops(meter) == ops(inside)
    assert ("addmm", BF16) in ops(meter)


def test_every_spelling_of_a_context_made_before_the_meter_works(layer: nn.Linear, x: Tensor) -> None:
    older = torch.cuda.amp.autocast(dtype=BF16)
    default = torch.autocast("cuda")

    @torch.autocast("cuda", dtype=BF16)
    def decorated(x: Tensor) -> Tensor:
        return layer(x)

    class Model(nn.Module):
        @torch.cuda.amp.autocast()
        def forward(self, x: Tensor) -> Tensor:
            return layer(x)

    model = Model()
    with FlopMeter():
        with older:
            assert layer(x).dtype == BF16
        with default:
            assert layer(x).dtype == FP16  # torch's default on CUDA
        assert decorated(x).dtype == BF16
        assert model(x).dtype == FP16


def test_what_the_program_disabled_before_the_meter_stays_disabled(layer: nn.Linear, x: Tensor) -> None:
    on, off = torch.autocast("cuda", dtype=BF16), torch.autocast("cuda", dtype=BF16, enabled=False)

    @torch.autocast("cuda", enabled=False)
    def in_fp32(x: Tensor) -> Tensor:
        return layer(x)

    with FlopMeter() as meter:
        with off:
            assert layer(x).dtype == FP32
        with on:
            with off:
                assert layer(x).dtype == FP32
            assert in_fp32(x).dtype == FP32
            assert layer(x).dtype == BF16
    assert "autocast" not in notes(meter)


def test_a_meter_entered_inside_of_an_autocast_meters_it(layer: nn.Linear, x: Tensor) -> None:
    with torch.autocast("cuda", dtype=BF16), FlopMeter() as meter:
        assert layer(x).dtype == BF16
        with torch.autocast("cuda", enabled=False):
            assert layer(x).dtype == FP32
    with torch.autocast("cuda", dtype=BF16), torch.autocast("cuda", enabled=False), FlopMeter():
        assert layer(x).dtype == FP32
    with torch.autocast("cuda", dtype=BF16):
        pass
    with FlopMeter():
        assert layer(x).dtype == FP32
    assert "autocast" not in notes(meter)


def test_a_custom_function_made_before_the_meter_casts_its_inputs(x: Tensor) -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=FP16)
        def forward(ctx: Any, a: Tensor) -> Tensor:
            return a @ a.t()

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx: Any, gradient: Tensor) -> None:
            return None

    ctx = torch.autocast("cuda", dtype=BF16)
    with FlopMeter(), ctx:
        assert Product.apply(x).dtype == FP16


# --- GradScaler ----------------------------------------------------------------------------------------------------


def scaled_step(scaler: torch.amp.GradScaler, layer: nn.Linear, x: Tensor) -> list[str]:
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with FlopMeter(checks="hold") as meter:
        scaler.scale(layer(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return [op.call.name for op in meter.trace.ops]


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, torch.cuda.amp.GradScaler])
def test_a_scaler_made_before_the_meter_scales_and_unscales(kind: Any, layer: nn.Linear, x: Tensor) -> None:
    scaler = kind(growth_interval=7)
    state = dict(vars(scaler))
    for _ in range(2):
        ran = scaled_step(scaler, layer, x)
        assert ran.count("_amp_foreach_non_finite_check_and_unscale_") == 1
        assert ran.count("_amp_update_scale_") == 1
    assert vars(scaler) == state  # disabled again
    with FlopMeter():
        assert scaler.get_growth_interval() == 7


def test_a_scaler_that_the_program_disabled_stays_disabled(layer: nn.Linear, x: Tensor) -> None:
    scaler = torch.amp.GradScaler("cuda", enabled=False)  # nanoGPT's with bf16
    assert not [name for name in scaled_step(scaler, layer, x) if "_amp_" in name]


# --- torch.autocast("cpu"), which frameworks pick where they find no CUDA --------------------------------------------


def test_cpu_autocast_on_meta_tensors_computes_as_cudas_and_says_so(layer: nn.Linear, x: Tensor) -> None:
    forward = torch.autocast("cpu", dtype=BF16)(layer.forward)  # as accelerate prepares a model
    with FlopMeter() as meter:
        assert forward(x).dtype == BF16
        with torch.autocast("cpu", dtype=BF16):
            with torch.autocast(device_type=x.device.type, enabled=False):
                assert layer(x).dtype == FP32
            with torch.autocast("cpu", enabled=False):
                assert layer(x).dtype == FP32
            assert layer(x).dtype == BF16
        assert layer(x).dtype == FP32
    assert "torch.autocast('cpu', torch.bfloat16) was taken for torch.autocast('cuda', torch.bfloat16)" in notes(meter)
    with torch.autocast("cpu", dtype=BF16), FlopMeter() as meter:
        assert layer(x).dtype == BF16
    assert "was taken for torch.autocast('cuda', torch.bfloat16)" in notes(meter)
    with torch.autocast("cpu", dtype=BF16), torch.autocast("cpu", enabled=False), FlopMeter():
        assert layer(x).dtype == FP32
    with torch.autocast("cuda", dtype=BF16), torch.autocast("cpu", enabled=False), FlopMeter():
        assert layer(x).dtype == BF16


def test_contexts_of_both_devices_within_each_other_end_one_by_one(layer: nn.Linear, x: Tensor) -> None:
    cpu, cuda = (torch.autocast(device, dtype=dtype) for device, dtype in (("cpu", BF16), ("cuda", FP16)))
    off = torch.autocast("cpu", enabled=False)
    for contexts, types in (((cpu, cuda), (BF16, FP16)), ((cuda, cpu), (FP16, BF16)), ((cpu, off), (BF16, FP32))):
        outer, inner = contexts
        with FlopMeter():
            for _ in range(2):
                with outer:
                    assert layer(x).dtype == types[0]
                    with inner:
                        assert layer(x).dtype == types[1]
                    assert layer(x).dtype == types[0]
                assert layer(x).dtype == FP32
        with outer, inner, FlopMeter():
            assert layer(x).dtype == types[1]
        with FlopMeter():
            assert layer(x).dtype == FP32


def test_a_cpu_autocast_that_outlives_the_meter_leaves_nothing(layer: nn.Linear, x: Tensor) -> None:
    context, meter = torch.autocast("cpu", dtype=BF16), FlopMeter()
    meter.__enter__()
    context.__enter__()
    meter.__exit__(None, None, None)
    assert not torch.is_autocast_enabled("cuda")
    context.__exit__(None, None, None)
    meter.__enter__()
    context.__enter__()
    context.__exit__(None, None, None)
    assert layer(x).dtype == FP32
    meter.__exit__(None, None, None)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_a_checkpoint_recomputes_in_the_types_of_its_forward_pass(device_type: str, layer: nn.Linear) -> None:
    x = on_meta(lambda: torch.empty(4, 8, requires_grad=True))
    context = torch.autocast(device_type, dtype=BF16)
    with FlopMeter() as meter:
        with context:
            output = checkpoint(lambda x: layer(x).relu(), x, use_reentrant=True)
        output.sum().backward()
    assert [dtype for name, dtype in ops(meter) if name == "addmm"] == [BF16, BF16]


# --- outside of a meter --------------------------------------------------------------------------------------------


def test_outside_of_a_meter_torch_does_what_it_did(layer: nn.Linear, x: Tensor) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        context, scaler = torch.autocast("cuda", dtype=BF16), torch.amp.GradScaler("cuda")
    assert [(Path(warning.filename), "Disabling" in str(warning.message)) for warning in caught] == [
        (Path(__file__), True),
        (Path(__file__), True),
    ]
    with FlopMeter(), context:
        assert scaler.is_enabled()
    with context:
        assert not torch.is_autocast_enabled("cuda")
        assert layer(x).dtype == FP32
    assert not scaler.is_enabled()


def python(program: str) -> str:
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_what_the_import_of_flopmeter_changes_in_torch_is_in_one_table() -> None:
    changed = python("""
import torch, torch.utils.checkpoint
owners = [torch.autocast, torch.amp.GradScaler, torch.cuda.amp.common, torch.amp.autocast_mode, torch]
owners += [torch.cuda.amp.autocast, torch.cuda.amp.GradScaler, torch.amp.grad_scaler]
before = [dict(vars(owner)) for owner in owners]
import flopmeter.as_cuda.amp_wishes as wishes
for owner, old in zip(owners, before):
    for name, value in vars(owner).items():
        if name in old and old[name] is not value:
            print(owner.__name__, name)
""")
    assert sorted(changed.split("\n")[:-1]) == [
        "autocast __enter__",
        "autocast __exit__",
        "torch.cuda.amp.common amp_definitely_not_available",
    ]
    from flopmeter.as_cuda.amp_wishes import WATCHED

    assert len(WATCHED) == 3
    assert all(any(name in path for path in WATCHED) for name in ("__enter__", "__exit__", "amp_definitely"))


def test_what_was_made_before_flopmeter_was_imported_is_said_to_be_unknown() -> None:
    said = python("""
import torch
old, scaler = torch.autocast("cuda", dtype=torch.bfloat16), torch.amp.GradScaler("cuda")
from flopmeter import FlopMeter
disabled, x = torch.autocast("cuda", enabled=False), torch.empty(4, 4, device="meta", requires_grad=True)
for program in ("with disabled: x @ x", "with old: x @ x", "scaler.scale(x.sum())"):
    with FlopMeter() as meter:
        exec(program)
    print([note for note in meter.report().notes if "import flopmeter first" in note])
""").split("\n")
    assert said[0] == "[]"
    assert "autocast for 'cuda' that was made before flopmeter was imported" in said[1]
    assert "GradScaler for 'cuda' that was made before flopmeter was imported" in said[2]


def test_an_import_inside_of_an_autocast_is_said_to_have_missed_it() -> None:
    said = python("""
import torch
with torch.autocast("cuda", dtype=torch.bfloat16):
    from flopmeter import FlopMeter
    with FlopMeter() as meter:
        torch.empty(4, device="meta").sin()
print(meter.report().notes)
""")
    assert "import flopmeter first" in said


@contextlib.contextmanager
def entered_unseen() -> Iterator[None]:
    """What an autocast that was entered before flopmeter was imported leaves of itself: torch counts it."""
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()


@pytest.mark.parametrize("is_seen", [True, False])
def test_an_autocast_that_was_entered_before_the_import_is_told(is_seen: bool) -> None:
    with torch.autocast("cuda", dtype=BF16) if is_seen else entered_unseen(), FlopMeter() as meter:
        torch.empty(4, device="meta").sin()
    assert ("import flopmeter first" in str(meter.report().notes)) is not is_seen


def test_a_meter_that_ends_while_autocast_is_on_leaves_the_threads_keys_as_they_were(x: Tensor) -> None:
    torch.set_autocast_enabled("cuda", True)
    try:
        before = torch._C._dispatch_tls_local_include_set()
        with FlopMeter():
            assert (x @ x.mT).dtype == torch.float16
        assert torch._C._dispatch_tls_local_include_set() == before
    finally:
        torch.set_autocast_enabled("cuda", False)
