"""Turns an op of a profile into a call again. The types of the arguments decide the overload; it runs on meta tensors
with the sizes and strides in the profile. What the tracer records then is priced by the rules for any program."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from flopmeter.known_values import DataDependentError
from flopmeter.measured.kineto import OpEvent, OpInputs
from flopmeter.records import Call
from flopmeter.records.dtypes import CPP_NAMES
from flopmeter.torch_names.operators import of_tensors
from flopmeter.torch_names.private import is_dispatched
from flopmeter.trace.handling import is_composite
from flopmeter.trace.tensor_specs import build_call

# A Python number among tensors is in the profile as a tensor without dimensions and without value; the tracer gets a
# number.
_NUMBERS = {"double": 1.0, "long int": 1, "long": 1, "long long": 1, "bool": True}
_NOTHING = ("", "nullptr (uninitialized)")
_FRAMES = ("autograd", "torch", "prim", "profiler")  # namespaces of events that only call ops
_COLLECTIVES = ("c10d::", "_c10d_functional::")
_META = torch.device("meta")
LONGEST_LIST = 30  # TENSOR_LIST_DISPLAY_LENGTH_LIMIT of torch/csrc/profiler/util.h
MOST_REASON = 120  # characters
# The types of the schema that a value of the trace can be passed as, the best first. In a trace dtype, layout and
# memory format are numbers.
_NUMBER = ("NumberType", "FloatType")
_WHOLE_NUMBER = ("IntType", "SymIntType", "ScalarTypeType", "LayoutType", "MemoryFormatType", *_NUMBER)
_BOOL = ("BoolType", *_NUMBER[:1])


# `CatArrayBatchedCopy<OpaqueType<2u>, ...>`, `multi_tensor_apply_kernel<..., BinaryOpScalarFunctor<float, 1, 1>, ...>`.
_TYPES_OF_KERNELS = {
    "OpaqueType<1u>": torch.uint8, "OpaqueType<2u>": torch.bfloat16, "OpaqueType<4u>": torch.float32,
    "OpaqueType<8u>": torch.int64, "Functor<float": torch.float32, "Functor<double": torch.float64,
    "Functor<c10::BFloat16": torch.bfloat16, "Functor<c10::Half": torch.float16,
}  # fmt: skip
_TYPES_IN_NAMES = re.compile(f"({'|'.join(map(re.escape, _TYPES_OF_KERNELS))})")

# Lists of numbers that an older trace leaves out but that follow from the shapes of the op's tensors, by parameter.
_UNTOLD: Mapping[str, Callable[[Mapping[str, Any]], list[Any]]] = {
    "normalized_shape": lambda shapes: list(shapes["weight"] or shapes["input"][-1:]),
    "output_mask": lambda shapes: [True, bool(shapes["weight"]), bool(shapes["weight"])],
}


class NotRebuilt(Exception):  # noqa: N818  (no error of the caller's)
    """Says why the call of an op is not known."""


class _Mismatch(Exception):  # noqa: N818
    """Raised for an overload that does not take these arguments."""


class _Traced(NamedTuple):
    """What the trace says about one argument; see OpInputs."""

    kind: Any
    dims: Any
    strides: Any  # None: nothing
    concrete: Any  # None: nothing


def _columns(inputs: OpInputs) -> Iterator[_Traced]:
    nothing = (None,) * len(inputs.types)
    columns = (inputs.types, inputs.dims, inputs.strides or nothing, inputs.concrete or nothing)
    yield from map(_Traced, *columns)


class RebuiltCall(NamedTuple):
    """An overload and the arguments to call it with."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    conversions: int  # how many values are passed as another type than their own
    assumes_dtype: bool  # of tensors in a list, whose dtype no trace has


def commonest_float(roots: Iterable[OpEvent]) -> torch.dtype:
    """The floating type that most tensor arguments of the profile have."""
    counts: Counter[torch.dtype] = Counter()
    for root in roots:
        counts.update(map(CPP_NAMES.__getitem__, _tensor_types(root)))
    return max((dtype for dtype in counts if dtype.is_floating_point), key=counts.__getitem__, default=torch.float32)


def type_in_lists(event: OpEvent) -> torch.dtype | None:
    """The type of the tensors in the op's lists by the names of the kernels that it launched; None if they do not tell
    or it has no list. Of kernels that only copy they tell the size of an element, which is all that counts there."""
    if event.inputs is None or "TensorList" not in event.inputs.types:
        return None
    found = (_TYPES_IN_NAMES.search(kernel.name) for kernel in event.all_launched())
    return next((_TYPES_OF_KERNELS[name.group(1)] for name in found if name), None)


def _tensor_types(event: OpEvent) -> Iterator[str]:
    if event.inputs:
        traced = zip(event.inputs.types, event.inputs.dims, strict=True)
        yield from (kind for kind, dims in traced if kind in CPP_NAMES and dims)
    for child in event.children:
        yield from _tensor_types(child)


