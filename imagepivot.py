"""Public Python interface of imagepivot.

>>> import imagepivot
>>> features = imagepivot.open_dataset("build/demo/features")  # doctest: +SKIP

Names are imported on first use: reading a dataset needs neither torch nor Beam, and a missing extra fails
only on use of a name that needs it.

Importing this module resolves ``schemas``, ``extractors``, ``pipelines`` and ``train`` to the packages of imagepivot. They precede
modules of these names in the script's folder, with a warning, or on ``PYTHONPATH``. The command, all worker processes and
``pipelines`` import it first. Another distribution's file in place of ours is an error before any package is imported.
"""

from __future__ import annotations

import functools
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
    from extractors import decode_image as decode_image
    from extractors import list_extractors as list_extractors
    from extractors import load_extractor as load_extractor
    from extractors.registration import register_extractor as register_extractor
    from pipelines.datasets.comparison import compare_datasets as compare_datasets
    from pipelines.datasets.duplicates import find_duplicates as find_duplicates
    from pipelines.datasets.publishing import Publication as Publication
    from pipelines.datasets.publishing import publish as publish
    from pipelines.datasets.transforms import ReadDataset as ReadDataset
    from pipelines.datasets.view import draw_view as draw_view
    from pipelines.datasets.view import read_pictures as read_pictures
    from pipelines.exchange.exporting import export_dataset as export_dataset
    from pipelines.exchange.importing import import_features as import_features
    from pipelines.exchange.jobs import ExportJob as ExportJob
    from pipelines.exchange.jobs import ImportJob as ImportJob
    from pipelines.features.extraction import extract_features as extract_features
    from pipelines.features.model_handler import Extract as Extract
    from pipelines.features.model_handler import ExtractorHandler as ExtractorHandler
    from pipelines.features.transforms import ExtractFeatures as ExtractFeatures
    from pipelines.inputs.captions.base import CaptionSource as CaptionSource
    from pipelines.inputs.captions.base import Selection as Selection
    from pipelines.inputs.captions.opening import open_captions as open_captions
    from pipelines.inputs.images.base import ImageSource as ImageSource
    from pipelines.inputs.images.opening import open_images as open_images
    from pipelines.jobs import CaptionsJob as CaptionsJob
    from pipelines.jobs import DiffJob as DiffJob
    from pipelines.jobs import DuplicatesJob as DuplicatesJob
    from pipelines.jobs import EncodeJob as EncodeJob
    from pipelines.jobs import FeaturesJob as FeaturesJob
    from pipelines.jobs import ImageOptions as ImageOptions
    from pipelines.jobs import TextFeaturesJob as TextFeaturesJob
    from pipelines.jobs import ViewJob as ViewJob
    from pipelines.jobs import VocabularyJob as VocabularyJob
    from pipelines.jobs import WordVectorsJob as WordVectorsJob
    from pipelines.running.execution import Accelerator as Accelerator
    from pipelines.running.execution import Execution as Execution
    from pipelines.running.meter import show_progress as show_progress
    from pipelines.running.transforms import CommitDataset as CommitDataset
    from pipelines.text.captions import prepare_captions as prepare_captions
    from pipelines.text.encoding import encode_captions as encode_captions
    from pipelines.text.moses import load_recipe as load_recipe
    from pipelines.text.queries import load_text_encoder as load_text_encoder
    from pipelines.text.queries import tokenize_query as tokenize_query
    from pipelines.text.text_features import extract_text_features as extract_text_features
    from pipelines.text.transforms import BuildVocabulary as BuildVocabulary
    from pipelines.text.transforms import CountTokens as CountTokens
    from pipelines.text.transforms import EncodeCaptions as EncodeCaptions
    from pipelines.text.transforms import ExtractTokenFeatures as ExtractTokenFeatures
    from pipelines.text.transforms import ReadCaptions as ReadCaptions
    from pipelines.text.transforms import TokenizeCaptions as TokenizeCaptions
    from pipelines.text.transforms import TrainTruecasers as TrainTruecasers
    from pipelines.text.vocabulary import build_vocabulary as build_vocabulary
    from pipelines.text.word_vectors import import_word_vectors as import_word_vectors
    from schemas.console.progress import Monitoring as Monitoring
    from schemas.dataset import Dataset as Dataset
    from schemas.dataset import open_dataset as open_dataset
    from schemas.duplicates import Duplicate as Duplicate
    from schemas.errors import DatasetError as DatasetError
    from schemas.errors import ImagepivotError as ImagepivotError
    from schemas.errors import InputError as InputError
    from schemas.errors import UsageError as UsageError
    from schemas.features import FeatureSpec as FeatureSpec
    from schemas.keys import CaptionKey as CaptionKey
    from schemas.keys import shard_of as shard_of
    from schemas.manifest import Manifest as Manifest
    from schemas.process.shutdown import DetachedError as DetachedError
    from schemas.storage.folder import Folder as Folder
    from schemas.vocabulary import Vocabulary as Vocabulary
    from schemas.writing.dataset_writer import write_dataset as write_dataset
    from schemas.writing.output import OutputDataset as OutputDataset
    from schemas.writing.repair import repair
    from schemas.writing.reuse_policy import ArrayTask as ArrayTask
    from schemas.writing.reuse_policy import FailureLimit as FailureLimit
    from schemas.writing.reuse_policy import Notes as Notes
    from schemas.writing.reuse_policy import ReusePolicy as ReusePolicy
    from schemas.writing.shard_writer import ShardWriter as ShardWriter
    from schemas.writing.shard_writer import open_shard as open_shard
    from schemas.writing.validation import validate
    from train.config.models import ModelConfig as ModelConfig
    from train.config.presets import list_presets as list_presets
    from train.config.sections import Config as Config
    from train.config.sections import load_config as load_config
    from train.data.batches import CaptionBatch as CaptionBatch
    from train.data.pair_batches import PairBatches as PairBatches
    from train.data.pair_batches import collate_pairs as collate_pairs
    from train.data.torch_datasets import PairDataset as PairDataset
    from train.data.torch_datasets import PairStream as PairStream
    from train.evaluation.embedding import embed as embed
    from train.evaluation.encoding import EncodingRun as EncodingRun
    from train.evaluation.encoding import JointModel as JointModel
    from train.evaluation.mteb_model import MtebModel
    from train.evaluation.ranks import read_ranks as read_ranks
    from train.evaluation.scores import Score as Score
    from train.evaluation.scores import evaluate as evaluate
    from train.evaluation.search import Hit as Hit
    from train.evaluation.search import embed_gallery as embed_gallery
    from train.evaluation.search import search as search
    from train.evaluation.search import search_gallery as search_gallery
    from train.jobs import Corpus as Corpus
    from train.jobs import EmbedJob as EmbedJob
    from train.jobs import EvaluateJob as EvaluateJob
    from train.jobs import FiguresJob as FiguresJob
    from train.jobs import ReproduceJob as ReproduceJob
    from train.jobs import SearchJob as SearchJob
    from train.jobs import StsJob as StsJob
    from train.jobs import TrainJob as TrainJob
    from train.jobs import TrainResult as TrainResult
    from train.loop.training import train as train
    from train.loop.training_data import TrainingInputs as TrainingInputs
    from train.loop.training_data import load_training_inputs as load_training_inputs
    from train.models.catalogue import register_model as register_model
    from train.models.retrieval_model import AttentionWeights as AttentionWeights
    from train.models.retrieval_model import Dimensions as Dimensions
    from train.models.retrieval_model import Encoded as Encoded
    from train.models.retrieval_model import ImageBatch as ImageBatch
    from train.models.retrieval_model import RetrievalModel as RetrievalModel
    from train.reports.comparison import Comparison as Comparison
    from train.reports.comparison import compare_runs as compare_runs
    from train.reports.comparison_plot import plot_comparison as plot_comparison
    from train.reports.figures import draw_figures as draw_figures
    from train.reports.reproduce import reproduce as reproduce
    from train.runs.log import LogLine as LogLine
    from train.runs.log import LogSink as LogSink
    from train.runs.log import register_log_sink as register_log_sink
    from train.runs.run import Run as Run
    from train.sts.pairs import read_sts as read_sts
    from train.sts.similarity import sts as sts

    mteb_model = MtebModel
    repair_dataset = repair
    validate_dataset = validate

