"""Calls at any depth of the stack find room for their frames."""

from __future__ import annotations

import resource
import sys

import pytest

from flopmeter.trace.frame_room import with_frame_room

CALLS = 200
DEPTHS = range(400)  # frames of more than one chunk of 16 KiB


def _leaf() -> None:
    pass


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
    assert with_frame_room(_most_faults)() < CALLS / 2


@pytest.mark.skipif(not (3, 11) <= sys.version_info < (3, 13), reason="this Python may keep a chunk")
def test_without_room_some_depth_does() -> None:
    assert _most_faults() >= CALLS


def test_arguments_results_and_errors_pass_through() -> None:
    assert with_frame_room(divmod)(7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        with_frame_room(divmod)(7, 0)
