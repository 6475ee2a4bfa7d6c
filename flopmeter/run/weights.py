"""Weights in files. Loaded onto the device named cuda they have a shape and no data; tensors without data are not
saved.

Works around: torch.load and torch.save, and safetensors, which copy data from and to a device.
Until: torch has a device named cuda without memory.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils._pytree import tree_leaves

from flopmeter.run.device import NamedCuda
from flopmeter.run.patches import Patch


class WeightFiles:
    """What the program saves is kept by its path, so that it can be loaded again."""

    def __init__(self, named: NamedCuda, note: Callable[[str], None]) -> None:
        self._named, self._note = named, note
        self._saved: dict[str | int, Any] = {}
        self._buffers: list[Any] = []  # in memory: kept, so that none gets the id of another

    def patches(self) -> Iterator[Patch]:
        serialization = torch.serialization
        save, load = self._save(torch.save), self._load(torch.load)
        restore = serialization.default_restore_location
        for owner in (torch, serialization):
            yield Patch(owner, "save", save, "weights without data are not saved")
            yield Patch(owner, "load", load, "what was saved in this run is loaded again")
        yield Patch(serialization, "default_restore_location", self._restore(restore), "loads onto the named device")
        if importlib.util.find_spec("safetensors") is not None:
            import safetensors.torch

            yield Patch(safetensors.torch, "save_file", self._save(safetensors.torch.save_file), "weights without data")

        for owner in (checkpoint, checkpoint.state_dict_saver, checkpoint.state_dict_loader):
            for name, stand_in in self._checkpoints().items():
                if hasattr(owner, name):
                    yield Patch(owner, name, stand_in(getattr(owner, name)), "checkpoints without data")

    def _checkpoints(self) -> dict[str, Callable[..., Any]]:
        """torch.distributed.checkpoint: state dicts are made, with their collectives, and no file is."""

        def instead(do: Callable[..., Any]) -> Callable[..., Any]:
            def standing_in(original: Callable[..., Any]) -> Callable[..., Any]:
                @functools.wraps(original)
                def run(state_dict: Any, *args: Any, **options: Any) -> Any:
                    made = {
                        name: each.state_dict() if isinstance(each, Stateful) else each
                        for name, each in state_dict.items()
                    }
                    if not self._named.is_open or not self._has_no_data(made):
                        return original(state_dict, *args, **options)
                    self._note(
                        "checkpoints were neither written nor read: weights have no data; copies are not counted"
                    )
                    return do(state_dict, made, options)

                return run

            return standing_in

        def save(_: Any, made: Any, options: Any) -> Any:
            return Metadata({})

        def async_save(_: Any, made: Any, options: Any) -> Any:
            done: Future[Any] = Future()
            done.set_result(None)
            return (
                done
                if options.get("async_stager") is None
                else checkpoint.state_dict_saver.AsyncSaveResponse(done, done)
            )

        def load(state_dict: Any, made: Any, options: Any) -> None:
            for name, each in state_dict.items():
                if isinstance(each, Stateful):
                    each.load_state_dict(made[name])

        return {"save": instead(save), "async_save": instead(async_save), "load": instead(load)}

    def _save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def save(obj: Any, f: Any = None, *args: Any, **kwargs: Any) -> Any:
            path = kwargs.pop("filename", f) if f is None else f
            if not self._named.is_open or not self._has_no_data(obj):
                return original(obj, path, *args, **kwargs)
            if isinstance(place := _place(path), int):
                self._buffers.append(path)
            self._saved[place] = obj
            self._note("weights were not saved: they have no data")
            return None

        return save

    def _load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load(f: Any, *args: Any, **kwargs: Any) -> Any:
            if self._named.is_open and (place := _place(f)) in self._saved:
                return self._saved[place]
            return original(f, *args, **kwargs)

        return load

    def _restore(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def restore(storage: Any, location: Any) -> Any:
            if self._named.is_open and str(location).startswith("cuda"):
                return torch.UntypedStorage(storage.nbytes(), device="meta")
            return original(storage, location)

        return restore

    def _has_no_data(self, obj: Any) -> bool:
        """Whether it contains tensors on the named device."""
        if isinstance(obj, nn.Module):
            obj = [*obj.parameters(), *obj.buffers()]
        leaves = tree_leaves(obj)
        if any(isinstance(leaf, Tensor) and self._named.holds(leaf) for leaf in leaves):
            return True
        return any(self._has_no_data(leaf) for leaf in leaves if isinstance(leaf, nn.Module))


def _place(file: Any) -> str | int:
    """The absolute path of a path or of an open file; the id of a buffer in memory."""
    name = getattr(file, "name", file)
    return os.path.abspath(name) if isinstance(name, (str, os.PathLike)) else id(file)
