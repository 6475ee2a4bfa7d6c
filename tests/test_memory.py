"""Memory: what is alive, as what, and whether it fits. Oracles: hand arithmetic, torch's MemTracker on fake
tensors, and what the CPU's allocator handed out according to torch.profiler."""

import math
import random
from functools import partial
from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools import MemTracker
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import flopmeter
from flopmeter import FlopMeter, HardwareError, load_hardware
from flopmeter.ask.largest_batch import largest_batch
from flopmeter.timing.allocator import CachingAllocator, OutOfMemoryError, serve
from flopmeter.timing.peak_memory import CATEGORIES, CONTEXT_BYTES, MemoryBlock, memory_of, usable_bytes

FLOAT = 4  # bytes


def memory_when(program, *args, as_cuda=False):
    with FlopMeter(as_cuda=as_cuda) as meter:
        program(*args)
    return memory_of(meter.trace)


def nonzero(sizes):
    return {category: nbytes for category, nbytes in sizes.items() if nbytes}


def state_bytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# Hand arithmetic


def test_an_input_and_two_temporaries_are_alive_at_once():
    x = torch.empty(1000, device="meta")

    def program():
        y = x + 1
        z = y + 1
        del y
        return z + 1

    memory = memory_when(program)
    assert memory.peak_bytes == 3 * 1000 * FLOAT
    assert nonzero(memory.at_peak) == {"inputs": 4000, "temporaries": 8000}
    assert list(memory.timeline["temporaries"]) == [4000, 8000, 8000, 0]


def test_an_output_that_is_kept_is_left_in_the_end():
    x = torch.empty(1000, device="meta")
    kept = []
    memory = memory_when(lambda: kept.append(x.half()))
    assert memory.timeline["temporaries"][-1] == 2000


def test_views_and_in_place_ops_take_no_memory():
    x = torch.empty(10, 100, device="meta")
    memory = memory_when(lambda: x.t().add_(1).unsqueeze(0).mul_(2))
    assert nonzero(memory.at_peak) == {"inputs": 4000}


def test_a_view_keeps_all_of_its_storage_alive():
    kept = []
    memory = memory_when(lambda: kept.append(torch.empty(1000, device="meta")[:1]))
    assert memory.timeline["temporaries"][-1] == 4000


def test_the_peak_names_its_op_module_and_phase():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 1000, bias=False), nn.Linear(1000, 4, bias=False))
        x = torch.empty(50, 4)
    with torch.no_grad():
        memory = memory_when(model, x)
    op = memory.peak_op
    # The first layer's input is the program's; at the second its output is alive beside the hidden layer.
    assert (op.call.name, op.module, op.phase) == ("mm", "Sequential.1", "forward")
    assert nonzero(memory.at_peak) == {
        "parameters": 2 * 4 * 1000 * FLOAT,
        "inputs": 50 * 4 * FLOAT,
        "temporaries": (50 * 1000 + 50 * 4) * FLOAT,
    }


