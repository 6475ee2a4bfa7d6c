"""Samples of stated shapes stand in for data that is missing (`flopmeter run --synthetic`).

Works around: data sets that a laptop does not have, whose classes fail where they look for their files.
Until: never; a meter needs the shapes of the data, and not the data.

A data set that can be made is used as it is. With 'first', its first sample stands for all others, so that one file is
enough. With a description such as '3x224x224,:1000', each data set that cannot be made has such samples.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from flopmeter.run.patches import Patch, applied
from flopmeter.run.synthetic_tables import SyntheticTables
from flopmeter.torch_names.around import around
from flopmeter.torch_names.imported import entered_once_imported
from flopmeter.torch_names.private import BATCHES, no_dispatch_modes

FIRST = "first"
SAMPLES = 2**16  # length of a data set that is missing; more than the steps of a run read, and soon evaluated
ELEMENTS = 2**26  # length of an array in a file of numpy's, if nobody says it
# Raised by torchvision, by code that opens files or asserts them, and by code that takes or joins what it found.
ABSENT = (OSError, RuntimeError, AssertionError, ValueError, IndexError)
TEXT, IMAGE = "text", "image"
_MODES = {(): "RGB", (1,): "L", (3,): "RGB", (4,): "RGBA"}  # of Pillow's images, by the channels before their size
_GRAMMAR = "fields with commas between them, each [NAME=]SHAPE[:DTYPE or :COUNT] or (fields), such as 3x224x224,:1000"


@dataclass(frozen=True, slots=True)
class Field:
    """One part of a sample. `below`: integers from 0 up to it; in place of a tensor `words`: a text of so many;
    `image`: an image of Pillow's of that mode, height and width."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    below: int | None = None
    words: int | None = None
    image: str | None = None

    def value(self) -> Any:
        """A tensor, a text or an image. Integers differ, so that they may choose among embeddings or experts."""
        if self.words is not None:
            return " ".join(["word"] * self.words)
        if self.image is not None:
            return importlib.import_module("PIL.Image").new(self.image, self.shape[::-1])
        with no_dispatch_modes():
            if self.below is None:
                return torch.zeros(self.shape, dtype=self.dtype, device="cpu")
            count = torch.arange(torch.Size(self.shape).numel(), device="cpu")
            numbers = count.reshape(self.shape) % self.below
            return numbers if self.shape else int(numbers)


@dataclass(frozen=True, slots=True)
class Sample:
    """What a data set gives at an index: a tuple of fields, one field alone, or a dictionary where they have names."""

    text: str
    names: tuple[str, ...]
    fields: tuple[Field | Sample, ...]

    def value(self) -> Any:
        values = [field.value() for field in self.fields]
        if self.names:
            return dict(zip(self.names, values, strict=True))
        return tuple(values) if len(values) > 1 else values[0]

    @property
    def classes(self) -> dict[str, int]:
        """The number of classes for each named field that is one integer below a number."""
        named = zip(self.names, self.fields, strict=False)
        return {
            name: field.below for name, field in named if isinstance(field, Field) and field.below and not field.shape
        }


def sample_of(part: str, text: str = "") -> Sample:
    """Read '3x224x224,:1000', 'input_ids=1024:50257,labels=1024:50257' or '(3x96x96,3x96x96),:10', which may be a part
    of `text`. Raises ValueError for anything else."""
    names, fields, text = [], [], text or part
    for each in _between_commas(part):
        name, equals, kind = each.strip().partition("=")
        if not equals or "(" in name:
            name, kind = "", each.strip()
        names += [name] if name else []
        in_parentheses = kind[:1] + kind[-1:] == "()"
        fields.append(sample_of(kind[1:-1], text) if in_parentheses else _field_of(kind, text))
    if names and len(names) < len(fields):
        raise ValueError(f"--synthetic {text}: name each field of a sample, or none")
    return Sample(part, tuple(names), tuple(fields))


def _between_commas(text: str) -> Iterator[str]:
    """The parts of a text between the commas that are in no parentheses."""
    depth = start = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and not depth:
            yield text[start:place]
            start = place + 1
    yield text[start:]


