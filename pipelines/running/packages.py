"""Makes the names of our four packages mean our packages, whatever lies in the user's folder or on ``PYTHONPATH``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

__all__ = ["resolve_our_packages_first"]

_NAMES = frozenset({"schemas", "extractors", "pipelines", "train"})
_ROOT = str(Path(__file__).resolve().parent.parent.parent)


class _OurPackages(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(fullname, [_ROOT]) if fullname in _NAMES else None


def resolve_our_packages_first() -> None:
    """Installs the rule for this process; once is enough, more does no harm."""
    if not any(isinstance(finder, _OurPackages) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OurPackages())
