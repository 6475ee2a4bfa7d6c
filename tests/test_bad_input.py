"""What a meter may be given: a right answer or one clear error, and nothing left behind."""

import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import checkpoint

from flopmeter import DataDependentError, FlopMeter, compare, on_meta
from flopmeter.report.drawers import FORMATS
from flopmeter.trace.mixed_devices import MixedDevicesError


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def metered(program, **options):
    """The report of a program, which every format can show."""
    with FlopMeter(**options) as meter:
        program()
    report = meter.report()
    for format in FORMATS:
        report.render(format)
    return report


def ops(report):
    return [op.call.name for kernel in report.kernels for op in kernel.ops]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.norm(self.stem(x)).mean(-1))


# --- devices


def test_a_model_left_on_the_cpu_is_one_error_that_lists_its_tensors():
    with pytest.raises(MixedDevicesError) as caught, FlopMeter():
        Net()(meta(4, 3, 16))
    message = str(caught.value)
    assert "Net" in message
    assert "stem.weight, stem.bias, norm.weight, norm.bias, head.weight, head.bias and 3 more" in message
    assert "model.to('meta')" in message


def test_a_part_of_a_model_left_on_the_cpu_is_listed_by_its_path():
    model = Net().to("meta")
    model.head = nn.Linear(8, 2)
    with pytest.raises(MixedDevicesError, match=r"not on meta: head\.weight, head\.bias\.") as caught, FlopMeter():
        model(meta(4, 3, 16))
    assert caught.value.__suppress_context__  # torch's own error, in fifty lines


@pytest.mark.parametrize(
    "module",
    [nn.Conv1d(3, 8, 3), nn.Linear(16, 2), nn.LayerNorm(16), nn.BatchNorm1d(3), nn.LSTM(16, 4), nn.PReLU()],
    ids=lambda module: type(module).__name__,
)
def test_every_layer_left_on_the_cpu_is_an_error(module):
    """On meta torch itself lets convolutions and LSTMs pass."""
    with pytest.raises(MixedDevicesError, match="weight"), FlopMeter():
        module(meta(4, 3, 16))


def test_an_input_left_on_the_cpu_is_named_by_what_it_is():
    model = nn.Linear(16, 2).to("meta")
    with pytest.raises(MixedDevicesError, match=r"float32 \[4, 16\]\. .*on_meta"), FlopMeter():
        model(torch.ones(4, 16))


def test_what_a_gpu_takes_from_the_cpu_is_no_error():
    x = meta(4, 8)
    report = metered(lambda: (x * torch.tensor(2.0), x[torch.tensor([0, 2])], x.copy_(torch.ones(4, 8))))
    assert ops(report) == ["mul", "_to_copy", "index", "copy_"]  # the places are sent first


def test_a_second_accelerator_is_an_error():
    with FakeTensorMode(allow_non_fake_inputs=True):
        elsewhere = torch.empty(4, device="cuda")
    with pytest.raises(MixedDevicesError, match="runs on cuda in a program that runs on meta"), FlopMeter():
        _ = meta(4) + 1, elsewhere + 1


@pytest.mark.parametrize(
    "made",
    [
        torch.empty_like, torch.zeros_like, torch.ones_like, torch.rand_like, torch.randn_like,
        lambda x, device: torch.full_like(x, 2.0, device=device),
        lambda x, device: x.new_empty(3, device=device),
        lambda x, device: x.new_empty_strided((3,), (1,), device=device),
        lambda x, device: x.new_zeros(3, device=device),
        lambda x, device: x.new_ones(3, device=device),
        lambda x, device: x.new_full((3,), 2.0, device=device),
        lambda x, device: x.to(device),
    ],
)  # fmt: skip
def test_a_tensor_elsewhere_that_another_is_made_after_does_not_put_the_program_there(made):
    with FakeTensorMode(allow_non_fake_inputs=True):
        elsewhere = torch.empty(4, device="cuda")
    with FlopMeter() as meter:
        _ = meta(4) + 1, made(elsewhere, device="meta")
    assert meter.report().uncounted == []


# --- data


def test_a_branch_on_data_is_an_error_with_the_line_that_asked():
    with pytest.raises(DataDependentError, match=r"test_bad_input\.py:\d+"), FlopMeter():
        _ = 1 if meta(3).sum() > 0 else 2


def test_the_size_of_a_selection_of_unknown_data_is_an_error():
    with pytest.raises(DataDependentError, match="nonzero"), FlopMeter():
        meta(8).nonzero()


# --- arguments


