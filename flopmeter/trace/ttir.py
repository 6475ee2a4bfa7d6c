"""What the programs of a Triton kernel do, read off its intermediate language (TTIR) as text.

The text is walked as the programs of the grid would run it, all at once: scalar integers are known from the arguments
and constants, as one number or as one for each program, so that bounds of loops that follow from them are too. What
depends on values in memory is not known: at a branch programs go the way with more work, and do not return early; a
loop is named, unless all that it does is to load and store.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from flopmeter.records import TritonBody, TritonOp
from flopmeter.records.bodies import ATOMICS

Scalar = int | Tensor | None
"""The value of an integer: the same in all programs, one for each, or not known."""

UNREADABLE = "a line of code that cannot be read"
MOST_PROGRAMS = 1 << 22
"""Of larger grids the programs are not told apart."""
MEMORY = ("tt.load", "tt.store", *ATOMICS)
MOST_STEPS = 4096
"""A loop is walked step by step, where it has to be, if it has no more."""


@dataclass
class Statement:
    """`results = name text`, with the regions that follow in braces: the names of their arguments, their statements."""

    results: list[str]
    name: str
    text: str
    regions: list[tuple[list[str], list[Statement]]] = field(default_factory=list)


@dataclass
class Function:
    """Its blocks by label, in the order of the text; the first has no label and is where it starts."""

    arguments: list[str]
    blocks: dict[str, list[Statement]]
    given: dict[str, list[str]]  # the names of a block's own arguments


_STATEMENT = re.compile(r'(?:(%[\w$.#:, %-]+?) = )?"?([a-z_]\w*(?:\.\w+)+)"?(.*)', re.DOTALL)
_LOCATION = re.compile(r"\s+loc\((?:[^()]|\([^()]*\))*\)$")
_LABEL = re.compile(r"\^\w+")
_VALUE = re.compile(r"%[\w$.-]+(?:#\d+)?")
_TYPE = re.compile(r"tensor<([^<>]*(?:<[^<>]*>[^<>]*)*)>|!tt\.ptr<\w+>|\b(?:b?f\d+\w*|i\d+|index)\b")


def parse(text: str) -> dict[str, Function]:
    """The functions of a module by name, the kernel first."""
    functions: dict[str, Function] = {}
    open_regions: list[list[Statement]] = []
    for line in text.splitlines():
        line = _LOCATION.sub("", line).strip()
        if line.startswith("tt.func"):
            name, rest = re.match(r"tt\.func (?:\w+ )?@\"?([^\"(]+)\"?\((.*)", line).groups()  # type: ignore[union-attr]
            function = functions[name] = Function(re.findall(r"(%\w+): ", rest), {"": []}, {})
            open_regions = [function.blocks[""]]
        elif not line or line.startswith(("module", "#", "//")) or not open_regions:
            continue
        elif line.startswith("}"):
            open_regions.pop()
            if open_regions and open_regions[-1]:
                owner = open_regions[-1][-1]
                owner.text += " " + line.strip("{} ")
                if line.endswith("{"):
                    open_regions.append(_new_region(owner, ""))
        elif line.startswith("^bb"):
            arguments = re.findall(r"(%\w+): ", line)
            if len(open_regions) == 1:  # a block of the function
                label = _LABEL.findall(line)[0]
                function.given[label], function.blocks[label] = arguments, []
                open_regions = [function.blocks[label]]
            else:
                open_regions[-2][-1].regions[-1][0].extend(arguments)
        else:
            _add_statement(line, open_regions)
    return functions


def _add_statement(line: str, open_regions: list[list[Statement]]) -> None:
    found = _STATEMENT.match(line)
    if found is None:
        statement = Statement([], UNREADABLE, line)
    else:
        results = [name.split(":")[0].strip() for name in (found[1] or "").split(",") if name.strip()]
        statement = Statement(results, found[2], found[3].rstrip("{( ") if line.endswith("{") else found[3])
    open_regions[-1].append(statement)
    if line.endswith("{"):
        induction = re.match(r"\s*(%\w+) = ", statement.text) if statement.name == "scf.for" else None
        open_regions.append(_new_region(statement, induction[1] if induction else ""))


def _new_region(owner: Statement, argument: str) -> list[Statement]:
    statements: list[Statement] = []
    owner.regions.append(([argument] if argument else [], statements))
    return statements


def body_of(name: str, functions: Mapping[str, Function], grid: Sequence[int], arguments: Sequence[Any]) -> TritonBody:
    """What a launch of the first function does with this grid and these arguments, which are in its order.

    Work that runs an unknown number of times is named, with the reason.
    """
    programs = prod(grid)
    walk = _Interpreter(functions, tuple(grid) + (1,) * (3 - len(grid)), programs)
    kernel = next(iter(functions))
    known = [argument if type(argument) in (int, bool) else None for argument in arguments]
    walk.run(kernel, [None if value is None else int(value) for value in known], 1)
    ops = tuple(TritonOp(*key[:2], number, key[2]) for key, number in walk.counts.items() if number)
    return TritonBody(name, programs, ops, tuple(walk.unknown), walk.is_longest, walk.moves_unknown)


Key = tuple[str, str, tuple[int, int, int] | None]


class _Interpreter:
    """Walks functions and adds up how often each operation runs, in all programs."""

    def __init__(self, functions: Mapping[str, Function], grid: tuple[int, ...], programs: int):
        self.functions, self.grid, self.programs = functions, grid, programs
        self.counts: dict[Key, int] = {}
        self.unknown: dict[str, None] = {}
        self.is_longest = self.moves_unknown = False

    def run(self, name: str, arguments: Sequence[Scalar], weight: int | Tensor) -> list[Scalar]:
        """The values that the function returns, run `weight` times in each program."""
        function = self.functions[name]
        values = dict(zip(function.arguments, arguments, strict=False))
        weights: dict[str, int | Tensor] = {"": weight}
        results: list[Scalar] = []
        for label, statements in function.blocks.items():
            if label not in weights:
                continue  # no program comes here
            here = weights.pop(label)
            results = self._walk(statements, values, here) or results
            for target, share in self._ways(statements[-1], values, function):
                weights[target] = weights.get(target, 0) + here * share
        if weights:
            self.unknown[f"a jump back in {name}"] = None
        return results

    def _ways(self, jump: Statement, values: dict[str, Scalar], function: Function) -> list[tuple[str, int | Tensor]]:
        """Where the programs that reach the end of a block go on, and which share of them: an early return is a jump to
        a block that returns."""
        if not jump.name.startswith("cf."):
            return []
        targets = _LABEL.findall(jump.text)
        if jump.name == "cf.br":
            return [(targets[0], 1)]
        condition = values.get(values_in(jump.text)[0])
        if condition is not None:
            return [(targets[0], condition), (targets[1], 1 - condition)]
        self.is_longest = True
        going_on = [target for target in targets if function.blocks[target][-1].name != "tt.return"]
        return [((going_on or targets)[-1], 1)]

    def _walk(self, statements: Sequence[Statement], values: dict[str, Scalar], weight: int | Tensor) -> list[Scalar]:
        """Walk the statements; the values that the last one returns or yields."""
        for statement in statements:
            name = statement.name
            if name in ("tt.return", "scf.yield", "tt.reduce.return", "tt.scan.return"):
                return [values.get(each) for each in values_in(statement.text)]
            if name == "scf.for":
                self._loop(statement, values, weight)
            elif name == "scf.if":
                self._branch(statement, values, weight)
            elif name == "tt.call":
                callee = re.match(r'\s*@"?([^"(]+)', statement.text)
                assert callee is not None
                given = [values.get(each) for each in values_in(statement.text)]
                self._bind(statement, self.run(callee[1], given, weight), values)
            elif name in ("tt.reduce", "tt.scan"):
                self._combine(statement, values, weight)
            elif name == "scf.while" and _waits(statement):
                continue
            elif statement.regions or name == UNREADABLE:
                self.unknown[name] = None
            else:
                self._count(statement, weight)
                if statement.results:
                    values[statement.results[0]] = self._integer(statement, values)
        return []

    def _bind(self, statement: Statement, results: Sequence[Scalar], values: dict[str, Scalar]) -> None:
        if len(statement.results) == 1 == len(results):
            values[statement.results[0]] = results[0]
        for number, result in enumerate(results):
            for name in statement.results:
                values[f"{name}#{number}"] = result

    def _loop(self, statement: Statement, values: dict[str, Scalar], weight: int | Tensor) -> None:
        (arguments, body), *_ = statement.regions
        bounds = re.match(r"\s*%\w+ = (\S+) to (\S+) step (\S+)", statement.text)
        start, stop, step = (values.get(each) for each in bounds.groups()) if bounds else (None,) * 3
        if start is None or stop is None or step is None:
            self._loop_of_unknown_length(body, values)
            return
        trips = _clamp(-((start - stop) // step))
        before, known, was_longest = dict(self.counts), dict(self.unknown), self.is_longest
        self.is_longest = False
        self._walk(body, dict(values), weight * trips)
        most = int(trips.max()) if isinstance(trips, Tensor) else trips
        if (self.is_longest or len(self.unknown) > len(known)) and most <= MOST_STEPS:
            self.counts, self.unknown, self.is_longest = before, known, False
            for index in range(most):
                goes_on = (trips > index).long() if isinstance(trips, Tensor) else 1
                self._walk(body, {**values, arguments[0]: start + index * step}, weight * goes_on)
        self.is_longest |= was_longest

    def _loop_of_unknown_length(self, body: list[Statement], values: dict[str, Scalar]) -> None:
        before, was_longest = self.counts, self.is_longest
        self.counts = {}
        self._walk(body, dict(values), 1)
        if all(name in ("tt.load", "tt.store") for name, *_ in self.counts):
            self.moves_unknown = True
        else:
            self.unknown["a loop whose bounds are read from memory"] = None
        self.counts, self.is_longest = before, was_longest

    def _branch(self, statement: Statement, values: dict[str, Scalar], weight: int | Tensor) -> None:
        condition = values.get(values_in(statement.text)[0])
        if condition is None:
            self._longer(statement, values, weight)
            return
        for (_, body), share in zip(statement.regions, (condition, 1 - condition), strict=False):
            results = self._walk(body, dict(values), weight * share)
            if isinstance(condition, int) and share:
                self._bind(statement, results, values)

    def _longer(self, statement: Statement, values: dict[str, Scalar], weight: int | Tensor) -> None:
        """Counts the branch in which more runs."""
        before, after = self.counts, [self.counts]
        for _, body in statement.regions:
            self.counts = dict(before)
            self._walk(body, dict(values), weight)
            after.append(self.counts)
        self.counts = max(after, key=lambda counts: sum(counts.values()))
        self.is_longest |= any(counts != self.counts for counts in after)

    def _combine(self, statement: Statement, values: dict[str, Scalar], weight: int | Tensor) -> None:
        """A reduction combines all elements but one of each row, and so does a scan."""
        taken_in = statement.text.rpartition("->")[0].rpartition("(")[2]
        taken = _elements(taken_in)
        axis = re.search(r"axis = (\d+)", statement.text)
        length = _shape(taken_in)[int(axis[1])] if axis else 1
        for _, body in statement.regions:
            self._walk(body, dict(values), weight * (taken - taken // max(length, 1)))

    def _count(self, statement: Statement, weight: int | Tensor) -> None:
        """Operations with a floating result, and what goes to memory."""
        if statement.name in ("tt.dot", "tt.dot_scaled"):
            left, right = (_shape(each) for each in statement.text.rpartition(" : ")[2].split(" * ")[:2])
            m, k, n = left[-2], left[-1], right[-1]
            precision = re.search(r"inputPrecision = (\w+)", statement.text)
            dtype = _dtype(statement.text.rpartition(" : ")[2])
            is_tf32 = dtype == "f32" and precision is not None and precision[1].startswith("tf32")
            key: Key = (statement.name, "tf32" if is_tf32 else dtype, (m, n, k))
            self._add(key, weight, prod(left[:-2]) * m * n * k)
            return
        kind = statement.text.rpartition(" : ")[2].rpartition(" -> ")[2].rpartition(" to ")[2]
        pointee = re.search(r"ptr<(\w+)", kind)
        if pointee is not None and statement.name in MEMORY:
            self._add((statement.name, pointee[1], None), weight, _elements(kind))
            return
        dtype = _dtype(kind)
        if statement.name == "tt.elementwise_inline_asm":
            for name, of in _instructions(statement.text):
                self._add((name, of, None), weight, _elements(kind))
        elif "f" in dtype and statement.name != "arith.constant":
            self._add((statement.name, dtype, None), weight, _elements(kind))

    def _add(self, key: Key, weight: int | Tensor, elements: int) -> None:
        times = int(weight.sum()) if isinstance(weight, Tensor) else weight * self.programs
        self.counts[key] = self.counts.get(key, 0) + times * elements

    def _integer(self, statement: Statement, values: Mapping[str, Scalar]) -> Scalar:
        """The value of a scalar integer."""
        name, text = statement.name, statement.text
        if "tensor<" in text or "ptr<" in text:
            return None
        if name in ("tt.get_program_id", "tt.get_num_programs"):
            return self._program(name, "xyz".index(text.split()[0]))
        if name == "arith.constant":
            literal = text.split(" : ")[0].strip()
            return {"true": 1, "false": 0}.get(literal, int(literal) if re.fullmatch(r"-?\d+", literal) else None)
        operands = [values.get(each) for each in values_in(text)]
        if any(each is None for each in operands) or not operands:
            return None
        if name == "arith.cmpi":
            name = text.split(",")[0].strip().lstrip("us")
        function = _INTEGERS.get(name)
        return None if function is None else function(*operands)

    def _program(self, name: str, axis: int) -> Scalar:
        if name == "tt.get_num_programs" or self.grid[axis] == 1:
            return self.grid[axis] if name == "tt.get_num_programs" else 0
        if self.programs > MOST_PROGRAMS:
            return None
        index = torch.arange(self.programs, device="cpu") // prod(self.grid[:axis])
        return index % self.grid[axis]


def _waits(loop: Statement) -> bool:
    """Whether it does nothing but ask, atomically, if another program has left a lock: it is taken to be free."""
    inside = {each.name for _, body in loop.regions for each in body}
    others = (name for name in inside - {*ATOMICS} if not name.startswith("arith."))
    return not inside.isdisjoint(ATOMICS) and {*others} <= {"scf.condition", "scf.yield"}


def values_in(text: str) -> list[str]:
    """The names of the values in a statement's text."""
    return _VALUE.findall(text.partition(" : ")[0])


