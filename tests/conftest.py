"""Fixtures: where the real data lies, and small data sets made in code."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# --- real data -------------------------------------------------------------------------------------------------------


def _data(name: str) -> Path:
    root = Path(os.environ.get("IMAGEPIVOT_TEST_DATA", Path(__file__).parent.parent.parent / "shared" / "data"))
    if not (root / name).is_dir():
        pytest.skip(f"no {name!r} in {root}: set IMAGEPIVOT_TEST_DATA to the folder that holds it")
    return root / name


@pytest.fixture(scope="session")
def multi30k() -> Path:
    """Folder of the Multi30K text, as its authors lay it out."""
    return _data("multi30k")


@pytest.fixture(scope="session")
def photos() -> Path:
    """Folder of eighteen photographs (``images/``) with captions (``captions.tsv``)."""
    return _data("photos")


@pytest.fixture(scope="session")
def visual_genome() -> Path:
    """Folder of the names of the 1,600 classes and 400 attributes, as the detector's releases carry them."""
    return _data("visual_genome")