@pytest.mark.parametrize("mode", ["fast", None, ["eager"], 1])
def test_an_unknown_mode_or_format_is_an_error_that_names_the_known_ones(mode):
    with FlopMeter() as meter:
        meta(4).sin()
    if mode is not None:  # as the program ran
        with pytest.raises(ValueError, match=r"unknown mode .* known: eager, compiled, cudagraph"):
            meter.report(mode=mode)
    with pytest.raises(ValueError, match=r"unknown format .* known: text, markdown, csv, json, html"):
        meter.report().render(mode)


@pytest.mark.parametrize("host", [3, "h100", {}])
def test_a_host_that_is_none_is_an_error_before_anything_runs(host):
    with pytest.raises(TypeError, match=r"flopmeter\.timing\.Host"):
        FlopMeter(host=host)


def test_one_device_where_a_list_is_due_is_an_error_that_shows_the_list():
    with pytest.raises(TypeError, match=r"such as \['l4'\]"):
        compare(lambda: None, "l4")
    with pytest.raises(TypeError, match="a function without arguments"):
        compare(3, ["l4"])


@pytest.mark.parametrize("mode", ["eager", "compiled", "cudagraph", "eager-cudagraph"])
def test_a_program_of_views_costs_nothing_in_every_mode_and_format(mode):
    x = torch.empty(0, 8, device="meta")
    with FlopMeter() as meter:
        x.t()
    report = meter.report(mode=mode)
    assert (report.flops, report.bytes_read, report.peak_memory_bytes, report.mfu) == (0, 0, 0, 0)
    assert all(report.render(format) for format in FORMATS)


@pytest.mark.parametrize(
    ("kind", "tensor"),
    [
        ("torch.sparse_coo", lambda: torch.eye(4).to_sparse()),
        ("torch.sparse_csr", lambda: torch.eye(4).to_sparse_csr()),
        ("nested", lambda: torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)])),
        ("quantized", lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)),
    ],
)
def test_a_tensor_that_meta_cannot_hold_has_no_twin(kind, tensor):
    with pytest.raises(TypeError, match=f"a {kind} tensor has no twin on meta: meter the program on real CPU tensors"):
        on_meta({"x": tensor()})


def test_a_jagged_tensor_has_a_twin():
    ragged = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], layout=torch.jagged)
    twin = on_meta(ragged)
    assert twin.is_meta
    assert twin.values().shape == (5, 8)


# --- exceptions


class Fails(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x):
        x.sin()
        raise self.error


@pytest.mark.parametrize("error", [KeyError("mine"), RuntimeError("mine"), KeyboardInterrupt(), SystemExit(3)])
def test_an_exception_of_the_model_comes_out_as_it_is(error):
    model = nn.Sequential(nn.Linear(4, 4), Fails(error)).to("meta")
    with pytest.raises(type(error)) as caught, FlopMeter() as meter:
        model(meta(2, 4))
    assert caught.value is error
    assert "sin" in ops(meter.report())


def test_an_exception_in_a_hook_comes_out_as_it_is():
    model = nn.Linear(4, 4).to("meta")
    model.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), FlopMeter():
        model(meta(2, 4))
    with FlopMeter() as meter:
        nn.Linear(4, 4, device="meta")(meta(2, 4))
    assert {op.module for op in meter.trace.ops if op.call.name == "addmm"} == {"Linear"}


def test_an_error_of_shapes_is_torchs_own():
    with pytest.raises(RuntimeError, match="reduction dim") as caught, FlopMeter():
        meta(2, 3) @ meta(4, 5)
    assert type(caught.value) is RuntimeError


# --- sizes


def test_more_elements_than_memory_addresses_are_counted_exactly():
    report = metered(lambda: meta(2**62, dtype=torch.float8_e4m3fn).clone())
    assert (report.bytes_read, report.bytes_written) == (2**62, 2**62)
    assert report.peak_memory_bytes == 2**63
    assert metered(lambda: meta(2**60) * 2).flops == 2**60


def test_products_beyond_64_bits_are_counted_exactly():
    side = 2**30
    report = metered(lambda: meta(side, side, dtype=torch.bfloat16) @ meta(side, side, dtype=torch.bfloat16))
    assert report.flops == 2 * 2**90


@pytest.mark.parametrize(
    "program",
    [
        lambda: meta(0, 8) @ meta(8, 4),
        lambda: meta(0) + 1,
        lambda: meta(0, 3).sum(),
        lambda: F.layer_norm(meta(0, 8), (8,)),
        lambda: torch.cat([meta(0), meta(0)]),
    ],
)
def test_nothing_costs_nothing(program):
    report = metered(program)
    assert report.flops == 0
    assert report.bytes_read <= 8 * 4 + 4


