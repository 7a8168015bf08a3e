"""Strict conversion of JSON, TOML and text to annotated types.

A whole number is a number; no other types are mixed.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from schemas.errors import DatasetError, ImagepivotError, UsageError
from schemas.escapes import to_json

_STORED = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    NoneType: "null",
}
_WRITTEN = {
    str: "text in quotes",
    int: "a whole number, written 20",
    float: "a number, written 0.05 or 2e-4",
    bool: "true or false, written without quotes",
    list: """a list, written ["en"] (in a shell as '["en"]')""",
    dict: 'a table, written { en = ["comparable"] }',
}
_ACCEPTED: dict[Any, Any] = {float: (int, float), list: (list, tuple), dict: Mapping}
_SIMILAR = 3  # Number of keys that a message suggests.
# The memory of tomllib grows with the square of the parts of a dotted key.
_MAX_TOML = 1 << 18  # Characters.
_MAX_DOTS = 500  # Dots in one line.
_MAX_WHOLE = 2**63 - 1  # Largest whole number of Arrow, numpy and torch.


class Tagged:
    """Base of dataclasses that a table selects by a key."""

    @classmethod
    def choose(cls, table: Mapping[str, Any], prefix: str) -> tuple[type[Any], Mapping[str, Any]]:
        """Return the selected dataclass, and the table without the key.

        ``prefix`` is the place of the table in messages.

        Raises:
            UsageError: the table selects no known dataclass.
        """
        return cls, table


def convert(value: Any, hint: Any, place: str = "", *, error: type[ImagepivotError] = UsageError) -> Any:
    """Convert a value of JSON, TOML or Python to an annotated type.

    Args:
        value: a plain value; lists become tuples where the annotation has tuples.
        hint: a dataclass, ``str``, ``int``, ``float``, ``bool``, ``None``, ``Any``, ``Literal``, a list, a
            tuple, a mapping with string keys, a union of these, or ``Annotated`` with one of these.
        place: key of the value in messages, e.g. ``loss.margin``.
        error: class of the errors: `UsageError` for values that users write, `DatasetError` for stored ones.

    Raises:
        ImagepivotError: of the class ``error``: a value has another type, a number is not finite or beyond 64
            bits, or a key of a dataclass is unknown or missing.
    """
    return _convert(value, hint, place, error, (hint, value, place))


def _convert(value: Any, hint: Any, place: str, error: type[ImagepivotError], root: tuple[Any, Any, str]) -> Any:
    """Convert a value; the root is annotation, value and place of the outermost value."""
    alternatives = alternatives_of(hint)
    hint = next((alternative for alternative in alternatives if _fits(value, alternative)), None)
    if hint is None:
        expected = f"{_expected(alternatives, error)}{_suggest(value, alternatives)}"
        raise error(f"{place or 'it'} is {shorten(value)}, expected {expected}")
    if is_dataclass(hint) and isinstance(hint, type):
        return _build(hint, value, place, error, root)
    kind, arguments = _kind(hint), get_args(hint)
    if kind is dict and arguments:
        return {key: _convert(item, arguments[1], f"{place}.{key}", error, root) for key, item in value.items()}
    if kind is list and arguments:
        is_fixed = get_origin(hint) is tuple and arguments[-1] is not Ellipsis
        if is_fixed and len(value) != len(arguments):
            raise error(f"{place} has {len(value)} values, expected {len(arguments)}")
        hints = arguments if is_fixed else arguments[:1] * len(value)
        pairs = enumerate(zip(value, hints, strict=True))
        return get_origin(hint)(
            _convert(item, item_hint, f"{place}[{index}]", error, root) for index, (item, item_hint) in pairs
        )
    check_number(value, place, error)
    return float(value) if hint is float else value


def check_number(value: Any, place: str, error: type[ImagepivotError] = UsageError) -> None:
    """Raise an error of the class for a number that is not finite or beyond 64 bits."""
    if isinstance(value, float) and not math.isfinite(value):
        raise error(f"{place or 'it'} is {value}, expected a finite number")
    if isinstance(value, int) and not -_MAX_WHOLE <= value <= _MAX_WHOLE:
        raise error(f"{place or 'it'} is beyond 64 bits, expected at most {_MAX_WHOLE:,}")


def convert_text(text: str, hint: Any, place: str = "") -> Any:
    """Convert text from a command line or the environment to an annotated type.

    Args:
        text: the value; items of a list and ``KEY=VALUE`` pairs of a mapping are separated by commas.
        hint: as `convert` takes it, or a class with a classmethod ``parse`` that takes text.
        place: name of the value in messages.

    Raises:
        UsageError: the text is not of that type; the message is that of `convert`.
    """
    for alternative in alternatives_of(hint):
        kind = _kind(alternative)
        if hasattr(alternative, "parse"):
            return alternative.parse(text)
        if kind is list:
            return tuple(part.strip() for part in text.split(",") if part.strip())
        if kind is dict:
            return _pairs(text.split(","), place)
        parsed = _PARSERS[kind](text.strip()) if kind in _PARSERS else text
        if parsed is not None and _fits(parsed, alternative):
            return parsed
    return convert(text, hint, place)


def _pairs(items: Sequence[str], place: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for item in filter(str.strip, items):
        ours, equals, theirs = item.partition("=")
        ours = ours.strip()  # The name of a column may begin and end with spaces.
        if not (ours and equals and theirs):
            raise UsageError(f"{place} has {item!r}, expected OURS=THEIRS with commas between, e.g. image_id=file,text=caption")
        if ours in pairs:
            raise UsageError(f"{place} names {ours!r} twice: keep one")
        pairs[ours] = theirs
    return pairs


def _parse_float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


_BOOLS = {**dict.fromkeys(("true", "1", "yes", "on"), True), **dict.fromkeys(("false", "0", "no", "off"), False)}
_PARSERS: dict[Any, Any] = {
    int: lambda text: int(text) if re.fullmatch(r"[+-]?[0-9]{1,1000}", text) else None,  # Python refuses some more digits.
    float: _parse_float,
    bool: lambda text: _BOOLS.get(text.lower()),
}


def stored_values(cls: Any, stored: Any, *, but: Collection[str] = ()) -> dict[str, Any]:
    """Return the values of a dataclass's fields from untrusted JSON.

    Missing fields and those in ``but`` are left out, other keys ignored.

    Raises:
        DatasetError: it is no object, or a value has another type; the message names the field.
    """
    stored = convert(stored, dict, error=DatasetError)
    hints = {name: hint for name, hint in hints_of(cls).items() if name in stored and name not in but}
    return {name: convert(stored[name], hint, name, error=DatasetError) for name, hint in hints.items()}


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        UsageError: the text is not TOML, or is too large.
    """
    import tomllib  # Only needed with a file.

    if len(text) > _MAX_TOML:
        raise UsageError(f"not TOML: it has {len(text):,} characters, expected at most {_MAX_TOML:,}: write several files")
    if text.count(".") > _MAX_DOTS < max(line.count(".") for line in text.split("\n")):
        raise UsageError(f"not TOML: a line has more than {_MAX_DOTS} dots: write lists and tables on several lines")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"not TOML: {error}") from error
    except RecursionError:
        raise UsageError("not TOML: it is nested too deeply") from None
    except ValueError:  # Python converts no whole number of more than 4,300 digits.
        raise UsageError("not TOML: it has a number of thousands of digits") from None


