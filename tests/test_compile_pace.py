"""What compiles is not held up by Python: its frames have room, its garbage waits."""

from __future__ import annotations

import gc
import resource
import sys

import pytest
import torch
from torch.utils._ordered_set import OrderedSet

from flopmeter import FlopMeter
from flopmeter.compiler import session
from flopmeter.compiler.pace import around_hash, around_set_making, around_union, undisturbed

CALLS = 200
DEPTHS = range(400)  # frames of more than one chunk of 16 KiB


def _leaf() -> None:
    pass


# A larger frame than that of `_faults_at`: at some depth that one fits into the rest of a chunk, and this one does not.
_leaf.__code__ = _leaf.__code__.replace(co_stacksize=200)


def _faults_at(depth: int) -> int:
    """Pages of memory that the kernel maps while `_leaf` is called at this depth."""
    if depth:
        return _faults_at(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        _leaf()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _most_faults() -> int:
    return max(map(_faults_at, DEPTHS))


def test_no_depth_of_the_stack_maps_memory_anew_for_each_call() -> None:
    assert undisturbed(_most_faults)() < CALLS / 2


@pytest.mark.skipif(not (3, 11) <= sys.version_info < (3, 13), reason="this Python may keep a chunk")
def test_without_room_some_depth_does() -> None:
    assert _most_faults() >= CALLS


def test_arguments_results_and_errors_pass_through() -> None:
    assert undisturbed(divmod)(7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        undisturbed(divmod)(7, 0)


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_waits_and_is_collected_again_afterwards_if_it_was_before(collects: bool) -> None:
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        assert not undisturbed(gc.isenabled)()
        assert gc.isenabled() == collects
        with pytest.raises(ZeroDivisionError):
            undisturbed(divmod)(7, 0)
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()


def test_a_hash_is_asked_for_once() -> None:
    class Key:
        asked = 0

        def __hash__(self) -> int:
            self.asked += 1
            return 17

    key, kept = Key(), around_hash(Key.__hash__)
    assert [kept(key), kept(key)] == [17, 17]
    assert key.asked == 1


def test_sets_of_sets_are_the_same_with_no_hash_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Key:
        asked = 0

        def __hash__(self) -> int:
            Key.asked += 1
            return id(self)

    a, b, c, d = Key(), Key(), Key(), Key()
    one, other = OrderedSet([c, a, b]), OrderedSet([d, a])
    expected = [list(OrderedSet(one)), list(one | other), list(one | {d}), list(OrderedSet(iter([b, a])))]
    monkeypatch.setattr(OrderedSet, "__init__", around_set_making(OrderedSet.__init__))
    monkeypatch.setattr(OrderedSet, "__or__", around_union(OrderedSet.__or__))
    asked = Key.asked
    copy, union = OrderedSet(one), one | other
    assert Key.asked == asked
    assert [list(copy), list(union), list(one | {d}), list(OrderedSet(iter([b, a])))] == expected
    copy.add(d)
    assert d not in one
    assert list(OrderedSet()) == []


def test_what_ops_a_kernel_of_an_optimizer_comes_from_is_the_same_at_that_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without what keeps a large graph from taking long."""
    seen = []
    for wraps in (True, False):
        if not wraps:
            for name in ("around_hash", "around_origins", "around_set_making", "around_union"):
                monkeypatch.setattr(session, name, lambda plain: plain)
        weights = [torch.nn.Parameter(torch.empty(8, size, device="meta")) for size in range(8, 20)]
        for weight in weights:
            weight.grad = torch.empty_like(weight)
        optimizer = torch.optim.AdamW(weights)
        with FlopMeter("a100-sxm4-80gb", compile=True) as meter:
            optimizer.step()
        (graph,) = meter.trace.compilation.graphs
        seen.append([(kernel.kind, kernel.scheduler_bytes, kernel.origins) for kernel in graph.kernels])
    assert seen[0] == seen[1]
    assert any(len(origins) > len(weights) for _, _, origins in seen[0])
