"""The emulation's manners: what it does not touch, what it leaves behind (nothing), whom it refuses, what it lacks."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from as_cuda_stream import Stream, bf16, f32, module, ops_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from work import instructions

from flopmeter import DataDependentError, FlopMeter, as_cuda
from flopmeter.as_cuda import CudaTarget, Emulation, dynamo, emulate_cuda
from flopmeter.torch_names import dispatcher, private

H100 = CudaTarget((9, 0))


@pytest.fixture
def h100() -> Iterator[Emulation]:
    with emulate_cuda(H100) as emulation:
        yield emulation


def test_kernels_of_torch_are_replaced_without_a_warning() -> None:
    """Torch would warn of one in a process, and of each where it is asked to."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with emulate_cuda(H100):
                pass
    finally:
        torch.set_warn_always(before)
    assert not [str(warning.message) for warning in caught if "kernel" in str(warning.message)]


GIVEN_KERNELS = """
    _fused_rms_norm mish_backward _cudnn_rnn_backward _thnn_fused_gru_cell _thnn_fused_gru_cell_backward
    _fused_sgd_ _fused_sgd_.tensor_lr _fused_adagrad_ _fused_adagrad_.tensor_lr _fused_adam_.tensor_lr
    _fused_adamw_.tensor_lr _transformer_encoder_layer_fwd
    _scaled_mm.out _ctc_loss_backward _ctc_loss_backward.Tensor
    multi_margin_loss_backward multilabel_margin_loss_backward fractional_max_pool3d_backward col2im
    _sample_dirichlet _dirichlet_grad _standard_gamma_grad binomial
    fake_quantize_per_tensor_affine_cachemask fake_quantize_per_channel_affine_cachemask
    _fake_quantize_per_tensor_affine_cachemask_tensor_qparams
    _fake_quantize_learnable_per_tensor_affine _fake_quantize_learnable_per_channel_affine
    _fake_quantize_learnable_per_tensor_affine_backward _fake_quantize_learnable_per_channel_affine_backward
"""


@pytest.mark.parametrize("name", GIVEN_KERNELS.split())
def test_an_op_that_cuda_has_a_kernel_for_has_one_on_meta_tensors(h100: Emulation, name: str) -> None:
    if dispatcher.overload(name) is None:
        pytest.skip("this torch has no such op")
    assert private.has_kernel(f"aten::{name}", "Meta")


def test_what_is_folded_has_no_gaps_and_refuses_columns_that_do_not_fit(h100: Emulation) -> None:
    columns = torch.empty(2, 3 * 9, 64, device="meta")
    folded = F.fold(columns, (8, 8), 3, padding=1)
    assert (folded.shape, folded.is_contiguous()) == ((2, 3, 8, 8), True)
    assert F.fold(columns[0], (8, 8), 3, padding=1).shape == (3, 8, 8)
    for misfit in (columns[:, :, 1:], columns[:, 1:]):
        with pytest.raises(RuntimeError, match=r"fold to \[8, 8\]"):
            F.fold(misfit, (8, 8), 3, padding=1)


def test_a_compiled_function_runs_eagerly_in_a_region_where_nothing_else_is_asked() -> None:
    regions: list[int | None] = []
    with emulate_cuda(H100):

        def program(x: Tensor) -> Tensor:
            regions.append(dynamo.compiled_region())
            return x.sin()

        torch.compile(program)(f32(4))
        assert dynamo.compiled_region() is None
    assert regions == [1]


# --- what is not touched -------------------------------------------------------------------------------------------


