"""Dataclasses from stored JSON, in which a damaged or edited file may hold anything."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from schemas.errors import DatasetError
from schemas.fingerprints import sha256_of_json

if TYPE_CHECKING:  # the storage loads Arrow, and completion in a shell needs the names of extractors alone
    from schemas.storage.folder import Folder

__all__ = ["read_stored", "stored_values"]

T = TypeVar("T")

_PLAIN = {str: "text", int: "a whole number", bool: "true or false", type(None): "null"}


def stored_values(cls: Any, stored: Any, *, but: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the stored values of a dataclass's fields, lists as tuples where the class has tuples.

    Args:
        cls: a dataclass, whose annotations say what the values must be.
        stored: what a file holds in its place; fields may be missing, and there may be others.
        but: fields that are read in another way.

    Raises:
        DatasetError: it is no object, or a value is of another type. The message names the field alone.
    """
    if not isinstance(stored, Mapping):
        raise DatasetError(f"it holds {_short(stored)}, expected an object")
    values = {}
    for name, hint in get_type_hints(cls).items():
        if name in stored and name not in but:
            if not _fits(stored[name], hint):
                raise DatasetError(f"{name} is {_short(stored[name])}, expected {_named(hint)}")
            values[name] = tuple(stored[name]) if isinstance(stored[name], list) else stored[name]
    return values


def read_stored(cls: type[T], folder: Folder, name: str, *, version: str, has_digest: bool, meaning: str) -> T | None:
    """Read a dataclass from a file of its own; None if there is no such file.

    Args:
        cls: the dataclass.
        folder: the folder of the file.
        name: its name.
        version: what the file must name as its ``format``.
        has_digest: whether it names its own SHA-256.
        meaning: what follows in the message on a damaged file: what it is for, what to do.

    Raises:
        DatasetError: it is damaged.
    """
    try:
        data = folder.read(name)
    except FileNotFoundError:
        return None
    try:
        content = json.loads(data)
        if has_digest and content.pop("sha256") != sha256_of_json(content):
            raise ValueError("its content does not have the sha256 that it names")
        if content.pop("format") != version:
            raise ValueError("it is of another version")
        return cls(**stored_values(cls, content))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, DatasetError) as error:
        raise DatasetError(f"{folder.path_of(name)} is damaged ({error}): {meaning}") from error


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is tuple:  # tuple[X, ...]
        return isinstance(value, (list, tuple)) and all(_fits(item, arguments[0]) for item in value)
    if origin is not None:  # Mapping[str, X]
        return isinstance(value, Mapping) and all(_fits(item, arguments[1]) for item in value.values())
    if hint is Any:
        return True
    return isinstance(value, hint) and not (hint is int and isinstance(value, bool))


def _named(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(map(_named, arguments))
    if origin is tuple:
        return f"a list, each {_named(arguments[0])}"
    if origin is not None:
        return "an object" if arguments[1] is Any else f"an object, each value {_named(arguments[1])}"
    return _PLAIN.get(hint, getattr(hint, "__name__", str(hint)))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
