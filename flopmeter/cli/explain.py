"""How one op is counted: its rule, the source of the rule, and the rule at work on an example."""

from __future__ import annotations

import argparse
import difflib
import inspect
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from flopmeter.cli.command import Command
from flopmeter.costs import RULES, find_rule
from flopmeter.costs.traffic import is_view
from flopmeter.meter import FlopMeter
from flopmeter.records import Call, Cost, VectorWork
from flopmeter.report.advice.spots import integers_for
from flopmeter.torch_names.private import DispatchKey, is_dispatched

# Arguments for ops whose schema does not tell what shapes go together; the others are tried with SHAPES.
_EXAMPLES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "convolution": lambda: (_half(8, 64, 56, 56), _half(64, 64, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    "native_layer_norm": lambda: (_half(512, 1024), [1024], _half(1024), _half(1024), 1e-5),
    "embedding": lambda: (_half(32000, 1024), torch.empty(8, 128, dtype=torch.long, device="meta")),
    "_scaled_dot_product_flash_attention": lambda: (*(_half(8, 16, 512, 64) for _ in range(3)), 0.0, True),
    "_scaled_dot_product_efficient_attention": lambda: (*(_half(8, 16, 512, 64) for _ in range(3)), None, True),
    "_scaled_mm": lambda: (_fp8(256, 512), _fp8(128, 512).t(), _scale(), _scale(), None, None, torch.bfloat16),
    "_grouped_mm": lambda: (_half(256, 512).bfloat16(), _half(8, 512, 128).bfloat16(), _ends(8)),
    "_softmax": lambda: (_half(512, 512), -1, False),
    "cat": lambda: ([_half(256, 256), _half(256, 256)],),
    "index_select": lambda: (_half(32000, 1024), 0, torch.empty(128, dtype=torch.long, device="meta")),
}
DEVICE = "h100-sxm5-80gb"  # of the examples: it multiplies in all types but fp4
SHAPES = ((256, 256), (8, 256, 256), (256,), (8, 16, 32, 32))


class UnknownOpError(ValueError):
    """A name that is no op of torch's."""


def explain(name: str) -> str:
    """What flopmeter knows of an op, as text. `name` is 'addmm', 'aten::addmm' or 'aten.addmm.default'.

    Raises UnknownOpError for a name that torch has no op for, with the nearest names.
    """
    overload = _overload(name)
    example = _example(overload)
    parts = [str(overload._schema), _how(overload, example)]
    if example is None:
        parts.append("(no example: flopmeter does not know arguments that go together)")
    else:
        parts.append("\n".join(("example", *_lines(example))))
    return "\n\n".join(parts)


def _overload(name: str) -> OpOverload:
    namespace, _, rest = name.replace("::", ".").rpartition("aten.")
    packet_name, _, overload_name = rest.partition(".")
    packet = getattr(torch.ops.aten, packet_name, None) if not namespace and packet_name.isidentifier() else None
    overloads = _dispatched(packet) if isinstance(packet, OpOverloadPacket) else []
    if not overloads:
        if not packet_name:
            raise UnknownOpError("name an op of torch's, such as addmm or aten.addmm.default")
        known = {str(op).removeprefix("aten.").split(".")[0] for op in RULES}
        near = difflib.get_close_matches(packet_name, known, n=4, cutoff=0.5)
        raise UnknownOpError(f"torch has no op {name!r}; near to it: {', '.join(near) or 'nothing with a rule'}")
    if overload_name and overload_name not in overloads:
        raise UnknownOpError(f"{packet} has no overload {overload_name!r}; it has: {', '.join(overloads)}")
    usual = next((usual for usual in ("default", "Tensor") if usual in overloads), overloads[0])
    return getattr(packet, overload_name or usual)


def _dispatched(packet: OpOverloadPacket) -> list[str]:
    """Its overloads without those of TorchScript's interpreter, as `aten::add` has one for two numbers."""
    return [name for name in packet.overloads() if is_dispatched(getattr(packet, name).name())]


def _how(overload: OpOverload, example: FlopMeter | None) -> str:
    """The docstring and code of the rule, or the default that stands in."""
    calls = [op.call for op in example.trace.ops] if example else []
    call = next((call for call in calls if call.func is overload), None)
    if call is None and (calls or overload.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)):
        return "a composite: PyTorch runs other ops for it, and those are counted"
    rule = find_rule(call or Call(overload, (), {}, (), ()))
    if rule is None:
        return "no rule: reported as *uncounted*, with its bytes; add one with @rule (see flopmeter/costs/rules.py)"
    if rule not in RULES.values():
        if is_view(overload):
            return "a view by its schema (it aliases its input): moves nothing, launches nothing, free"
        return f"no rule of its own; the default of its kind, {_place(rule)}\n\n{_code(rule)}"
    return f"{_place(rule)}\n\n{_code(rule)}"


