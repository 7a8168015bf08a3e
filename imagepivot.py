"""imagepivot from Python: one import for everything that the documentation shows.

>>> import imagepivot
>>> features = imagepivot.open_dataset("build/demo/features")  # doctest: +SKIP

Every name is loaded when it is first used, so that reading a dataset needs neither torch nor Beam, and a name whose extra is not
installed fails only where it is used.

Importing this module makes ``schemas``, ``extractors``, ``pipelines`` and ``train`` mean the packages of imagepivot, whatever
lies in the script's folder or on ``PYTHONPATH``. The command and all worker processes import it first, and so does ``pipelines``.
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
    from extractors import ExtractorRequest as ExtractorRequest
    from extractors import RegionOptions as RegionOptions
    from extractors import decode as decode_image
    from extractors import entries as extractor_catalogue
    from extractors import load as load_extractor
    from extractors import names as extractor_names
    from pipelines.datasets.comparison import compare_datasets as compare_datasets
    from pipelines.datasets.pictures import read_pictures as read_pictures
    from pipelines.datasets.viewing import draw_view as draw_view
    from pipelines.exchange.exporting import export_dataset as export_dataset
    from pipelines.exchange.importing import import_features as import_features
    from pipelines.exchange.jobs import ExportJob as ExportJob
    from pipelines.exchange.jobs import ImportJob as ImportJob
    from pipelines.features.dry_run import plan_dry_run as plan_dry_run
    from pipelines.features.extraction import extract_features as extract_features
    from pipelines.features.extraction import list_images as list_images
    from pipelines.features.transforms import ExtractFeatures as ExtractFeatures
    from pipelines.inputs.captions import Selection as Selection
    from pipelines.inputs.captions import open_source as open_captions
    from pipelines.inputs.images import open_images as open_images
    from pipelines.jobs import CaptionsJob as CaptionsJob
    from pipelines.jobs import DiffJob as DiffJob
    from pipelines.jobs import EncodeJob as EncodeJob
    from pipelines.jobs import FeaturesJob as FeaturesJob
    from pipelines.jobs import ImageOptions as ImageOptions
    from pipelines.jobs import TokenFeaturesJob as TokenFeaturesJob
    from pipelines.jobs import ViewJob as ViewJob
    from pipelines.jobs import VocabularyJob as VocabularyJob
    from pipelines.jobs import WordVectorsJob as WordVectorsJob
    from pipelines.running.accelerators import Accelerator as Accelerator
    from pipelines.running.commits import CommitDataset as CommitDataset
    from pipelines.running.execution import Execution as Execution
    from pipelines.running.meter import show_progress as show_progress
    from pipelines.text.caption_transforms import ReadCaptions as ReadCaptions
    from pipelines.text.caption_transforms import TokenizeCaptions as TokenizeCaptions
    from pipelines.text.caption_transforms import TrainTruecasers as TrainTruecasers
    from pipelines.text.captions import prepare_captions as prepare_captions
    from pipelines.text.encoding import encode_captions as encode_captions
    from pipelines.text.encoding_transforms import EncodeCaptions as EncodeCaptions
    from pipelines.text.queries import tokenize_query as tokenize_query
    from pipelines.text.token_feature_transforms import ExtractTokenFeatures as ExtractTokenFeatures
    from pipelines.text.token_features import extract_token_features as extract_token_features
    from pipelines.text.vocabulary import build_vocabulary as build_vocabulary
    from pipelines.text.vocabulary_transforms import BuildVocabulary as BuildVocabulary
    from pipelines.text.vocabulary_transforms import CountTokens as CountTokens
    from pipelines.text.word_vectors import import_word_vectors as import_word_vectors
    from schemas import ArrayTask as ArrayTask
    from schemas import CaptionKey as CaptionKey
    from schemas import Dataset as Dataset
    from schemas import DatasetError as DatasetError
    from schemas import DetachedError as DetachedError
    from schemas import FeatureSpec as FeatureSpec
    from schemas import Folder as Folder
    from schemas import ImagepivotError as ImagepivotError
    from schemas import InputError as InputError
    from schemas import Manifest as Manifest
    from schemas import OutputDataset as OutputDataset
    from schemas import Repair as Repair
    from schemas import ReusePolicy as ReusePolicy
    from schemas import ShardWriter as ShardWriter
    from schemas import UsageError as UsageError
    from schemas import Vocabulary as Vocabulary
    from schemas import open_dataset as open_dataset
    from schemas import open_shard as open_shard
    from schemas import repair as repair
    from schemas import shard_of as shard_of
    from schemas import validate as validate
    from schemas import write_dataset as write_dataset
    from train.config.models import ModelConfig as ModelConfig
    from train.config.presets import preset_names as preset_names
    from train.config.sections import Config as Config
    from train.config.sections import resolve as resolve_config
    from train.data.batches import CaptionBatch as CaptionBatch
    from train.data.torch_datasets import PairDataset as PairDataset
    from train.data.torch_datasets import PairStream as PairStream
    from train.data.torch_datasets import collate_pairs as collate_pairs
    from train.evaluation.embedding import embed as embed
    from train.evaluation.scores import averages as averages
    from train.evaluation.scores import evaluate_run as evaluate
    from train.evaluation.scores import score_run as score_run
    from train.evaluation.scores import score_together as score_together
    from train.evaluation.search import embed_gallery as embed_gallery
    from train.evaluation.search import search as search
    from train.evaluation.search import search_gallery as search_gallery
    from train.evaluation.sts import score_sts as score_sts
    from train.evaluation.sts import sts as sts
    from train.evaluation.sts_data import read_sts as read_sts
    from train.jobs import Corpus as Corpus
    from train.jobs import EmbedJob as EmbedJob
    from train.jobs import EvaluateJob as EvaluateJob
    from train.jobs import FiguresJob as FiguresJob
    from train.jobs import ReproduceJob as ReproduceJob
    from train.jobs import SearchJob as SearchJob
    from train.jobs import StsJob as StsJob
    from train.jobs import TrainJob as TrainJob
    from train.loop import train as train
    from train.models.catalogue import register_model as register_model
    from train.models.retrieval_model import AttentionWeights as AttentionWeights
    from train.models.retrieval_model import Dimensions as Dimensions
    from train.models.retrieval_model import Encoded as Encoded
    from train.models.retrieval_model import ImageBatch as ImageBatch
    from train.models.retrieval_model import RetrievalModel as RetrievalModel
    from train.reports.comparison import Comparison as Comparison
    from train.reports.comparison import compare_runs as compare_runs
    from train.reports.figures import Figures as Figures
    from train.reports.figures import draw_figures as draw_figures
    from train.reports.gold_ranks import gold_ranks as gold_ranks
    from train.reports.plots import plot_comparison as plot_comparison
    from train.reports.published import presets_of_table as presets_of_table
    from train.reports.reproduce import reproduce as reproduce
    from train.reports.sts_rows import sts_rows as sts_rows
    from train.runs.run import Run as Run
    from train.runs.run import open_run as open_run
    from train.training_data import Material as Material
    from train.training_data import open_material as open_material

__all__ = [
    "Accelerator",
    "ArrayTask",
    "AttentionWeights",
    "BuildVocabulary",
    "CaptionBatch",
    "CaptionKey",
    "CaptionsJob",
    "CommitDataset",
    "Comparison",
    "Config",
    "Corpus",
    "CountTokens",
    "Dataset",
    "DatasetError",
    "DetachedError",
    "DiffJob",
    "Dimensions",
    "EmbedJob",
    "EncodeCaptions",
    "EncodeJob",
    "Encoded",
    "EvaluateJob",
    "Execution",
    "ExportJob",
    "ExtractFeatures",
    "ExtractTokenFeatures",
    "Extractor",
    "ExtractorRequest",
    "FeatureSpec",
    "FeaturesJob",
    "Figures",
    "FiguresJob",
    "Folder",
    "ImageBatch",
    "ImageOptions",
    "ImagepivotError",
    "ImportJob",
    "InputError",
    "Manifest",
    "Material",
    "ModelConfig",
    "OutputDataset",
    "PairDataset",
    "PairStream",
    "ReadCaptions",
    "RegionOptions",
    "Repair",
    "ReproduceJob",
    "RetrievalModel",
    "ReusePolicy",
    "Run",
    "SearchJob",
    "Selection",
    "ShardWriter",
    "StsJob",
    "TokenFeaturesJob",
    "TokenizeCaptions",
    "TrainJob",
    "TrainTruecasers",
    "UsageError",
    "ViewJob",
    "Vocabulary",
    "VocabularyJob",
    "WordVectorsJob",
    "averages",
    "build_vocabulary",
    "collate_pairs",
    "compare_datasets",
    "compare_runs",
    "decode_image",
    "draw_figures",
    "draw_view",
    "embed",
    "embed_gallery",
    "encode_captions",
    "evaluate",
    "export_dataset",
    "extract_features",
    "extract_token_features",
    "extractor_catalogue",
    "extractor_names",
    "gold_ranks",
    "import_features",
    "import_word_vectors",
    "list_images",
    "load_extractor",
    "open_captions",
    "open_dataset",
    "open_images",
    "open_material",
    "open_run",
    "open_shard",
    "plan_dry_run",
    "plot_comparison",
    "prepare_captions",
    "preset_names",
    "presets_of_table",
    "read_pictures",
    "read_sts",
    "register_model",
    "repair",
    "reproduce",
    "resolve_config",
    "score_run",
    "score_sts",
    "score_together",
    "search",
    "search_gallery",
    "shard_of",
    "show_progress",
    "sts",
    "sts_rows",
    "tokenize_query",
    "train",
    "validate",
    "write_dataset",
]

# Where each name is defined; ``name = other`` where it is called otherwise there. A test compares all three lists.
_MODULES = {
    "extractors": (
        "decode_image = decode",
        "Extractor",
        "extractor_catalogue = entries",
        "extractor_names = names",
        "ExtractorRequest",
        "load_extractor = load",
        "RegionOptions",
    ),
    "pipelines.datasets.comparison": ("compare_datasets",),
    "pipelines.datasets.pictures": ("read_pictures",),
    "pipelines.datasets.viewing": ("draw_view",),
    "pipelines.exchange.exporting": ("export_dataset",),
    "pipelines.exchange.importing": ("import_features",),
    "pipelines.exchange.jobs": ("ExportJob", "ImportJob"),
    "pipelines.features.extraction": ("extract_features", "list_images"),
    "pipelines.features.dry_run": ("plan_dry_run",),
    "pipelines.features.transforms": ("ExtractFeatures",),
    "pipelines.inputs.captions": ("open_captions = open_source", "Selection"),
    "pipelines.inputs.images": ("open_images",),
    "pipelines.running.accelerators": ("Accelerator",),
    "pipelines.running.commits": ("CommitDataset",),
    "pipelines.running.execution": ("Execution",),
    "pipelines.running.meter": ("show_progress",),
    "pipelines.text.caption_transforms": ("ReadCaptions", "TokenizeCaptions", "TrainTruecasers"),
    "pipelines.text.captions": ("prepare_captions",),
    "pipelines.text.encoding": ("encode_captions",),
    "pipelines.text.encoding_transforms": ("EncodeCaptions",),
    "pipelines.jobs": (
        "CaptionsJob",
        "DiffJob",
        "EncodeJob",
        "FeaturesJob",
        "ImageOptions",
        "TokenFeaturesJob",
        "ViewJob",
        "VocabularyJob",
        "WordVectorsJob",
    ),
    "pipelines.text.queries": ("tokenize_query",),
    "pipelines.text.token_feature_transforms": ("ExtractTokenFeatures",),
    "pipelines.text.token_features": ("extract_token_features",),
    "pipelines.text.vocabulary": ("build_vocabulary",),
    "pipelines.text.vocabulary_transforms": ("BuildVocabulary", "CountTokens"),
    "pipelines.text.word_vectors": ("import_word_vectors",),
    "schemas": (
        "CaptionKey",
        "Dataset",
        "DatasetError",
        "DetachedError",
        "FeatureSpec",
        "Folder",
        "ImagepivotError",
        "InputError",
        "Manifest",
        "open_dataset",
        "open_shard",
        "OutputDataset",
        "Repair",
        "repair",
        "shard_of",
        "ShardWriter",
        "ArrayTask",
        "ReusePolicy",
        "UsageError",
        "validate",
        "Vocabulary",
        "write_dataset",
    ),
    "train.config.models": ("ModelConfig",),
    "train.config.presets": ("preset_names",),
    "train.config.sections": ("Config", "resolve_config = resolve"),
    "train.data.batches": ("CaptionBatch",),
    "train.data.torch_datasets": ("collate_pairs", "PairDataset", "PairStream"),
    "train.evaluation.embedding": ("embed",),
    "train.evaluation.scores": ("averages", "evaluate = evaluate_run", "score_run", "score_together"),
    "train.evaluation.search": ("embed_gallery", "search", "search_gallery"),
    "train.evaluation.sts": ("score_sts", "sts"),
    "train.evaluation.sts_data": ("read_sts",),
    "train.jobs": (
        "Corpus",
        "EmbedJob",
        "EvaluateJob",
        "FiguresJob",
        "ReproduceJob",
        "SearchJob",
        "StsJob",
        "TrainJob",
    ),
    "train.loop": ("train",),
    "train.training_data": ("Material", "open_material"),
    "train.models.catalogue": ("register_model",),
    "train.models.retrieval_model": ("AttentionWeights", "Dimensions", "Encoded", "ImageBatch", "RetrievalModel"),
    "train.reports.comparison": ("compare_runs", "Comparison"),
    "train.reports.plots": ("plot_comparison",),
    "train.reports.figures": ("draw_figures", "Figures"),
    "train.reports.gold_ranks": ("gold_ranks",),
    "train.reports.published": ("presets_of_table",),
    "train.reports.sts_rows": ("sts_rows",),
    "train.reports.reproduce": ("reproduce",),
    "train.runs.run": ("open_run", "Run"),
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


def command() -> None:
    """Run the command ``imagepivot`` in a process that ends with it."""
    from pipelines.commands.process import ending_at_once

    with ending_at_once():
        main()


def main() -> None:
    """Run the command ``imagepivot``.

    Raises:
        SystemExit: with its exit code.
    """
    from schemas.process.resources import keep_freed_memory

    keep_freed_memory()
    from pipelines.commands.process import prepare_streams, spare_collections, stoppable

    prepare_streams()
    spare_collections()
    with stoppable():
        from pipelines.commands.app import main as run

        run()


if __name__ == "__main__":
    command()
