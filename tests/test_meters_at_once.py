"""Threads and asyncio tasks beside a meter: what it does not see it says, and meters that overlap are an error."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from flopmeter import EmptyProgramError, FlopMeter
from flopmeter.known_values.assumptions import Assumptions


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta")


def two_ops() -> None:
    meta_one = X + 1
    torch.cat([meta_one, X])
    torch.ones(3) + 1  # on the CPU: the host's own


X = meta(4)


def notes(meter: FlopMeter) -> list[str]:
    return [note for note in meter.report().notes if note.startswith("not metered")]


def lost(ops: int) -> list[str]:
    text = f"not metered: {ops} ops on meta tensors and 0 module calls in other threads"
    return [f"{text}; a meter sees the ops of the thread that entered it"]


def run_in(thread: threading.Thread) -> None:
    thread.start()
    thread.join()


def test_a_task_that_a_thread_comes_to_after_the_meter_is_closed_makes_what_it_makes_without_a_meter() -> None:
    """The only thread of the pool waits until then."""
    closed = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(closed.wait)
        with FlopMeter() as meter:
            X.sin()
            task = pool.submit(lambda: torch.zeros(3, dtype=torch.int8, device="meta"))
        closed.set()
        made = task.result()
    assert (made.dtype, made.device.type) == (torch.int8, "meta")
    assert notes(meter) == []


def test_a_thread_that_logs_reads_what_the_meters_own_would() -> None:
    """As a callback does that frameworks run beside the loop; without the answer `.item()` fails on meta."""
    told = []

    def log(loss: torch.Tensor, count: torch.Tensor) -> None:
        told.extend([loss.item(), f"{loss:.2f}", loss.cpu().numpy().tolist(), count.item(), torch.ones(2).sum().item()])

    with FlopMeter(unknown="stand-in") as meter:
        loss, count = X.sum(), torch.tensor(7, device="meta")
        before = len(meter.trace.ops)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(log, loss, count).result()
        run_in(threading.Thread(target=log, args=(loss, count)))
    assert told == [1.0, "1.00", 1.0, 7, 2.0] * 2
    assert len(meter.trace.ops) == before
    lines = [line for line in meter.report().assumptions if "unknown float" in line]
    assert len(lines) == 1
    assert "test_meters_at_once.py" in lines[0]


def test_a_loop_in_a_thread_ends_where_known_numbers_end_it() -> None:
    """As text that is generated in a thread, whose length is known."""
    lengths = []

    def generate() -> None:
        done, length = torch.zeros(2, dtype=torch.bool, device="meta"), 0
        while not done.all():
            length += 1
            done = done | torch.full((2,), length >= 3, device="meta")
        lengths.append(length)

    with FlopMeter(unknown="stand-in") as meter:
        X.sin()
        run_in(threading.Thread(target=generate))
    assert lengths == [3]
    assert [op.call.name for op in meter.trace.ops] == ["sin"]


class OwnRun(threading.Thread):
    def run(self) -> None:
        two_ops()


def test_ops_of_a_thread_are_counted_as_not_metered() -> None:
    with FlopMeter() as meter:
        X.sin()
        run_in(threading.Thread(target=two_ops))
        run_in(OwnRun())
        run_in(threading.Thread(target=lambda: run_in(threading.Thread(target=two_ops))))
    assert [op.call.name for op in meter.trace.ops] == ["sin"]
    assert notes(meter) == lost(6)


def test_threads_that_run_nothing_on_meta_are_not_mentioned() -> None:
    with FlopMeter() as meter:
        X.sin()
        run_in(threading.Thread(target=lambda: torch.ones(3) + 1))
    assert notes(meter) == []


def test_a_program_that_runs_all_in_other_threads_is_an_error_that_says_so() -> None:
    with FlopMeter() as meter:
        run_in(threading.Thread(target=two_ops))
    with pytest.raises(EmptyProgramError, match="ran no op.*; " + lost(2)[0]):
        meter.report()


def test_ops_of_thread_pools_are_counted_whenever_the_pool_was_made() -> None:
    async def program() -> None:
        await asyncio.to_thread(two_ops)

    with ThreadPoolExecutor(1) as older:
        older.submit(two_ops).result()
        with FlopMeter() as meter, ThreadPoolExecutor(1) as newer:
            X.sin()
            older.submit(two_ops).result()
            list(newer.map(lambda _: two_ops(), range(3)))
            asyncio.run(program())
        assert notes(meter) == lost(2 + 6 + 2)


def test_an_optimizer_that_steps_in_another_thread_is_none_of_the_metered_program() -> None:
    """Its parameters and its state are not in the memory of the thread that is metered."""
    own, other = (torch.nn.Linear(4, 4, device="meta") for _ in range(2))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9) for layer in (own, other)]

    def step(layer: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        layer(X).sum().backward()
        optimizer.step()

    def held(*programs: Callable[[], None]) -> dict[str, int]:
        with FlopMeter() as meter:
            for program in programs:
                program()
        return dict(meter.report().memory.at_peak)

    def in_a_thread() -> None:
        run_in(threading.Thread(target=step, args=(other, optimizers[1])))

    step(own, optimizers[0])
    alone = held(lambda: step(own, optimizers[0]))
    assert held(lambda: step(own, optimizers[0]), in_a_thread) == alone
    assert alone["parameters"] == 4 * (16 + 4)


def test_nothing_stays_on_threads_and_pools_after_the_meter() -> None:
    start, submit = threading.Thread.start, ThreadPoolExecutor.submit
    with ThreadPoolExecutor(1) as pool:
        with FlopMeter() as meter:
            X.sin()
            pool.submit(two_ops).result()
        assert pool.submit(_get_current_dispatch_mode_stack).result() == []
        pool.submit(two_ops).result()
    run_in(threading.Thread(target=two_ops))
    assert notes(meter) == lost(2)
    assert (threading.Thread.start, ThreadPoolExecutor.submit) == (start, submit)


def test_a_thread_computes_and_fails_as_it_would() -> None:
    def fail() -> None:
        raise KeyError("mine")

    with ThreadPoolExecutor(1) as pool, FlopMeter():
        assert pool.submit(lambda a, b: a + b, torch.ones(2), b=1).result().tolist() == [2, 2]
        with pytest.raises(KeyError, match="mine"):
            pool.submit(fail).result()


# --- meters that overlap -------------------------------------------------------------------------------------------


def assert_nothing_is_left() -> None:
    assert _get_current_dispatch_mode_stack() == []
    with FlopMeter("v100-sxm2-32gb") as meter:  # refused while another emulation is open
        X.sin()
    assert [op.call.name for op in meter.trace.ops] == ["sin"]


def test_meters_of_two_asyncio_tasks_that_interleave_are_refused() -> None:
    first, second = FlopMeter(), FlopMeter()

    async def task(meter: FlopMeter, op: Callable[[torch.Tensor], Any]) -> None:
        with meter:
            for _ in range(3):
                op(X)
                await asyncio.sleep(0)

    async def program() -> list[Any]:
        return await asyncio.gather(task(first, torch.sin), task(second, torch.cos), return_exceptions=True)

    ran, refused = asyncio.run(program())
    assert ran is None
    assert isinstance(refused, RuntimeError)
    assert "open in another asyncio task" in str(refused)
    assert [op.call.name for op in first.trace.ops] == ["sin"] * 3
    assert_nothing_is_left()


def test_asyncio_tasks_may_meter_one_after_another_and_nest() -> None:
    async def task(names: list[str]) -> None:
        with FlopMeter() as outer, FlopMeter() as inner:
            X.sin()
            await asyncio.sleep(0)
            X.cos()
        names += [op.call.name for meter in (outer, inner) for op in meter.trace.ops]

    async def program() -> list[str]:
        names: list[str] = []
        await asyncio.create_task(task(names))
        await asyncio.create_task(task(names))
        return names

    assert asyncio.run(program()) == ["sin", "cos"] * 4


def test_a_task_may_meter_a_part_of_what_a_meter_around_all_tasks_counts() -> None:
    inner = FlopMeter()

    async def program() -> None:
        X.sin()
        with inner:
            X.cos()

    with FlopMeter() as outer:
        asyncio.run(program())
    assert [op.call.name for op in outer.trace.ops] == ["sin", "cos"]
    assert [op.call.name for op in inner.trace.ops] == ["cos"]


@pytest.mark.parametrize("as_cuda", [True, False])
def test_leaving_meters_in_the_wrong_order_is_an_error_and_leaves_nothing(as_cuda: bool) -> None:
    first, second = FlopMeter(as_cuda=as_cuda), FlopMeter(as_cuda=as_cuda)
    first.__enter__()
    second.__enter__()
    with pytest.raises(RuntimeError, match="was left before one that was entered after it"):
        first.__exit__(None, None, None)
    with pytest.raises(RuntimeError, match="not open in this thread"):
        second.__exit__(None, None, None)
    assert_nothing_is_left()
    with second:
        X.cos()
    assert [op.call.name for op in second.trace.ops] == ["cos"]


def test_one_meter_in_two_threads_is_an_error() -> None:
    meter = FlopMeter()

    def enter() -> None:
        with meter:
            X.cos()

    with ThreadPoolExecutor(1) as pool, meter:
        with pytest.raises(RuntimeError, match="open in another thread"):
            pool.submit(enter).result()
        with pytest.raises(RuntimeError, match="not open in this thread"):
            pool.submit(meter.__exit__, None, None, None).result()
        X.sin()
    assert [op.call.name for op in meter.trace.ops] == ["sin"]
    assert_nothing_is_left()


def leave_in_turn(first: Callable[[], Any], second: Callable[[], Any]) -> None:
    """Two threads' contexts overlap: the first is entered first and left first."""
    first_is_in, second_is_in = threading.Event(), threading.Event()

    def run_first() -> None:
        with first():
            first_is_in.set()
            second_is_in.wait(10)

    one = threading.Thread(target=run_first)

    def run_second() -> None:
        first_is_in.wait(10)
        with second():
            second_is_in.set()
            one.join(10)

    other = threading.Thread(target=run_second)
    one.start()
    other.start()
    other.join(10)


