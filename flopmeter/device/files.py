"""Records in YAML files, one each: those that ship with flopmeter, by name, and a user's own, by path."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from flopmeter.device.schema import MAX_BYTES, HardwareError, SchemaRecord, build, expected, read_mapping

Record = TypeVar("Record", bound=SchemaRecord)
Fields = dict[str, Any]

SUFFIXES = (".yaml", ".yml")


def names_in(folder: Path) -> list[str]:
    """The names of the files in the folder, without suffix, sorted."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def resolve(
    name: str | os.PathLike[str] | Record,
    kind: type[Record],
    what: str,
    by_name: Callable[[str], Record],
    by_path: Callable[[Path], Record],
) -> Record:
    """The record that a user names, by its name or by the path of a file. A record is returned as it is."""
    if isinstance(name, kind):
        return name
    if isinstance(name, os.PathLike):
        return by_path(Path(name))
    if not isinstance(name, str):
        raise expected(f"the name of a {what}, a path or a {kind.__name__}", name)
    return by_path(Path(name)) if name.endswith(SUFFIXES) else by_name(name)


def read_record(path: Path, kind: type[Record], complete: Callable[[Fields], Fields] = dict) -> Record:
    """The record in a file, which has the name of the file; `complete` adds the fields that are stated elsewhere.

    Raises HardwareError, with the file, for one that cannot be read or is not valid.
    """
    try:
        with path.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise unreadable(path, error) from None
    try:
        fields = read_mapping(content)
        if "name" in fields:
            raise HardwareError("unknown field; the name is the stem of the file", field="name")
        return build(kind, complete(fields) | {"name": path.stem})
    except HardwareError as error:
        raise HardwareError(error.message, field=error.field, file=error.file or path.name) from None


def unreadable(path: Path, error: Exception) -> HardwareError:
    return HardwareError(f"this file cannot be read ({error})", file=str(path))