def _field_of(kind: str, text: str) -> Field:
    sizes, _, last = kind.partition(":")
    try:
        shape = tuple(int(size) for size in sizes.split("x") if sizes)
        if last == TEXT:
            return Field((), words=shape[0] if shape else 1)
        if last == IMAGE and len(shape) >= 2 and shape[:-2] in _MODES:
            return Field(shape[-2:], image=_MODES[shape[:-2]])
        if last.isdigit():
            return Field(shape, torch.int64, below=int(last))
        dtype = getattr(torch, last or "float32")
        if kind and min(shape, default=1) > 0 and isinstance(dtype, torch.dtype):
            return Field(shape, dtype)
    except (ValueError, AttributeError):
        pass
    raise ValueError(f"--synthetic {text}: {kind!r} is no field: give 'first', or {_GRAMMAR}")


def is_absent(data: Any) -> bool:
    """Whether synthetic samples stand in for this data set."""
    return isinstance(data, Dataset) and vars(data).get("flopmeter_absent", False)


class SyntheticData:
    """Stands in for the data sets of a program. `note` is told once for each of them."""

    def __init__(self, text: str, note: Callable[[str], None]) -> None:
        self._sample = None if text == FIRST else sample_of(text)
        self._note = note
        self._is_open = True  # classes made during the run keep their methods, which do nothing after it

    def close(self) -> None:
        self._is_open = False

    def patches(self) -> Iterator[Patch]:
        for kind in dict.fromkeys(_subclasses(Dataset)):
            yield from self._standing_in(kind)
        yield Patch(Dataset, "__init_subclass__", classmethod(self._on_subclass), "classes of the program's own")
        for owner in (torch.utils.data, torch.utils.data.dataset):
            split = self._random_split(torch.utils.data.random_split)
            yield Patch(owner, "random_split", split, "programs know how many samples a data set has that is not there")
        yield Patch(DataLoader, BATCHES, _in_process(getattr(DataLoader, BATCHES)), "workers that do not know of this")
        if self._sample is not None:
            yield from self._of_numpy()

    def once_imported(self) -> AbstractContextManager[None]:
        """Stands in for data sets of the hub once the program imports their package; a folder of its own may have the
        same name."""
        return entered_once_imported("datasets", self._of_hub)

    @contextmanager
    def _of_hub(self) -> Iterator[None]:
        sample = self._sample
        if sample is None:
            yield
            return
        tables = SyntheticTables(sample.value if sample.names else None, sample.classes, ABSENT, self._tell)
        with applied(tables.patches(sys.modules["datasets"])):
            yield

    def _on_subclass(self, kind: Any, /, **kwargs: Any) -> None:
        super(Dataset, kind).__init_subclass__(**kwargs)  # type: ignore[misc]
        for patch in self._standing_in(kind):
            setattr(patch.owner, patch.name, patch.value)

    def _standing_in(self, kind: Any) -> Iterator[Patch]:
        """The patches for the methods that the class defines itself. Methods of torch's own classes only pass on what
        others give."""
        if kind.__module__.startswith("torch.utils.data"):
            return
        wrap = {"__getitem__": self._getitem, "__len__": self._len, "__iter__": self._iter}
        if self._sample is not None:
            wrap["__init__"] = self._init
        for name in wrap.keys() & vars(kind).keys():
            yield Patch(kind, name, wrap[name](vars(kind)[name]), "a data set that is not there")

    @around
    def _init(self, original: Callable[..., None], data: Any, /, *args: Any, **kwargs: Any) -> None:
        if not self._is_open or "flopmeter_absent" in vars(data):  # a class calls the method of its base
            return original(data, *args, **kwargs)
        data.flopmeter_absent = False
        try:
            original(data, *args, **kwargs)
        except ABSENT as error:
            data.flopmeter_absent = True
            self._tell(type(data).__name__, error)

    def _tell(self, what: str, error: BaseException) -> None:
        assert self._sample is not None
        why = str(error).partition("\n")[0]
        self._note(f"synthetic samples {self._sample.text} stand in for {what} ({type(error).__name__}: {why})")

    def _is_absent(self, data: Any) -> bool:
        return self._is_open and is_absent(data)

    def _stands_in(self, data: Any) -> bool:
        return self._is_absent(data) or (self._is_open and self._sample is None)

    @around
    def _getitem(self, original: Callable[..., Any], data: Any, index: Any) -> Any:
        if not self._is_open:
            return original(data, index)
        if self._sample is not None:
            return self._read(self._sample, original, data, index)
        if "flopmeter_first" not in vars(data):
            data.flopmeter_first = original(data, 0)
            self._note(f"the first sample of {type(data).__name__} stands for all of its samples")
        return data.flopmeter_first

    def _read(self, sample: Sample, original: Callable[..., Any], data: Any, index: Any) -> Any:
        """What the data set has there; or a sample, also where it only fails to open a file."""
        if not is_absent(data):
            try:
                return original(data, index)
            except OSError as error:
                data.flopmeter_absent = True
                self._tell(type(data).__name__, error)
        return sample.value()

    @around
    def _len(self, original: Callable[..., int], data: Any) -> int:
        if not self._stands_in(data):
            found = original(data)
            if found or not self._is_open or self._sample is None:
                return found
            data.flopmeter_absent = True  # it looked for files, and took what it found
            self._note(f"synthetic samples {self._sample.text} stand in for {type(data).__name__}, which is empty")
        return getattr(data, "flopmeter_length", SAMPLES)

    @around
    def _random_split(self, original: Callable[..., Any], dataset: Any, lengths: Any, *args: Any, **kwargs: Any) -> Any:
        """Splits a data set that is not there into parts of the lengths that the program knows it to have."""
        if self._stands_in(dataset) and all(type(length) is int for length in lengths):
            dataset.flopmeter_length = sum(lengths)
        return original(dataset, lengths, *args, **kwargs)

    @around
    def _iter(self, original: Callable[..., Iterator[Any]], data: Any) -> Iterator[Any]:
        if self._is_absent(data) and self._sample is not None:
            for _ in range(SAMPLES):
                yield self._sample.value()
        else:
            yield from original(data)

    def _of_numpy(self) -> Iterator[Patch]:
        if importlib.util.find_spec("numpy") is None:
            return
        numpy: Any = importlib.import_module("numpy")
        why = "arrays in files that are not there"
        tell = self._tell

        class Memmap(numpy.memmap):  # type: ignore[misc]
            def __new__(cls, filename: Any, dtype: Any = numpy.uint8, *args: Any, **kwargs: Any) -> Any:
                try:
                    return numpy_memmap(filename, dtype, *args, **kwargs)
                except FileNotFoundError as error:
                    tell(str(filename), error)
                    return numpy.zeros(kwargs.get("shape") or ELEMENTS, dtype)

        numpy_memmap, fromfile = numpy.memmap, numpy.fromfile

        @functools.wraps(fromfile)
        def from_file(file: Any, dtype: Any = float, count: int = -1, *args: Any, **kwargs: Any) -> Any:
            try:
                return fromfile(file, dtype, count, *args, **kwargs)
            except FileNotFoundError as error:
                tell(str(file), error)
                return numpy.zeros(ELEMENTS if count < 0 else count, dtype)

        yield Patch(numpy, "memmap", Memmap, why)
        yield Patch(numpy, "fromfile", from_file, why)


@around
def _in_process(original: Callable[..., Iterator[Any]], loader: Any) -> Iterator[Any]:
    """Workers that are not forked import the classes of data sets anew, without what stands in for them: this process
    makes the batches in their place."""
    context = loader.multiprocessing_context or torch.multiprocessing
    if not loader.num_workers or context.get_start_method() == "fork":
        return original(loader)
    asked = loader.num_workers, loader.timeout
    loader.num_workers = loader.timeout = 0
    try:
        return original(loader)
    finally:
        loader.num_workers, loader.timeout = asked


def _subclasses(kind: type) -> Iterator[type]:
    below: Sequence[type] = kind.__subclasses__()
    for each in below:
        yield each
        yield from _subclasses(each)
