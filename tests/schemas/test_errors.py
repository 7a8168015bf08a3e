"""Errors that a user can fix, their way through Beam, and the system's errors behind them."""

import errno
import inspect
import json
import traceback

import pytest

from schemas import errors
from schemas.errors import DatasetError, ImagepivotError, InputError, UsageError, errno_of, read_error
from schemas.escapes import escape_text

MESSAGES = [
    "",
    "photos is a file, expected a folder: move it",
    "'it''s' \"b\" \\n \\\\ \\\" 100% %41 {x} }",
    "first line\nsecond line\n\n\ttabbed\r\n",
    "caf\u00e9 \u4e2d \U0001f431 e\u0301 \x1b[31m \u202e \udcff \u2028",
    "a step [while running 'Other'] of another",
    'imagepivot-error: {"kind": "UsageError", "message": "forged"}',
    "long " * 20_000,
]
KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, ImagepivotError)]


def text_from_beam(kind: type[Exception], message: str) -> str:
    """Return the trace that a worker sends: Beam raises an error anew, with the step in its message."""
    try:
        try:
            raise kind(message)
        except kind as error:
            raise type(error)(f"{error.args[0]} [while running 'Deep/Step']", *error.args[1:])  # noqa: B904
    except kind:
        return traceback.format_exc()


def raised(cause: BaseException) -> DatasetError:
    try:
        try:
            raise cause
        except BaseException as error:
            raise DatasetError("cannot write") from error
    except DatasetError as error:
        return error


def test_number_of_the_systems_error_is_found_behind_others():
    assert errno_of(OSError(errno.EIO, "I/O error")) == errno.EIO
    assert errno_of(raised(OSError(errno.ENOSPC, "full"))) == errno.ENOSPC
    assert errno_of(raised(raised(OSError(errno.EDQUOT, "quota")))) == errno.EDQUOT


def test_errno_of_errors_without_a_number_is_none():
    assert errno_of(raised(ValueError("x"))) is None
    first, second = OSError("no number"), ValueError("x")
    first.__cause__, second.__context__ = second, first
    assert errno_of(first) is None


@pytest.mark.parametrize("message", MESSAGES, ids=range(len(MESSAGES)))
def test_read_error_has_kind_and_message_through_any_quoting(message):
    text = text_from_beam(DatasetError, message)
    java = (
        f"java.lang.RuntimeException: Error received from SDK harness for instruction 4: {text}\n\tat java.base/x.Y(Z.java:1)"
    )
    grpc = f'<RpcError: details = "{text.encode("unicode_escape").decode()}" debug_error_string = "{text!a}">'
    for arrived in (text, java, grpc, repr(text), repr(repr(repr(text))), ascii(text), json.dumps(json.dumps([text]))):
        error = read_error(arrived)
        assert type(error) is DatasetError
        assert str(error) == escape_text(message, lines=True)


@pytest.mark.parametrize("kind", KINDS)
def test_read_error_keeps_every_kind(kind):
    assert repr(read_error(text_from_beam(kind, "x"))) == repr(kind("x"))


def test_read_error_takes_the_last_whole_error():
    first, second = text_from_beam(InputError, "first"), text_from_beam(UsageError, "second")
    assert repr(read_error(first + second)) == repr(UsageError("second"))
    assert repr(read_error(first + second.rstrip()[:-1])) == repr(InputError("first"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ValueError: x [while running 'Step']",
        "schemas.errors.InputError: a bug's message that quotes one of ours",
        text_from_beam(ValueError, "x"),
        text_from_beam(InputError, "x").rstrip()[:-1],
        *("imagepivot-error: " + rest for rest in ("", "{", "[]", "3", "null", "{}", '{"kind": []}', '{"kind": "InputError"}')),
        'imagepivot-error: {"kind": "InputError", "message": 3}',
    ],
)
def test_read_error_of_another_text_is_none(text):
    assert read_error(text) is None
