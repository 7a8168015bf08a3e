"""Truecasers on disk: one file per language in Moses' own format, in the folder ``_truecaser`` of a captions dataset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pipelines.text.truecasing import TruecaseModel
from schemas.errors import InputError
from schemas.fingerprints import sha256_of_bytes
from schemas.keys import check_language
from schemas.storage.folder import Folder
from schemas.text import decode_text

TRUECASER_FOLDERS = ("_truecaser", "truecaser")
"""The folder in this version of the format of datasets, then that in version 1."""

TRUECASER_FILES = rf"({'|'.join(TRUECASER_FOLDERS)})/[A-Za-z0-9-]+\.model"
"""Regular expression of the paths of truecasers within a captions dataset."""


def truecaser_name(language: str) -> str:
    """Return the path of a language's truecaser within a captions dataset."""
    return f"{TRUECASER_FOLDERS[0]}/{language}.model"


@dataclass(frozen=True)
class Truecasers:
    """Truecasers that were trained earlier.

    Attributes:
        texts: text of each model, by language.
    """

    texts: Mapping[str, str]

    def inputs(self) -> list[dict[str, Any]]:
        """Return what the truecasers add to the inputs of a dataset: name, size in bytes and digest of each."""
        return [
            {"name": f"truecaser/{language}.model", "bytes": len(text.encode()), "sha256": sha256_of_bytes(text.encode())}
            for language, text in sorted(self.texts.items())
        ]


def load_truecasers(location: str) -> Truecasers:
    """Read every ``LANGUAGE.model`` in a folder, or in its folder ``_truecaser`` if there is one.

    Raises:
        InputError: the folder holds no model, or a broken one.
        UsageError: the name of a file is not a language tag.
    """
    folder = Folder(location)
    below = next((name for name in TRUECASER_FOLDERS if folder.children(name)), None)
    if below is not None:
        folder = Folder(folder.path_of(below))
    texts: dict[str, str] = {}
    for name in folder.children():
        if not name.endswith(".model"):
            continue
        text = _checked_text(folder.read(name), folder.path_of(name))
        texts[check_language(name.removesuffix(".model"))] = text
    if not texts:
        raise InputError(
            f"--truecaser {location!r} holds no LANGUAGE.model, such as en.model: give the folder of a captions dataset "
            "made with --recipe moses-truecase, or a folder of models in Moses' format"
        )
    return Truecasers(texts)


def write_truecaser(language: str, text: str, folder: Folder) -> str:
    """Write a truecaser into a captions dataset, and return its path there."""
    name = truecaser_name(language)
    folder.write(name, text.encode())
    return name


@lru_cache(maxsize=64)
def parse_truecaser(text: str) -> TruecaseModel:
    """Parse the text of a model, once per process."""
    return TruecaseModel.from_text(text)


@lru_cache(maxsize=64)
def _checked_text(data: bytes, location: str) -> str:
    """Return the text of a file and check that it is a model, once per process: queries are tokenized one at a time."""
    text = decode_text(data, location)
    TruecaseModel.from_text(text, source=location)
    return text
