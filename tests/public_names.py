"""Public names as type checkers see them: mypy reads this module in ``make check``, where an ignored error must be one."""

from typing import assert_type

import imagepivot


def read(folder: str) -> None:
    assert_type(imagepivot.open_dataset(folder), imagepivot.Dataset)
    assert_type(imagepivot.validate_dataset(folder), list[str])
    assert_type(imagepivot.resolve_config("demo"), imagepivot.Config)
    imagepivot.open_datasets  # type: ignore[attr-defined]
    imagepivot.validate  # type: ignore[attr-defined]
