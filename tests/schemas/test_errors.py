"""Errors that a user can fix, and the system's errors behind them."""

import errno

from schemas.errors import DatasetError, errno_of


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


def test_circle_of_causes_has_an_end():
    first, second = OSError("no number"), ValueError("x")
    first.__cause__, second.__context__ = second, first
    assert errno_of(first) is None


def test_errors_without_a_number_have_none():
    assert errno_of(raised(ValueError("x"))) is None
    assert errno_of(OSError("no number")) is None