def test_a_training_step_is_split_into_its_parts():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 8, bias=False))
        x = torch.empty(64, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step():
        model(x).sum().backward()
        optimizer.step()

    memory = memory_when(step)
    first, second = 16 * 32 * FLOAT, 32 * 8 * FLOAT
    hidden = 64 * 32 * FLOAT
    assert tuple(memory.at_peak) == tuple(memory.timeline) == CATEGORIES
    assert set(memory.timeline["parameters"]) == {first + second}
    assert set(memory.timeline["inputs"]) == {64 * 16 * FLOAT}
    # The hidden layer after the ReLU serves its gradient and the next layer's weights; then the loss and its
    # gradient, 1. Temporary are the hidden layer before the ReLU and, more, its gradients before and after.
    assert max(memory.timeline["activations"]) == hidden + 2 * FLOAT
    assert max(memory.timeline["temporaries"]) == 2 * hidden
    assert memory.timeline["gradients"][-1] == first + second
    assert memory.timeline["optimizer state"][-1] == first + second


def test_what_is_freed_right_before_the_backward_pass_was_not_saved_for_it():
    x, gradient = torch.empty(1000, device="meta", requires_grad=True), torch.empty(1000, device="meta")

    def program():
        y = x * gradient
        z = y + 1
        del z
        y.backward(gradient)  # `y` is held by the program, and so counts

    timeline = memory_when(program).timeline
    assert list(timeline["activations"][:2]) == [4000, 4000]
    assert list(timeline["temporaries"][:3]) == [0, 4000, 0]


def test_inference_saves_nothing_for_backward():
    with torch.device("meta"):
        model, x = nn.Sequential(*[nn.Linear(8, 8) for _ in range(5)]), torch.empty(100, 8)
    with torch.inference_mode():
        memory = memory_when(model, x)
    assert memory.at_peak["activations"] == 0
    assert memory.at_peak["temporaries"] == 2 * 100 * 8 * FLOAT  # one layer's input and its output


def test_parameters_and_buffers_that_no_op_touches_count():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.used = nn.Linear(10, 10, bias=False)
            self.unused = nn.Linear(10, 10, bias=False)
            self.register_buffer("table", torch.empty(7))

        def forward(self, x):
            return self.used(x)

    with torch.device("meta"):
        model, x = Net(), torch.empty(1, 10)
    assert memory_when(model, x).at_peak["parameters"] == (100 + 100 + 7) * FLOAT


def test_an_average_of_weights_that_never_runs_is_parameters():
    """As torch's AveragedModel, whose weights each step reads and writes without calling it."""
    model, average = nn.Linear(50, 50, device="meta"), nn.Linear(50, 50, device="meta")

    def program():
        model(torch.empty(10, 50, device="meta"))
        for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
            mean.detach().lerp_(weight.detach(), 0.01)

    weights = 50 * 50 + 50
    assert memory_when(program).at_peak["parameters"] == 2 * weights * FLOAT


def test_a_module_may_have_an_attribute_named_as_one_of_torchs_methods():
    """Megatron-LM's DistributedDataParallel keeps its gradients in a list named `buffers`."""

    class Around(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module
            self.buffers = []

        def forward(self, x):
            return self.module(x)

    with torch.device("meta"):
        model, x = Around(nn.Linear(10, 10, bias=False)), torch.empty(1, 10)
    assert memory_when(model, x).at_peak["parameters"] == 100 * FLOAT


def test_parameters_that_a_model_gets_after_its_first_call_count():
    """As adapters do that are added to a model which has run."""
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(10, 10, bias=False)), torch.empty(1, 10)

    def grow():
        model(x)
        model.append(nn.Linear(10, 10, bias=False, device="meta"))
        return model(x)

    assert memory_when(grow).at_peak["parameters"] == 2 * 100 * FLOAT


def test_a_model_built_inside_the_context_has_parameters_too():
    def program():
        with torch.device("meta"):
            return nn.Linear(10, 10)(torch.empty(5, 10))

    memory = memory_when(program)
    assert memory.at_peak["parameters"] == 110 * FLOAT
    assert memory.at_peak["inputs"] == 0


def adam_step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()


def small_training(optimizer=torch.optim.AdamW, **options):
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.empty(4096, 64)
    return model, optimizer(model.parameters(), lr=0.1, **options), x


def test_the_optimizers_first_step_makes_its_state_and_the_next_finds_it():
    model, optimizer, x = small_training()
    parameters = state_bytes(model.parameters())
    first = memory_when(adam_step, model, optimizer, x)
    assert first.timeline["optimizer state"][0] == 0
    assert first.timeline["optimizer state"][-1] == 2 * parameters
    second = memory_when(adam_step, model, optimizer, x)
    assert set(second.timeline["optimizer state"]) == {2 * parameters}
    # The batch is large: the peak is in the backward pass, where only the second step has the state.
    assert second.peak_bytes == first.peak_bytes + 2 * parameters
    assert first.steady_peak_bytes == second.peak_bytes == second.steady_peak_bytes


def test_the_state_of_a_function_that_returned_still_counts_for_the_next_repetition():
    def program():
        model, optimizer, x = small_training()
        adam_step(model, optimizer, x)

    memory = memory_when(program)
    assert memory.timeline["optimizer state"][-1] == 0
    assert memory.steady_peak_bytes == memory.peak_bytes + 2 * (2 * 64 * 65) * FLOAT


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_frees_gradients_or_keeps_them(set_to_none):
    model, _, x = small_training()
    parameters = state_bytes(model.parameters())

    def program():
        model(x).sum().backward()
        model.zero_grad(set_to_none=set_to_none)
        model(x)

    memory = memory_when(program)
    assert max(memory.timeline["gradients"]) == parameters
    assert memory.timeline["gradients"][-1] == (0 if set_to_none else parameters)


def test_gradients_that_were_there_before_count_from_the_start():
    model, _, x = small_training()
    model(x).sum().backward()
    parameters = state_bytes(model.parameters())
    forward = memory_when(lambda: model(x))
    assert set(forward.timeline["gradients"]) == {parameters}
    accumulating = memory_when(lambda: model(x).sum().backward())
    assert accumulating.timeline["gradients"][0] == parameters
    assert accumulating.timeline["gradients"][-1] == parameters


def test_the_gradient_of_an_input_is_a_gradient_and_that_of_an_activation_is_not():
    x = torch.empty(1000, device="meta", requires_grad=True)
    memory = memory_when(lambda: (x * 2).exp().sum().backward())
    assert memory.timeline["gradients"][-1] == 4000
    assert max(memory.timeline["gradients"]) == 4000


class Factors:
    """What Shampoo keeps of a matrix: a sum of products of gradients for each of its sides."""

    def __init__(self, owner, parameter):
        self.owner = owner
        self.sides = tuple(torch.zeros(size, size, device=parameter.device) for size in parameter.shape)


class SumsOfProducts(torch.optim.Optimizer):
    """Its state lies in objects of a class of its own, which know their optimizer."""

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            factors = self.state[parameter].setdefault("block", {}).setdefault("factors", Factors(self, parameter))
            for side, factor in enumerate(factors.sides):
                rows = parameter.grad.transpose(0, side)
                factor.addmm_(rows, rows.mT)


def test_state_that_an_optimizer_keeps_in_objects_is_optimizer_state():
    with torch.device("meta"):
        model, x = nn.Linear(300, 200, bias=False), torch.empty(16, 300)
    optimizer = SumsOfProducts(model.parameters(), {})
    adam_step(model, optimizer, x)
    memory = memory_when(adam_step, model, optimizer, x)
    assert set(memory.timeline["optimizer state"]) == {(300**2 + 200**2) * FLOAT}
    assert set(memory.timeline["inputs"]) == {16 * 300 * FLOAT}


def test_an_optimizer_that_steps_inside_the_backward_pass_is_the_optimizer():
    model, _, x = small_training(torch.optim.SGD, momentum=0.9)
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def step_at_once(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_at_once)
    memory = memory_when(lambda: model(x).sum().backward())
    parameters = state_bytes(model.parameters())
    assert memory.timeline["optimizer state"][-1] == parameters
    assert max(memory.timeline["gradients"]) == (64 * 64 + 64) * FLOAT  # never more than one layer's


def test_an_optimizer_that_steps_in_a_backward_pass_that_another_one_asks_for_is_the_optimizer():
    layer, outer = nn.Linear(4, 4, device="meta"), nn.Parameter(torch.empty(3, device="meta"))
    inner = torch.optim.SGD([layer.weight], lr=0.1)
    layer.weight.register_post_accumulate_grad_hook(lambda weight: inner.step())
    with FlopMeter() as meter:
        torch.optim.SGD([outer], lr=0.1).step(lambda: layer(torch.empty(2, 4, device="meta")).sum().backward())
    assert [op.phase for op in meter.trace.ops if op.call.name == "_foreach_add_"] == ["optimizer"]


def test_an_output_buffer_that_grows_counts_at_its_new_size():
    x = torch.empty(1000, device="meta")

    def program():
        out = torch.empty(0, device="meta")
        torch.exp(x, out=out)
        return torch.empty(10, device="meta"), out

    memory = memory_when(program)
    assert memory.peak_bytes == (1000 + 1000 + 10) * FLOAT


def test_tensors_made_of_lists_are_not_there_before_they_are_made():
    def program():
        for _ in range(5):
            torch.tensor([1.0] * 1000).sum()

    assert memory_when(program).peak_bytes == 1000 * FLOAT + FLOAT


def test_tensors_made_of_lists_on_meta_are_not_there_before_they_are_made():
    """torch.tensor on meta runs no op: the meter is told by the constructor. Each is there while it is sent."""
    with FlopMeter() as meter:
        for _ in range(5):
            torch.tensor([1.0] * 1000, device="meta").sum()
            torch.as_tensor([1.0] * 4000, device="meta")
    memory = memory_of(meter.trace)
    assert memory.peak_bytes == 4000 * FLOAT
    assert memory.reserved_bytes == 2 * 2**20  # one segment serves all


def test_the_gradient_of_a_leaf_made_of_a_list_is_a_gradient():
    with FlopMeter() as meter:
        x = torch.tensor([1.0] * 1000, device="meta", requires_grad=True)
        (x * 2).sum().backward()
    assert max(memory_of(meter.trace).timeline["gradients"]) == 1000 * FLOAT


def test_the_gradient_of_a_leaf_made_in_the_context_is_a_gradient():
    def program():
        x = torch.empty(1000, device="meta", requires_grad=True)
        (x * 2).sum().backward()

    assert max(memory_when(program).timeline["gradients"]) == 1000 * FLOAT


def test_a_parameter_that_ops_made_in_the_context_has_a_gradient():
    def program():
        with torch.device("meta"):
            layer = nn.Linear(10, 10, bias=False)
            layer.weight = nn.Parameter(torch.empty(10, 10) * 0.02)
            layer(torch.empty(5, 10)).sum().backward()

    assert max(memory_when(program).timeline["gradients"]) == 100 * FLOAT


def test_sizes_beyond_64_bits_add_up():
    def program():
        x = torch.empty(2**62, dtype=torch.uint8, device="meta")
        y = x + 1
        return x, y, y + 1

    memory = memory_when(program)
    assert memory.peak_bytes == max(memory.timeline["temporaries"]) == 3 * 2**62
    assert not memory.fits(load_hardware("b300-sxm-288gb"), allocator=True)


def test_the_closure_of_an_optimizer_has_gradients_and_the_optimizer_its_history():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.ones(8, 64)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, history_size=5)

    def loss():
        optimizer.zero_grad()
        value = model(x).square().mean()
        value.backward()
        return value

    memory = memory_when(lambda: optimizer.step(loss))
    parameters = state_bytes(model.parameters())
    assert max(memory.timeline["gradients"]) >= parameters
    (state,) = optimizer.state.values()
    kept = [state["d"], state["prev_flat_grad"], *state["old_dirs"], *state["old_stps"]]
    assert len(kept) > 2
    # The rest are numbers: the step's length, products of the directions.
    assert memory.timeline["optimizer state"][-1] == pytest.approx(state_bytes(kept), abs=100)