def _place(rule: Callable[..., Any]) -> str:
    return f"rule {rule.__module__}.{getattr(rule, '__name__', '')}"


def _code(rule: Callable[..., Any]) -> str:
    """Docstring and formula: rules are a few lines, so their source is the clearest account of them."""
    try:
        return inspect.getsource(rule).rstrip()
    except OSError:
        return inspect.getdoc(rule) or ""


def _example(overload: OpOverload) -> FlopMeter | None:
    """What ran on the first arguments that the op accepts."""
    for arguments in _candidates(overload):
        meter = FlopMeter(DEVICE, as_cuda=False)
        try:
            with meter:
                overload(*arguments)
            if meter.trace.ops:
                meter.report()  # torch's own shapes may be none that the rule knows
                return meter
        except Exception:  # not these arguments, then
            continue
    return None


def _candidates(overload: OpOverload) -> Iterator[tuple[Any, ...]]:
    known = _EXAMPLES.get(overload.overloadpacket.__name__)
    if known is not None:
        yield known()
        return
    needed = [argument for argument in overload._schema.arguments if not argument.has_default_value()]
    for shape, number in product(SHAPES, (1, 0, 2, -1)):
        yield tuple(_value(str(argument.type), shape, number) for argument in needed if not argument.kwarg_only)


def _value(kind: str, shape: tuple[int, ...], number: int) -> Any:
    """A plausible argument of that schema type."""
    plain = {
        "Tensor": _half(*shape), "List[Tensor]": [_half(*shape)] * 2, "bool": False, "float": 1.0, "int": number,
        "number": number, "List[int]": [number],
    }  # fmt: skip
    return plain.get(kind)


def _half(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float16, device="meta")


def _fp8(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta")


def _scale() -> Tensor:
    return torch.empty((), dtype=torch.float32, device="meta")


def _ends(groups: int) -> Tensor:
    """Where the rows of each group end."""
    return torch.empty(groups, dtype=torch.int32, device="meta")


def _lines(example: FlopMeter) -> Iterator[str]:
    kernels = example.report().kernels
    for op in example.trace.ops:
        inputs = ", ".join(f"{list(spec.shape)} {str(spec.dtype).removeprefix('torch.')}" for spec in op.call.inputs)
        outputs = ", ".join(str(list(spec.shape)) for spec in op.call.outputs)
        yield f"  {op.call.name}({inputs}) -> {outputs or 'nothing'}"
        own = [kernel.cost for kernel in kernels if kernel.op is op]
        for number, cost in enumerate(own, 1):
            if len(own) > 1:
                yield f"    kernel {number} of {len(own)}:"
            yield from _cost(cost)
        if not own:
            yield "    launches nothing"


def _cost(cost: Cost) -> Iterator[str]:
    flops = " + ".join(f"{count:,} {op_class}" for op_class, count in cost.flops_by_class)
    macs = f" ({cost.macs:,} multiply-adds)" if cost.macs else ""
    intensity = cost.flops / cost.bytes if cost.bytes else 0.0
    yield f"    FLOP   {flops}{macs}, in {cost.dtype}"
    yield f"    bytes  {cost.bytes_read:,} read, {cost.bytes_written:,} written; {intensity:.3g} FLOP/B"
    if isinstance(cost.work, VectorWork) and cost.work.index_operations:
        yield f"    index  {cost.work.index_operations:,} integer operations, for {integers_for(cost)}"


def _run(options: argparse.Namespace) -> int:
    print(explain(options.op))
    return 0


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", metavar="OP", help="addmm, aten::addmm or aten.addmm.default")


COMMAND = Command(
    _run, "How an op is counted: its rule, formula and an example", "Example: flopmeter explain addmm\n", _arguments
)
