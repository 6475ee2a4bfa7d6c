"""Which answer to a question keeps the program from raising an error: `assert x > 0` wants yes, `if x < 0: raise ...`
wants no.

A program that runs on the GPU passes its own checks, so an unknown condition that decides between going on and an
error is taken to go on. The program's bytecode says where its two branches lead.
"""

from __future__ import annotations

import dis
from collections.abc import Sequence
from functools import lru_cache
from types import CodeType, FrameType

_PASSED_ON = {"CACHE", "COPY_FREE_VARS", "EXTENDED_ARG", "NOP", "NOT_TAKEN", "TO_BOOL"}  # between answer and branch
_ENDS_OF_A_BRANCH = ("JUMP", "POP_JUMP", "RETURN", "FOR_ITER", "YIELD", "SEND", "RERAISE")


def answer_without_error(frame: FrameType) -> bool | None:
    """The answer to what the frame asks now; None if neither or both of its branches lead straight to an error."""
    return _answer(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=1024)
def _answer(code: CodeType, asked_at: int) -> bool | None:
    instructions = list(dis.get_instructions(code))
    place = next(number for number, each in enumerate(instructions) if each.offset >= asked_at)
    jump, is_negated = _next_branch(instructions, place)
    if jump is None:
        return None
    target = instructions[jump].argval
    there = next((number for number, each in enumerate(instructions) if each.offset >= target), len(instructions))
    raises_there, raises_here = _raises(instructions, there), _raises(instructions, jump + 1)
    if raises_there == raises_here:
        return None
    jumps_if = instructions[jump].opname.endswith("IF_TRUE") != is_negated
    return jumps_if != raises_there


def _next_branch(instructions: Sequence[dis.Instruction], place: int) -> tuple[int | None, bool]:
    """The number of the branch that the answer decides, and whether the answer is negated on the way."""
    is_negated = False
    for number in range(place, len(instructions)):
        name = instructions[number].opname
        if name.startswith("POP_JUMP") and name.endswith(("IF_TRUE", "IF_FALSE")):
            return number, is_negated
        if name == "UNARY_NOT":
            is_negated = not is_negated
        elif number > place and name not in _PASSED_ON:
            break
    return None, False


def _raises(instructions: Sequence[dis.Instruction], place: int) -> bool:
    """Whether the code there leads to an error without another branch."""
    for each in instructions[place:]:
        if each.opname == "RAISE_VARARGS":
            return True
        if each.opname.startswith(_ENDS_OF_A_BRANCH):
            return False
    return False
