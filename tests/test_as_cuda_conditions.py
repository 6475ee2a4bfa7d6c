"""The ends of the conditions by which CUDA takes a kernel, and what an emulation changes and leaves as it is."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from as_cuda_stream import f16, f32, ops_of
from test_as_cuda_attention import BF16, SINGLE, by_rules, target, tensors
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flopmeter import FlopMeter, on_meta
from flopmeter.as_cuda import CudaTarget, dynamo, emulate_cuda
from flopmeter.as_cuda.emulation import Emulation
from flopmeter.as_cuda.kernels import composites
from flopmeter.torch_names import private

A100 = CudaTarget((8, 0))

# --- attention

MOST = 65535  # blocks of a CUDA grid in y and in z (CUDA programming guide, compute capabilities)


@pytest.mark.parametrize("shape", [(MOST, 1, 16, 64), (1, MOST, 16, 64)], ids=["batch", "heads"])
@pytest.mark.parametrize(
    ("version", "sm", "kernel", "other"), [((2, 13), 90, "cudnn", "flash"), ((2, 15), 80, "flash", "efficient")]
)
def test_a_grid_has_room_for_65535_sequences_and_heads_and_not_for_one_more(version, sm, kernel, other, shape):
    one_more = tuple(size + (size == MOST) for size in shape)
    assert by_rules(version, sm, *tensors(BF16, q=shape)) == kernel
    assert by_rules(version, sm, *tensors(BF16, q=one_more)) == other


@pytest.mark.parametrize(("queries", "keys"), [(0, 16), (16, 0), (0, 0)])
@pytest.mark.parametrize("dtype", [BF16, SINGLE])
@pytest.mark.parametrize("sm", [75, 80, 90, 120])
def test_no_fused_kernel_takes_a_sequence_of_no_tokens(sm, dtype, queries, keys):
    assert by_rules((2, 13), sm, *tensors(dtype, q=(2, 8, queries, 64), k=(2, 8, keys, 64))) == "math"


# One respect decides: what each check of sdp_utils.cpp refuses that the others let pass.
DECIDED: list[tuple[str, tuple[int, int], int, str, dict[str, Any], dict[str, Any]]] = [
    ("one batch", (2, 13), 80, "math", {"q": (2, 8, 64, 64), "k": (1, 8, 64, 64)}, {}),
    ("three heads for eight", (2, 13), 80, "math", {"q": (2, 8, 64, 64), "k": (2, 3, 64, 64)}, {"enable_gqa": True}),
    ("heads that divide", (2, 13), 90, "cudnn",
     {"q": (2, 8, 64, 64), "k": (2, 4, 64, 64), "v": (2, 2, 64, 64)}, {"enable_gqa": True}),
    ("keys do not divide", (2, 13), 90, "math",
     {"q": (2, 8, 64, 64), "k": (2, 3, 64, 64), "v": (2, 4, 64, 64)}, {"enable_gqa": True}),
    ("values do not divide", (2, 13), 90, "math",
     {"q": (2, 8, 64, 64), "k": (2, 4, 64, 64), "v": (2, 3, 64, 64)}, {"enable_gqa": True}),
    ("one head for all", (2, 14), 80, "flash", {"q": (2, 8, 64, 64), "k": (2, 1, 64, 64)}, {}),
    ("one head for none", (2, 14), 80, "math", {"q": (2, 0, 64, 64), "k": (2, 1, 64, 64)}, {}),
    ("after all that is known", (2, 13), 122, "math", {"dtype": SINGLE}, {}),
    ("the last that is known", (2, 13), 121, "efficient", {"dtype": SINGLE}, {}),
    ("heads of nothing", (2, 13), 80, "math", {"dtype": SINGLE, "q": (2, 8, 64, 0)}, {}),
    ("cuDNN 9.15 is not preferred", (2, 14), 90, "flash", {}, {"cudnn_version": 91500}),
    ("cuDNN 9.16 is", (2, 14), 90, "cudnn", {}, {"cudnn_version": 91600}),
    *(
        (f"one query on Blackwell, cuDNN {version}", (2, 14), 100, kernel,
         {"q": (2, 8, 1, 64), "k": (2, 8, 64, 64)}, {"cudnn_version": version})
        for version, kernel in (
            (91800, "cudnn"), (91900, "flash"), (92400, "flash"), (92401, "cudnn"), (92500, "flash"), (92600, "cudnn")
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("version", "sm", "kernel", "shapes", "options"), [row[1:] for row in DECIDED],
                         ids=[row[0] for row in DECIDED])  # fmt: skip
def test_each_check_of_a_fused_kernel_decides_for_itself(version, sm, kernel, shapes, options):
    assert by_rules(version, sm, *tensors(**shapes), **options) == kernel


@pytest.mark.parametrize(
    ("sm", "sizes", "cudnn_version", "kernel"),
    [
        (90, (256, 256), 90900, "math"), (90, (256, 256), 91000, "cudnn"), (80, (256, 256), 91000, "math"),
        (100, (192, 128), 91000, "math"), (100, (192, 128), 91100, "cudnn"), (90, (192, 128), 90900, "math"),
    ],
)  # fmt: skip
def test_long_heads_wait_for_the_cudnn_that_has_them(sm, sizes, cudnn_version, kernel):
    """check_cudnn_tensor_shapes: 256 on sm90 from 9.10 on, 192 with 128 on sm10x from 9.11 on."""
    query, value = sizes
    qkv = tensors(q=(2, 8, 64, query), v=(2, 8, 64, value))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH], set_priority=True):
        assert by_rules((2, 13), sm, *qkv, cudnn_version=cudnn_version) == kernel


def test_a_single_place_of_a_head_may_lie_anywhere_for_flash_attention():
    wide = torch.empty(2, 8, 1, 64, dtype=BF16, device="meta").mT
    assert wide.stride(-1) == 64
    assert by_rules((2, 13), 80, wide, wide, wide) == "flash"


# --- batch norm: select_batch_norm_backend in ATen/native/Normalization.cpp


@pytest.mark.parametrize(
    ("mean", "var", "training", "cudnn"),
    [
        (True, True, True, True), (False, False, True, True), (True, True, False, True),
        (True, False, True, False), (False, True, True, False),
    ],
)  # fmt: skip
def test_cudnn_takes_both_running_statistics_or_in_training_none(mean, var, training, cudnn):
    statistics = [f32(16, grad=False) if given else None for given in (mean, var)]
    with emulate_cuda(A100):
        ran = ops_of(lambda: F.batch_norm(f32(8, 16, 4, 4), *statistics, f32(16), f32(16), training))
    assert ("cudnn_batch_norm" in ran) is cudnn


@pytest.mark.parametrize(
    ("images", "training", "cudnn"),
    [(65535, False, True), (65536, False, False), (65536, True, True), (880801, True, True), (880802, True, False)],
)
def test_cudnn_normalizes_more_images_at_once_in_training_than_in_evaluation(images, training, cudnn):
    vectors = [f32(16, grad=False) for _ in range(4)]
    with emulate_cuda(A100):
        ran = ops_of(lambda: F.batch_norm(f32(images, 16, 2, 2, grad=False), *vectors, training))
    assert ("cudnn_batch_norm" in ran) is cudnn


@pytest.mark.parametrize("classes", [10, -1])
def test_one_hot_scatters_ones_into_zeros_where_meta_tensors_would_be_compared_with_every_class(classes):
    """As ATen/native/Onehot.cpp has it for all devices but meta; its results are those of the CPU."""
    ids = torch.tensor([[3, 0], [1, 3]])
    with FlopMeter("a100-sxm4-80gb") as meter:
        found = F.one_hot(on_meta(ids), classes)
        values = found.sum(0).tolist()
    assert values == F.one_hot(ids, classes).sum(0).tolist()
    ran = [op.call.name for op in meter.trace.ops]
    assert [name for name in ran if name in ("zeros", "scatter_", "arange", "eq")] == ["zeros", "scatter_"]


def test_allclose_compares_element_by_element_and_reads_one_answer():
    with FlopMeter("a100-sxm4-80gb", checks="hold", unknown="stand-in") as meter:
        x = torch.rand(64, 64, device="meta")
        assert torch.allclose(x, x + 1)
        assert not torch.allclose(on_meta(torch.ones(3)), on_meta(torch.zeros(3)))
    names = [str(kernel.op.call.func.overloadpacket) for kernel in meter.report().kernels]
    assert not meter.report().uncounted
    assert [names.count(f"aten.{name}") for name in ("all", "_local_scalar_dense", "le")] == [2, 2, 2]


def test_one_hot_refuses_numbers_that_are_no_ids_as_torch_does():
    with FlopMeter("a100-sxm4-80gb"), pytest.raises(RuntimeError, match="index tensor"):
        F.one_hot(torch.ones(3, device="meta"), 3)


def test_types_are_named_as_torchs_own_errors_name_them():
    for dtype in (torch.float16, torch.float32, torch.float64, torch.bfloat16):
        other = torch.float64 if dtype is torch.float32 else torch.float32
        with pytest.raises(RuntimeError, match="same dtype") as error:
            torch.dot(torch.ones(2, dtype=dtype), torch.ones(2, dtype=other))
        assert re.search(rf"\b{composites._type_name(dtype)}\b", str(error.value)), str(error.value)


# --- decompositions


def called(program: Any, name: str) -> list[Any]:
    with FlopMeter("a100-sxm4-80gb") as meter:
        program()
    return [op.call for op in meter.trace.ops if op.call.name == name]


def test_the_driver_that_a_program_asks_for_reaches_the_decomposition():
    for driver in ("gesvd", "gesvdj", None):
        (call,) = called(lambda d=driver: torch.linalg.svdvals(f32(8, 6, grad=False), driver=d), "_linalg_svd")
        assert call.argument("driver") == driver
        assert call.argument("compute_uv") is False


class Subclass(torch.Tensor):
    """Of a library: it may need a gradient that its type hides."""


def test_the_values_of_a_subclass_come_with_the_vectors_that_its_gradient_may_need():
    matrix = f32(8, 8, grad=False)
    assert [call.argument("compute_v") for call in called(lambda: torch.linalg.eigvalsh(matrix), "_linalg_eigh")] == [
        False
    ]
    own = matrix.as_subclass(Subclass)
    assert [call.argument("compute_v") for call in called(lambda: torch.linalg.eigvalsh(own), "_linalg_eigh")] == [True]


# --- autocast


def test_clearing_the_cache_of_autocast_makes_weights_on_the_cpu_cast_again_too():
    weight, x = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4)

    def casts(clears: bool) -> int:
        with FlopMeter("a100-sxm4-80gb") as meter, torch.autocast("cpu", torch.bfloat16):
            for _ in range(2):
                x @ weight
                if clears:
                    torch.clear_autocast_cache()
        return sum(op.call.name == "_to_copy" for op in meter.trace.ops)

    assert casts(clears=False) == 2 + 1  # x twice, the weight once
    assert casts(clears=True) == 2 + 2


# --- torch.compile


def test_a_program_that_never_compiles_does_not_load_the_compiler(monkeypatch):
    """Loading it takes seconds. The first call of torch.compile does."""
    monkeypatch.setattr(dynamo.private, "AROUND_COMPILED_CALL", private.PrivateName("torch._not_loaded", "mark", ""))
    marked: list[Emulation] = []
    monkeypatch.setattr(dynamo, "_mark_regions", marked.append)
    with FlopMeter("a100-sxm4-80gb", compile="rules"):
        assert marked == []
        torch.compile(lambda x: x)
        assert len(marked) == 1
        torch.compile(lambda x: x)
        assert len(marked) == 1


# --- targets


@pytest.mark.parametrize("is_on", [False, True])
def test_a_program_that_asks_for_deterministic_kernels_is_told_that_they_are_not_priced(is_on):
    with FlopMeter("h100-sxm5-80gb") as meter:
        torch.use_deterministic_algorithms(is_on)
        f32(4, 4).index_add(0, torch.zeros(3, dtype=torch.long, device="meta"), f32(3, 4))
    torch.use_deterministic_algorithms(False)
    assert any("use_deterministic_algorithms" in note for note in meter.report().notes) == is_on


def test_the_note_about_a_device_of_another_maker_says_as_which_one_it_is_taken():
    (note,) = CudaTarget.stand_in("mi300x").notes
    assert note == "mi300x is not an NVIDIA device: ops are those that CUDA dispatches on compute capability 8.0"
    assert CudaTarget((12, 1)).sm == 121


# --- layer norm, as torch refuses it from 2.14 on


@pytest.fixture
def as_in_2_14(monkeypatch):
    monkeypatch.setattr(composites, "LAYER_NORM_REFUSES_MIXED_TYPES", (2, 11))


@pytest.mark.parametrize(
    ("weight", "bias", "named"),
    [(torch.float16, torch.float64, "Half"), (torch.float32, torch.float64, "Double"), (torch.int64, None, "Long")],
)
def test_a_layer_norm_names_the_first_type_that_is_not_its_inputs(as_in_2_14, weight, bias, named):
    """CUDA's kernel asks the weight for its data first; torch writes types in words of its own."""
    given = [None if dtype is None else torch.empty(8, dtype=dtype, device="meta") for dtype in (weight, bias)]
    with emulate_cuda(A100), pytest.raises(RuntimeError, match=f"expected scalar type Float but found {named}$"):
        F.layer_norm(f32(4, 8), (8,), *given)