def test_growing_a_tensor_needs_its_old_memory_and_its_new():
    kept = []

    def program():
        x = torch.empty(100, device="meta").resize_(1000)
        kept.append(x.half())

    assert list(memory_when(program).timeline["temporaries"]) == [400, 4400, 4000 + 2000, 2000]


def test_a_wrapped_parameter_counts_as_what_it_wraps():
    layer = nn.Linear(10, 10, bias=False)
    layer.weight = nn.Parameter(TwoTensor(torch.empty(10, 10), torch.empty(10, 10)))
    memory = memory_when(layer, torch.empty(3, 10))
    assert memory.at_peak["parameters"] == 2 * 100 * FLOAT


def test_a_program_without_ops_has_no_peak_op():
    memory = memory_when(lambda: None)
    assert (memory.peak_bytes, memory.peak_op, memory.steady_peak_bytes) == (0, None, 0)
    assert memory.reserved_bytes == 0


def test_memory_stands_still_while_the_trace_goes_on():
    kept = []
    with FlopMeter() as meter:
        kept.append(torch.empty(10, device="meta"))
        early, checked = memory_of(meter.trace), memory_of(meter.trace)
        assert checked.peak_bytes == 40
        assert checked.timeline
        kept.append(torch.empty(1000, device="meta"))
        kept.clear()
    assert early.peak_bytes == checked.peak_bytes
    assert early.timeline == checked.timeline
    assert early.allocated_bytes == 512