if TYPE_CHECKING:  # Types of the functions below, not public.
    from os import PathLike

    import torch

__version__: str

_EXTRAS = {"pipelines.datasets.duplicates": "duplicates", "train.evaluation.mteb_model": "mteb"}
"""Extras of modules that need more than their package's."""

_PACKAGES = frozenset({"schemas", "extractors", "pipelines", "train"})
_ROOT = Path(__file__).resolve().parent


class _OurPackages(MetaPathFinder):
    """Import finder of our four packages, in the folder of this file."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _PACKAGES:
            return None
        if message := _foreign_file():
            raise ImportError(message)
        return PathFinder.find_spec(fullname, [str(_ROOT)])


@functools.cache
def _foreign_file() -> str:
    """Return the error of an installed package whose first file is not ours, or "".

    Installers overwrite and remove files that two distributions have. A checkout has no ``RECORD`` and is not compared.
    """
    import hashlib
    from base64 import urlsafe_b64encode

    record = "".join(file.read_text(encoding="utf-8") for file in _ROOT.glob("imagepivot-*.dist-info/RECORD"))
    for name in sorted(_PACKAGES):
        file, entry = _ROOT / name / "__init__.py", f"{name}/__init__.py,sha256="
        if entry not in record:
            continue
        if not file.is_file():
            return (
                f"{file} of imagepivot is missing, probably since the uninstallation of another distribution with a package "
                f"{name!r}: install imagepivot again, in an environment of its own"
            )
        digest = urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).decode().rstrip("=")
        if entry + digest not in record:
            return _describe_foreign_file(name, file)
    return ""


def _describe_foreign_file(name: str, file: Path) -> str:
    """Return the error of a foreign file, with the distribution that installed it."""
    from importlib.metadata import distributions

    others = [other for other in distributions(path=[str(_ROOT)]) if other.name != "imagepivot"]
    owners = [other for other in others if file in {_ROOT / path for path in other.files or ()}]
    described = " and ".join(f"{owner.name} {owner.version}" for owner in owners) or "another distribution"
    names = " ".join(owner.name for owner in owners) or "DISTRIBUTION"
    return (
        f"{file} is a file of {described}, expected imagepivot's, whose package {name!r} has the same name: install imagepivot in "
        f"an environment of its own, or run `pip uninstall {names}`, which also removes files of ours, and install imagepivot again"
    )


def _warn_of_hidden_modules() -> None:
    """Warn of modules with our names in the script's folder, which ours hide.

    The command hides none that matter: its folder is the interpreter's. Worker processes have no main module of this name.
    """
    main = sys.modules["__main__"]
    script = Path(getattr(main, "__file__", None) or __file__).resolve()
    folder = Path(sys.path[0] if sys.path else "").absolute()
    if main.__name__ != "__main__" or script == Path(__file__).resolve() or folder in (_ROOT, Path(sys.executable).parent):
        return
    for name in sorted(_PACKAGES):
        spec = PathFinder.find_spec(name, [str(folder)])
        place = Path((spec and spec.origin) or folder / name)
        if spec is not None and place != script and (place.is_file() or any(place.glob("*.py"))):
            import warnings

            warnings.warn(
                f"{place} is hidden: in this process `import {name}` gives the package of imagepivot. "
                "Rename yours, or import it in a process without imagepivot",
                stacklevel=3,
            )


def _resolve_our_packages_first() -> None:
    """Install the finder in this process.

    Raises:
        ImportError: another module of such a name is loaded already.
    """
    for name in sorted(_PACKAGES.intersection(sys.modules)):
        module = sys.modules[name]
        places = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", ())]
        if not any(Path(place).resolve().is_relative_to(_ROOT / name) for place in places if place):
            raise ImportError(
                f"imagepivot has a package {name!r}, but another module of that name is loaded already, from "
                f"{places[0] or places[-1]!r}: rename that module, or import it in another process"
            )
    if not any(isinstance(finder, _OurPackages) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OurPackages())


_resolve_our_packages_first()
_warn_of_hidden_modules()


@functools.cache
def _places() -> dict[str, tuple[str, str]]:
    """Return module and attribute of each public name, from the imports above."""
    import ast

    block = next(node for node in ast.parse(Path(__file__).read_text(encoding="utf-8")).body if isinstance(node, ast.If))
    imports = [(node.module, alias) for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    renamed = {ast.unparse(node.value): ast.unparse(node.targets[0]) for node in block.body if isinstance(node, ast.Assign)}
    places = {alias.asname or renamed[alias.name]: (str(module), alias.name) for module, alias in imports}
    return places | {name: (__name__, name) for name in ("open_joint_model", "open_run")}


def _load(name: str) -> Any:
    """Import the object of a public name."""
    if name == "__version__":
        from importlib.metadata import version

        return version("imagepivot")
    if name not in _places():
        raise AttributeError(f"module 'imagepivot' has no attribute {name!r}")
    module, original = _places()[name]
    try:
        value = getattr(importlib.import_module(module), original)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(module, module.partition(".")[0])
        if extra == "schemas" or (error.name or "").partition(".")[0] in _PACKAGES:
            raise
        raise ImportError(
            f"imagepivot.{name} needs {error.name}, which is not installed: pip install 'imagepivot[{extra}]'"
        ) from error
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # Otherwise a checker accepts any name.
    __getattr__ = _load


def __dir__() -> list[str]:
    return sorted(_places())


def open_run(folder: str | PathLike[str], *, checkpoint: str = "best", device: str | torch.device = "cpu") -> EncodingRun:
    """Open a run to encode texts and images with it, see `train.runs.run.open_run`."""
    encoding_run = _load("EncodingRun")
    from train.runs.run import open_run

    return encoding_run(**vars(open_run(folder, checkpoint=checkpoint, device=device)), tokenize=_tokenize_query)


def open_joint_model(model: str, images: str | PathLike[str], *, device: str = "cpu") -> JointModel:
    """Load a text encoder, and compare texts with vectors of images in its space.

    Args:
        model: ``open_clip:NAME``, ``open_clip:FOLDER`` or ``sentence:FOLDER``.
        images: dataset of the vectors of images.
        device: device of the encoder and of the comparison.

    Raises:
        DatasetError: the encoder and the vectors do not share a space.
    """
    from schemas.dataset import open_dataset
    from schemas.parameters import FeaturesParameters

    parameters = FeaturesParameters.from_json(open_dataset(images, kind="features").manifest.parameters)
    return _load("JointModel")(_load("load_text_encoder")(model, device), parameters, place=str(images), device=device)


def _tokenize_query(*given: Any) -> Sequence[str]:
    return _load("tokenize_query")(*given)


def command() -> None:
    """Run the command ``imagepivot`` and end the process."""
    if message := _foreign_file():
        sys.exit(f"Error: {message}")
    from pipelines.commands.signals import fast_exit

    with fast_exit():
        main()


def main() -> None:
    """Run the command ``imagepivot``.

    Raises:
        SystemExit: with its exit code.
    """
    from schemas.process.startup import keep_freed_memory, reduce_gc

    keep_freed_memory()
    reduce_gc()
    from pipelines.commands.signals import prepare_streams, stoppable

    prepare_streams()
    with stoppable():
        from pipelines.commands.app import main as run

        run()


if __name__ == "__main__":
    command()