def test_a_layer_norm_of_mixed_types_is_refused_and_others_run_as_they_do(as_in_2_14):
    x, half, single = f32(4, 8), f16(4, 8, grad=False), f32(8, grad=False)
    with emulate_cuda(A100):
        with pytest.raises(RuntimeError, match="expected scalar type Half but found Float"):
            F.layer_norm(half, (8,), single, single)
        with pytest.raises(RuntimeError, match=r"expected scalar type Half but found Double$"):
            F.layer_norm(half, (8,), None, single.double())
        assert ops_of(lambda: F.layer_norm(x, (8,), single, single)) == ["native_layer_norm"]
        assert F.layer_norm(half[:0], (8,), single, single).shape == (0, 8)
        assert F.layer_norm(half, (8,)).dtype is torch.float16


def test_layer_norm_under_vmap_is_what_it_is_without_an_emulation(as_in_2_14):
    x, weight = f32(3, 4, 8, grad=False), f32(8, grad=False)

    def program():
        return torch.vmap(lambda row: F.layer_norm(row, (8,), weight))(x)

    plain = ops_of(program)
    with emulate_cuda(A100):
        assert ops_of(program) == plain
        assert program().shape == x.shape


def test_grouped_products_of_two_types_are_refused():
    """As CUDA refuses them; fp16, which the meta kernel does not know, is no way around."""
    ends = torch.tensor([2, 4], dtype=torch.int32, device="meta")
    with emulate_cuda(A100):
        for first, second in ((torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)):
            a, b = (
                torch.empty(*shape, dtype=dtype, device="meta")
                for shape, dtype in (((4, 16), first), ((2, 16, 8), second))
            )
            with pytest.raises(RuntimeError):
                torch._grouped_mm(a, b, offs=ends)