def test_weights_that_another_thread_moves_are_said_with_their_time_on_the_link() -> None:
    """As block swapping does: 2 x 64 MiB over an A100's PCIe 4, of whose 32 GB/s 88 % are reached."""

    def swap(block: torch.Tensor) -> None:
        block.copy_(block.to("cpu"))

    with FlopMeter("a100-sxm4-80gb", unknown="stand-in") as meter, ThreadPoolExecutor(1) as pool:
        pool.submit(swap, meta(64, 1024, 256)).result()
        X.sin()
        between = len(meter.trace.ops)
        pool.submit(swap, meta(64)).result()  # as much as data would be
        X.sin()
    seconds = 2 * 2**26 / (0.88 * 32e9)
    assert seconds == pytest.approx(4.77e-3, rel=1e-3)
    caution = meter.report().caution
    assert caution.startswith("another thread copies 134 MB between host and device (the largest at "), caution
    assert "not metered: 4.77 ms on their link" in caution
    assert not meter.report(ops=range(between, len(meter.trace.ops))).caution


def test_a_stand_in_is_taken_back_though_ops_ran_since_in_another_thread() -> None:
    ops = itertools.count()  # another one has run whenever anyone asks
    assume = Assumptions(None, None, None, "stand-in", lambda: next(ops))
    assume.taking_back(assume.note("stand-in 1.0 for an unknown float", "aten.copy_"))()
    assert list(assume.uses_in(None)) == []


def what_torch_says_of_modes() -> tuple[bool, bool]:
    return (
        _python_dispatch.is_in_torch_dispatch_mode(),
        _python_dispatch.is_in_any_mode_without_ignore_compile_internals(),
    )


def test_after_overlapping_meters_of_two_threads_torch_does_not_think_that_a_mode_is_on() -> None:
    def meter() -> FlopMeter:
        return FlopMeter(as_cuda=False)

    leave_in_turn(meter, meter)
    assert what_torch_says_of_modes() == (False, False)


def test_compiled_functions_pass_their_guards_after_modes_of_two_threads_overlapped() -> None:
    leave_in_turn(FlopCounterMode, FlopCounterMode)
    try:
        assert what_torch_says_of_modes() == (True, True), "torch has mended it: the meter need not"
        compiled = torch.compile(lambda x: x.sin().cos(), fullgraph=True)
        with FlopMeter("a100-sxm4-80gb") as meter:
            compiled(X)
            compiled(X)
        assert [(graph.part, graph.calls) for graph in meter.report().graphs] == [("inference", 2)]
    finally:
        with FlopMeter():  # sets it right
            X.sin()
    assert what_torch_says_of_modes() == (False, False)