# Against MemTracker and real runs


class ConvNet(nn.Module):
    """A stem, a residual block, a head, as in a ResNet."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.first, self.first_norm = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.second, self.second_norm = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)), inplace=True)
        y = F.relu(self.first_norm(self.first(x)), inplace=True)
        x = F.relu(x + self.second_norm(self.second(y)))
        return self.head(F.max_pool2d(x, 2).mean((2, 3)))


# The state of the CPU's random numbers, 5056 B that checkpoints save, is memory that no op makes.
SAVE_NO_STATE = {"preserve_rng_state": False}


class Residual(nn.Module):
    """Four feed-forward blocks, checkpointed (with a reentrant backward pass or not) or plain."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            plain = self.reentrant is None
            x = x + (block(x) if plain else checkpoint(block, x, use_reentrant=self.reentrant, **SAVE_NO_STATE))
        return x


def transformer():
    layers = (nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, dropout=0.1) for _ in range(2))
    return nn.Sequential(*layers)


def images():
    return torch.randn(8, 3, 32, 32)


def rows(requires_grad=False):
    return torch.randn(1024, 64, requires_grad=requires_grad)


def tokens():
    return torch.randn(8, 32, 64)


TRAININGS = {
    "transformer": (transformer, tokens),
    "convolutions": (ConvNet, images),
    "plain": (Residual, rows),
    "checkpointed": (partial(Residual, reentrant=False), rows),
    "checkpointed reentrant": (partial(Residual, reentrant=True), partial(rows, requires_grad=True)),
}


def training_step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def training(case):
    make_model, make_input = TRAININGS[case]
    torch.manual_seed(0)
    model = make_model()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True), make_input()


def mem_tracker_peak(case, steps):
    with FakeTensorMode():
        model, optimizer, x = training(case)
        tracker = MemTracker()
        tracker.track_external(model, optimizer, x)
        with tracker:
            for _ in range(steps):
                tracker.reset_mod_stats()
                training_step(model, optimizer, x)
        snapshot = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return {getattr(kind, "value", kind): nbytes for kind, nbytes in snapshot.items()}


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("case", TRAININGS)
def test_the_peak_is_mem_trackers(case, steps):
    with FakeTensorMode():
        state = training(case)
        memory = memory_when(lambda: [training_step(*state) for _ in range(steps)])
    expected = mem_tracker_peak(case, steps)
    assert memory.peak_bytes == pytest.approx(expected["Total"], rel=0.001)
    at_peak = memory.at_peak
    assert at_peak["parameters"] == expected["Parameter"] + expected["Buffer"]
    if at_peak["activations"]:  # the peak is before the step, in which MemTracker calls all that is made state
        assert at_peak["optimizer state"] == pytest.approx(expected["Optstate"], abs=1000)
    if "checkpointed" not in case:  # there it may misattribute, by its own docstring
        assert at_peak["activations"] == expected["Activation"]
        mine = at_peak["gradients"] + at_peak["temporaries"]
        if at_peak["activations"]:
            assert mine == expected["Gradient"] + expected["Temp"]


