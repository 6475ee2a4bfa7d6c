"""The mutants that scripts/mutate.py draws from: where they are, which lines feel them, and what they name."""

from __future__ import annotations

import ast
import functools
import random
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from kinds import KINDS
from syntax import Edit, Module

ROOT = Path(__file__).parents[1]
PARTS = (
    "flopmeter/costs", "flopmeter/timing", "flopmeter/launch/fusion", "flopmeter/launch/modes.py",
    "flopmeter/timing/allocator.py", "flopmeter/as_cuda", "flopmeter/known_values", "flopmeter/distributed",
    "flopmeter/trace/recorder.py", "flopmeter/trace/attribution.py", "flopmeter/trace/handling.py",
    "flopmeter/trace/storages.py", "flopmeter/trace/module_paths.py",
)  # fmt: skip
# Never drawn, since nobody could see them, and why: `file: change`, without the line.
EQUIVALENT = {
    "flopmeter/costs/data_movement/movement.py: return FREE  ->  return ()": "FREE is ()",
    "flopmeter/costs/contractions/attention.py: k  ->  v  in  return AttentionShape(batch, heads, k.shape[1], queries, "
    "k.shape[2], depth, v.shape[-1])": "keys and values have the same heads and tokens",
    "flopmeter/timing/allocator.py: 1  ->  2  in  index = bisect_left(free, (size, -1))": "no address is below 0",
    "flopmeter/costs/arithmetic/resampling.py: 1  ->  2  in  flops = (axes * _UNNORMALIZE + weights) * positions + "
    "(2 * taps if taps > 1 else 0) * out.numel": "no filter has two taps",
    **dict.fromkeys(
        (
            f"flopmeter/trace/handling.py: Handling(True, False, False, False, False)  ->  Handling(True, {flags})"
            for flags in (
                "True, False, False, False",
                "False, True, False, False",
                "False, False, True, False",
                "False, False, False, True",
            )
        ),
        "of an op of the host nothing else is asked",
    ),
    "flopmeter/launch/fusion/roles.py: all  ->  any  in  is_scratch = bool(written) and all((spec.storage < 0 for spec "
    "in written))": "a kernel writes scratch or tensors of the program, never both",
    "flopmeter/timing/convolution.py: busy.work_seconds  ->  busy.seconds": "kernels of vector units have no latency",
    **dict.fromkeys(
        (
            f"flopmeter/costs/flex_attention.py: {used}  ->  {other}  in  prepared = make_cost(call, REDUCTION, "
            "2 * out.numel + (0 if grad_lse is None else 2 * lse.numel), read=inputs, written=(row_sums,))"
            for used, other in (("lse", "grad_lse"), ("out", "grad_out"))
        ),
        "a gradient has the shape of its tensor",
    ),
    "flopmeter/launch/fusion/parts.py: len(op.storages) + 1 + MOST_SCRATCH + number  ->  len(op.storages) + 1 + "
    "MOST_SCRATCH - number": "numbers above those of scratch: no op that reduces to two results has so much",
    "flopmeter/as_cuda/jagged_attention.py: False  ->  True  in  def can_use(params: Any, debug: bool=False) -> "
    "bool:": ("it says why a kernel cannot run, of tensors on a true GPU"),
    "flopmeter/costs/flex_attention.py: share[0] < share[1]  ->  share[0] <= share[1]": "of all it is all",
    "flopmeter/costs/contractions/linalg.py: form_q_flops(m, n, reflectors)  ->  form_q_flops(n, m, reflectors)": (
        "the formula is the same in rows and columns"
    ),
    "flopmeter/launch/fusion/parts.py: Role(True, True)  ->  Role(False, True)": (
        "zeros have no producer, and what scatters into them joins no consumer"
    ),
    "flopmeter/launch/fusion/parts.py: Role(True, True, Loops(kept, splits, True), kept)  ->  Role(False, True, "
    "Loops(kept, splits, True), kept)": "what makes partial results joins no consumer",
    "flopmeter/timing/concurrency.py: deleted: self.since = 0.0": "it is set again when the task begins",
    "flopmeter/timing/gemm_kernels.py: for columns in [*range(64, 257, 16)][:-1]": "256 columns come as rows, turned",
    "flopmeter/timing/timeline.py: clock  ->  cached  in  if clock not in self._devices:": "it only spares time",
    "flopmeter/distributed/sync_batch_norm.py: x  ->  gradient  in  of_weight = [_channels(x) if weight is None else "
    "torch.empty_like(weight) for _ in range(2)]": "a gradient has the shape of its tensor",
    "flopmeter/known_values/assumed.py: 'other'  ->  'other_'  in  source, other = (call.args[0], call.argument(1, "
    "'other'))": "the dispatcher passes it by its place",
    "flopmeter/costs/arithmetic/fake_quantize.py: 3  ->  4  in  dense = in_one_piece(scratch(x, 3), "
    "x.shape)": "a number that only tells one scratch from another",
    "flopmeter/costs/flex_attention.py: 0  ->  1  in  begin = 0 if mask.left is None else max(first - mask.left, 0)": (
        "blocks have more than one column"
    ),
    "flopmeter/as_cuda/kernels/rnn.py: _cudnn_rnn(mode, tensor, hx, params, own, False, batch_sizes.tolist())  ->  "
    "_cudnn_rnn(mode, tensor, hx, params, own, True, batch_sizes.tolist())": "packed sequences have no batch dimension",
    "flopmeter/as_cuda/kernels/rnn.py: tensor  ->  hx  in  new_cell = tensor.new_empty(0 if cx is None else "
    "cx.shape)": "a state has the type of its input",
    "flopmeter/costs/flex_attention.py: cost.flops  ->  cost.executed_flops": "a function on one score masks nothing",
    "flopmeter/trace/module_paths.py: node._sequence_nr() > next_node_number()  ->  node._sequence_nr() >= "
    "next_node_number()": "no node has the number of the next one",
    "flopmeter/known_values/generation.py: has_ended(...): without **kwargs": (
        "what finds the end of a sequence looks at its tokens alone"
    ),
}


