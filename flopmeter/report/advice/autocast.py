"""The program under torch.autocast: weights stay in fp32, and products read casts of them and of what they are given.

By the lists of torch.autocast, and by what autograd does with the casts: a gradient has the type of its tensor.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Literal

import torch

from flopmeter.as_cuda.autocast import FP32, FP32_SET_DTYPE, LOWER_PRECISION
from flopmeter.records import Op, Storage, TensorSpec, Trace
from flopmeter.report.advice.rewrite import are_in_torch, in_place_of, rebuilt, statistics_of, with_ops
from flopmeter.torch_names.operators import aten_overloads

Policy = Literal["narrow", "wide", "sums", "follow"]
"""Of an op: it runs in autocast's dtype; in fp32; it reads either and returns fp32; by what it is given."""
_LOWER = LOWER_PRECISION | {"_cudnn_rnn"}
# cuFFT has no bf16, and fp16 for powers of two alone; autocast does not know, so the program casts what it gives them.
FOURIER = frozenset({"_fft_r2c", "_fft_c2r", "_fft_c2c"})
# Not `_log_softmax`: cross_entropy asks it for the type of its input.
_FP32 = FP32 | {"_softmax"} | FOURIER
_WHOLE_LAYERS = ("_transformer_encoder_layer_fwd", "_native_multi_head_attention")
WIDE = torch.float32


def autocast(trace: Trace, dtype: torch.dtype) -> Trace | None:
    """The trace of a program in fp32, as if its forward pass ran under autocast with that dtype. For the casts only
    their time counts, not how long their results live.

    None where it runs whole layers as one op, which autocast would take apart, and where the compiler's kernels ran,
    into which the casts would go; and in a torch that lacks the op that casts.
    """
    if any(op.call.name in _WHOLE_LAYERS or "kernel" in op.call.kwargs for op in trace.ops):
        return None
    run = _UnderAutocast(trace, dtype)
    changed = {index: run.follow(index, op) for index, op in enumerate(trace.ops) if op.phase != "optimizer"}
    if not are_in_torch(cast for casts in run.casts_before.values() for cast in casts):
        return None
    return with_ops(dataclasses.replace(trace, storages=run.storages), (), put_in=changed, put_before=run.casts_before)


