"""Images in row groups make the same dataset wherever they are read, and each row group is read once by all workers together."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from extractors import ExtractorRequest
from pipelines.features import stage_images
from pipelines.features.extraction import extract_features
from pipelines.features.ref_chunks import chunk_refs, from_chunks
from pipelines.features.stage_images import row_group_batches, staging_area
from pipelines.inputs.images.archives import ImagesInParquet
from pipelines.inputs.images.base import ImageRef
from pipelines.inputs.images.opening import open_images
from pipelines.jobs import FeaturesJob
from pipelines.running.execution import Execution
from schemas.keys import shard_of
from schemas.storage.folder import Folder
from schemas.writing.reuse_policy import ArrayTask
from tests.builders import tree
from tests.fake_extractors import picture, use_colours
from tests.reuse import with_policy

HERE, TWO = Execution(workers=1), Execution(workers=2)
ELSEWHERE = Execution(beam_flags=("--runner=BundleBasedDirectRunner",))
"""Takes the way of runners on other machines, in this process."""
SHARDS = 4
GROUPS = {("a.parquet", 0): 10, ("a.parquet", 1): 10, ("a.parquet", 2): 4, ("b.parquet", 0): 10, ("b.parquet", 1): 2}


@pytest.fixture(autouse=True)
def colours(monkeypatch):
    use_colours(monkeypatch)


@pytest.fixture(params=[TWO, ELSEWHERE], ids=["two workers", "beam"])
def several(request, monkeypatch) -> Execution:
    """An execution with several workers, whose functions are called in this process, where reads are counted."""
    monkeypatch.setattr("pipelines.running.job.open_workers", lambda count: nullcontext(map))
    return request.param


def image(number: int) -> bytes | None:
    return {5: None, 6: b"no image"}.get(number, picture(number, 3 * number % 256, 7))


def write(folder: Path, name: str, numbers: range) -> None:
    folder.mkdir(exist_ok=True)
    columns = {"image_id": [f"i{number}" for number in numbers], "image": [image(number) for number in numbers]}
    pq.write_table(pa.table(columns), folder / name, row_group_size=10)


@pytest.fixture
def images(tmp_path) -> Path:
    write(tmp_path / "in", "a.parquet", range(24))
    write(tmp_path / "in", "b.parquet", range(24, 36))
    return tmp_path / "in"


@pytest.fixture
def listed(monkeypatch) -> list[str]:
    """The files whose ids were read, one by one."""
    names, refs_in = [], ImagesInParquet._refs_in

    def noted(self, name, skipped):
        names.append(name)
        return refs_in(self, name, skipped)

    monkeypatch.setattr(ImagesInParquet, "_refs_in", noted)
    return names


def job_of(images: Path, output: Path, **more) -> FeaturesJob:
    request = ExtractorRequest("resnet50-pool", weights="random:0")
    return FeaturesJob(open_images(images), str(output), request, device="cpu", **with_policy({"shards": SHARDS, **more}))


@pytest.mark.slow
def test_each_row_group_is_read_once_and_the_bytes_are_those_of_one_process(
    several, images, tmp_path, read, listed, monkeypatch
):
    extract_features(job_of(images, tmp_path / "here"), HERE)
    assert read == dict.fromkeys(GROUPS, 1)
    assert listed == ["a.parquet", "b.parquet"] * 2  # On this machine a listing costs little.
    read.clear()
    listed.clear()
    monkeypatch.setattr(ImagesInParquet, "read", lambda self, ref: pytest.fail(f"{ref.uri} was read by itself"))
    manifest = extract_features(job_of(images, tmp_path / "there"), several)
    assert (manifest.rows, manifest.failed) == (34, 2)
    assert read == dict.fromkeys(GROUPS, 1)
    assert listed == ["a.parquet", "b.parquet"] * (1 if several is ELSEWHERE else 2)
    assert tree(tmp_path / "there") == tree(tmp_path / "here")


@pytest.mark.cluster
def test_update_reads_only_row_groups_of_new_images(several, images, tmp_path, read):
    extract_features(job_of(images, tmp_path / "there"), several)
    read.clear()
    extract_features(job_of(images, tmp_path / "there", update=True), several)
    assert read == {("a.parquet", 0): 1}  # Row 5 could not be read, and is tried again.
    read.clear()
    write(images, "c.parquet", range(40, 52))
    extract_features(job_of(images, tmp_path / "there", update=True, only_add=True), several)
    assert read == {("c.parquet", 0): 1, ("c.parquet", 1): 1}
    read.clear()
    extract_features(job_of(images, tmp_path / "there", retry_failed=True), several)
    assert read == {("a.parquet", 0): 1}  # Rows 5 and 6 have failed.
    read.clear()
    extract_features(job_of(images, tmp_path / "there", update=True, check_content=True), several)
    assert set(read.values()) == {1}
    assert len(read) == len(GROUPS) + 2
    extract_features(job_of(images, tmp_path / "fresh"), HERE)
    assert tree(tmp_path / "there") == tree(tmp_path / "fresh")


@pytest.mark.slow
def test_resumed_run_reads_only_missing_images(several, images, tmp_path, read):
    job = job_of(images, tmp_path / "f")
    extract_features(job, several)
    before = tree(tmp_path / "f")
    read.clear()
    (tmp_path / "f" / "part-00001-of-00004.parquet").unlink()
    (tmp_path / "f" / ".images-0-0.tmp-0").write_bytes(b"left by a run that was killed")
    (tmp_path / "f" / ".listing-0.tmp-0").write_bytes(b"likewise")
    extract_features(job, several)
    assert set(read.values()) == {1}
    assert tree(tmp_path / "f") == before


@pytest.mark.slow
def test_failed_run_leaves_no_staged_images(several, images, tmp_path, monkeypatch):
    def fail(*arguments, **options):
        assert list((tmp_path / "f").glob(".images-*"))
        raise ZeroDivisionError("it has failed")

    with monkeypatch.context() as patch:
        patch.setattr("pipelines.features.shard_worker.write_feature_shard", fail)
        with pytest.raises(Exception, match="it has failed"):
            extract_features(job_of(images, tmp_path / "f"), several)
    assert list((tmp_path / "f").rglob("*")) == []
    assert extract_features(job_of(images, tmp_path / "f"), several).rows == 34


def test_row_group_batches_hold_whole_groups(images, monkeypatch):
    source = open_images(images)
    refs = list(source.refs())
    assert {number for _, (number, _) in row_group_batches(source, refs, SHARDS, skip_shards=frozenset(), folder=None)} == {0}
    monkeypatch.setattr(stage_images, "_MIN_BATCH_REFS", 12)
    monkeypatch.setattr(stage_images, "_SHARD_REFS", 1)
    found: dict[int, set[ImageRef]] = {}
    for shard, (number, piece) in row_group_batches(source, refs, SHARDS, skip_shards=frozenset({2}), folder=None):
        assert {shard_of(ref.image_id, SHARDS) for ref in from_chunks([piece])[0]} == {shard}
        found.setdefault(number, set()).update(from_chunks([piece])[0])
    parts = refs[:20], refs[20:34], refs[34:]
    assert found == {number: {ref for ref in part if shard_of(ref.image_id, SHARDS) != 2} for number, part in enumerate(parts)}


def test_staging_area_depends_on_runner_and_output(images, tmp_path, monkeypatch):
    (tmp_path / "photo").mkdir()
    (tmp_path / "photo" / "a.png").write_bytes(picture(1, 3, 7))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    local, store = Folder(str(tmp_path / "f")), Folder("gs://bucket/f")

    def place(execution, output, images=images, **more) -> str | None:
        with staging_area(job_of(images, tmp_path / "f", **more), execution, output) as copies:
            return copies and copies.folder.location

    for execution in (HERE, TWO, ELSEWHERE):
        assert place(execution, store, tmp_path / "photo") is None
    for execution, more in ((HERE, {}), (TWO, {}), (TWO, {"task": ArrayTask(0, 2)}), (ELSEWHERE, {})):
        assert place(execution, local, **more) == local.location
    assert place(ELSEWHERE, store) == store.location
    for more in ({}, {"task": ArrayTask(0, 2)}):
        assert {Path(place(execution, store, **more)).parent for execution in (HERE, TWO)} == {tmp_path / "tmp"}
    assert list((tmp_path / "tmp").iterdir()) == []


# --- references --------------------------------------------------------------------------------------------------------


REF_SHARDS = 7


def reference(number: int) -> ImageRef:
    name = f"année/{number:06d}-猫"
    return ImageRef(name, f"{name}.jpg", 10_000 + number, number % 3 - 1, f"{1_700_000_000 + number}.5" if number % 2 else "")


@pytest.fixture(params=[True, False], ids=["file", "bytes"])
def chunk_folder(request, tmp_path) -> str | None:
    return str(tmp_path) if request.param else None


@pytest.mark.cluster
@pytest.mark.parametrize("count", [0, 1, 100, 140_000])
def test_each_shard_gets_its_references_in_their_order(chunk_folder, count):
    refs = [reference(number) for number in range(count)]
    by_shard: dict[int, list] = {}
    for shard, piece in chunk_refs(iter(refs), REF_SHARDS, folder=chunk_folder):
        by_shard.setdefault(shard, []).append(pickle.loads(pickle.dumps(piece)))  # Workers are other processes.
    found = {shard: from_chunks(pieces)[0] for shard, pieces in by_shard.items()}
    expected: dict[int, list[ImageRef]] = {}
    for ref in refs:
        expected.setdefault(shard_of(ref.image_id, REF_SHARDS), []).append(ref)
    assert found == expected
    assert from_chunks([]) == ([], [])