def values_of_jump(text: str) -> list[str]:
    """The same of a jump, which has types behind the arguments of each block."""
    return _VALUE.findall(text)


def _shape(kind: str) -> list[int]:
    inside = re.search(r"tensor<((?:\d+x)*)", kind)
    return [int(size) for size in inside[1].split("x")[:-1]] if inside else []


def _instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of inline PTX that compute with floats, or that touch memory, and their types: one an element
    each. `packed_element` elements share a text, which repeats its instructions for each of them."""
    asm = re.match(r'\s*"((?:[^"\\]|\\.)*)"', text)
    packed = re.search(r"packed_element = (\d+)", text)
    if asm is None or packed is None:
        return [("tt.elementwise_inline_asm", "f32")]
    found = re.findall(r"(?:^|[;{}\s])([a-z]\w*)((?:\.\w+)+)\s", re.sub(r"\\[0-9A-F]{2}|\\[nt]", " ", asm[1]))
    floats = [
        (f"ptx.{name}", kind.removesuffix("x2"))
        for name, parts in found
        if "f" in (kind := parts.rpartition(".")[2]) or name in _PTX_MEMORY
        for _ in range(2 if kind.endswith("x2") else 1)
    ]
    each, rest = _divided(floats, int(packed[1]))
    return [("tt.elementwise_inline_asm", "f32")] if rest else each


_PTX_MEMORY = ("ld", "st", "atom", "red", "mma", "wgmma", "cp")


def _divided(instructions: list[tuple[str, str]], parts: int) -> tuple[list[tuple[str, str]], bool]:
    """The share of one element in instructions for several, and whether it is no whole number of each."""
    of = Counter(instructions)
    return [each for each in of for _ in range(of[each] // parts)], any(number % parts for number in of.values())


def _elements(kind: str) -> int:
    """The number of elements of the first type in the text."""
    return prod(_shape(kind))


def _dtype(kind: str) -> str:
    """The element type of the first type in the text; 'ptr' for pointers."""
    found = _TYPE.search(kind)
    if found is None:
        return ""
    inner = re.sub(r"^(?:\d+x)*", "", found[1]) if found[1] is not None else found[0]
    return "ptr" if "ptr" in inner else inner.split(",")[0]


def _clamp(value: int | Tensor) -> int | Tensor:
    return value.clamp(min=0) if isinstance(value, Tensor) else max(value, 0)


def _quotient(a: Any, b: Any) -> Any:
    """Rounded towards zero."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return torch.div(torch.as_tensor(a, device="cpu"), torch.as_tensor(b, device="cpu"), rounding_mode="trunc")
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _select(condition: Any, a: Any, b: Any) -> Any:
    return condition * a + (1 - condition) * b