def find_ops(root: OpEvent) -> Iterator[OpEvent]:
    """The ops of the tree that the tracer would see: not autograd's and not composites, which consist of other ops in
    the tree, and not those that a kernel calls. Ops of libraries that are not loaded are included."""
    if is_frame(root):
        for child in root.children:
            yield from find_ops(child)
    else:
        yield root


def find_frames(root: OpEvent) -> Iterator[OpEvent]:
    """The events through which find_ops looks: nodes of autograd and composites."""
    if is_frame(root):
        yield root
        for child in root.children:
            yield from find_frames(child)


def is_frame(event: OpEvent) -> bool:
    """Whether the op only calls others. A composite that launched a kernel itself has one on that device."""
    namespace, _, name = event.name.partition("::")
    return not name or namespace.partition(".")[0] in _FRAMES or (not event.launched and _is_composite(event))


def arguments_of(event: OpEvent, dtype_in_lists: torch.dtype) -> RebuiltCall:
    """The overload and its arguments, with tensors on meta. No trace has the dtype of tensors in a list: it is taken
    from the op's other tensors, or from its kernels, or else from `dtype_in_lists`.

    Raises NotRebuilt if the trace does not say enough.
    """
    packet = _packet(event.name)
    if packet is None:
        raise NotRebuilt("no op of this name is registered: import the library that it comes from")
    if event.inputs is None:
        raise NotRebuilt("the trace tells no arguments")
    if event.name.startswith(_COLLECTIVES):
        raise NotRebuilt("a collective: the trace does not tell of which ranks")
    if any(traced.kind == "TensorList" and not traced.dims for traced in _columns(event.inputs)):
        which = "tensors in lists" if event.inputs.strides is None else f"lists of more than {LONGEST_LIST} tensors"
        raise NotRebuilt(f"the trace leaves out {which}")
    told = type_in_lists(event)
    best = _best(packet, event.inputs, told or dtype_in_lists)
    if best is not None and told is not None:
        best = best._replace(assumes_dtype=False)
    if best is None:
        raise NotRebuilt("no overload takes what the trace tells of the arguments")
    return best


def _is_composite(event: OpEvent) -> bool:
    packet = _packet(event.name)
    if packet is None:
        return False
    best = _best(packet, event.inputs) if event.inputs else None
    return all(map(is_composite, [best.func] if best else _overloads(packet)))


def _packet(qualified: str) -> OpOverloadPacket | None:
    namespace, _, name = qualified.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name, None) if namespace and name.isidentifier() else None
    return packet if isinstance(packet, OpOverloadPacket) else None


def _overloads(packet: OpOverloadPacket) -> list[OpOverload]:
    """The overloads that the dispatcher knows: aten::to also has some of TorchScript's interpreter."""
    found: list[OpOverload] = [getattr(packet, name) for name in packet.overloads()]
    return [overload for overload in found if is_dispatched(overload.name())]


def _best(
    packet: OpOverloadPacket, inputs: OpInputs, dtype_in_lists: torch.dtype = torch.float32
) -> RebuiltCall | None:
    """The overload that takes such arguments with the least conversions."""
    found = _candidates(packet, inputs, dtype_in_lists)
    return min(found, key=lambda arguments: arguments.conversions, default=None)


def _candidates(packet: OpOverloadPacket, inputs: OpInputs, dtype_in_lists: torch.dtype) -> Iterator[RebuiltCall]:
    """Each overload that takes such arguments."""
    sized = [
        CPP_NAMES[kind] for kind, dims in zip(inputs.types, inputs.dims, strict=True) if kind in CPP_NAMES and dims
    ]
    in_lists = sized[0] if sized else dtype_in_lists
    for overload in _overloads(packet):
        parameters = overload._schema.arguments
        if len(parameters) != len(inputs.types):
            continue
        takes_number = False  # once there is a tensor
        conversions = 0
        args, kwargs = [], {}
        shapes = {parameter.name: dims for parameter, dims in zip(parameters, inputs.dims, strict=True)}
        try:
            for parameter, traced in zip(parameters, _columns(inputs), strict=True):
                value: Any
                if inputs.concrete is None and traced.kind in _NOTHING and parameter.name in _UNTOLD:
                    value, is_converted = _UNTOLD[parameter.name](shapes), False
                else:
                    value, is_converted = _value(parameter, traced, in_lists, number_for_scalar=takes_number)
                conversions += is_converted
                takes_number |= isinstance(value, Tensor) and torch.Tag.pointwise in overload.tags
                if parameter.kwarg_only:
                    kwargs[parameter.name] = value
                else:
                    args.append(value)
        except _Mismatch:
            continue
        yield RebuiltCall(overload, tuple(args), kwargs, conversions, "TensorList" in inputs.types and not sized)