# The CPU's convolutions reorder their operands into buffers of their own, which no op shows.
@pytest.mark.parametrize("case", [case for case in TRAININGS if case != "convolutions"])
def test_a_real_run_allocates_as_much(case):
    state = training(case)
    training_step(*state)
    state[1].zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        training_step(*state)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    real_rise = max(accumulate(event.nbytes() for event in events))

    state = training(case)
    training_step(*state)
    state[1].zero_grad()
    memory = memory_when(training_step, *state)
    there_before = sum(block.nbytes for block in memory.blocks if block.born < 0)
    assert memory.peak_bytes - there_before == pytest.approx(real_rise, rel=0.001)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_keeps_one_blocks_activations(reentrant):
    def most(reentrant):
        with torch.device("meta"):
            model, x = Residual(reentrant), rows(requires_grad=True)
        timeline = memory_when(lambda: model(x).sum().backward()).timeline
        # A reentrant backward pass differentiates with respect to a copy of each block's input: only the first
        # one's is a copy of x, and its gradient one of x.
        assert max(timeline["gradients"]) == state_bytes([*model.parameters(), x, *([x] if reentrant else [])])
        freed = sum(max(0, before - after) for before, after in pairwise(timeline["gradients"]))
        assert freed == state_bytes([x] if reentrant else [])  # of the copy of x; all others stay
        return max(timeline["activations"])

    loss, hidden, row = 2 * FLOAT, 1024 * 256 * FLOAT, 1024 * 64 * FLOAT
    # Plain: of each block the hidden layer before and after the GELU, and the input of all but the first.
    assert most(None) == 4 * 2 * hidden + 3 * row + loss
    # Checkpointed: these inputs, and the inside of the one block that is recomputed; with a reentrant
    # backward pass also its output, which is the root of that pass.
    assert most(reentrant) == pytest.approx(2 * hidden + 3 * row + (row if reentrant else 0), abs=loss)


# Laws


def random_program(seed):
    """A random chain of element-wise ops, reductions and views that keeps some results and drops others."""
    choose = random.Random(seed)
    with torch.device("meta"):
        parameter = nn.Parameter(torch.empty(choose.randint(1, 300)))
        alive = [torch.empty_like(parameter)]

    def program():
        for _ in range(choose.randint(1, 30)):
            make = choose.choice(
                [lambda x: x * parameter, lambda x: x + 1, lambda x: x.detach().clone().mul_(2), lambda x: x.view(-1)]
            )
            alive.append(make(choose.choice(alive)))
            if choose.random() < 0.4:
                alive.pop(choose.randrange(len(alive)))
        total = torch.stack([parameter, *alive]).sum()
        total.backward()

    return program


@pytest.mark.parametrize("seed", range(30))
def test_the_timeline_adds_up_and_holds_every_ops_tensors(seed):
    with FlopMeter(as_cuda=False) as meter:
        random_program(seed)()
    trace, memory = meter.trace, memory_of(meter.trace)
    totals = [sum(step) for step in zip(*memory.timeline.values(), strict=True)]
    assert len(totals) == len(trace.ops) + 1
    assert min(min(sizes) for sizes in memory.timeline.values()) >= 0
    assert max(totals) == memory.peak_bytes == sum(memory.at_peak.values())
    assert memory.peak_op is trace.ops[totals.index(memory.peak_bytes)]
    for op, total in zip(trace.ops, totals, strict=False):
        assert total >= sum(trace.storages[number].nbytes for number in set(op.storages))
    assert memory.peak_bytes <= memory.allocated_bytes <= memory.reserved_bytes
    assert memory.steady_peak_bytes >= memory.peak_bytes


@pytest.mark.parametrize("case", TRAININGS)
def test_twice_the_batch_has_twice_the_activations_and_the_same_parameters(case):
    def parts(times):
        with torch.device("meta"):
            model, _, x = training(case)
            x = torch.cat([x.detach()] * times)
        x.requires_grad_(case.endswith("reentrant"))
        return memory_when(lambda: model(x).square().sum().backward()).timeline

    single, double = parts(1), parts(2)
    assert max(double["parameters"]) == max(single["parameters"])
    # Weights' transposes are views; only scalars (the loss, the norms' statistics of a channel) do not double.
    assert max(double["activations"]) == pytest.approx(2 * max(single["activations"]), rel=1e-3)


# The caching allocator

KIB, MIB = 2**10, 2**20