def test_a_product_over_an_empty_dimension_writes_zeros():
    report = metered(lambda: meta(4, 0) @ meta(0, 5))
    assert (report.flops, report.bytes_read, report.bytes_written) == (0, 0, 4 * 4 * 5)


# --- kinds of tensors


def test_a_complex_multiply_add_is_eight_real_operations():
    z = meta(3, 5, dtype=torch.complex64)
    report = metered(lambda: z @ z.mH)
    assert report.flops == 8 * 3 * 3 * 5


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_sparse_tensor_counts_the_bytes_that_it_holds(layout):
    eye = torch.eye(64).to_sparse() if layout == "coo" else torch.eye(64).to_sparse_csr()
    indices = 2 * 64 if layout == "coo" else 64 + 65
    report = metered(lambda: eye.clone())
    assert report.bytes_read == report.bytes_written == 64 * 4 + indices * 8


def test_a_nested_tensor_counts_the_bytes_that_it_holds():
    ragged = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)])
    assert metered(lambda: ragged.sin()).bytes_read == 5 * 8 * 4


def test_a_layer_over_a_nested_tensor_runs():
    ragged = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)])
    assert "linear" in ops(metered(lambda: nn.Linear(8, 4)(ragged)))


def test_a_jagged_tensor_counts_its_dense_values():
    ragged = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], layout=torch.jagged)
    weight = torch.ones(8, 4)
    assert metered(lambda: ragged @ weight).macs == 5 * 8 * 4


def test_a_quantized_tensor_moves_a_byte_an_element():
    x = torch.ones(64, 64)
    report = metered(lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8))
    assert report.bytes_written == 64 * 64


def test_symbolic_sizes_count_as_what_they_stand_for_and_stay_symbolic():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.ones(6, 8), static_shapes=False)
    with mode:
        weight = torch.ones(8, 5)
    report = metered(lambda: (x @ weight).relu().reshape(-1))
    assert report.macs == 6 * 8 * 5
    assert isinstance(x.shape[0], torch.SymInt)
    assert x.shape[0].node.expr.is_symbol  # was not specialized


def test_a_size_that_no_one_knows_is_an_error():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.ones(6, 8), static_shapes=False)
    with pytest.raises(DataDependentError, match="nonzero"), FlopMeter(), mode:
        x.nonzero()


def test_functional_tensors_are_counted_once():
    x = meta(4, 4)
    assert ops(metered(lambda: torch.func.functionalize(lambda y: y.clone().add_(1))(x))) == ["clone", "add"]


def test_a_subclass_with_a_torch_function_is_counted_as_its_data():
    class Marked(torch.Tensor):
        pass

    x = meta(4, 8).as_subclass(Marked)
    assert metered(lambda: x @ x.T).macs == 4 * 4 * 8


