"""The values of index lists, as in `x[:, [-1, 0]]`, read off the program's source.

Works around: torch turns the list into a meta tensor in C++, where nothing can see its numbers, and none of the ways to
intercept subscripting is harmless (entry_points.py).
Until: torch makes the index tensor with an op that a dispatch mode sees.

But the program is at that subscript when the op arrives, so the numbers are read off its source.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
from types import CodeType, FrameType
from typing import Any

from flopmeter.known_values.assumptions import program_frame
from flopmeter.torch_names.frames import locals_of


def index_lists() -> list[list[int]]:
    """The lists and NumPy arrays of numbers in the subscript that the program evaluates, literal or in variables."""
    frame = program_frame()
    if frame is None:
        return []
    node = _expression(frame.f_code, frame.f_lasti)
    if not isinstance(node, ast.Subscript):
        return []
    elements = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    values = [_value(element, frame) for element in elements]
    return [value for value in values if isinstance(value, list) and value and all(type(n) is int for n in value)]


@functools.lru_cache(1024)  # a loop comes by again and again
def _expression(code: CodeType, instruction: int) -> ast.expr | None:
    """The expression that an instruction evaluates. (The instruction is given as a byte offset; each has two bytes.)"""
    line, end_line, start, end = next(itertools.islice(code.co_positions(), instruction // 2, None))
    if line is None or end_line is None or start is None or end is None:
        return None
    lines = [linecache.getline(code.co_filename, number).encode() for number in range(line, end_line + 1)]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    try:
        return ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
    except SyntaxError:
        return None


def _value(element: ast.expr, frame: FrameType) -> object:
    if isinstance(element, ast.Name):
        found: Any = locals_of(frame).get(element.id, frame.f_globals.get(element.id))
        return found.tolist() if hasattr(found, "__array_interface__") else found
    try:
        return ast.literal_eval(element)
    except ValueError:
        return None
