"""on_meta: meta twins of real tensors; the values of small ones stay known."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections import UserDict
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from flopmeter.known_values import entry_points
from flopmeter.known_values.values import KnownStorage, is_small, is_weight, no_modes

T = TypeVar("T")

_twins: dict[int, KnownStorage] = {}  # by storage address; an entry is removed when its storage dies


def alive() -> Iterable[KnownStorage]:
    return tuple(_twins.values())


def on_meta(tree: T) -> T:
    """The same tree, with a meta tensor (a twin) in place of each real tensor.

    Takes tensors, modules, mappings (a tokenizer's output too), dataclasses and any pytree of them. Tensors of up to
    2^20 elements keep their values, as long as they are not written to outside of a meter. Larger tensors and
    parameters keep only shape, strides and dtype. A tensor that occurs twice has one twin. Raises TypeError for a name
    or a class, which hold no tensors.
    """
    if isinstance(tree, (str, type)):
        raise TypeError(f"on_meta takes tensors, a module or what holds them, not {tree!r}")
    return _Twinning().of(tree)


class _Twinning:
    def __init__(self) -> None:
        self._memo: dict[int, Any] = {}  # of copy.deepcopy: id of the original -> its twin

    def of(self, tree: Any) -> Any:
        if isinstance(tree, Tensor):
            return self._tensor(tree)
        if isinstance(tree, nn.Module):
            for tensor in (*tree.parameters(), *nn.Module.buffers(tree)):
                self._tensor(tensor)
            return copy.deepcopy(tree, self._memo)
        if isinstance(tree, UserDict):
            twin = copy.copy(tree)
            twin.data = {key: self.of(value) for key, value in tree.data.items()}
            return twin
        if dataclasses.is_dataclass(tree) and not isinstance(tree, (type, dict)):
            twin = copy.copy(tree)  # type: ignore[arg-type]
            for name in (entry.name for entry in dataclasses.fields(tree)):
                object.__setattr__(twin, name, self.of(getattr(tree, name)))
            return twin
        children, form = tree_flatten(tree, is_leaf=lambda node: node is not tree)
        if len(children) == 1 and children[0] is tree:  # a leaf
            return tree
        return tree_unflatten([self.of(child) for child in children], form)

    def _tensor(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor
        if id(tensor) not in self._memo:
            with no_modes(), torch.inference_mode(False):
                self._memo[id(tensor)] = _twin(tensor)
        return self._memo[id(tensor)]


def _twin(tensor: Tensor) -> Tensor:
    is_plain = tensor.layout is torch.jagged or (tensor.layout is torch.strided and not tensor.is_nested)
    if not is_plain or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)
        raise TypeError(
            f"a {kind} tensor has no twin on meta: meter the program on real CPU tensors, as they are, or pass the "
            "dense tensors that this one is made of"
        )
    twin = torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(twin, tensor.requires_grad)
    if tensor.layout is torch.strided and is_small(tensor) and not is_weight(tensor):
        memory = torch.empty_like(twin, device="cpu").copy_(tensor).untyped_storage()
        cell = KnownStorage(twin.untyped_storage(), memory, _on_death, twin._version)
        _twins[cell.address] = cell
        for known in entry_points.open_ones():
            known.values.bring(cell)
    return twin


def _on_death(cell: weakref.ref[Any]) -> None:
    if isinstance(cell, KnownStorage) and _twins.get(cell.address) is cell:
        del _twins[cell.address]
