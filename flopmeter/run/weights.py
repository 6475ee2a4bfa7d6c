"""Weights in files. Loaded onto the device named cuda they have a shape and no data; tensors without data are not
saved.

Works around: torch.load and torch.save, and safetensors, which copy data from and to a device.
Until: torch has a device named cuda without memory.
"""

from __future__ import annotations

import importlib.util
import mimetypes
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_leaves

from flopmeter.run.device import NamedCuda
from flopmeter.run.patches import Patch
from flopmeter.run.truth import true_is_meta
from flopmeter.torch_names.around import around

OF_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
"""Endings of names of files."""

CHECKPOINTS = "checkpoints were neither written nor read: weights have no data; copies are not counted"

CPU = torch.device("cpu")

KEEPS_ITS_OWN = ": its model keeps the weights that it was made with"
"""The end of a note about a file that is not here."""


class AbsentWeights(OrderedDict[str, Any]):
    """Stands in for the content of a file of weights that is not here or has none: it is empty, and so is each of its
    parts. As a number (the epoch to go on from) it is 0."""

    def __missing__(self, key: str) -> AbsentWeights:
        return self

    def __index__(self) -> int:
        return 0


class WeightFiles:
    """What the program saves is kept by its path, so that it can be loaded again. `may_be_absent`: a file that is not
    there, or is empty, has AbsentWeights."""

    def __init__(self, named: NamedCuda, note: Callable[[str], None], may_be_absent: bool) -> None:
        self._named, self._note, self._may_be_absent = named, note, may_be_absent
        self._saved: dict[str | int, Any] = {}
        self._any_absent, self._absent_on = False, CPU  # where the file would have been loaded to
        self._buffers: list[Any] = []  # in memory: kept, so that none gets the id of another

    def patches(self) -> Iterator[Patch]:
        serialization = torch.serialization
        save, load = self._save(torch.save), self._load(torch.load)
        restore = serialization.default_restore_location
        for owner in (torch, serialization):
            yield Patch(owner, "save", save, "weights without data are not saved")
            yield Patch(owner, "load", load, "what was saved in this run is loaded again")
        hub = torch.hub
        yield Patch(hub, "download_url_to_file", self._download(hub.download_url_to_file), "weights that are not here")
        into, on = self._load_into(nn.Module.load_state_dict), self._step_on(Optimizer.load_state_dict)
        yield Patch(nn.Module, "load_state_dict", into, "weights that are not here")
        yield Patch(Optimizer, "load_state_dict", on, "states that are not here")
        if (hf := _hub()) is not None:
            yield Patch(hf, "hf_hub_download", self._from_hub(hf.hf_hub_download), "weights that are not here")
        yield Patch(serialization, "default_restore_location", self._restore(restore), "loads onto the named device")
        if importlib.util.find_spec("safetensors") is not None:
            import safetensors.torch

            yield Patch(safetensors.torch, "save_file", self._save(safetensors.torch.save_file), "weights without data")
            yield Patch(safetensors.torch, "load_file", self._load(safetensors.torch.load_file), "weights without data")

        for owner in (checkpoint, checkpoint.state_dict_saver, checkpoint.state_dict_loader):
            for name, stand_in in self._checkpoints().items():
                if hasattr(owner, name):
                    yield Patch(owner, name, stand_in(getattr(owner, name)), "checkpoints without data")

    def _checkpoints(self) -> dict[str, Callable[..., Any]]:
        """Patches of torch.distributed.checkpoint: state dicts are made, with their collectives, and no file is."""

        def instead(do: Callable[..., Any]) -> Callable[..., Any]:
            @around
            def standing_in(original: Callable[..., Any], state_dict: Any, *args: Any, **options: Any) -> Any:
                items = state_dict.items()
                made = {name: each.state_dict() if isinstance(each, Stateful) else each for name, each in items}
                if not self._named.is_open or not (_of_many_ranks() or self._has_no_data(made)):
                    return original(state_dict, *args, **options)
                self._note(CHECKPOINTS)
                return do(state_dict, made, options)

            return standing_in

        def save(_: Any, made: Any, options: Any) -> Any:
            return Metadata({})

        def async_save(_: Any, made: Any, options: Any) -> Any:
            done: Future[Any] = Future()
            done.set_result(None)
            is_staged = options.get("async_stager") is not None
            return checkpoint.state_dict_saver.AsyncSaveResponse(done, done) if is_staged else done

        def load(state_dict: Any, made: Any, options: Any) -> None:
            for name, each in state_dict.items():
                if isinstance(each, Stateful):
                    each.load_state_dict(made[name])

        return {"save": instead(save), "async_save": instead(async_save), "load": instead(load)}

    @around
    def _save(self, original: Callable[..., Any], obj: Any, f: Any = None, *args: Any, **kwargs: Any) -> Any:
        path = kwargs.pop("filename", f) if f is None else f
        if not self._named.is_open or not self._has_no_data(obj):
            return original(obj, path, *args, **kwargs)
        if isinstance(place := _place(path), int):
            self._buffers.append(path)
        self._saved[place] = obj
        self._note("weights were not saved: they have no data")
        return None

    @around
    def _load(self, original: Callable[..., Any], f: Any, *args: Any, **kwargs: Any) -> Any:
        if self._named.is_open and (place := _place(f)) in self._saved:
            return self._saved[place]
        may_be_absent = self._named.is_open and self._may_be_absent
        if may_be_absent and _is_empty(f):
            return self._is_absent(f, os.fspath(f), "is empty", _asked_device(*args[:1], **kwargs))
        try:
            return original(f, *args, **kwargs)
        except FileNotFoundError as error:
            if not may_be_absent:
                raise
            why = f"is not here ({type(error).__name__})"
            return self._is_absent(f, os.fspath(f), why, _asked_device(*args[:1], **kwargs))

    @around
    def _download(self, original: Callable[..., Any], url: str, dst: str, *args: Any, **kwargs: Any) -> Any:
        """torch.hub's download. Where it cannot be reached, a model keeps the weights that it was made with, and other
        things are missing, as the fonts of YOLO's figures."""
        try:
            return original(url, dst, *args, **kwargs)
        except OSError as error:
            if not self._named.is_open:
                raise
            if _is_no_weights(url):
                self._note(f"{url} {_not_reached(error)}: the program goes on without it")
            else:
                self._is_absent(dst, url, _not_reached(error))

    @around
    def _from_hub(self, original: Callable[..., str], repo_id: str, filename: str, *args: Any, **kwargs: Any) -> str:
        """The download of a file of weights from the hub of Hugging Face, which timm loads by its name. If the hub
        cannot be reached, the model keeps the weights that it was made with."""
        try:
            return original(repo_id, filename, *args, **kwargs)
        except OSError as error:
            if not self._named.is_open or not filename.endswith(OF_WEIGHTS):
                raise
            path = os.path.join(repo_id, filename)
            self._is_absent(path, path, _not_reached(error))
            return path

    def _is_absent(self, file: Any, name: str, why: str, on: torch.device = CPU) -> AbsentWeights:
        self._any_absent, self._absent_on = True, on
        absent = self._saved[_place(file)] = AbsentWeights()
        self._note(f"{name} {why}{KEEPS_ITS_OWN}")
        return absent

    @around
    def _load_into(
        self, original: Callable[..., Any], module: nn.Module, state_dict: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if isinstance(state_dict, AbsentWeights) or (self._any_absent and not state_dict):  # sorted by a program
            state_dict = module.state_dict()
            if kwargs.get("assign"):
                state_dict = {name: self._with_memory(each) for name, each in state_dict.items()}
        return original(module, state_dict, *args, **kwargs)

    def _with_memory(self, value: Any) -> Any:
        """A weight in the place of one that was made on the device meta, which a file's would have taken."""
        is_on_meta = isinstance(value, Tensor) and true_is_meta(value) and not self._named.holds(value)
        return torch.empty_like(value, device=self._absent_on) if is_on_meta else value

    @around
    def _step_on(self, original: Callable[..., Any], optimizer: Optimizer, state_dict: Any) -> Any:
        return None if isinstance(state_dict, AbsentWeights) else original(optimizer, state_dict)

    @around
    def _restore(self, original: Callable[..., Any], storage: Any, location: Any) -> Any:
        if self._named.is_open and str(location).startswith("cuda"):
            return torch.UntypedStorage(storage.nbytes(), device="meta")
        return original(storage, location)

    def _has_no_data(self, obj: Any) -> bool:
        """Whether it contains tensors on the named device."""
        if isinstance(obj, nn.Module):
            obj = [*obj.parameters(), *nn.Module.buffers(obj)]
        leaves = tree_leaves(obj)
        if any(isinstance(leaf, Tensor) and self._named.holds(leaf) for leaf in leaves):
            return True
        return any(self._has_no_data(leaf) for leaf in leaves if isinstance(leaf, nn.Module))


def _is_no_weights(url: str) -> bool:
    kind, _ = mimetypes.guess_type(url)
    return kind is not None and kind.partition("/")[0] in ("font", "image", "text")


def _is_empty(file: Any) -> bool:
    """Whether it is the path of a file without content, which stands for one where a script looks for it by itself."""
    return isinstance(file, (str, os.PathLike)) and os.path.isfile(file) and os.path.getsize(file) == 0


def _asked_device(first: Any = None, *, map_location: Any = None, device: Any = None, **_: Any) -> torch.device:
    """Where torch.load's map_location, or the device of safetensors' load_file, puts weights."""
    asked = next((each for each in (map_location, device, first) if isinstance(each, (str, int, torch.device))), "cpu")
    return torch.device(asked)


def _of_many_ranks() -> bool:
    """Whether a checkpoint (or one of copies on the host) needs the parts of ranks that do not run."""
    return dist.is_initialized() and dist.get_world_size() > 1


def _not_reached(error: OSError) -> str:
    why = str(error).partition("\n")[0]
    return f"cannot be downloaded ({why})"


def _place(file: Any) -> str | int:
    """The absolute path of a path or of an open file; the id of a buffer in memory."""
    name = getattr(file, "name", file)
    return os.path.abspath(name) if isinstance(name, (str, os.PathLike)) else id(file)


def _hub() -> Any:
    """huggingface_hub, which imports its functions when they are asked for. None, too, if what it needs itself is
    missing: the program may not use it."""
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        return hub if hub.hf_hub_download else None
    except ImportError:
        return None
