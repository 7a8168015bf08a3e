"""How often sources of images are listed and read, in bytes, by runs of many processes: a proxy before a store counts."""

import io
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from schemas.dataset import open_dataset
from schemas.storage.folder import Folder
from schemas.writing.file_names import LOCK_NAME
from tests.integration import clusters
from tests.integration.workload import MODEL
from tests.pipelines.inputs.reading import write_tar
from tests.stores import FarStore, emulator, far_away, is_installed, use

pytest.importorskip("distributed", reason="the extra dev installs it")
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not is_installed("s3"), reason="no emulator of S3"),
]

IMAGES, SHARDS = 48, 16


@pytest.fixture(scope="module")
def pictures() -> dict[str, bytes]:
    """Noise, which no file makes smaller: 25 KB each."""
    found = {}
    for number in range(IMAGES):
        data = io.BytesIO()
        Image.effect_noise((160, 160), number + 10).save(data, "png")
        found[f"i{number:02d}"] = data.getvalue()
    return found


@pytest.fixture(scope="module")
def sources(pictures, tmp_path_factory) -> dict[str, dict[str, bytes]]:
    """The same images as files of their own, in two tars, and in two Parquet files of four row groups each."""
    packed = {"photos": {f"{name}.png": data for name, data in pictures.items()}, "tars": {}, "parquet": {}}
    names = list(pictures)
    for file, chosen in {"a": names[: IMAGES // 2], "b": names[IMAGES // 2 :]}.items():
        members = [(f"{name}.png", pictures[name]) for name in chosen]
        packed["tars"][f"{file}.tar"] = write_tar(tmp_path_factory.mktemp("tars") / "a.tar", members).read_bytes()
        rows = io.BytesIO()
        columns = {"image_id": chosen, "image": [pictures[name] for name in chosen]}
        pq.write_table(pa.table(columns), rows, row_group_size=len(chosen) // 4)
        packed["parquet"][f"{file}.parquet"] = rows.getvalue()
    return packed


@pytest.fixture(scope="module")
def store(sources) -> Iterator[FarStore]:
    with emulator("s3") as near, far_away(near, 0) as far, pytest.MonkeyPatch.context() as patch:
        use(far.environment, patch)
        for source, files in sources.items():
            for name, data in files.items():
                Folder(far.address(source)).put(name, data)
        yield far


@pytest.fixture(scope="module")
def expected(store, imagepivot, tmp_path_factory) -> tuple[list[str], bytes]:
    """The features that a run in one process makes."""
    folder = tmp_path_factory.mktemp("expected") / "f"
    features(imagepivot, store.address("photos"), str(folder), "--workers", "1")
    return made_in(str(folder))


@contextmanager
def runner(kind: str, folder) -> Iterator[tuple[str, ...]]:
    """Yield the words of a command that choose where it runs; workers that start here see the store behind the proxy."""
    if kind == "processes":
        yield ("--workers", "3")
        return
    with clusters.job_service(folder) if kind == "job_service" else clusters.dask(folder) as cluster:
        yield ("--shared-disk", "--", *cluster.flags)


def features(imagepivot, images: str, output: str, *words: str) -> None:
    options = ("--extractor", MODEL, "--weights", "random:0", "--device", "cpu", "--shards", str(SHARDS))
    imagepivot("features", images, output, *options, *words)


def made_in(location: str) -> tuple[list[str], bytes]:
    dataset = open_dataset(location)
    return dataset.image_ids(), dataset.numpy().tobytes()


def listings(asked, prefix: str) -> int:
    return sum("list-type=2" in path and f"prefix={prefix}" in path for _, path, _ in asked.all)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("processes", "parquet"),
        ("job_service", "photos"),
        ("job_service", "tars"),
        ("job_service", "parquet"),
        ("dask", "parquet"),
    ],
)
def test_source_is_listed_once_and_read_at_most_twice(kind, source, store, sources, expected, imagepivot, tmp_path):
    size = sum(map(len, sources[source].values()))
    with runner(kind, tmp_path / "cluster") as words:
        store.asked()
        features(imagepivot, store.address(source), str(tmp_path / "f"), *words)
        asked = store.asked()
    read = asked.answered / size
    print(f"{kind}, {source}: {read:.2f} of the source's bytes, {len(asked)} requests, {listings(asked, source)} listings")
    assert listings(asked, source) == 3  # Is it a folder? Are there archives in it? These two ask for a page each.
    assert 1 <= read < {"photos": 1.1, "tars": 2.1, "parquet": 1.5}[source]
    assert made_in(str(tmp_path / "f")) == expected
    assert not [path.name for path in (tmp_path / "f").rglob("*") if ".tmp-" in path.name]


def test_copies_in_a_bucket_are_gone_with_the_commit(store, sources, expected, imagepivot, tmp_path):
    with clusters.job_service(tmp_path / "cluster") as cluster:
        store.asked()
        features(imagepivot, store.address("parquet"), store.address("f"), "--", *cluster.flags)
        asked = store.asked()
    copied = {path.partition("?")[0] for method, path, _ in asked.all if method == "PUT" and "/f/.images-" in path}
    assert len(copied) == 1  # All of it is less than a file of copies.
    assert any(method == "PUT" and "/f/.listing-" in path for method, path, _ in asked.all)
    assert listings(asked, "parquet") == 3
    assert made_in(store.address("f")) == expected
    assert [name for name in Folder(store.address("f")).names() if ".tmp-" in name or name == LOCK_NAME] == []
