"""Option ``--import``: modules of users, which register their own model kinds."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, TypeAlias

from schemas.errors import UsageError
from schemas.options import Opt

Imports: TypeAlias = Annotated[
    tuple[str, ...],
    Opt(
        "Import this module, e.g. to register a model kind; repeatable.",
        name="import",
        metavar="MODULE",
        is_repeated=True,
        code_in=tuple,
    ),
]


def import_modules(names: Iterable[str]) -> None:
    """Import modules of installed packages or of the current folder, in order.

    The folder is the last on the path, so that its files hide no installed module.

    Raises:
        UsageError: a module is missing, or fails while it is imported.
    """
    for name in names:
        if (folder := str(Path.cwd())) not in sys.path:
            sys.path.append(folder)
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            fault = f"which fails at {frame.filename}:{frame.lineno} ({type(error).__name__}: {error}): correct the module"
            if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
                place = "in the current folder or in an installed package"
                fault = f"but there is no module {error.name!r}: expected the dotted name, without .py, of a module {place}"
            raise UsageError(f"--import is {name!r}, {fault}") from error