@pytest.mark.parametrize(
    ("request_bytes", "segment_bytes"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 1, 10 * MIB),  # rounded to 512 B first, and so no longer below 10 MiB
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (100 * MIB + 1, 102 * MIB),
    ],
)
def test_requests_are_served_from_segments_of_2_and_20_mib_and_of_their_own(request_bytes, segment_bytes):
    allocator = CachingAllocator()
    allocator.allocate(request_bytes)
    assert allocator.reserved_bytes == segment_bytes


def test_allocated_bytes_are_whole_blocks_of_512_bytes():
    kept = []

    def program():
        kept.extend(torch.empty(nbytes, dtype=torch.uint8, device="meta") for nbytes in (0, 1, 512, 513))

    assert memory_when(program).allocated_bytes == 0 + 512 + 512 + 1024


def test_small_requests_share_a_segment_and_large_ones_do_not_use_it():
    allocator = CachingAllocator()
    for _ in range(4):
        allocator.allocate(512 * KIB)
    assert allocator.reserved_bytes == 2 * MIB
    allocator.allocate(1)
    assert allocator.reserved_bytes == 4 * MIB


def test_what_one_stream_has_freed_serves_no_other():
    """c10/cuda/CUDACachingAllocator.cpp looks for a block of the stream that asks; so 30 MiB are taken twice."""
    allocator = CachingAllocator(capacity=60 * MIB)
    allocator.free(allocator.allocate(30 * MIB))
    piece = allocator.allocate(30 * MIB, stream=1)
    assert allocator.reserved_bytes == 60 * MIB
    allocator.free(piece)
    allocator.allocate(30 * MIB, stream=1)
    assert allocator.reserved_bytes == 60 * MIB
    allocator.allocate(20 * MIB, stream=2)  # what nobody uses goes back first
    assert allocator.reserved_bytes == 50 * MIB


def test_reserved_memory_of_a_program_tells_its_streams_apart():
    with flopmeter.cuda("a100-sxm4-80gb") as device:
        torch.empty(32 * MIB, device="cuda", dtype=torch.uint8).add_(1)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.empty(32 * MIB, device="cuda", dtype=torch.uint8).add_(1)
        assert torch.cuda.max_memory_reserved() == 64 * MIB
    assert device.report().step.memory.reserved_bytes == 64 * MIB


def test_freed_neighbours_become_one_piece_again():
    allocator = CachingAllocator()
    pieces = [allocator.allocate(5 * MIB) for _ in range(4)]
    assert allocator.reserved_bytes == 20 * MIB
    for piece in (pieces[0], pieces[2], pieces[1]):
        allocator.free(piece)
    allocator.allocate(15 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_a_gap_between_pieces_in_use_serves_nothing_larger():
    allocator = CachingAllocator()
    pieces = [allocator.allocate(5 * MIB) for _ in range(4)]
    allocator.free(pieces[0])
    allocator.free(pieces[2])
    allocator.allocate(6 * MIB)
    assert allocator.reserved_bytes == 40 * MIB


def test_a_remainder_of_at_most_1_mib_stays_with_a_large_piece():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(30 * MIB))
    assert allocator.allocate(29 * MIB).nbytes == 30 * MIB
    allocator.allocate(512)
    assert allocator.reserved_bytes == 30 * MIB + 2 * MIB
    allocator.allocate(MIB + 512)
    assert allocator.reserved_bytes == 30 * MIB + 2 * MIB + 20 * MIB


def test_unused_segments_are_given_back_before_memory_runs_out():
    lives = [MemoryBlock(30 * MIB, 0, 1, "temporaries", 0), MemoryBlock(40 * MIB, 1, 2, "temporaries", 1)]
    assert serve(lives, 2) == 70 * MIB
    assert serve(lives, 2, capacity=45 * MIB) == 40 * MIB
    with pytest.raises(OutOfMemoryError):
        serve(lives, 2, capacity=39 * MIB)