@pytest.mark.parametrize("trains", [True, False])
def test_packed_sequences_say_that_the_reserve_is_taken_only_in_training(trains):
    with torch.device("meta"):
        lstm = nn.LSTM(8, 16, bias=not trains).train(trains)
    packed = nn.utils.rnn.pack_padded_sequence(f32(5, 2, 8, grad=False), torch.tensor([5, 3]))
    with FlopMeter("a100-sxm4-80gb") as meter:
        lstm(packed)
    assert ("cuDNN's reserve" in str(meter.report())) is trains


@pytest.mark.parametrize(
    ("x", "weight", "bias", "training", "cudnn"),
    [
        (f32(8, 16, 4, 4), f32(16), f32(16), True, True),
        (f32(8, 16, 4, 4), None, f32(16), True, False),
        (f32(8, 16, 4, 4), f32(16), None, True, False),
        (f16(8, 16, 4, 4), f32(16), f32(16), True, True),
        (f16(8, 16, 4, 4), f16(16), f16(16), True, False),
        (f32(0, 16, 4, 4), f32(16), f32(16), False, False),
    ],
)  # fmt: skip
def test_cudnn_normalizes_images_with_both_vectors_in_its_types(x, weight, bias, training, cudnn):
    with emulate_cuda(A100):
        statistics = f32(16, grad=False), f32(16, grad=False)
        ran = ops_of(lambda: F.batch_norm(x, *statistics, weight, bias, training))
    assert ("cudnn_batch_norm" in ran) is cudnn


