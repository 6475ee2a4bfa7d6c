"""A program that checks what it computes, in every form in which a check is written."""

import torch

x = torch.randn(8, device="cuda")
low, high = x.min(), x.max()

assert high < low
assert not high < low, f"{high} of {x.shape}"
assert x.norm().item() > 3, "too small"
assert x.norm().item() < -3
assert x.norm().item() != 1
assert (x.abs() < 3).all()

if (x > 2).any():
    raise ValueError(f"too large at {x.argmax()}")
if high < 0:
    raise ValueError
if not low < 0:
    raise ValueError("no negative ones")
if high < low:
    print("a case that goes on")
else:
    raise ValueError("no such case")
if high == 0:
    print("zero")
elif high < low:
    print("a later case that goes on")
else:
    raise ValueError
turns, known = 0, "a few instructions: Python 3.13 copies less of them, up to the error, to where a branch ends"
try:
    raise ValueError
except ValueError:  # a bare `raise` is one instruction, at which the branch arrives
    if high < low:
        print("what was caught is passed over")
    else:
        raise


def is_told_yes(value: object) -> bool:
    return bool(value)


while high > low:
    turns += 1
print("turns of a loop", turns)
print("between unknown values", is_told_yes(high < low), is_told_yes(high > low))
for limit in (0.5, 1, 2):
    of_tensors = [high < limit, high <= limit, high > limit, high >= limit, high == limit, high != limit]
    number = high.item()
    of_numbers = [number < limit, number <= limit, number > limit, number >= limit, number == limit, number != limit]
    print("as a number that was read", [is_told_yes(each) for each in of_tensors] == of_numbers)

two = torch.tensor(2.0, device="cuda")
print("known", is_told_yes(two < 1.5), is_told_yes(two > 1.5))
assert two < 1.5, "known values are compared as they are"