def test_the_last_byte_of_the_capacity_can_be_had_once_free_memory_is_given_back():
    allocator = CachingAllocator(capacity=20 * MIB)
    allocator.free(allocator.allocate(12 * MIB))
    allocator.allocate(20 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_the_end_of_an_expandable_segment_is_kept_for_what_fits_nowhere_else(monkeypatch):
    """get_free_block of c10/cuda/CUDACachingAllocator.cpp: it counts as large as it can become. Pages are of 20 MiB."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    allocator = CachingAllocator()
    first, _, last = (allocator.allocate(size * MIB) for size in (40, 5, 30))
    assert allocator.reserved_bytes == 80 * MIB
    allocator.free(first)
    allocator.free(last)
    allocator.allocate(25 * MIB)  # into the first 40, though the last 35 fit better
    allocator.allocate(60 * MIB)  # from 45 to 105
    assert allocator.reserved_bytes == 120 * MIB
    allocator.allocate(512)  # small requests have a segment of their own, with pages of 2 MiB
    assert allocator.reserved_bytes == 122 * MIB


def test_a_segment_that_is_partly_in_use_is_kept_and_serves_on():
    allocator = CachingAllocator(capacity=40 * MIB)
    allocator.allocate(5 * MIB)
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(30 * MIB)
    allocator.allocate(8 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


@settings(max_examples=100)
@given(st.lists(st.one_of(st.integers(1, 30 * MIB), st.integers(1, 2 * MIB), st.just(0)), max_size=60), st.randoms())
def test_pieces_in_use_never_overlap_and_all_that_is_freed_can_be_used_again(requests, choose):
    allocator = CachingAllocator()
    held = []
    for nbytes in requests:
        if nbytes:
            held.append((allocator.allocate(nbytes), nbytes))
        elif held:
            allocator.free(held.pop(choose.randrange(len(held)))[0])
        spans = sorted((piece.address, piece.address + piece.nbytes) for piece, _ in held)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert all(piece.nbytes >= nbytes for piece, nbytes in held)
        assert sum(end - start for start, end in spans) <= allocator.reserved_bytes
    reserved = allocator.reserved_bytes
    while held:
        allocator.free(held.pop(choose.randrange(len(held)))[0])
    assert allocator.reserved_bytes == reserved
    whole = [piece for pool in allocator._free.values() for _, _, piece in pool]
    assert sum(piece.nbytes for piece in whole) == reserved
    assert all(piece.before is None and piece.after is None for piece in whole)


# Fitting a device


def keeping(nbytes):
    """A program that holds so many bytes."""
    return lambda: torch.empty(nbytes, dtype=torch.uint8, device="meta").add_(1)


def test_less_than_the_nominal_memory_is_usable():
    device = load_hardware("a100-sxm4-80gb")
    assert usable_bytes(device) == 85_100_000_000 - CONTEXT_BYTES
    assert memory_when(keeping(usable_bytes(device))).fits(device)
    assert not memory_when(keeping(usable_bytes(device) + 1)).fits(device)


def test_the_allocators_rounding_can_decide_whether_a_program_fits():
    device = load_hardware("a100-sxm4-80gb").replace(memory_gb=(30 * MIB + CONTEXT_BYTES) / 1e9)
    memory = memory_when(lambda: [keeping(25 * MIB)(), keeping(3 * MIB)()])
    assert memory.peak_bytes == 28 * MIB
    assert memory.fits(device)
    assert memory.reserved_bytes == (26 + 20) * MIB
    assert not memory.fits(device, allocator=True)


def test_a_step_that_fits_only_before_there_is_optimizer_state_does_not_fit():
    memory = memory_when(adam_step, *small_training())
    assert memory.peak_bytes < memory.steady_peak_bytes
    device = load_hardware("a100-sxm4-80gb").replace(memory_gb=(memory.peak_bytes + CONTEXT_BYTES) / 1e9)
    assert not memory.fits(device)


def test_a_device_of_unknown_memory_gives_an_error_that_says_what_to_do():
    cpu = load_hardware("cpu-xeon-8480plus")
    with pytest.raises(HardwareError, match=r"memory_gb"):
        memory_when(keeping(1)).fits(cpu)
    with pytest.raises(HardwareError, match=r"memory_gb"):
        largest_batch(lambda batch: pytest.fail("must not run"), cpu)
    assert memory_when(keeping(1)).fits(cpu.replace(memory_gb=256))


@pytest.mark.parametrize("largest", [0, 1, 2, 3, 31, 32, 33, 1000])
def test_the_largest_batch_is_the_last_that_fits(largest):
    device = load_hardware("a100-sxm4-80gb")
    item = usable_bytes(device) // largest if largest else usable_bytes(device) + 1
    batches = []

    def program(batch):
        batches.append(batch)
        keeping(batch * item)()

    assert largest_batch(program, device) == largest
    assert len(batches) <= 2 * math.ceil(math.log2(largest + 2)) + 1


def test_the_largest_batch_stops_at_its_limit():
    assert largest_batch(lambda batch: keeping(1)(), "l4", limit=100) == 100
    assert largest_batch(lambda batch: keeping(1)(), "l4", limit=1) == 1
    with pytest.raises(ValueError, match="limit"):
        largest_batch(lambda batch: keeping(1)(), "l4", limit=0)


def test_the_largest_batch_of_a_training_fits_and_the_next_does_not():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 4096))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch):
        adam_step(model, optimizer, torch.empty(batch, 4096, device="meta"))

    device = load_hardware("t4")
    batch = largest_batch(step, device, allocator=True)
    for more, fits in ((0, True), (1, False)):
        with FlopMeter(device) as meter:
            step(batch + more)
        assert memory_of(meter.trace, device).fits(device, allocator=True) == fits
    # At the GELU's gradient: weights and two moments, the second layer's gradients, and of each item the
    # input, the hidden layer, and its gradients before and after the GELU. Segments round up to 2 MiB, and cuBLAS has
    # 8.5 MB of workspace in each of two threads.
    fixed = 3 * state_bytes(model.parameters()) + state_bytes(model[2].parameters())
    assert batch == pytest.approx((usable_bytes(device) - fixed) / (4 * 4096 * FLOAT), rel=2e-3)


def test_the_largest_batch_is_that_of_the_mode():
    """Eight sines keep their eight inputs for backward, where a gradient, a cosine and their product are beside them.
    Compiled they are one kernel forward, whose result is one number, and one backward, which computes all but the
    input again and writes the gradient."""

    def sines(x):
        for _ in range(8):
            x = x.sin()
        return x.sum()

    def step(batch):
        sines(torch.empty(batch, 8192, device="meta", requires_grad=True)).backward()

    device = load_hardware("t4")
    room = usable_bytes(device) / (8192 * FLOAT)
    assert largest_batch(step, device) == pytest.approx(room / 10, rel=1e-2)
    for mode in ("compiled", "cudagraph"):
        assert largest_batch(step, device, mode=mode) == pytest.approx(room / 2, rel=1e-2)


# In the report


def test_the_report_says_what_the_peak_is_made_of_and_whether_it_fits():
    model, optimizer, x = small_training()
    with FlopMeter("l4") as meter:
        adam_step(model, optimizer, x)
    report = meter.report()
    assert report.peak_memory_bytes == report.memory.peak_bytes
    text = str(report)
    assert "fits NVIDIA L4" in text
    assert "activations" in text
    with FlopMeter("l4") as meter:
        keeping(24 * 10**9)()
    assert "does NOT fit NVIDIA L4: 23.2 of 23.8 GB usable (0.6 assumed for the process)" in str(meter.report())


def test_a_tensor_of_just_a_mebibyte_takes_the_small_pool_and_leaves_its_place_to_the_next():
    """kSmallSize of CUDACachingAllocator.cpp: a segment of 2 MiB serves both."""

    def program():
        for _ in range(2):
            torch.empty(2**20, dtype=torch.uint8, device="meta").add_(1)

    assert memory_when(program).reserved_bytes == 2 * 2**20


@pytest.mark.parametrize(("setting", "given"), [("expandable_segments:True", 19.5), ("", 20)])
def test_only_an_expandable_segment_splits_off_less_than_a_mebibyte(monkeypatch, setting, given):
    """`should_split` in c10/cuda/CUDACachingAllocator.cpp."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(20 * MIB))
    assert allocator.allocate(39 * MIB // 2).nbytes == given * MIB


def test_expandable_segments_grow_by_what_is_lacking(monkeypatch: pytest.MonkeyPatch):
    """In pages of 20 MiB (c10/cuda/CUDACachingAllocator.cpp, Note [Expandable Segments]): 30 MiB take two; after they
    are given back, 70 MiB take two more, where a segment of their own would be 70."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(30 * MIB))
    assert allocator.reserved_bytes == 40 * MIB
    held = allocator.allocate(70 * MIB)
    assert allocator.reserved_bytes == 80 * MIB
    other = allocator.allocate(10 * MIB)  # the rest of the last page
    allocator.allocate(25 * MIB, stream=1)  # a segment of its own
    assert allocator.reserved_bytes == 120 * MIB
    allocator.free(held)
    allocator.allocate(50 * MIB)
    allocator.allocate(20 * MIB)
    assert allocator.reserved_bytes == 120 * MIB
    allocator.free(other)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    fixed = CachingAllocator()
    fixed.free(fixed.allocate(30 * MIB))
    fixed.allocate(70 * MIB)
    assert fixed.reserved_bytes == 100 * MIB


def test_expandable_segments_of_small_requests_grow_by_2_mebibytes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    allocator = CachingAllocator()
    for _ in range(3):
        allocator.allocate(MIB)
    assert allocator.reserved_bytes == 4 * MIB


def test_expandable_segments_give_all_free_pages_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512,expandable_segments:True")
    allocator = CachingAllocator(capacity=60 * MIB)
    first = allocator.allocate(30 * MIB)
    allocator.allocate(10 * MIB)
    allocator.free(first)
    allocator.allocate(40 * MIB, stream=1)  # of 60, 10 are in use
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(30 * MIB)


def test_pages_that_were_given_back_are_reserved_again_when_they_are_used(monkeypatch: pytest.MonkeyPatch):
    """No more than what is in use: what was given back left a gap in the addresses, not in the memory."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    allocator = CachingAllocator()
    first = allocator.allocate(40 * MIB)
    allocator.allocate(20 * MIB)
    allocator.free(first)
    allocator.give_back()
    assert allocator.reserved_bytes == 20 * MIB
    allocator.allocate(30 * MIB)
    assert allocator.reserved_bytes == 50 * MIB
    allocator.allocate(10 * MIB)  # the rest of the gap
    assert allocator.reserved_bytes == allocator.peak_reserved_bytes == 60 * MIB
