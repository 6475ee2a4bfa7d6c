"""Constants of the time model against the tables that they are from."""

import pytest

from flopmeter.timing.constants import RESIDENT_THREADS, RESIDENT_THREADS_BY_CAPABILITY

# 'Maximum number of resident threads per SM', CUDA C++ Programming Guide, technical specifications by capability.
GUIDE = {
    (6, 0): 2048, (6, 1): 2048, (7, 0): 2048, (7, 5): 1024, (8, 0): 2048, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536,
    (9, 0): 2048, (10, 0): 2048, (12, 0): 1536,
}  # fmt: skip


@pytest.mark.parametrize("capability", GUIDE)
def test_an_sm_holds_as_many_threads_as_the_programming_guide_says(capability):
    assert RESIDENT_THREADS_BY_CAPABILITY.get(capability, RESIDENT_THREADS) == GUIDE[capability]
