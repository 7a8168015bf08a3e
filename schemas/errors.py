"""Errors that a user can fix.

The command line prints their message without a traceback; every other exception is a bug and keeps its traceback. A message has one
paragraph: the place (file, row, key), the value (with ``!r``), the expected value and advice. Beam transports only the text of an
error: once Beam has named the step that raised it, its text ends with a marked line of JSON for `read_error`.
"""

import contextlib
import json
import re
from urllib.parse import quote, unquote

from schemas.escapes import escape_text

_MARK = "imagepivot-error: "
_FROM_BEAM = re.compile(r"(.*) \[while running '[^']*'\]", re.DOTALL)  # A message to which Beam has appended the step.


class ImagepivotError(Exception):
    """Base of all errors that a user can fix. The command ends with exit code 1.

    Examples:
        >>> try:
        ...     imagepivot.open_dataset("photos")
        ... except imagepivot.ImagepivotError as error:
        ...     print(type(error).__name__)
        DatasetError
    """

    def __str__(self) -> str:
        """Return the message; control characters of data in it are escapes."""
        text = escape_text(super().__str__(), lines=True)
        if match := _FROM_BEAM.fullmatch(text):
            # Quoted: runners may escape quotes, backslashes and characters beyond ASCII, and do so repeatedly.
            fields = {"kind": type(self).__name__, "message": quote(match[1], safe=" ")}
            text += f"\n{_MARK}{json.dumps(fields)}"
        return text


class UsageError(ImagepivotError):
    """An argument or a combination of arguments is invalid (exit code 2).

    Examples:
        >>> imagepivot.ArrayTask(3, 3)
        Traceback (most recent call last):
        schemas.errors.UsageError: ...
    """


class InputError(ImagepivotError):
    """Raw input (captions, images, weights) is missing, broken or contradicts itself.

    Examples:
        >>> imagepivot.open_captions("table", "missing.tsv")
        Traceback (most recent call last):
        schemas.errors.InputError: ...
    """


class DatasetError(ImagepivotError):
    """A dataset folder is invalid, of the wrong kind, or in use by another run.

    Examples:
        >>> imagepivot.open_dataset("photos")
        Traceback (most recent call last):
        schemas.errors.DatasetError: ...
    """


class CommittedError(DatasetError):
    """Another run has committed the dataset."""


class TooManyFailuresError(ImagepivotError):
    """More inputs failed than allowed; the dataset is committed."""


class LostJobError(ImagepivotError):
    """The runner no longer reports the state of a job."""


class OtherDatasetError(DatasetError):
    """The folder of an output has another dataset."""


def read_error(text: str) -> ImagepivotError | None:
    """Return the last error of ours in the text of an error of Beam, if any."""
    kinds = {name: kind for name, kind in globals().items() if isinstance(kind, type)}
    for line in reversed(text.split(_MARK)[1:]):
        with contextlib.suppress(ValueError, KeyError, TypeError):  # A part of a line.
            fields, _ = json.JSONDecoder().raw_decode(line.replace("\\", ""))
            return kinds.get(fields["kind"], ImagepivotError)(unquote(fields["message"]))
    return None


def errno_of(error: BaseException | None) -> int | None:
    """Return the number of the system's error behind an error, if any."""
    seen = set[int]()  # The causes of errors that were raised again may form a circle.
    while error is not None and id(error) not in seen:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def first_line(error: BaseException) -> str:
    """Return the first non-blank line of an error's message, or else its type."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
