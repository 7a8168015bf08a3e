"""Examples in public docstrings, run as doctests in a folder of small datasets."""

import doctest
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pytest
import torch
from apache_beam.options.pipeline_options import StandardOptions
from PIL import Image

import imagepivot
from tests.builders import write_rows
from tests.tiny_bert import make_tiny_bert

NAMES = {"imagepivot": imagepivot, "beam": beam, "np": np, "pa": pa, "torch": torch, "Path": Path}
NAMES |= {"dataclass": dataclass, "ClassVar": ClassVar}
RUNNER = "apache_beam.runners.portability.fn_api_runner.FnApiRunner"
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
MAX_LINES = 6
IMAGES = 6
LANGUAGES = {"en": "a red circle", "de": "ein roter Kreis", "fr": "un cercle rouge", "cs": "červený kruh"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Working folder with photos, captions, datasets, a run and a BERT."""
    folder = tmp_path_factory.mktemp("examples")
    rows = ["image_id\tlanguage\tportion\tsplit\ttext"]
    (folder / "photos").mkdir()
    for index in range(IMAGES):
        image_id, split = f"img-{index:02d}", ("train", "val", "test")[index % 3]
        Image.new("RGB", (240, 240), (40 * index, 90, 200)).save(folder / "photos" / f"{image_id}.jpg")
        for language, text in LANGUAGES.items():
            portions = ("comparable", "translation") if language in ("en", "de") else ("translation",)
            rows += [f"{image_id}\t{language}\t{portion}\t{split}\t{text} {index}" for portion in portions]
    (folder / "captions.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    make_tiny_bert(folder / "bert")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(StandardOptions, "DEFAULT_RUNNER", RUNNER)  # The default runner of Beam downloads a program.
        here = imagepivot.Execution(workers=1)
        imagepivot.prepare_captions(imagepivot.CaptionsJob("captions.tsv", "captions", format="table", shards=2), here)
        imagepivot.build_vocabulary(imagepivot.VocabularyJob("captions", "vocabulary", min_count=1), here)
        imagepivot.encode_captions(imagepivot.EncodeJob("captions", "vocabulary", "encoded"), here)
        rows = [
            {"image_id": f"img-{index:02d}", "feature": np.arange(2048, dtype=np.float32) % (index + 7)}
            for index in range(IMAGES)
        ]
        write_rows(folder / "features", "features", rows, imagepivot.FeatureSpec("resnet50-pool", (2048,)), shards=2)
        corpus = imagepivot.Corpus("encoded", "features", "vocabulary")
        imagepivot.train(imagepivot.TrainJob("demo", corpus, "runs/demo", device="cpu", max_steps=2, curves=False))
        yield folder


def example(name: str) -> doctest.DocTest:
    docstring = inspect.getdoc(getattr(imagepivot, name)) or ""
    return doctest.DocTestParser().get_doctest(docstring, dict(NAMES), name, None, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", dir(imagepivot))
def test_example_runs(name: str, folder: Path) -> None:
    test, messages = example(name), []
    if inspect.isclass(getattr(imagepivot, name)):
        assert 1 <= sum(item.source.count("\n") for item in test.examples) <= MAX_LINES
    doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=messages.append)
    assert messages == []
