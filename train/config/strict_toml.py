"""Strict conversion between TOML and frozen dataclasses: an unknown key or a value of the wrong type is an error that names it."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from schemas.errors import UsageError
from schemas.escapes import to_json

__all__ = ["Tagged", "build", "dump", "override", "parse"]

T = TypeVar("T")

_NAMES = {
    dict: 'a table, written { en = ["comparable"] }',
    list: """a list, written ["en"] (in a shell as '["en"]')""",
    str: 'a string, written "word"',
    bool: "true or false, written without quotes",
    int: "a whole number, written 20",
    float: "a number, written 0.05 or 2e-4",
}
_SIMILAR = 3  # Number of keys that a message suggests.


class Tagged:
    """Base of dataclasses of which a table names the one to build."""

    @classmethod
    def choose(cls, table: Mapping[str, Any], prefix: str) -> tuple[type[Any], Mapping[str, Any]]:
        """Return the dataclass that a table names, and the table without the key that names it.

        Args:
            table: table of a TOML file.
            prefix: prefix of keys in messages.

        Raises:
            UsageError: there is none of that name.
        """
        return cls, table


def parse(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        UsageError: the text is not TOML.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"not TOML: {error}") from error
    except RecursionError:
        raise UsageError("not TOML of a configuration: it is nested too deeply") from None


def override(table: dict[str, Any], key: str, text: str) -> None:
    """Set one value in a table.

    Args:
        table: changed in place.
        key: dotted, e.g. ``optimizer.learning_rate``.
        text: the value as TOML; anything that is not TOML is taken as a string.

    Raises:
        UsageError: a part of the key is not a section.
    """
    *sections, name = key.split(".")
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise UsageError(f"cannot set {key!r}: {section!r} is a value, not a section")
    try:
        table[name] = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        table[name] = text


def build(cls: type[T], table: Mapping[str, Any], prefix: str = "") -> T:
    """Build a dataclass from a table.

    Args:
        cls: a dataclass whose fields are dataclasses, numbers, strings, booleans, tuples, literals, or mappings with string keys;
            or values of which there may be a list, such as ``str | tuple[str, ...]``.
        table: table of a TOML file.
        prefix: prefix of keys in messages, e.g. ``loss.``.

    Raises:
        UsageError: a key is unknown or missing, or a value has the wrong type.
    """
    return _built(cls, table, prefix, tuple(_keys(cls, table, prefix)))


def _built(cls: type[T], table: Mapping[str, Any], prefix: str, keys: Sequence[str]) -> T:
    """Build a dataclass from a table, which is one of those that have these keys."""
    if issubclass(cls, Tagged):
        cls, table = cls.choose(table, prefix)
    known = {item.name: item for item in fields(cls)}  # type: ignore[arg-type]
    for key in table:
        if key not in known:
            similar = _similar(key, prefix, known, keys)
            raise UsageError(
                f"unknown key {prefix}{key}: "
                + (f"did you mean {' or '.join(similar)}?" if similar else f"the known keys are {', '.join(known)}")
            )
    for key, item in known.items():
        if key not in table and item.default is MISSING and item.default_factory is MISSING:
            raise UsageError(f"{prefix}{key} is missing")
    hints = get_type_hints(cls)
    return cls(**{key: _convert(value, hints[key], f"{prefix}{key}", keys) for key, value in table.items()})


def _keys(cls: type[Any], table: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Yield the dotted keys of the values in a dataclass and in those that it holds, whatever is wrong with the table."""
    if issubclass(cls, Tagged):
        try:
            cls, table = cls.choose(table, prefix)
        except UsageError:
            return  # It is reported where it is built.
    hints = get_type_hints(cls)
    for item in fields(cls):
        hint = hints[item.name]
        if is_dataclass(hint) and isinstance(hint, type):
            inner = table.get(item.name, {})
            yield from _keys(hint, inner if isinstance(inner, Mapping) else {}, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}"


def _similar(key: str, prefix: str, known: Collection[str], keys: Sequence[str]) -> list[str]:
    """Return the keys that an unknown one may stand for: a neighbour of a similar name, or keys of its name in other sections."""
    if neighbours := get_close_matches(key, known, n=1):
        return [f"{prefix}{neighbours[0]}"]
    last = [other.rpartition(".")[2] for other in keys]
    matches = get_close_matches(key, dict.fromkeys(last), n=_SIMILAR, cutoff=0.75)
    return [other for match in matches for other, name in zip(keys, last, strict=True) if name == match][:_SIMILAR]


def dump(value: Any) -> str:
    """Return a value as TOML on one line, with inline tables."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{to_json(key)} = {dump(item)}" for key, item in value.items()) + " }"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(dump, value)) + "]"
    return to_json(value)  # Strings, numbers and booleans look the same in JSON and TOML.


def _convert(value: Any, hint: Any, key: str, keys: Sequence[str]) -> Any:
    """Convert a value to the type of its key. A float may be given as a whole number; no other types are mixed."""
    if is_dataclass(hint) and isinstance(hint, type):
        return _built(hint, _expect(value, dict, key), f"{key}.", keys)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType:  # A value, or a list of such values.
        return _convert(value, arguments[isinstance(value, list)], key, keys)
    if origin is Literal:
        if value not in arguments:
            raise UsageError(f"{key} is {value!r}, expected one of {', '.join(map(repr, arguments))}")
        return value
    if origin is tuple:
        items = _expect(value, list, key)
        if arguments[-1] is not Ellipsis and len(items) != len(arguments):
            raise UsageError(f"{key} has {len(items)} values, expected {len(arguments)}")
        return tuple(_convert(item, arguments[0], f"{key}[{number}]", keys) for number, item in enumerate(items))
    if origin is not None:  # A mapping with string keys.
        return {name: _convert(item, arguments[1], f"{key}.{name}", keys) for name, item in _expect(value, dict, key).items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return _expect(value, hint, key)


def _expect(value: Any, cls: type, key: str) -> Any:
    if not isinstance(value, cls) or (cls is int and isinstance(value, bool)):
        raise UsageError(f"{key} is {value!r}, expected {_NAMES[cls]}")
    return value