@pytest.fixture(scope="module")
def four_ranks():
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (4,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_dtensor_counts_the_work_of_its_rank(four_ranks, device):
    from torch.distributed.tensor import DTensor, Replicate, Shard

    # sizes that no other test uses: torch caches what it learns of shapes, and the first time is the hard one
    rows, depth, columns = (18, 26, 10) if device == "cpu" else (22, 34, 14)
    x = DTensor.from_local(torch.empty(rows, depth, device=device), four_ranks, [Replicate()], run_check=False)
    weight = DTensor.from_local(torch.empty(depth, columns, device=device), four_ranks, [Shard(1)], run_check=False)
    with FlopMeter() as meter:
        (x @ weight).sin()
    assert meter.report().macs == rows * depth * columns
    assert [op.call.name for op in meter.trace.ops] == ["mm", "sin"]


# --- programs


class Nest(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.inner = Nest(depth - 1) if depth else nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x)


def test_a_thousand_modules_deep_is_a_path_of_a_thousand_names():
    paths = []

    def run():
        with torch.device("meta"):
            model, x = Nest(1000), torch.empty(2, 8)
        report = metered(lambda: model(x).sum().backward())
        paths.append(max((op.module for kernel in report.kernels for op in kernel.ops), key=len))

    threading.stack_size(256 * 1024 * 1024)  # Python's own frames need it, with the meter or without
    try:
        with _recursion_limit(100_000):
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
    finally:
        threading.stack_size(0)
    assert paths == ["Nest" + 1001 * ".inner"]


class _recursion_limit:  # noqa: N801
    def __init__(self, limit):
        self.limit = limit

    def __enter__(self):
        self.before = sys.getrecursionlimit()
        sys.setrecursionlimit(self.limit)

    def __exit__(self, *_):
        sys.setrecursionlimit(self.before)


def test_arguments_from_a_generator_are_not_used_up():
    x = meta(4)
    assert ops(metered(lambda: torch.cat([each.sin() for each in (x for _ in range(3))]))) == ["sin"] * 3 + ["cat"]


def test_a_custom_op_may_take_lists_and_options_and_text():
    with torch.library._scoped_library("flopmeter_test", "DEF") as library:
        library.define("mix(Tensor[] xs, Tensor? y, str how, int[] dims, ScalarType t, Device d) -> Tensor[]")
        library.impl("mix", lambda xs, *_: [torch.empty_like(x) for x in xs], "Meta")
        mix, x = torch.ops.flopmeter_test.mix, meta(4)
        report = metered(lambda: [mix([x, x + 1], y, "up", [1, 2], x.dtype, x.device) for y in (None, x)])
    assert [(row.name, row.calls) for row in report.uncounted] == [("flopmeter_test::mix", 2)]


def test_a_branch_of_cond_is_the_one_that_its_predicate_takes():
    x, small = meta(4, 8), lambda y: y @ y.t()  # (torch takes `y.T` for an alias of an input, and refuses it)
    large = lambda y: y @ y.t() @ y @ y.t()  # noqa: E731
    yes = torch.tensor(True)
    assert metered(lambda: torch.cond(on_meta(yes), small, large, (x,))).macs == 4 * 4 * 8
    assert metered(lambda: torch.cond(on_meta(~yes), small, large, (x,))).macs == 4 * 4 * 8 + 2 * 4 * 4 * 8
    with pytest.raises(DataDependentError), FlopMeter():
        torch.cond(x.sum() > 0, small, large, (x,))


def test_loops_of_higher_order_ops_are_walked():
    from torch._higher_order_ops.map import map as map_
    from torch._higher_order_ops.scan import scan
    from torch._higher_order_ops.while_loop import while_loop

    x = meta(4, 8)
    assert ops(metered(lambda: map_(lambda row: row.sin(), x))).count("sin") == 4
    assert ops(metered(lambda: scan(lambda c, row: (c + row, c * row), meta(8), x, dim=0))).count("mul") == 4
    count = on_meta(torch.tensor(0))
    loop = lambda: while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y.sin()), (count, x))  # noqa: E731
    assert ops(metered(loop)).count("sin") == 3


def test_a_higher_order_op_that_hides_its_body_is_an_error_that_names_it():
    from torch._ops import HigherOrderOperator

    class Hidden(HigherOrderOperator):
        def __call__(self, *args):
            return super().__call__(*args)

    hidden = Hidden("hidden")
    for key in (torch._C.DispatchKey.AutogradMeta, torch._C.DispatchKey.Autograd):
        hidden.fallthrough(key)
    with pytest.raises(NotImplementedError, match="hidden cannot be metered"), FlopMeter():
        hidden(meta(4))


def test_a_checkpoint_that_is_a_higher_order_op_is_open():
    x = meta(4, 8).requires_grad_()
    assert "relu" in ops(metered(lambda: checkpoint(F.relu, x, use_reentrant=False).sum().backward()))


def test_other_threads_are_said_to_be_unmetered_and_spoil_nothing():
    with torch.device("meta"):
        mine, theirs, x = nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8), torch.empty(4, 8)

    class Spawns(nn.Module):
        def forward(self, y):
            thread = threading.Thread(target=lambda: (theirs(y), torch.optim.SGD(theirs.parameters(), 0.1).step()))
            thread.start()
            thread.join()
            return y.sin()

    mine.append(Spawns())
    with FlopMeter(as_cuda=False) as meter:
        mine(x)
    assert [op.module for op in meter.trace.ops if op.call.name == "sin"] == ["Sequential.1"]
    assert [op.phase for op in meter.trace.ops if op.call.name == "sin"] == ["forward"]
    report = meter.report().render()
    assert "not metered: 2 ops on meta tensors and 1 module calls in other threads" in report
    assert (
        "\nLinear runs in another thread (1 call of modules), which is not metered: the time is of all else;" in report
    )


def test_two_meters_in_two_threads_see_each_its_own():
    def work(modules, counts):
        with torch.device("meta"):
            model, x = nn.Sequential(*[nn.Linear(8, 8) for _ in range(modules)]), torch.empty(4, 8)
        with FlopMeter(as_cuda=False) as meter:
            for _ in range(20):
                model(x)
        names = {op.module for op in meter.trace.ops if op.call.name == "addmm"}
        counts[modules] = (sum(op.call.name == "addmm" for op in meter.trace.ops), names)

    counts = {}
    threads = [threading.Thread(target=work, args=(modules, counts)) for modules in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = {n: (20 * n, {f"Sequential.{i}" for i in range(n)}) for n in (1, 2, 3)}
    assert counts == expected