def cpu_program() -> list[Tensor]:
    """Every overridden composite, transforms, an optimizer, both kinds of autocast: on CPU."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, 16, 8, requires_grad=True)
    layers = nn.ModuleDict(
        {
            "norm": nn.RMSNorm(8),
            "batch": nn.BatchNorm2d(4),
            "lstm": nn.LSTM(8, 8, 2, dropout=0.5),
            "cell": nn.LSTMCell(8, 8),
            "mlp": nn.Sequential(nn.Linear(8, 8), nn.Mish(), nn.Dropout(0.3)),
        }
    )
    y = layers["mlp"](layers["norm"](layers["batch"](F.scaled_dot_product_attention(x, x, x, is_causal=True))))
    with torch.autocast("cpu", torch.bfloat16):
        y = y + F.linear(y, layers["mlp"][0].weight)
    sequence, _ = layers["lstm"](y.mean(0).float())
    hidden, _ = layers["cell"](sequence.mean(0))
    loss = torch.log_softmax(hidden.half(), -1, dtype=torch.float32).norm()
    optimizer = torch.optim.AdamW(layers.parameters())
    loss.backward()
    nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
    optimizer.step()
    per_sample = torch.vmap(torch.func.grad(lambda x: F.dropout(F.rms_norm(x, (8,)), 0.1).sum()), randomness="same")
    attention = torch.vmap(lambda x: F.scaled_dot_product_attention(x, x, x))
    with torch.no_grad():
        return [loss, x.grad, *layers.parameters(), per_sample(x.detach()), attention(x.detach())]


def test_cpu_tensors_compute_the_same_bits_inside() -> None:
    outside = cpu_program()
    with emulate_cuda(H100):
        inside = cpu_program()
        with torch.autocast("cuda", torch.bfloat16):
            inside_autocast = cpu_program()
    assert all(map(torch.equal, outside, inside))
    assert all(map(torch.equal, outside, inside_autocast))


def test_cpu_tensors_dispatch_the_same_ops_inside() -> None:
    with Stream() as outside:
        cpu_program()
    with emulate_cuda(H100), torch.autocast("cuda", torch.bfloat16), Stream() as inside:
        cpu_program()
    assert inside.ops == outside.ops


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_fake_tensors_are_their_owners(device: str) -> None:
    def fake_program() -> list[str]:
        with FakeTensorMode() as mode, Stream() as stream:
            x = torch.empty(2, 4, 16, 8, device=device, requires_grad=True)
            y = F.dropout(F.mish(F.rms_norm(F.scaled_dot_product_attention(x, x, x), (8,))), 0.1)
            (F.linear(y, torch.empty(8, 8, device=device))).sum().backward()
        assert mode is not None
        return stream.ops

    outside = fake_program()
    with emulate_cuda(H100), torch.autocast("cuda", torch.bfloat16):
        assert fake_program() == outside


# --- coming and going ----------------------------------------------------------------------------------------------

TABLES = (
    *("scaled_dot_product_attention", "dropout", "softmax.int", "log_softmax.int", "batch_norm", "rms_norm"),
    *(
        "_fused_rms_norm",
        "mish_backward",
        "lstm.input",
        "lstm_cell",
        "linear",
        "mm",
        "_cudnn_rnn",
        "_cudnn_rnn_backward",
    ),
    *("_weight_int4pack_mm", "_fused_sgd_", "_nested_tensor_from_mask_left_aligned", "add.Tensor"),
)


def state_of_torch() -> list[Any]:
    """The dispatch tables of the ops concerned, this thread's keys, and every attribute that is patched."""
    import torch.utils.checkpoint
    from torch.optim import adam, optimizer, swa_utils
    from torch.utils import _foreach_utils, backend_registration

    owners = (
        *(torch, torch.cuda, torch.cuda.amp.common, torch.amp.autocast_mode, torch.amp.autocast_mode.autocast),
        *(torch.utils.checkpoint, optimizer, adam, swa_utils, _foreach_utils, backend_registration),
    )
    attributes = [(owner.__name__, name, id(value)) for owner in owners for name, value in vars(owner).items()]
    tables = [torch._C._dispatch_dump_table(f"aten::{name}") for name in TABLES]
    keys = [torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()]
    return [attributes, tables, list(map(str, keys)), torch.is_autocast_enabled("cuda")]


def test_nothing_is_left_behind() -> None:
    before = state_of_torch()
    with emulate_cuda(H100):
        assert state_of_torch() != before
        with torch.autocast("cuda", torch.bfloat16):
            F.linear(f32(2, 2), f32(2, 2))
    assert state_of_torch() == before


def test_nothing_is_left_behind_after_an_exception() -> None:
    before = state_of_torch()
    with pytest.raises(KeyError, match="program"):
        with emulate_cuda(H100), torch.autocast("cuda", torch.bfloat16):
            raise KeyError("program")
    assert state_of_torch() == before


def test_nothing_is_left_behind_when_opening_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    before = state_of_torch()

    def fails(scope: Any) -> None:
        raise KeyError("installer")

    monkeypatch.setitem(as_cuda._FEATURES, private.FOREACH, fails)
    with pytest.raises(KeyError, match="installer"), emulate_cuda(H100):
        pass
    assert state_of_torch() == before
    monkeypatch.undo()
    with emulate_cuda(H100):
        assert ops_of(lambda: F.dropout(f32(4, 64), 0.1))[-1] == "native_dropout"


def test_contexts_of_one_target_nest(h100: Emulation) -> None:
    with emulate_cuda(CudaTarget((9, 0))) as inner:
        assert inner is h100
    assert ops_of(lambda: F.dropout(f32(4, 64), 0.1))[-1] == "native_dropout"


def test_a_nested_context_of_another_capability_is_refused(h100: Emulation) -> None:
    with pytest.raises(RuntimeError, match=r"9\.0 .* is open: one of 8\.0"), emulate_cuda(CudaTarget((8, 0))):
        pass
    assert ops_of(lambda: F.dropout(f32(4, 64), 0.1))[-1] == "native_dropout"


