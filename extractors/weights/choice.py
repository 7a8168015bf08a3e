"""The set of weights to take of a file that holds several, as ``PATH#NAME``. Importing this loads no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from schemas.storage.locations import is_remote


@dataclass
class Choice:
    """The set of weights to take of a file.

    Attributes:
        name: key of the set in the file, such as ``model_ema``; those of containers in it are joined by ``/``. Empty for the
            usual one.
        remark: filled in by who reads the file: the set that was taken of several, and how to take another; else empty.
    """

    name: str = ""
    remark: str = ""


def split_choice(weights: str) -> tuple[str, str]:
    """Return the file or address of ``PATH#NAME`` and the name of the set of weights in it, which may be empty.

    A file whose own name has a ``#`` stays a file, and so does an address with an extension behind it.

    Example:
        >>> split_choice("model.pth.tar#model_ema")
        ('model.pth.tar', 'model_ema')
    """
    file, mark, name = weights.rpartition("#")
    is_file = "." in name if is_remote(weights) else os.path.lexists(weights)
    return (file, name) if mark and name and not is_file else (weights, "")
