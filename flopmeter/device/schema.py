"""Frozen records that check their own fields, and a loader for YAML that can only hold data.

Each field of a `SchemaRecord` has a parser. It takes the value from YAML or from a caller and returns the stored form,
or raises a HardwareError that says what it expected. Each level adds the name of its field in front, so the message is
`mine.yaml: achieved.memory: expected a number over 0 and at most 1.5, got 85`.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from math import inf
from typing import Any, Generic, TypeVar

import yaml

T = TypeVar("T")
MappedValue = TypeVar("MappedValue")
FieldParser = Callable[[object], T]


class HardwareError(ValueError):
    """An unknown device, a profile that is not valid, or a rate that a device does not have."""

    def __init__(self, message: str, *, field: str = "", file: str = "") -> None:
        whole = ": ".join(part for part in (file, field, message) if part)
        super().__init__(" ".join(whole.splitlines()))  # a key or a file name may hold line breaks
        self.message, self.field, self.file = message, field, file


class FrozenMapping(Mapping[str, MappedValue], Generic[MappedValue]):
    """An immutable mapping that, unlike MappingProxyType, can be hashed, copied and sent to another process."""

    __slots__ = ("_entries",)

    def __init__(self, entries: Iterable[tuple[str, MappedValue]] = ()) -> None:
        self._entries = dict(entries)

    def __getitem__(self, key: str) -> MappedValue:
        return self._entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __hash__(self) -> int:
        return hash(frozenset(self._entries.items()))

    def __repr__(self) -> str:
        return repr(self._entries)


# --- parsers -----------------------------------------------------------------------------------------------------


def expected(what: str, value: object) -> HardwareError:
    """The error of a parser, without the name of the field."""
    hint = ""
    if isinstance(value, bool):
        hint = " (YAML reads a bare yes, no, on or off as true or false: quote it if it is text)"
    elif isinstance(value, str) and "number" in what:
        hint = " (text to YAML, which reads numbers written like 1000, 0.5 or 1.0e+3)"
    return HardwareError(f"expected {what}, got {reprlib.repr(value)}{hint}")


def at(place: str, parse: FieldParser[T], value: object) -> T:
    """Parse the value. An error gets `place` (a field, a key or `[index]`) in front of its field."""
    try:
        return parse(value)
    except HardwareError as error:
        joint = "." if error.field and not error.field.startswith("[") else ""
        raise HardwareError(error.message, field=f"{place}{joint}{error.field}") from None


def number(what: str, *, above: float = -inf, least: float = -inf, most: float) -> FieldParser[float]:
    """A number over `above`, at least `least` and at most `most`: finite, and no bool."""

    def parse(value: object) -> float:
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not (above < value <= most and least <= value)
        ):
            raise expected(what, value)
        return float(value)

    return parse


def whole_number(least: int, most: int) -> FieldParser[int]:
    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise expected(f"a whole number from {least} to {most}", value)
        return value

    return parse


def true_or_false(value: object) -> bool:
    if not isinstance(value, bool):
        raise HardwareError(f"expected true or false, got {reprlib.repr(value)}")
    return value


def text(value: object) -> str:
    """Text on one line; runs of white space become one space."""
    words = " ".join(value.split()) if isinstance(value, str) else ""
    if not words or not words.isprintable():
        raise expected("printable text", value)
    return words


def one_of(*choices: str) -> FieldParser[str]:
    def parse(value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            raise expected(" or ".join(choices), value)
        return value

    return parse


def tuple_of(parse: FieldParser[T]) -> FieldParser[tuple[T, ...]]:
    def parse_all(value: object) -> tuple[T, ...]:
        if not isinstance(value, list | tuple):
            raise expected("a list", value)
        return tuple(at(f"[{index}]", parse, entry) for index, entry in enumerate(value))

    return parse_all


def mapping_of(parse: FieldParser[T], keys: tuple[str, ...]) -> FieldParser[FrozenMapping[T]]:
    """A mapping that has some of `keys`; it keeps their order."""

    def parse_all(value: object) -> FrozenMapping[T]:
        if not isinstance(value, Mapping):
            raise expected("a mapping", value)
        for key in value:
            if key not in keys:
                raise HardwareError(f"unknown key; the keys are {', '.join(keys)}", field=str(key))
        return FrozenMapping((key, at(key, parse, value[key])) for key in keys if key in value)

    return parse_all


def record(cls: type[T]) -> FieldParser[T]:
    """A nested record: an instance, or a mapping with its fields."""

    def parse(value: object) -> T:
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise expected("a mapping", value)
        return build(cls, value)

    return parse


# --- records -----------------------------------------------------------------------------------------------------


def by(parse: FieldParser[object]) -> dict[str, FieldParser[object]]:
    """Metadata of a field: its parser."""
    return {"parse": parse}


@dataclass(frozen=True, slots=True)
class SchemaRecord:
    """A frozen record whose fields are parsed however it is made. None is kept if it is the field's default."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value is not None or entry.default is not None:
                object.__setattr__(self, entry.name, at(entry.name, entry.metadata["parse"], value))


