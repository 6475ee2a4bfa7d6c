"""Tensors on meta that say they are on a device named cuda.

Works around: a torch without a GPU, which has no device named cuda, neither for a tensor to be on nor to be asked for.
Until: tensors without memory can call their device cuda.

Functions that are given cuda get meta instead; functions that tell a device say cuda instead of meta. The program, and
torch's own Python code above the dispatcher, then take the ways that they take on a GPU. Code below the dispatcher is
told the truth (flopmeter.run.truth): it computes shapes, and has to know that there is no memory.

A program may also use the device meta itself, to make a model before its weights come. Storages that it asked for on
meta are marked, and go on saying meta.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module
from torch.utils._pytree import tree_map_only

from flopmeter.known_values.values import address
from flopmeter.run.device_arguments import functions_with_device
from flopmeter.run.moved_in_place import parameters_keep_identity, script_to, set_data
from flopmeter.run.named_types import META, CudaDevice, DefaultType, LegacyType, device_type, generator_type
from flopmeter.run.patches import Patch, applied
from flopmeter.run.printing import printed_as_cuda
from flopmeter.run.truth import (
    asked_from_below,
    true_data,
    true_device,
    true_get_device,
    true_is_cuda,
    true_is_meta,
    true_mesh_type,
    wrapped_from_below,
)
from flopmeter.torch_names.around import around
from flopmeter.torch_names.private import (
    device_constructors,
    function_modes,
    lazy_type,
    no_dispatch_modes,
    torch_device,
)
from flopmeter.trace.shapes_only import MarkedStorages, ShapesOnly
from flopmeter.trace.subclasses import is_wrapper, wrapped

_TAKES = "takes the device named cuda"
_APART = 4096  # what an address counts for, so that storages do not seem to overlap


class OtherDeviceError(RuntimeError):
    """The program puts tensors on several GPUs from one process, or on one that is not there."""


class NamedCuda:
    """The device named cuda: how many there are, and which one is metered."""

    def __init__(self, count: int, index: int = 0) -> None:
        self.count, self.index = count, index
        self._is_named = False  # the program has said which one it uses
        self.is_adopted = False  # it is another one than the first, which the program named
        self.is_open = False  # functions that a library imported during the run do nothing after it
        self.name = torch.device("cuda", index)
        self.true_meta = ShapesOnly()  # what the program asked to be on meta
        self._pinned = MarkedStorages()

    @contextmanager
    def open(self) -> Iterator[list[Patch]]:
        """In this context torch tells and accepts the name. Yields the argument of `hidden`."""
        patches = list(self.patches())
        with applied([*patches, allowed_on_lazy_parameters(patches)]) as undoing:
            self.is_open = True
            try:
                yield undoing
            finally:
                self.is_open = False

    def patches(self) -> Iterator[Patch]:
        """The patches that make torch tell and accept the name."""
        device_constructors()  # it caches torch's functions at its first call, before they are replaced here
        yield from self._patches_of_tensors()
        yield from self._patches_of_storages()
        yield from self._patches_of_modules()
        for owner, name in functions_with_device():
            yield Patch(owner, name, self._taking(getattr(owner, name)), _TAKES)
        yield Patch(Tensor, "_make_wrapper_subclass", self._wrapping(), _TAKES)
        yield Patch(torch, "Generator", generator_type(self), _TAKES)
        yield Patch(torch, "device", device_type(), "an index alone is one of the accelerator's: cuda")
        if true_mesh_type is not None:
            yield Patch(DeviceMesh, "device_type", property(self._mesh_type), "a mesh of GPUs says so")
        yield from DefaultType().patches()
        context = torch_device.DeviceContext
        entered = self._default_device(context.__torch_function__)
        yield Patch(context, "__torch_function__", entered, "with torch.device('cuda')")

    def _patches_of_tensors(self) -> Iterator[Patch]:
        tells = "tells the device named cuda"
        yield Patch(Tensor, "device", property(self._device), tells)
        yield Patch(Tensor, "is_cuda", property(self._is_cuda), tells)
        yield Patch(Tensor, "is_meta", property(self._is_meta), tells)
        yield Patch(Tensor, "get_device", lambda own: self.index if self.holds(own) else true_get_device(own), tells)
        yield Patch(Tensor, "data", property(true_data, set_data), "is given data of the device named cuda")
        yield Patch(Tensor, "__repr__", printed_as_cuda(self, Tensor.__repr__), "prints a tensor as a GPU's")
        yield Patch(Tensor, "to", self._to(Tensor.to), _TAKES)
        yield Patch(Tensor, "cuda", self._cuda(Tensor.to), _TAKES)
        yield Patch(Tensor, "type", self._type(Tensor.type), "tells and takes torch.cuda.FloatTensor and its kin")
        no_driver = "there is no driver that pins memory"
        yield Patch(Tensor, "pin_memory", self._pin(), no_driver)
        yield Patch(Tensor, "is_pinned", lambda tensor, device=None: self._pinned.has(tensor), no_driver)
        yield Patch(Tensor, "data_ptr", self._data_ptr(Tensor.data_ptr), "tells tensors apart that share no memory")
        yield Patch(Tensor, "record_stream", lambda tensor, stream: None, "streams are those of flopmeter")

    def _patches_of_storages(self) -> Iterator[Patch]:
        storage = torch.UntypedStorage
        share, is_shared, why = storage.share_memory_, storage.is_shared, "memory of the GPU is shared as it is"
        yield Patch(storage, "share_memory_", lambda own: own if own.device.type == "meta" else share(own), why)
        yield Patch(storage, "is_shared", lambda own: own.device.type == "meta" or is_shared(own), why)
        # torch.load gives storages to a map_location that is a function
        yield Patch(storage, "__new__", self._storage(storage.__new__), "a program's own storages on meta stay there")
        yield Patch(storage, "clone", self._clone(storage.clone), "a copy, such as copy.deepcopy's, stays there too")
        yield Patch(storage, "cuda", lambda own, *_, **__: torch.UntypedStorage(own.nbytes(), device=META), _TAKES)

    def _patches_of_modules(self) -> Iterator[Patch]:
        yield Patch(Module, "to", self._module_to(Module.to), _TAKES)
        yield Patch(Module, "cuda", lambda own, device=None: own.to(self.name if device is None else device), _TAKES)
        yield Patch(Module, "cpu", lambda module: module.to("cpu"), _TAKES)
        yield Patch(torch.nn.DataParallel, "scatter", self._scatter(), "DataParallel on one GPU")

    # --- what the program is told

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor is on the device named cuda."""
        return true_is_meta(tensor) and not any(map(self.true_meta.has, wrapped(tensor)))

    def _device(self, tensor: Tensor) -> torch.device:
        true: torch.device = true_device(tensor)
        if true.type != "meta" or asked_from_below() or not self.holds(tensor):
            return true
        return self.name

    def _is_cuda(self, tensor: Tensor) -> bool:
        return true_is_cuda(tensor) or (self.holds(tensor) and not asked_from_below())

    def _is_meta(self, tensor: Tensor) -> bool:
        return true_is_meta(tensor) and (asked_from_below() or not self.holds(tensor))

    def _mesh_type(self, mesh: DeviceMesh) -> str:
        kind: str = true_mesh_type(mesh)
        return "cuda" if kind == "meta" and not asked_from_below() else kind

    def _data_ptr(self, original: Callable[[Tensor], int]) -> Callable[[Tensor], int]:
        """A number in place of the address, which is 0 on meta: equal where two tensors begin at the same element. A
        DTensor, which only wraps tensors, has none on a GPU either: by that copy.deepcopy knows what to clone."""

        def data_ptr(tensor: Tensor) -> int:  # not @around: it looks at the frame of its caller
            if not self.holds(tensor) or asked_from_below() or is_wrapper(tensor):
                return original(tensor)
            return address(tensor) * _APART + int(tensor.storage_offset()) * tensor.element_size()

        return data_ptr

    # --- what the program may ask for

    def real(self, value: Any) -> Any:
        """A device as torch can take it: meta in place of cuda. Anything else stays as it is.

        Raises OtherDeviceError for the name of another GPU than the metered one.
        """
        if not self.is_open:
            return value
        if isinstance(value, str):
            kind = value.partition(":")[0]
            value = torch.device(value) if kind == "cuda" else value
        elif isinstance(value, int) and not isinstance(value, bool):
            value = torch.device("cuda", value)
        elif isinstance(value, CudaDevice):
            value = value.device
        if not isinstance(value, torch.device) or value.type != "cuda":
            return value
        self.check(value.index)
        return META

    def check(self, index: int | None) -> None:
        """Raises OtherDeviceError unless the metered GPU has that index; None is the current one. Where there is one
        GPU, it has the index that the program names first: many are written for the second or the third one of their
        author's machine."""
        if self.count == 1 and not self._is_named and index is not None and index > 0:
            self.index, self.count, self.name = index, index + 1, torch.device("cuda", index)
            self.is_adopted = True
        if index is None or index == self.index:
            self._is_named = True
            return
        if index >= self.count or index < 0:
            raise OtherDeviceError(f"CUDA error: invalid device ordinal: there is no cuda:{index} among {self.count}")
        raise OtherDeviceError(
            f"the program puts a tensor on cuda:{index}, and this process is metered as cuda:{self.index}: flopmeter "
            "run meters one GPU of a process. Start one for each GPU (--gpus N -- torchrun ...), or use one GPU"
        )

    def _scatter(self) -> Callable[..., Any]:
        """nn.DataParallel copies the batch to its GPUs; with one it does only that."""

        def scatter(module: Any, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
            for device in device_ids:
                self.check(device if isinstance(device, int) else device.index)
            there = tree_map_only(Tensor, lambda tensor: tensor.to(META, non_blocking=True), (inputs, kwargs or {}))
            return (there[0],), (there[1],)

        return scatter

    def _taking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function of torch that has a keyword `device`."""

        @functools.wraps(original)
        def taking(*args: Any, **kwargs: Any) -> Any:
            if (made := _by_class_of_first(taking, args, kwargs)) is not NotImplemented:
                return made
            if self.is_open and kwargs.get("pin_memory"):
                pinned = taking(*args, **{**kwargs, "pin_memory": False})
                self._pinned.add(pinned)
                return pinned
            device = kwargs.get("device")
            if device is not None:
                real = self.real(device)
                if real is not device:
                    return original(*args, **{**kwargs, "device": real})
                if torch.device(device).type != "meta" or is_compiling() or asked_from_below() or wrapped_from_below():
                    return original(*args, **kwargs)
            elif not _default_is_meta():
                return original(*args, **kwargs)
            return self._on_meta(original, args, kwargs)

        return taking

    def _on_meta(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Whether the program asks for the device meta itself, which no GPU sees."""
        with no_dispatch_modes():
            result = original(*args, **kwargs)
        if isinstance(result, Tensor) and true_is_meta(result):
            self.true_meta.add(result)
        return result

    def _storage(self, new: Callable[..., Any]) -> Any:
        def made(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> Any:
            storage = new(cls, *args, **kwargs, **({} if device is None else {"device": device}))
            if device is not None and torch.device(device) == META and not is_compiling() and not asked_from_below():
                self.true_meta.add(storage)
            return storage

        return staticmethod(made)

    @around
    def _clone(self, original: Callable[..., Any], storage: torch.UntypedStorage) -> Any:
        if storage.device != META or self.true_meta.has_storage(storage):
            return original(storage)
        return torch.UntypedStorage(storage.nbytes(), device=META).copy_(storage)

    def _wrapping(self) -> Any:
        """A subclass that wraps tensors is given the device that they tell. Autograd would ask a true CUDA tensor for
        its stream, and end the process."""
        make = Tensor._make_wrapper_subclass

        def wrapping(*args: Any, **kwargs: Any) -> Any:
            real_args, real_kwargs = tree_map_only(torch.device, self.real, (args, kwargs))
            made = make(*real_args, **real_kwargs)
            if kwargs.get("device") == META and not asked_from_below():  # as what it wraps tells
                self.true_meta.add(made)
            return made

        return staticmethod(wrapping)

    @around
    def _default_device(
        self, original: Callable[..., Any], mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if mode.device.type == "cuda" and func in device_constructors() and kwargs.get("device") is None:
            return func(*args, **{**kwargs, "device": self.real(mode.device)})
        return original(mode, func, types, args, kwargs)

    @around
    def _to(self, original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (self.real(args[0]), *args[1:])
        if kwargs.get("device") is not None:
            kwargs["device"] = self.real(kwargs["device"])
        target = kwargs["device"] if "device" in kwargs else args[0] if args else None
        if true_is_meta(tensor) and not self.holds(tensor) and target is META:
            raise NotImplementedError(
                "Cannot copy out of meta tensor; no data! Please use torch.nn.Module.to_empty() instead of "
                "torch.nn.Module.to() when moving module from meta to a different device."
            )
        return original(tensor, *args, **kwargs)

    def _cuda(self, to: Callable[..., Any]) -> Callable[..., Any]:
        def cuda(tensor: Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
            target = META if device is None else self.real(device)
            return to(tensor, target, non_blocking=non_blocking, **kwargs)

        return cuda

    @around
    def _type(self, original: Callable[..., Any], tensor: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            name: str = original(tensor)
            return name.replace("torch.meta.", "torch.cuda.") if self.holds(tensor) else name
        if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
            dtype = getattr(torch.cuda, dtype.removeprefix("torch.cuda."))
        if isinstance(dtype, LegacyType):
            return tensor.to(META, dtype.dtype)
        return original(tensor, dtype, *args, **kwargs)

    def _pin(self) -> Callable[..., Tensor]:
        def pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
            if not tensor.is_cpu:
                raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
            if self._pinned.has(tensor):
                return tensor
            pinned = tensor.clone(memory_format=torch.preserve_format)
            self._pinned.add(pinned)
            return pinned.requires_grad_(tensor.requires_grad)

        return pin_memory

    @around
    def _module_to(self, original: Callable[..., Any], module: Module, *args: Any, **kwargs: Any) -> Any:
        args = tuple(torch.device("cuda", each) if type(each) is int else each for each in args)
        args = tuple(each.device if isinstance(each, CudaDevice) else each for each in args)
        if isinstance(kwargs.get("device"), (int, CudaDevice)):
            kwargs["device"] = torch.device("cuda", getattr(kwargs["device"], "index", kwargs["device"]))
        try:
            with parameters_keep_identity(module):
                return original(module, *args, **kwargs)
        except RuntimeError as error:
            if "Couldn't swap" not in str(error):
                raise
            if isinstance(module, torch.jit.ScriptModule):
                return script_to(module, *args, **kwargs)
            return original(module, *args, **kwargs)  # something looks at a parameter, as torch.export does


def allowed_on_lazy_parameters(patches: Iterable[Patch]) -> Patch:
    """Parameters such as those of nn.LazyLinear, which have no shape yet, refuse all but a list of methods."""
    allowed = lazy_type._allowed_methods
    ours = [patch.value for patch in patches if patch.owner is Tensor and getattr(Tensor, patch.name) in allowed]
    return Patch(lazy_type, "_allowed_methods", [*allowed, *ours], "lazy parameters move to the named device")


def _default_is_meta() -> bool:
    """Whether the innermost `with torch.device(...)` names meta."""
    contexts = (mode for mode in reversed(function_modes()) if isinstance(mode, torch_device.DeviceContext))
    return next((mode.device.type == "meta" for mode in contexts), False)


def _by_class_of_first(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What the class of the first argument makes of a call of `function`, where that is no tensor (TensorDict). Such a
    class was loaded by the program, and knows torch's functions by those that the program sees. NotImplemented for all
    others, and where it knows torch's own."""
    first = args[0] if args else None
    takes = None if isinstance(first, Tensor) else getattr(type(first), "__torch_function__", None)
    return NotImplemented if takes is None else takes(function, (type(first),), args, kwargs)