def _value(parameter: Any, traced: _Traced, in_lists: torch.dtype, *, number_for_scalar: bool) -> tuple[Any, bool]:
    """The value to pass, and whether the schema's type differs from the value's. Raises _Mismatch."""
    wanted = parameter.real_type
    is_optional = wanted.kind() == "OptionalType"
    if is_optional:
        wanted = wanted.getElementType()
    if wanted.kind() == "DeviceObjType":
        return _META, False
    if parameter.name == "pin_memory":  # of host memory
        return None, False
    if traced.kind in _NOTHING and wanted.kind() == "TensorType" and not is_optional and traced.concrete is not None:
        return None, True  # an undefined tensor, such as the lengths of fused attention where all sequences are as long
    if traced.kind in _NOTHING:
        return _default(parameter, is_optional), False
    if wanted.kind() == "TensorType":
        if traced.kind not in CPP_NAMES:
            raise _Mismatch
        if number_for_scalar and traced.kind in _NUMBERS and traced.dims == ():
            return _NUMBERS[traced.kind], False
        return _tensor(CPP_NAMES[traced.kind], traced.dims, traced.strides), False
    if wanted.kind() == "ListType" and wanted.getElementType().kind() == "TensorType":
        if traced.kind != "TensorList" or not isinstance(traced.dims, tuple):
            raise _Mismatch
        strides = (None,) * len(traced.dims) if traced.strides is None else traced.strides
        if not isinstance(strides, tuple) or len(traced.dims) != len(strides):
            raise _Mismatch
        return [_tensor(in_lists, *geometry) for geometry in zip(traced.dims, strides, strict=True)], False
    if traced.concrete is None and traced.kind == "Scalar":
        return _stand_in(parameter, wanted), False
    return _literal(wanted, traced)


def _stand_in(parameter: Any, wanted: Any) -> Any:
    """A value for a number that is not in the trace: the parameter's default; any number if it is only computed with;
    the last dimension for a dimension. For other parameters (types, sizes) the cost may depend on the number."""
    if parameter.has_default_value() and parameter.default_value is not None:
        return parameter.default_value
    if wanted.kind() in _NUMBER:
        return 1
    if wanted.kind() == "IntType" and parameter.name == "dim":
        return -1
    raise _Mismatch


def _default(parameter: Any, is_optional: bool) -> Any:
    if parameter.has_default_value():
        return parameter.default_value
    if is_optional or parameter.real_type.kind() == "GeneratorType":
        return None
    raise _Mismatch


def _tensor(dtype: torch.dtype, dims: Any, strides: Any) -> Tensor:
    try:
        if strides is None:
            return torch.empty(dims, dtype=dtype, device=_META)
        return torch.empty_strided(dims, strides, dtype=dtype, device=_META)
    except (RuntimeError, TypeError, ValueError):
        raise _Mismatch from None


def _literal(wanted: Any, traced: _Traced) -> tuple[Any, bool]:
    if traced.kind not in ("Scalar", "ScalarList") or not isinstance(traced.concrete, str):
        raise _Mismatch
    value = _parsed(traced.concrete)
    if isinstance(value, list):
        if wanted.kind() != "ListType":
            raise _Mismatch
        return value, any(_is_converted(wanted.getElementType().kind(), item) for item in value)
    return value, _is_converted(wanted.kind(), value)


def _is_converted(wanted: str, value: Any) -> bool:
    takes = _BOOL if isinstance(value, bool) else _WHOLE_NUMBER if isinstance(value, int) else _NUMBER
    if wanted not in takes:
        raise _Mismatch
    return isinstance(value, bool) and wanted != "BoolType"


def _parsed(text: str) -> Any:
    """The value of 'True', '3', '0.5', '-inf' or '[1, 2]'."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        pass
    try:
        return float(text)
    except ValueError:
        raise _Mismatch from None


def run(arguments: RebuiltCall) -> Call | None:
    """Run the call on meta, under the mode that records it. An op that returns a value instead of tensors cannot run on
    meta; its call is returned without running it. Raises NotRebuilt if the call fails."""
    func = arguments.func
    if func._schema.returns and not of_tensors(func._schema.returns):
        numbers: dict[int, int] = {}
        return build_call(
            func, arguments.args, arguments.kwargs, None, lambda tensor: numbers.setdefault(id(tensor), len(numbers))
        )
    try:
        func(*arguments.args, **arguments.kwargs)
    except DataDependentError:
        raise NotRebuilt("its result depends on data, which no trace holds") from None
    except Exception as error:
        reason = " ".join(str(error).split())[:MOST_REASON] or type(error).__name__
        raise NotRebuilt(f"it does not run on meta tensors: {reason}") from error
    return None