class _UnderAutocast:
    """Which tensors are narrow so far, and the casts that the ops make necessary."""

    def __init__(self, trace: Trace, dtype: torch.dtype):
        self.dtype, self.storages = dtype, [*trace.storages]
        self.casts_before = defaultdict[int, list[Op]](list)
        self._narrow = set[int]()
        self._casts = dict[int, int]()  # of a storage that the forward pass cast: where
        self._gradients = set[int]()  # what the backward pass made
        self._statistics = set[int]().union(*map(statistics_of, trace.ops))
        self._of_leaves = {
            number
            for each in trace.accumulations
            if trace.storages[each.leaf].role == "parameters"
            for number in trace.ops[each.op].storages
        }
        self._was_narrow = dict[int, bool]()  # of what an op of the forward pass made: whether its tensor was
        self._was_narrow_for = dict[tuple[str, int], bool]()  # the same of all that an op of this name touched
        self._of_wide_input = set[int]()  # weights of products whose input was cast as well

    def follow(self, index: int, op: Op) -> Op:
        """The op, with the types that it then reads and returns."""
        policy = policy_of(op)
        read = [spec for spec in dict.fromkeys(op.inputs) if spec.dtype == WIDE and spec.device != "cpu"]
        made = {spec.storage for spec in op.outputs if spec.dtype == WIDE} - {spec.storage for spec in read}
        was_narrow = self._tensor_was_narrow(op)
        now = {spec.storage: self._type_read(policy, spec, was_narrow) for spec in read}
        place = {spec.storage: self._place_read(index, op, spec, now[spec.storage]) for spec in read}
        results = made & self._narrow_results(policy, op, read, was_narrow)

        def typed(spec: TensorSpec) -> TensorSpec:
            if spec.dtype != WIDE:
                return spec
            if spec.storage in now:
                return spec._replace(dtype=now[spec.storage], storage=place[spec.storage])
            return spec._replace(dtype=self.dtype) if spec.storage in results else spec

        self._narrow |= results
        if op.phase == "backward":
            self._gradients |= made
            self._cast_gradients(index, op, policy, made, was_narrow)
        else:
            self._note(policy, op, read, results)
        if op.call.body is not None:
            return op._replace(storages=tuple(place.get(number, number) for number in op.storages))
        return rebuilt(op, typed)

    def _tensor_was_narrow(self, op: Op) -> bool | None:
        """Whether what was kept for an op of the backward pass was narrow; None where nothing was kept."""
        own = [(_base(op), spec.storage) for spec in op.inputs]
        kept = [self._was_narrow_for[each] for each in own if each in self._was_narrow_for]
        kept = kept or [self._was_narrow[spec.storage] for spec in op.inputs if spec.storage in self._was_narrow]
        return any(kept) if kept and op.phase == "backward" else None

    def _type_read(self, policy: Policy, spec: TensorSpec, was_narrow: bool | None) -> torch.dtype:
        now = self.dtype if spec.storage in self._narrow else WIDE
        if spec.storage in self._statistics:
            return WIDE
        if policy in ("narrow", "wide"):
            return self.dtype if policy == "narrow" else WIDE
        if spec.storage in self._gradients and was_narrow is not None:
            return self.dtype if was_narrow else WIDE
        return now

    def _place_read(self, index: int, op: Op, spec: TensorSpec, dtype: torch.dtype) -> int:
        """The storage that the op reads, which it may have to be cast to before."""
        number = spec.storage
        if (number in self._narrow) == (dtype != WIDE):
            return number
        is_kept = op.phase == "backward" and number not in self._gradients
        if number in self._casts and (is_kept or self._is_weight(number)):
            return self._casts[number]
        if is_kept:
            return number
        place = self._cast(index, op, spec, dtype)
        if op.phase != "backward":
            self._casts[number] = place
        return place

    def _narrow_results(self, policy: Policy, op: Op, read: list[TensorSpec], was_narrow: bool | None) -> set[int]:
        if policy == "follow":
            narrow = [spec for spec in read if spec.storage in self._narrow]
            if "batch_norm" in op.call.name and op.inputs[0] in narrow:  # its weights and sums stay in fp32
                return {spec.storage for spec in op.outputs if spec.shape == op.inputs[0].shape}
            is_mixed = any(spec.shape and spec.storage not in self._narrow for spec in read)
            return op.makes if was_narrow or (narrow and not is_mixed) else set()
        return op.makes - self._statistics if policy == "narrow" else set()

    def _note(self, policy: Policy, op: Op, read: list[TensorSpec], results: set[int]) -> None:
        """What the backward pass has to know of an op of the forward pass."""
        is_narrow = bool(results) or (policy == "wide" and any(spec.storage in self._narrow for spec in read))
        self._was_narrow |= {spec.storage: is_narrow for spec in op.outputs if spec.storage not in op.reads}
        if policy == "wide" and op.call.body is None:
            self._was_narrow_for |= {(_base(op), number): is_narrow for number in op.reads | op.makes}
        weights = {spec.storage for spec in read if self._is_weight(spec.storage)}
        if policy == "narrow" and any(spec.storage not in self._narrow | weights for spec in read):
            self._of_wide_input |= weights

    def _cast_gradients(self, index: int, op: Op, policy: Policy, made: set[int], was_narrow: bool | None) -> None:
        """Casts the gradient of what the forward pass cast back, after the op that makes it."""
        is_of_wide_input = any(spec.storage in self._of_wide_input for spec in op.inputs)
        for spec in op.outputs:
            if spec.storage in made & self._narrow and (self._is_gradient(spec.storage) or is_of_wide_input):
                self._narrow.discard(spec.storage)
                self._cast(index + 1, op, spec, WIDE)
            elif spec.storage in made and policy == "wide" and was_narrow and not self._is_gradient(spec.storage):
                self._narrow.add(spec.storage)
                self._cast(index + 1, op, spec, self.dtype)

    def _is_weight(self, number: int) -> bool:
        return self.storages[number].role == "parameters"

    def _is_gradient(self, number: int) -> bool:
        return number in self._of_leaves or self.storages[number].role == "gradients"

    def _cast(self, before: int, op: Op, spec: TensorSpec, dtype: torch.dtype) -> int:
        """Put a cast for an op before the op of that index. Returns the storage of its result, which is its own."""
        number, nbytes = len(self.storages), spec.numel * dtype.itemsize
        self.storages.append(Storage(nbytes, spec.device, before, before + 1))
        source = spec._replace(dtype=WIDE if dtype != WIDE else self.dtype)
        cast = spec._replace(dtype=dtype, storage=number)
        func, options = aten_overloads._to_copy.default, {"dtype": dtype}
        self.casts_before[before].append(in_place_of(op, func, (source,), options, (source,), (cast,)))
        return number


def policy_of(op: Op) -> Policy:
    """What autocast does with an op that it meets. The program's own kernels were read for the types that they have,
    and keep them."""
    if op.call.body is not None:
        return "wide"
    name, base = op.call.name, _base(op)
    overload = op.call.func._schema.overload_name
    full = f"{name}.{overload}" if overload else name
    if {name, base, full} & _LOWER or name.startswith("_scaled_dot_product"):
        return "narrow"
    if {name, base, full} & _FP32:
        return "wide"
    return "sums" if full in FP32_SET_DTYPE and op.phase != "backward" else "follow"


def _base(op: Op) -> str:
    """The name that autocast lists, which the op has parts added to, forward or backward."""
    base = op.call.name.removesuffix("_data").removesuffix("_backward").removesuffix("_forward")
    return base.removeprefix("native_").removeprefix("_fused_")