def test_a_second_thread_is_refused_and_may_open_one_later() -> None:
    errors: list[BaseException | None] = []

    def open_one() -> None:
        try:
            with emulate_cuda(H100):
                errors.append(None)
        except RuntimeError as error:
            errors.append(error)

    def in_a_thread() -> None:
        thread = threading.Thread(target=open_one)
        thread.start()
        thread.join()

    with emulate_cuda(H100):
        in_a_thread()
    in_a_thread()
    refused, opened = errors
    assert "open in another thread" in str(refused)
    assert opened is None


def test_entering_and_leaving_take_the_work_of_a_few_milliseconds() -> None:
    """In Python instructions, of which a millisecond has 20,000 or more. The kernels of autocast come when it is first
    on; they would be the most of it."""

    def enter(*, autocast: bool) -> None:
        with emulate_cuda(H100), torch.autocast("cuda", torch.bfloat16) if autocast else nullcontext():
            pass

    enter(autocast=True)  # fills caches
    plain, casting = (instructions(lambda on=on: enter(autocast=on)) for on in (False, True))
    assert plain < 110_000
    assert plain + 20_000 < casting < 200_000


def test_no_warning_is_given_on_the_way_in() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with emulate_cuda(H100):
            pass


# --- the target ----------------------------------------------------------------------------------------------------


def test_a_device_that_is_not_nvidias_has_a_stated_rule() -> None:
    with emulate_cuda(CudaTarget.stand_in("MI300X")) as emulation:
        q = bf16(2, 4, 128, 64)
        assert ops_of(lambda: F.scaled_dot_product_attention(q, q, q))[0] == "_scaled_dot_product_flash_attention"
    assert emulation.notes[0].startswith("MI300X is not an NVIDIA device")


@pytest.mark.parametrize("capability", [(3, 5), (13, 0), (9, 12), (90, 0)])
def test_a_capability_that_torch_does_not_run_on_is_refused(capability: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="compute capability"):
        CudaTarget(capability)


# --- private names of torch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("feature", "name"), [(feature, name) for feature, names in private.NAMES.items() for name in names], ids=str
)
def test_this_torch_has_each_private_name(feature: str, name: private.PrivateName) -> None:
    pytest.importorskip(name.module)
    assert name.present(), f"torch {torch.__version__} has no {name.path} ({name.used}): without it no {feature}"


@pytest.mark.parametrize(
    ("feature", "name"), [(feature, name) for feature, names in dispatcher.OPERATORS.items() for name in names]
)
def test_this_torch_has_each_private_operator_as_it_was(feature: str, name: str) -> None:
    op = dispatcher.overload(name)
    assert op is not None, f"without it no {feature}"
    assert " ".join(dispatcher.schema_arguments(op)) == dispatcher.OPERATORS[feature][name], f"without it no {feature}"


def test_private_operators_are_listed_with_their_arguments() -> None:
    """Operators of aten may be called anywhere, if the table holds their arguments."""
    listed = {name for operators in dispatcher.OPERATORS.values() for name in operators}
    for path in Path(as_cuda.__file__).parent.glob("*.py"):
        assert set(re.findall(r"aten\.(_\w+)", path.read_text())) <= listed, path.name


def test_a_torch_without_a_dispatcher_to_speak_to_emulates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = private.PrivateName("torch.library", "Library._gone", "")
    monkeypatch.setitem(private.NAMES, private.DISPATCHER, (gone,))
    with emulate_cuda(H100) as emulation:
        assert "native_dropout" not in ops_of(lambda: F.dropout(f32(4, 64), 0.1))
    assert emulation.notes[0] == "not emulated: everything; this torch has no torch.library.Library._gone"


def test_what_this_torch_lacks_is_left_out_and_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = private.PrivateName("torch.utils._foreach_utils", "_gone", "")
    monkeypatch.setitem(private.NAMES, private.FOREACH, (gone,))
    monkeypatch.setitem(dispatcher.OPERATORS, private.RNN, {"_cudnn_rnn": "x"})
    with emulate_cuda(H100) as emulation:
        assert ops_of(lambda: F.dropout(f32(4, 64), 0.1))[-1] == "native_dropout"
        assert "_cudnn_rnn" not in ops_of(lambda: module(lambda: nn.LSTM(8, 16))(f32(5, 2, 8)))
    lacking = [note for note in emulation.notes if note.startswith("not emulated")]
    assert len(lacking) == 2
    assert any("foreach" in note and "torch.utils._foreach_utils._gone" in note for note in lacking)
    assert any("RNN" in note and "_cudnn_rnn as it was (now (" in note for note in lacking)


