"""The powers of two next to a number, by which kernels choose threads and tiles."""

from __future__ import annotations


def power_of_two_up_to(number: int) -> int:
    """The largest that is no larger than a number of at least 1."""
    return 1 << (number.bit_length() - 1)


def power_of_two_from(number: int) -> int:
    """The least that is no less than a number of at least 1."""
    return 1 << (number - 1).bit_length()