def _as_number(comparison: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def compare(a: Any, b: Any) -> Any:
        result = comparison(a, b)
        return result.long() if isinstance(result, Tensor) else int(result)

    return compare


_COMPARISONS = {name: _as_number(getattr(operator, name)) for name in ("lt", "le", "gt", "ge", "eq", "ne")}
_minimum = lambda a, b: _select(_COMPARISONS["lt"](a, b), a, b)  # noqa: E731
_maximum = lambda a, b: _select(_COMPARISONS["gt"](a, b), a, b)  # noqa: E731
_INTEGERS: dict[str, Callable[..., Any]] = {
    **_COMPARISONS,
    "arith.addi": operator.add,
    "arith.subi": operator.sub,
    "arith.muli": operator.mul,
    **dict.fromkeys(("arith.divsi", "arith.divui"), _quotient),
    "arith.ceildivsi": lambda a, b: -(-a // b),
    "arith.floordivsi": operator.floordiv,
    "arith.remsi": lambda a, b: a - _quotient(a, b) * b,
    "arith.remui": operator.mod,
    "arith.andi": operator.and_,
    "arith.ori": operator.or_,
    "arith.xori": operator.xor,
    "arith.shli": operator.lshift,
    **dict.fromkeys(("arith.shrsi", "arith.shrui"), operator.rshift),
    "arith.select": _select,
    **dict.fromkeys(("arith.minsi", "arith.minui"), _minimum),
    **dict.fromkeys(("arith.maxsi", "arith.maxui"), _maximum),
    **dict.fromkeys(("arith.extsi", "arith.extui", "arith.trunci", "arith.bitcast", "arith.index_cast"), lambda a: a),
}