def build(cls: type[T], values: Mapping[Any, Any]) -> T:
    """Make a record from a mapping. Unknown and missing keys are errors."""
    known = {entry.name: entry for entry in fields(cls)}  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise HardwareError(f"unknown field{hint}", field=str(key))
    for name, entry in known.items():
        if name not in values and entry.default is MISSING and entry.default_factory is MISSING:
            raise HardwareError("this field is missing", field=name)
    return cls(**values)


def plain(value: Any) -> Any:
    """The YAML form of a record: mappings, lists, texts and numbers, without what is unknown."""
    if isinstance(value, SchemaRecord):
        pairs = ((entry.name, getattr(value, entry.name)) for entry in fields(value))
        return {name: plain(item) for name, item in pairs if item is not None}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


def merge(base: Mapping[Any, Any], changes: Mapping[Any, Any]) -> dict[Any, Any]:
    """`base` with `changes`: mappings merge, None removes an entry, any other value replaces the old one."""
    merged = dict(base)
    for key, change in changes.items():
        value = plain(change)
        if isinstance(value, dict):
            below = merged.get(key)
            merged[key] = merge(below if isinstance(below, dict) else {}, value)
        elif value is None:
            merged.pop(key, None)
        else:
            merged[key] = value
    return merged


# --- YAML --------------------------------------------------------------------------------------------------------

MAX_BYTES = 64 * 1024  # a profile has 3 kB
_MAX_DEPTH = 8  # a profile nests 5 deep
_PLAIN_NUMBER = re.compile(r"[-+]?(0|[1-9][0-9]*)?(\.[0-9]*)?([eE][-+]?[0-9]+)?")


class _DataLoader(yaml.SafeLoader):
    """SafeLoader without features that data does not need: tags, anchors, aliases, merges, unusual keys and numbers."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        problem = None
        if event.anchor is not None:
            problem = "anchors and aliases (&, *) are not allowed"
        elif event.tag is not None:
            problem = "tags (!) are not allowed"
        elif self._depth == _MAX_DEPTH:
            problem = "nested too deeply"
        if problem is not None:
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            problem = None
            if key.tag != "tag:yaml.org,2002:str":
                problem = "keys must be plain text"
            elif key.value in seen:
                problem = f"{key.value} stands twice"
            if problem is not None:
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_plain_number(self, node: yaml.ScalarNode) -> float:
        """Octal (010), sexagesimal (1:30), .inf and similar numbers are refused, since their value would surprise."""
        if not _PLAIN_NUMBER.fullmatch(node.value):
            problem = f"write {node.value} as a plain decimal number, or quote it if it is text"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return float(node.value) if set(node.value) & set(".eE") else int(node.value)

    def construct_text(self, node: yaml.ScalarNode) -> str:
        """A date stays text."""
        return str(node.value)


_DataLoader.add_constructor("tag:yaml.org,2002:int", _DataLoader.construct_plain_number)
_DataLoader.add_constructor("tag:yaml.org,2002:float", _DataLoader.construct_plain_number)
_DataLoader.add_constructor("tag:yaml.org,2002:timestamp", _DataLoader.construct_text)


def read_mapping(content: bytes) -> dict[str, Any]:
    """Parse a small YAML document that is a mapping. Nothing in it can execute or grow; raises HardwareError."""
    if len(content) > MAX_BYTES:
        raise HardwareError(f"expected a file of at most {MAX_BYTES} bytes")
    try:
        document = yaml.load(content.decode(), _DataLoader)  # a SafeLoader, and stricter
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise HardwareError(f"{line}{error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # undecodable bytes, "\UFFFFFFFF", ...
        raise HardwareError(f"expected YAML text: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict):
        raise expected("a mapping of fields", document)
    return document
