"""A change of a price shows: recorded_prices.py says what is recorded, and how to record it anew."""

import pytest
import recorded_prices
import torch

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith(recorded_prices.TORCH), reason="prices are recorded with one version of torch"
)
CALLS = recorded_prices.recorded(recorded_prices.CALLS_FILE)
PROGRAMS = recorded_prices.recorded(recorded_prices.PROGRAMS_FILE)
TESTS = recorded_prices.recorded(recorded_prices.TESTS_FILE)
HOW = "if this is meant, `python tests/recorded_prices.py` records it; `git diff` then shows all that moved"


def test_every_call_and_program_is_recorded():
    assert recorded_prices.calls_by_op().keys() == CALLS.keys(), HOW
    assert recorded_prices.programs().keys() == PROGRAMS.keys(), HOW
    assert recorded_prices.tests().keys() >= TESTS.keys(), HOW


@pytest.mark.parametrize("op", CALLS)
def test_the_price_of_a_call_is_the_one_recorded(op):
    assert recorded_prices.price_of_calls(recorded_prices.calls_by_op()[op]) == CALLS[op], HOW


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_price_of_a_program_is_the_one_recorded(name):
    assert recorded_prices.price_of_program(*recorded_prices.programs()[name]) == PROGRAMS[name], HOW


@pytest.mark.parametrize("name", TESTS)
def test_what_another_test_meters_has_the_prices_recorded(name):
    assert recorded_prices.price_of_test(recorded_prices.tests()[name]) == TESTS[name], HOW
