"""imagepivot from Python: one import for everything that the documentation shows.

>>> import imagepivot
>>> features = imagepivot.open_dataset("build/demo/features")  # doctest: +SKIP

Every name is loaded when it is first used, so that reading a dataset needs neither torch nor Beam, and a name whose extra is not
installed fails only where it is used.

Importing this module makes ``schemas``, ``extractors``, ``pipelines`` and ``train`` mean the packages of imagepivot, whatever
lies in the script's folder or on ``PYTHONPATH``. The command and all worker processes import it first.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from extractors import Extractor as Extractor
    from extractors import decode as decode_image
    from extractors import load as load_extractor
    from extractors.settings import RegionOptions as RegionOptions
    from pipelines.exchange.exporting import ExportJob as ExportJob
    from pipelines.exchange.exporting import export_dataset as export_dataset
    from pipelines.exchange.importing import ImportJob as ImportJob
    from pipelines.exchange.importing import import_features as import_features
    from pipelines.features.extract import ExtractFeatures as ExtractFeatures
    from pipelines.features.extract import extract_features as extract_features
    from pipelines.features.job import FeaturesJob as FeaturesJob
    from pipelines.inputs.captions import Selection as Selection
    from pipelines.inputs.captions import open_source as open_captions
    from pipelines.inputs.images import open_images as open_images
    from pipelines.running.progress import show_progress as show_progress
    from pipelines.running.runner import Execution as Execution
    from pipelines.text.captions import CaptionsJob as CaptionsJob
    from pipelines.text.captions import TokenizeCaptions as TokenizeCaptions
    from pipelines.text.captions import TrainTruecasers as TrainTruecasers
    from pipelines.text.captions import prepare_captions as prepare_captions
    from pipelines.text.encoding import EncodeCaptions as EncodeCaptions
    from pipelines.text.encoding import EncodeJob as EncodeJob
    from pipelines.text.encoding import encode_captions as encode_captions
    from pipelines.text.vocabulary import CountTokens as CountTokens
    from pipelines.text.vocabulary import VocabularyJob as VocabularyJob
    from pipelines.text.vocabulary import build_vocabulary as build_vocabulary
    from schemas import Dataset as Dataset
    from schemas import FeatureSpec as FeatureSpec
    from schemas import ImagepivotError as ImagepivotError
    from schemas import Vocabulary as Vocabulary
    from schemas import open_dataset as open_dataset
    from schemas import shard_of as shard_of
    from schemas import validate as validate
    from schemas import write_dataset as write_dataset

__all__ = [
    "CaptionsJob",
    "CountTokens",
    "Dataset",
    "EncodeCaptions",
    "EncodeJob",
    "Execution",
    "ExportJob",
    "ExtractFeatures",
    "Extractor",
    "FeatureSpec",
    "FeaturesJob",
    "ImagepivotError",
    "ImportJob",
    "RegionOptions",
    "Selection",
    "TokenizeCaptions",
    "TrainTruecasers",
    "Vocabulary",
    "VocabularyJob",
    "build_vocabulary",
    "decode_image",
    "encode_captions",
    "export_dataset",
    "extract_features",
    "import_features",
    "load_extractor",
    "open_captions",
    "open_dataset",
    "open_images",
    "prepare_captions",
    "shard_of",
    "show_progress",
    "validate",
    "write_dataset",
]

# Where each name is defined; ``name = other`` where it is called otherwise there. A test compares all three lists.
_MODULES = {
    "extractors": ("Extractor", "decode_image = decode", "load_extractor = load"),
    "extractors.settings": ("RegionOptions",),
    "pipelines.exchange.exporting": ("ExportJob", "export_dataset"),
    "pipelines.exchange.importing": ("ImportJob", "import_features"),
    "pipelines.features.extract": ("ExtractFeatures", "extract_features"),
    "pipelines.features.job": ("FeaturesJob",),
    "pipelines.inputs.captions": ("Selection", "open_captions = open_source"),
    "pipelines.inputs.images": ("open_images",),
    "pipelines.running.progress": ("show_progress",),
    "pipelines.running.runner": ("Execution",),
    "pipelines.text.captions": ("CaptionsJob", "TokenizeCaptions", "TrainTruecasers", "prepare_captions"),
    "pipelines.text.encoding": ("EncodeCaptions", "EncodeJob", "encode_captions"),
    "pipelines.text.vocabulary": ("CountTokens", "VocabularyJob", "build_vocabulary"),
    "schemas": (
        "Dataset",
        "FeatureSpec",
        "ImagepivotError",
        "Vocabulary",
        "open_dataset",
        "shard_of",
        "validate",
        "write_dataset",
    ),
}
_PLACES = {
    name: (module, original or name)
    for module, entries in _MODULES.items()
    for name, _, original in (entry.partition(" = ") for entry in entries)
}

_PACKAGES = frozenset({"schemas", "extractors", "pipelines", "train"})
_ROOT = Path(__file__).resolve().parent


class _OurPackages(MetaPathFinder):
    """Finds our four packages beside this file, before anything else is asked for them: their names are generic."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(fullname, [str(_ROOT)]) if fullname in _PACKAGES else None


def _resolve_our_packages_first() -> None:
    """Install the rule for this process.

    Raises:
        ImportError: another module of such a name is loaded already.
    """
    for name in sorted(_PACKAGES.intersection(sys.modules)):
        module = sys.modules[name]
        places = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", ())]
        if not any(Path(place).resolve().is_relative_to(_ROOT / name) for place in places if place):
            raise ImportError(
                f"imagepivot has a package called {name!r}, and another module of that name is loaded already, from "
                f"{places[0] or places[-1]!r}. In one process a name can mean one module only: rename the other one, or import it "
                "in a process of its own"
            )
    if not any(isinstance(finder, _OurPackages) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OurPackages())


_resolve_our_packages_first()


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'imagepivot' has no attribute {name!r}")
    module, original = _PLACES[name]
    try:
        value = getattr(importlib.import_module(module), original)
    except ModuleNotFoundError as error:
        if (extra := _extra_for(module, error.name or "")) is None:
            raise
        raise ImportError(
            f"imagepivot.{name} needs {error.name}, which is not installed: pip install 'imagepivot[{extra}]'"
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _extra_for(module: str, missing: str) -> str | None:
    """Return the extra that brings a missing package; None where it is one of ours."""
    package = module.partition(".")[0]
    return None if missing.partition(".")[0] in _PACKAGES or package == "schemas" else package


def main() -> None:
    """Run the command ``imagepivot``."""
    from pipelines.commands.app import main as run

    run()


if __name__ == "__main__":
    main()
