"""What wraps another function: it is given that one, and looks like it."""

from flopmeter.torch_names.around import around


@around
def _twice(plain, number):
    return 2 * plain(number)


class _Counter:
    def __init__(self):
        self.calls = 0

    @around
    def counted(self, plain, *args, **kwargs):
        self.calls += 1
        return plain(*args, **kwargs)


def _less(number, by=1):
    """One less, or more than one."""
    return number - by


def test_what_wraps_a_function_is_given_it_before_the_arguments():
    assert _twice(_less)(5) == 8


def test_a_method_that_wraps_a_function_is_given_its_object_too():
    counter = _Counter()
    assert [counter.counted(_less)(5, by=3), counter.counted(_less)(2)] == [2, 1]
    assert counter.calls == 2


def test_a_wrapped_function_keeps_its_name_and_its_docstring_and_binds_as_a_method():
    wrapped = _twice(_less)
    assert (wrapped.__name__, wrapped.__doc__, wrapped.__wrapped__) == (_less.__name__, _less.__doc__, _less)
    number = type("Number", (int,), {"less": wrapped})(4)
    assert number.less() == 6