def parse_value(text: str) -> Any:
    """Parse one value of TOML; return invalid TOML as text."""
    try:
        return parse_toml(f"value = {text}")["value"]
    except UsageError:
        return text


def override(table: dict[str, Any], key: str, text: str) -> None:
    """Set a value by a dotted key, e.g. ``optimizer.learning_rate``.

    Raises:
        UsageError: a part of the key is not a section.
    """
    *sections, name = key.split(".")
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise UsageError(f"cannot set {key!r}: {section!r} is a value, not a section")
    table[name] = parse_value(text)


def dump(value: Any) -> str:
    """Return a value as TOML on one line, with inline tables."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{to_json(key)} = {dump(item)}" for key, item in value.items()) + " }"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(dump, value)) + "]"
    return to_json(value)  # Strings, numbers and booleans look the same in JSON and TOML.


def key_value_pairs(settings: Sequence[str], example: str) -> dict[str, str]:
    """Split values of the option ``--set``, of the form ``KEY=VALUE``.

    Raises:
        UsageError: a setting has another form.
    """
    pairs = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--set {setting!r} is not KEY=VALUE, e.g. --set {example}")
        pairs[key.strip()] = value.strip()
    return pairs


def did_you_mean(name: str, known: Collection[str], prefix: str = "", known_keys: Sequence[str] = ()) -> str:
    """Return the end of a message about an unknown name: similar or all known names.

    ``prefix`` precedes a similar name. If no known name is similar, ``known_keys`` are compared by their last part after a dot.
    """
    similar = [f"{prefix}{match}" for match in get_close_matches(name, known, n=1)]
    if not similar:
        last = [key.rpartition(".")[2] for key in known_keys]
        matches = get_close_matches(name, dict.fromkeys(last), n=_SIMILAR, cutoff=0.75)
        similar = [key for match in matches for key, part in zip(known_keys, last, strict=True) if part == match][:_SIMILAR]
    if similar:
        return f": did you mean {' or '.join(map(repr, similar))}?"
    return f": expected {', '.join(map(repr, known))}"


def _build(cls: Any, table: Mapping[str, Any], place: str, error: type[ImagepivotError], root: tuple[Any, Any, str]) -> Any:
    """Build a dataclass from a table."""
    prefix = f"{place}." if place else ""
    if issubclass(cls, Tagged):
        cls, table = cls.choose(table, prefix)
    known = {item.name: item for item in fields(cls)}
    for key in table:
        if key not in known:
            raise error(f"unknown key {prefix}{key}{did_you_mean(key, known, prefix, tuple(_keys(*root)))}")
    for key, item in known.items():
        if key not in table and item.default is MISSING and item.default_factory is MISSING:
            raise error(f"{prefix}{key} is missing")
    hints = hints_of(cls)
    return cls(**{key: _convert(value, hints[key], f"{prefix}{key}", error, root) for key, value in table.items()})


def _keys(hint: Any, table: Any, place: str) -> Iterator[str]:
    """Yield the dotted keys of a dataclass and of its nested dataclasses."""
    [hint, *others] = alternatives_of(hint)
    if others or not is_dataclass(hint):
        yield place
        return
    prefix = f"{place}." if place else ""
    table = table if isinstance(table, Mapping) else {}
    if isinstance(hint, type) and issubclass(hint, Tagged):
        try:
            hint, table = hint.choose(table, prefix)
        except UsageError:
            return  # It is reported where it is built.
    hints = hints_of(hint)
    for item in fields(hint):
        yield from _keys(hints[item.name], table.get(item.name), f"{prefix}{item.name}")


def default_of(field: Any) -> Any:
    """Return the default of a dataclass's field, or ``MISSING``."""
    return field.default if field.default_factory is MISSING else field.default_factory()


