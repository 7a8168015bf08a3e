"""Digests of small datasets of every kind, and the descriptions of all extractors, for `tests/test_golden.py`.

The values of the vectors are multiples of 1/256, which float16 holds exactly, so that no byte depends on the processor. Bytes of
Parquet files depend on pyarrow, whose version constraints.txt pins.

    python -m tests.golden  # writes tests/golden.json after a change that is meant
"""

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import extractors
from extractors import ExtractorRequest
from pipelines.demo.run import write_scenes
from pipelines.exchange.importing import import_features
from pipelines.exchange.jobs import ImportJob
from pipelines.inputs.captions.opening import open_captions
from pipelines.jobs import CaptionsJob, EncodeJob, VocabularyJob, WordVectorsJob
from pipelines.running.execution import Execution
from pipelines.text.captions import prepare_captions
from pipelines.text.encoding import encode_captions
from pipelines.text.vocabulary import build_vocabulary
from pipelines.text.word_vectors import import_word_vectors
from schemas.features import FeatureSpec
from tests.schemas import conftest as toys
from tests.schemas.conftest import Toy

GOLDEN = Path(__file__).with_suffix(".json")

LARGE = FeatureSpec(name="vgg19-10crop", shape=(10, 4096), dtype="float16")
"""52 rows fill a row group."""

EXTRACTORS: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name in extractors.extractor_names()},
    "resnet50-pool bf16 compiled float16": {"name": "resnet50-pool", "precision": "bf16", "compile": True, "dtype": "float16"},
    "vgg19-10crop separate": {"name": "vgg19-10crop", "keep_crops": True},
    "faster-rcnn-36 10 to 100": {"name": "faster-rcnn-36", "regions": extractors.RegionOptions(10, 100)},
    "timm": {"name": "timm:test_resnet.r160_in1k"},
    "timm grid": {"name": "timm:test_resnet.r160_in1k", "unpooled": True},
}
"""Arguments of an `ExtractorRequest`, beside untrained weights."""


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a dataset, without its records.

    The manifest counts without the versions of libraries, and without its own digest, which covers them.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    manifest = json.loads(files["_manifest.json"])
    del manifest["libraries"], manifest["sha256"]
    manifest.pop("sample_outputs", None)  # Rounded by the processor.
    files["_manifest.json"] = json.dumps(manifest, indent=2, ensure_ascii=False).encode()
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items() if not name.startswith(".records/")}


def write_toys(root: Path) -> dict[str, Path]:
    """Write the toy of each kind through the public writers, with exact vectors."""
    captions = toys.make_captions(root / "captions")
    vocabulary = toys.make_vocabulary(root / "vocabulary", captions)
    large = [f"image-{number:02d}" for number in range(60)]
    datasets = {
        "captions": captions,
        "vocabulary": vocabulary,
        "encoded": toys.make_encoded(root / "encoded", captions, vocabulary),
        "word-vectors": toys.make_word_vectors(root / "word-vectors", captions, vocabulary),
        "token-features": toys.make_token_features(root / "token-features", captions),
        "token-features float16": toys.make_token_features(root / "token-features16", captions, toys.TOKENS16),
        "features": toys.make_features(root / "features", failures=toys.FAILED_IMAGES),
        "features float16": toys.make_features(root / "features16", toys.CROPS16),
        "features in row groups": toys.make_features(root / "large", LARGE, image_ids=large, shards=1),
        "regions": toys.make_regions(root / "regions"),
        "embeddings": toys.make_embeddings(root / "embeddings", captions),
    }
    for toy in datasets.values():
        _with_exact_vectors(toy).write()
    return {name: toy.path for name, toy in datasets.items()}


def _with_exact_vectors(toy: Toy) -> Toy:
    """Replace all that is drawn from a normal distribution: its tails go through the system's logarithm."""
    generator = np.random.default_rng(29)

    def exact(value: Any) -> Any:
        if not isinstance(value, np.ndarray) or not np.issubdtype(value.dtype, np.floating):
            return value
        return (generator.integers(0, 512, value.shape) / 256 * (value != 0)).astype(value.dtype)

    vectors = ("feature", "features", "vector", "vectors", "embedding")
    rows = [{name: exact(value) if name in vectors else value for name, value in row.items()} for row in toy.rows]
    return replace(toy, rows=rows)


def write_demo(root: Path) -> dict[str, Path]:
    """Write the text of the demo by the jobs of the commands, with a failed caption, truecasers and word vectors."""
    write_scenes(root / "scenes", 24)
    table = root / "scenes" / "captions.tsv"
    with table.open("a", encoding="utf-8") as file:
        file.write("scene-00003\ten\tcomparable\t9\ttrain\t \n")
    alone = Execution(workers=1)
    names = ("captions", "truecased", "vocabulary", "encoded", "word-vectors")
    folders = {name: str(root / f"demo-{name}") for name in names}
    for name, recipe in {"captions": {}, "truecased": {"recipe": "moses-truecase"}}.items():
        job = CaptionsJob(open_captions("table", table), folders[name], shards=4, **recipe)
        prepare_captions(job, alone)
    build_vocabulary(VocabularyJob(folders["captions"], folders["vocabulary"]), alone)
    encode_captions(EncodeJob(folders["captions"], folders["vocabulary"], folders["encoded"], max_length=8), alone)
    vectors = root / "wiki.en.vec"
    vectors.write_text("3 4\na 0.5 1 -2 0.25\nred 1 1 1 1\nunseen 0 0 0 1\n", encoding="utf-8")
    import_word_vectors(WordVectorsJob(folders["vocabulary"], (str(vectors),), folders["word-vectors"], ("en",)))
    return {f"demo {name}": Path(path) for name, path in folders.items()}


def write_imports(root: Path) -> dict[str, Path]:
    """Import an array of features in each of the types."""
    generator = np.random.default_rng(31)
    folders = {}
    for dtype in ("float32", "float16"):
        array, ids, output = (root / f"import-{dtype}{end}" for end in (".npy", ".txt", ""))
        np.save(array, (generator.integers(-512, 512, (len(toys.IMAGE_IDS), 16)) / 256).astype(dtype))
        ids.write_text("".join(f"{name}.jpg\n" for name in toys.IMAGE_IDS), encoding="utf-8")
        job = ImportJob((str(array),), str(output), name="toy", ids=(str(ids),), source="a tool", shards=3)
        import_features(job)
        folders[f"imported {dtype}"] = output
    return folders


GROUPS: dict[str, Callable[[Path], dict[str, Path]]] = {"toys": write_toys, "demo": write_demo, "imports": write_imports}


def datasets_of(group: str, root: Path) -> dict[str, dict[str, str]]:
    """Write the datasets of a group, and return the `digests` of each."""
    return {name: digests(path) for name, path in GROUPS[group](root).items()}


def describe(name: str) -> dict[str, Any]:
    """Return the parameters of an entry of `EXTRACTORS`, untrained."""
    parameters = ExtractorRequest(**EXTRACTORS[name], weights="random:0").describe().parameters
    return json.loads(json.dumps(parameters))


def without_weights(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the digest of untrained weights, which torch draws otherwise on a processor without AVX2."""
    weights = {name: value for name, value in parameters["weights"].items() if name != "sha256"}
    return {**parameters, "weights": weights}


def main() -> None:
    """Write the file."""
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = {}
        for group in GROUPS:
            (Path(folder) / group).mkdir()
            found[group] = datasets_of(group, Path(folder) / group)
    found["extractors"] = {name: describe(name) for name in EXTRACTORS}
    GOLDEN.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