@pytest.mark.parametrize(
    ("dtype", "enabled", "channels_last"),
    [(torch.float32, True, True), (torch.float64, True, False), (torch.float32, False, False)],
)
def test_only_cudnn_writes_a_convolution_as_its_input_lies(dtype, enabled, channels_last):
    """cudnn_conv_suggest_memory_format in ConvUtils.h."""
    x = torch.empty(2, 8, 6, 6, dtype=dtype, device="meta").to(memory_format=torch.channels_last)
    weight = torch.empty(4, 8, 3, 3, dtype=dtype, device="meta")
    with FlopMeter("a100-sxm4-80gb"), torch.backends.cudnn.flags(enabled=enabled):
        out = F.conv2d(x, weight)
    assert out.is_contiguous(memory_format=torch.channels_last) is channels_last


@pytest.mark.parametrize(
    ("sm", "version", "dtype", "enabled", "batch", "cudnn"),
    [
        (90, 92000, BF16, True, 2, True), (90, 91200, BF16, True, 2, False), (75, 92000, BF16, True, 2, False),
        (90, 92000, SINGLE, False, 2, False), (90, 92000, SINGLE, True, 0, False), (90, 91200, SINGLE, True, 2, True),
    ],
)  # fmt: skip
def test_cudnn_runs_recurrent_layers_in_its_types_if_it_may_and_there_is_something(
    sm, version, dtype, enabled, batch, cudnn
):
    """`use_cudnn` in RNN.cpp. What it does not run keeps no reserve, and no note tells of one."""
    layer = nn.LSTM(8, 16, device="meta", dtype=dtype)
    x = torch.empty(5, batch, 8, device="meta", dtype=dtype)
    with emulate_cuda(target(sm, version)) as emulation, torch.backends.cudnn.flags(enabled=enabled):
        ran = ops_of(lambda: layer(x))
    assert ("_cudnn_rnn" in ran) is cudnn
    assert any("reserve" in note for note in emulation.notes) is cudnn


@pytest.mark.parametrize(("trains", "rate"), [(True, 0.5), (True, 0.0), (False, 0.5)])
def test_a_recurrent_layer_has_a_state_of_dropout_where_it_drops(trains, rate):
    layer = nn.LSTM(8, 16, num_layers=2, dropout=rate, device="meta").train(trains)
    with FlopMeter("h100-sxm5-80gb") as meter:
        layer(f32(5, 2, 8))
    (call,) = [op.call for op in meter.trace.ops if op.call.func is torch.ops.aten._cudnn_rnn.default]
    assert (call.argument("dropout_state") is not None) is (trains and rate > 0)
