"""What a streaming multiprocessor holds: NVIDIA's table, and a line of it for each device that flopmeter knows."""

import pytest

from flopmeter.device.hardware import available_hardware, load_hardware
from flopmeter.device.sm_limits import sm_limits

CAPABILITIES = sorted({each for name in available_hardware() if (each := load_hardware(name).compute_capability)})


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_each_compute_capability_of_a_profile_is_listed(capability):
    assert sm_limits(capability).shared_kb is not None


def test_an_h100_and_an_rtx_4090_hold_what_their_white_papers_say():
    """NVIDIA H100 Tensor Core GPU Architecture, table 4; NVIDIA Ada GPU Architecture tuning guide, 1.4.1 and 1.4.2."""
    assert sm_limits((9, 0)) == (2048, 228, 227)
    assert sm_limits((8, 9)) == (1536, 100, 99)
