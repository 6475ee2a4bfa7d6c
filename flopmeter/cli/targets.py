"""What the command line runs: a name becomes a model and its inputs on meta, and those a program to meter.

A target is one of
    gpt2-124m               a model of `flopmeter.models.BUILTINS`
    hf:CONFIG.json, hf:TYPE a Hugging Face model from its config, without weights and without network
    hf:OWNER/NAME           one of the hub, whose config comes from the cache or from the network
    timm:NAME               an image model of timm
    package.module:function or path/to/file.py:function
A function returns (model, inputs): a module or any callable, and a tensor, a tuple or a mapping of arguments. It is
called with those of `batch`, `seq`, `image_size` and `dtype` that its signature names and the caller gave, and with
`train` (whether it will be trained) where it names that.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from flopmeter.cli.training import OptimizerChoice, TrainingStep, checkpoint_blocks
from flopmeter.costs import UncountedError
from flopmeter.device.hardware import HardwareError
from flopmeter.known_values import DataDependentError, on_meta
from flopmeter.meter import EmptyProgramError
from flopmeter.models import BUILTINS
from flopmeter.models.hub_inputs import SOUNDS, WRITE_A_FUNCTION, TargetError
from flopmeter.models.hubs import huggingface, timm_model
from flopmeter.trace.other_threads import uncounted

__all__ = ["Program", "Programs", "Target", "TargetError", "load_target"]

OPTIONS = ("batch", "seq", "image_size", "dtype")
# Than "the target raised ..." would.
_SAY_IT_BETTER = (HardwareError, EmptyProgramError, DataDependentError, UncountedError)
_OTHER_INPUTS = f"; if it wants other inputs than its config tells, {WRITE_A_FUNCTION}"


class Program(NamedTuple):
    """A run to meter: call `run` inside a FlopMeter, as often as needed."""

    run: Callable[[], None]
    items: int | None  # that one run works on; None if the inputs do not tell
    unit: str  # of items: 'tokens', 'images', 'recordings' or 'samples'


@dataclass(frozen=True)
class Target:
    """Something that builds a model and its inputs."""

    name: str
    builder: Callable[..., Any]
    accepts: tuple[str, ...]  # those of OPTIONS that the builder takes
    asks_train: bool = False  # the builder wants to know whether the model will be trained
    folder: Path | None = None  # where its imports are looked up first

    def program(
        self,
        *,
        train: bool = False,
        autocast: torch.dtype | None = None,
        compiled: bool = False,
        optimizer: OptimizerChoice | None = None,
        checkpointing: bool = False,
        **options: Any,
    ) -> Program:
        """The program at these options (None: the target's default): a forward pass without autograd, or with
        `train` forward, backward and a step of the optimizer (AdamW) in its steady state.

        autocast: run under torch.autocast in this type, with weights in fp32 where the target lets that be said.
        compiled: under torch.compile, the step too. checkpointing: blocks run again in the backward pass.

        Raises TargetError for an option that the target does not take and for whatever goes wrong in it.
        """
        if autocast and "dtype" in self.accepts:
            options["dtype"] = torch.float32
        model, arguments, keywords = self.built(train=train, **options)
        with blaming(self.name), _imports_from(self.folder):
            if checkpointing and isinstance(model, nn.Module):
                checkpoint_blocks(self.name, model)
            step = TrainingStep(self.name, model, optimizer=optimizer, compiled=compiled) if train else None
        if compiled:
            model = torch.compile(model)

        def run() -> None:
            casting = torch.autocast("cuda", autocast) if autocast else contextlib.nullcontext()
            with blaming(self.name):
                if step is not None:
                    step(casting, arguments, keywords)
                else:
                    with torch.no_grad(), casting:
                        model(*arguments, **keywords)

        sounds = tuple(keywords.get(name) for name in SOUNDS)
        return Program(run, *_items(tree_leaves((arguments, keywords)), sounds))

    def built(
        self, *, train: bool = False, **options: Any
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """The model on meta, and its positional and keyword arguments. Raises TargetError as `program` does."""
        given = {name: value for name, value in options.items() if value is not None}
        for name in given:
            if name not in self.accepts:
                takes = ", ".join(self.accepts) or "no options"
                raise TargetError(f"{self.name} takes no {name}; it takes {takes}")
        with blaming(self.name), _imports_from(self.folder):
            if self.asks_train:
                given["train"] = train
            model, arguments, keywords = on_meta(_checked(self.name, self.builder(**given)))
            if isinstance(model, nn.Module):
                model.train(train)
        return model, arguments, keywords


class Programs:
    """A target's programs by batch or by length: called with a size, runs the program of that size.

    It may be called inside a meter: each program is built in a thread of its own, which no mode of PyTorch's watches.
    """

    def __init__(self, target: Target, over: str, **options: Any):
        self._target, self._over, self._options = target, over, options
        self._built: dict[int, Program] = {}

    def __call__(self, size: int) -> None:
        self.of(size).run()

    def of(self, size: int) -> Program:
        if size not in self._built:
            with uncounted(), ThreadPoolExecutor() as elsewhere:
                options = {**self._options, self._over: size}
                self._built[size] = elsewhere.submit(self._target.program, **options).result()
        return self._built[size]


def _items(leaves: list[Any], sounds: tuple[Any, ...]) -> tuple[int | None, str]:
    """How many items the first input holds, and of which kind, by its shape: token ids [batch, length], states [batch,
    length, width] or images [batch, channels, height, width]; else samples. Sounds are told by their names."""
    first = next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim), None)
    if first is None:
        return None, "samples"
    if any(first is sound for sound in sounds):
        return first.shape[0], "recordings"
    if first.ndim == 3 or (first.ndim == 2 and not first.is_floating_point()):
        return first.shape[0] * first.shape[1], "tokens"
    return first.shape[0], "images" if first.ndim == 4 else "samples"


@contextlib.contextmanager
def blaming(name: str) -> Iterator[None]:
    """An error in the target's own code becomes a TargetError that names the target."""
    try:
        yield
    except (TargetError, *_SAY_IT_BETTER):
        raise
    except Exception as error:
        *_, last = traceback.extract_tb(error.__traceback__)
        text = " ".join(str(error).split()) or "without a message"
        if "overflow" in text.lower():  # of torch's 64-bit sizes
            raise TargetError(
                f"{name} has a tensor of more than 2**63 bytes at these sizes: take smaller ones"
            ) from error
        place = f"{Path(last.filename).name}:{last.lineno}"
        otherwise = _OTHER_INPUTS if name.startswith("hf:") else ""
        raise TargetError(f"{name} raised {type(error).__name__}: {text} ({place}){otherwise}") from error


def load_target(name: str) -> Target:
    """The target of that name. Raises TargetError where there is none, with the nearest names."""
    scheme, _, rest = name.partition(":")
    if scheme in ("hf", "timm") and rest:
        with blaming(name):
            return _of_function(name, huggingface(rest) if scheme == "hf" else timm_model(rest))
    if name in BUILTINS:
        return _of_function(name, BUILTINS[name])
    place, _, function = name.rpartition(":")
    if place and function:
        return _from_code(name, place, function)
    if name.rstrip(":").endswith(".py"):
        file = name.rstrip(":")
        raise TargetError(
            f"{file} is a file: name its function that returns (model, inputs), as in {file}:build, "
            f"or run it as it is: flopmeter run {file}"
        )
    near = difflib.get_close_matches(name, BUILTINS, n=3, cutoff=0.4)
    raise TargetError(
        f"no built-in model is named {name!r}; {'near to it: ' + ', '.join(near) if near else 'see flopmeter models'} "
        "(or give module:function, file.py:function, hf:CONFIG.json, hf:TYPE, hf:OWNER/NAME or timm:NAME)"
    )


def _of_function(name: str, function: Callable[..., Any], folder: Path | None = None) -> Target:
    parameters = inspect.signature(function).parameters
    accepts = tuple(option for option in OPTIONS if option in parameters)
    return Target(name, function, accepts, "train" in parameters, folder)


def _from_code(name: str, place: str, attribute: str) -> Target:
    """A function of a file, or of a module that is found from the working directory or installed."""
    is_file = place.endswith(".py")
    folder = Path(place).resolve().parent if is_file else Path.cwd()
    if is_file and not Path(place).is_file():
        raise TargetError(f"{name}: there is no file {place}")
    with _imports_from(folder):
        try:
            module = _execute(Path(place)) if is_file else importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise TargetError(f"{name}: {error}") from error
        except Exception as error:
            raise TargetError(f"{name}: importing {place} raised {type(error).__name__}: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise TargetError(f"{name}: {place} has no function {attribute}")
    return _of_function(name, function, folder)


def _execute(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None  # a .py file has both
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _imports_from(folder: Path | None) -> Iterator[None]:
    """Look imports up in the folder first, as `python file.py` does."""
    before = list(sys.path)
    if folder is not None:
        sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = before


def _checked(name: str, result: Any) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Model, positional and keyword arguments from what the function returned."""
    if not isinstance(result, tuple) or len(result) != 2 or not callable(result[0]):
        raise TargetError(f"{name} must return (model, inputs), not {type(result).__name__}")
    model, inputs = result
    if isinstance(inputs, Mapping):
        return model, (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return model, tuple(inputs), {}
    return model, (inputs,), {}
