"""Option ``--import``: users' modules, which register models and extractors."""

import importlib
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, TypeAlias

from schemas.errors import UsageError
from schemas.fingerprints import sha256_of_bytes
from schemas.options import Opt
from schemas.user_code import set_user_code

Imports: TypeAlias = Annotated[
    tuple[str, ...],
    Opt(
        "Import this module first; repeatable.",
        name="import",
        metavar="MODULE",
        is_repeated=True,
        code_in=tuple,
    ),
]


_INSTALLED = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *(str(Path(__file__).parents[2] / name) for name in ("imagepivot.py", "schemas", "extractors", "pipelines", "train")),
)

_loaded: dict[str, set[str]] = {}  # Names of the modules that the first import of a module loaded.


def import_modules(names: Iterable[str]) -> None:
    """Import modules of installed packages or of the current folder, in order.

    The folder is the last on the path, so that its files hide no installed module. Sources of the modules, and of those that they
    load from other places than the interpreter's and its packages', become part of what results are made from.

    Raises:
        UsageError: a module is missing, or fails while it is imported.
    """
    names = tuple(names)
    for name in names:
        before = set(sys.modules)
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
        _loaded.setdefault(name, set()).update(set(sys.modules) - before)
    set_user_code({module: digest for name in names for module, digest in _digests(name)})


def _digests(name: str) -> Iterator[tuple[str, str]]:
    """Yield the modules of an import with the digests of their files."""
    top = name.partition(".")[0]
    for module in _loaded[name] | {loaded for loaded in sys.modules if loaded.partition(".")[0] == top}:
        file = getattr(sys.modules.get(module), "__file__", None)
        if file is None or (module.partition(".")[0] != top and any(map(Path(file).is_relative_to, _INSTALLED))):
            continue
        with suppress(OSError):  # A module of a zip archive has no file.
            yield module, sha256_of_bytes(Path(file).read_bytes())