@cache
def hints_of(cls: Any) -> dict[str, Any]:
    """Return the evaluated annotations of a dataclass, including ``Annotated``."""
    return get_type_hints(cls, include_extras=True)


def alternatives_of(hint: Any) -> list[Any]:
    """Return the members of a union, or the annotation alone, without ``Annotated``."""
    if get_origin(hint) is Annotated:
        return alternatives_of(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return [alternative for argument in get_args(hint) for alternative in alternatives_of(argument)]
    return [hint]


def _kind(hint: Any) -> Any:
    """Return ``list``, ``dict``, or the annotation without its arguments."""
    origin = get_origin(hint) or hint
    if is_dataclass(origin) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return dict
    return list if origin is tuple else origin


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value has the annotated type; items are not checked."""
    kind = _kind(hint)
    if kind is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(hint))
    return kind is Any or (isinstance(value, _ACCEPTED.get(kind, kind)) and (kind is bool or not isinstance(value, bool)))


def _expected(alternatives: Sequence[Any], error: type[ImagepivotError]) -> str:
    words = _WRITTEN if error is UsageError else _STORED
    names = [
        f"one of {', '.join(map(repr, get_args(hint)))}" if _kind(hint) is Literal else words[_kind(hint)]
        for hint in alternatives
        if _kind(hint) is not NoneType or NoneType in words
    ]
    if len(names) == 1:
        return names[0]
    *names, last = [name.partition(", written")[0] for name in names]
    return f"{', '.join(names)} or {last}"


def _suggest(value: Any, alternatives: Sequence[Any]) -> str:
    """Return the end of a message with a similar choice; empty without one."""
    choices = [
        choice for hint in alternatives if _kind(hint) is Literal for choice in get_args(hint) if isinstance(choice, str)
    ]
    lowered = {choice.lower(): choice for choice in choices}
    matches = get_close_matches(value.lower(), lowered, n=1) if isinstance(value, str) else []
    return f": did you mean {lowered[matches[0]]!r}?" if matches else ""


def shorten(value: Any) -> str:
    """Return the ``repr`` of a value, cut after 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