class Mutant(NamedTuple):
    """One change: the `place`-th edit of its kind in this file."""

    file: str
    kind: str
    place: int
    used: tuple[tuple[str, int], ...]  # files and lines: a test that reaches one of them may notice
    names: frozenset[str]  # of the file, the function, the entry of a table, the op or the option that it is in
    tables: frozenset[str]  # of the module that it is in, or in what they are made of: a test may read them itself
    line: int
    change: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.change}"

    @property
    def reason(self) -> str | None:
        """Why nobody could notice it."""
        return EQUIVALENT.get(f"{self.file}: {self.change}")


def mutated(source: str, kind: str, place: int) -> str:
    """The source with one change."""
    module = Module(source)
    list(KINDS[kind](module))[place].apply()
    return ast.unparse(module.tree)


def all_mutants(parts: Iterable[str], kinds: Collection[str]) -> list[Mutant]:
    found = []
    for path in (path for part in parts for path in sorted((ROOT / part).rglob("*.py")) or [ROOT / part]):
        module, file = Module(path.read_text(encoding="utf-8")), str(path.relative_to(ROOT))
        for kind in kinds:
            for place, edit in enumerate(KINDS[kind](module)):
                line: int = getattr(edit.shown, "lineno", 1)
                known = _used(module, file, edit), _names(module, edit) | words(path.stem), _tables(module, edit)
                found.append(Mutant(file, kind, place, *known, line, module.describe(edit)))
    stale = EQUIVALENT.keys() - {f"{mutant.file}: {mutant.change}" for mutant in found}
    if parts == PARTS and len(kinds) == len(KINDS) and stale:
        sys.exit(f"EQUIVALENT has what is no mutant any more: {', '.join(sorted(stale))}")
    return [mutant for mutant in found if mutant.reason is None]


def draw(mutants: list[Mutant], count: int, rng: random.Random) -> list[Mutant]:
    """As many of each kind, as far as there are."""
    by_kind = defaultdict[str, list[Mutant]](list)
    for mutant in rng.sample(mutants, len(mutants)):
        by_kind[mutant.kind].append(mutant)
    in_turn = (mutant for turn in zip_longest(*by_kind.values()) for mutant in turn if mutant is not None)
    return list(islice(in_turn, count))


def _used(module: Module, file: str, edit: Edit) -> tuple[tuple[str, int], ...]:
    """Where the change is felt: at its statement (the head of a compound one), in the body of a function whose head it
    is in, wherever a name of the module is used that it is the value of."""
    statement: Any = edit.shown
    while not isinstance(statement, ast.stmt):
        statement = module.parent[statement]
    first, last, body = statement.lineno, statement.end_lineno or statement.lineno, getattr(statement, "body", None)
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        first = statement.body[0].lineno
    elif body:
        last = max(body[0].lineno - 1, first)
    here = tuple((file, line) for line in range(first, last + 1))
    if module.parent[statement] is not module.tree or not isinstance(statement, (ast.Assign, ast.AnnAssign)):
        return here
    return (
        tuple(place for name in sorted(_bound(statement)) for place in _mentions()[name] if place not in here) or here
    )


def _bound(statement: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}


def _tables(module: Module, edit: Edit) -> frozenset[str]:
    up = next(
        (up for up in (edit.shown, *module.above(edit.shown)) if isinstance(up, (ast.Assign, ast.AnnAssign))), None
    )
    if up is None or module.parent[up] is not module.tree:
        return frozenset()
    found = _bound(up)
    for other in module.tree.body:
        if isinstance(other, (ast.Assign, ast.AnnAssign)) and other.value is not None:
            used = {each.id for each in ast.walk(other.value) if isinstance(each, ast.Name)}
            found |= _bound(other) if used & found else set()
    return frozenset(name.strip("_").lower() for name in found)


@functools.cache
def _mentions() -> dict[str, list[tuple[str, int]]]:
    """Files and lines of the package that have the word."""
    found = defaultdict[str, list[tuple[str, int]]](list)
    for path in sorted((ROOT / "flopmeter").rglob("*.py")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            for word in set(re.findall(r"\w+", line)):
                found[word].append((str(path.relative_to(ROOT)), number))
    return found


def _names(module: Module, edit: Edit) -> frozenset[str]:
    """What a test that is about the changed code may name too: the function, the key in a table, what is changed."""
    named = [edit.text or ast.unparse(edit.shown)]
    node: ast.AST = edit.shown
    for up in module.above(edit.shown):
        if isinstance(up, ast.Dict):
            named += [ast.unparse(key) for key, value in zip(up.keys, up.values, strict=True) if key and value is node]
        elif isinstance(up, ast.FunctionDef):
            named += [up.name, *(ast.unparse(each) for each in up.decorator_list if node not in up.decorator_list)]
        node = up
    return words(" ".join(named)) - words(_SAID)


_SAID = "deleted without the entry if True False"  # by an edit, of which no test tells


def words(text: str) -> frozenset[str]:
    """Each word, and its parts: `triton_kernel` tells of triton."""
    whole = [word.strip("_").lower() for word in re.findall(r"\w+", text)]
    return frozenset(part for word in whole for part in (word, *word.split("_")) if part)