def test_an_unknown_torch_is_used_with_one_warning_and_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.1")
    as_cuda._warn_once.cache_clear()
    q = bf16(2, 4, 128, 64)
    with ExitStack() as stack:
        with pytest.warns(UserWarning, match=r"torch 2\.99"):
            emulation = stack.enter_context(emulate_cuda(H100))
        assert ops_of(lambda: F.scaled_dot_product_attention(q, q, q))[0] == "_scaled_dot_product_cudnn_attention"
    assert (
        "torch 2.99: ops are dispatched by the rules of CUDA torch 2.15, the newest that flopmeter knows"
        in emulation.notes
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with emulate_cuda(H100):
            pass


@pytest.mark.parametrize(
    ("version", "rules"),
    [
        ("2.11.0", "its own CUDA build, of which no stream was recorded"),
        ("2.12.1+cpu", "its own CUDA build, of which no stream was recorded"),
        ("2.14.0", "its own CUDA build, of which no stream was recorded"),
    ],
)
def test_a_supported_but_uncompared_torch_gets_a_note_and_no_warning(
    monkeypatch: pytest.MonkeyPatch, version: str, rules: str
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with emulate_cuda(H100) as emulation:
            pass
    assert any(note.endswith(f"ops are dispatched by the rules of {rules}") for note in emulation.notes)


@pytest.mark.parametrize("version", ["2.13.1+cu130", "2.15.0"])
def test_a_torch_whose_streams_were_compared_gets_no_note(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with emulate_cuda(H100) as emulation:
        assert not any("ops are dispatched" in note for note in emulation.notes)


@pytest.mark.filterwarnings("ignore:torch:UserWarning")
@pytest.mark.parametrize("version", ["2.16.0a0+git1b2c3d", "2.16.0.dev20270101", "2.16rc1", "3.0"])
def test_a_report_of_an_unknown_newer_torch_says_whose_rules_were_used(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with FlopMeter("h100-sxm5-80gb") as meter:
        torch.empty(8, 8, device="meta") + 1
    running = "3.0" if version == "3.0" else "2.16"
    assert (
        f"torch {running}: ops are dispatched by the rules of CUDA torch 2.15, the newest that flopmeter knows"
        in str(meter.report())
    )


def test_a_fake_tensor_of_a_size_that_nobody_knows_is_one_clear_error() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        x = torch.zeros(8)
    with FlopMeter(), mode, pytest.raises(DataDependentError, match=r"aten\.nonzero"):
        x.nonzero()


def test_the_devices_with_kernels_of_optimizers_are_torchs_own_and_meta() -> None:
    """However a program asks: TPUs (xla) are on one of the lists unless they are left out."""
    from torch.optim import optimizer

    asked: list[Callable[[], list[str]]] = [
        lambda: torch.utils._foreach_utils._get_foreach_kernels_supported_devices(),
        lambda: optimizer._get_capturable_supported_devices(),
        lambda: optimizer._get_capturable_supported_devices(supports_xla=False),
        lambda: optimizer._get_capturable_supported_devices(False),
        lambda: torch.utils._foreach_utils._get_fused_kernels_supported_devices(),
    ]
    outside = [ask() for ask in asked]
    with emulate_cuda(H100):
        inside = [ask() for ask in asked]
    assert inside == [[*devices, "meta"] for devices in outside]


def test_tensors_on_the_cpu_take_torchs_own_way_under_inference_mode() -> None:
    """There a dispatch mode meets composites whole, and runs the emulation's kernel for tensors on meta."""
    torch.manual_seed(0)
    lstm, gru, x, half = nn.LSTM(4, 3), nn.GRU(4, 3), torch.randn(5, 2, 4), torch.randn(2, 8, dtype=torch.float16)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]))
    scores, lengths = torch.randn(6, 2, 5).log_softmax(-1), torch.tensor([6, 5])
    programs: list[Callable[[], Tensor]] = [
        lambda: F.one_hot(torch.tensor([0, 2, 1])),
        lambda: F.softmax(half, -1, dtype=torch.float32),
        lambda: F.log_softmax(half, -1, dtype=torch.float32),
        lambda: F.dropout(x, 0.5, training=False),
        lambda: F.layer_norm(x, (4,)),
        lambda: F.batch_norm(x, None, None, training=True),
        lambda: lstm(x)[0],
        lambda: gru(x)[0],
        lambda: lstm(packed)[0].data,
        lambda: gru(packed)[0].data,
        lambda: nn.LSTMCell(4, 3)(x[0])[0] * 0,
        lambda: F.scaled_dot_product_attention(x, x, x),
        lambda: F.ctc_loss(scores, torch.tensor([[1, 2], [3, 4]]), lengths, torch.tensor([2, 2])),
    ]
    with torch.inference_mode():
        outside = [program() for program in programs]
        with FlopMeter("h100-sxm5-80gb"):
            inside = [program() for program in programs]
    assert all(map(torch.equal, outside, inside))
