import hashlib
import os
import random
import shutil
from pathlib import Path

import apache_beam as beam
import numpy as np
import pytest

from extractors import Description, ExtractorRequest, RegionOptions
from pipelines.features.dry_run import plan_dry_run
from pipelines.features.extraction import FeaturesPlan, extract_features
from pipelines.features.planning import list_images, plan_features
from pipelines.features.ref_chunks import listed_refs
from pipelines.features.transforms import ExtractFeatures
from pipelines.inputs.ids import read_skipped
from pipelines.inputs.images import listing
from pipelines.inputs.images.folders import ImagesInFolder
from pipelines.inputs.images.listing import Listing, ListingPart
from pipelines.inputs.images.opening import open_images
from pipelines.jobs import FeaturesJob
from pipelines.running import runner
from pipelines.running.execution import Execution
from pipelines.running.meter import Meter, counts_of
from schemas.dataset import open_dataset
from schemas.errors import DatasetError, InputError, UsageError
from schemas.keys import shard_of
from schemas.storage.folder import Folder
from schemas.writing.output import OutputDataset
from schemas.writing.shard_count import VECTOR_SHARD_BYTES, choose_shards
from schemas.writing.validation import validate
from tests.beam import IN_BEAM
from tests.builders import tree
from tests.fake_extractors import SPEC, ColourExtractor, picture
from tests.reuse import with_policy

ONE = Execution(workers=1)


class FakeExtractor(ColourExtractor):
    """Counts how often it is loaded."""

    loaded = 0

    def __init__(self, name: str, weights: str):
        super().__init__(describe(name, weights))
        FakeExtractor.loaded += 1

    def sample(self):
        return np.ones(3)  # Counts as no batch.


def describe(name: str, weights: str) -> Description:
    return Description(SPEC, {"name": name, "weights": weights, "precision": "fp32"})


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    """Puts the fake in place of all extractors; this reaches no worker process, so one worker runs here."""
    monkeypatch.setattr(ExtractorRequest, "describe", lambda request: describe(request.name, request.weights))
    monkeypatch.setattr(ExtractorRequest, "load", lambda request, device: FakeExtractor(request.name, request.weights))
    monkeypatch.setattr(FakeExtractor, "loaded", 0)


STAMP = 1_700_000_000 * 10**9


@pytest.fixture
def colours() -> dict[str, tuple[int, int, int]]:
    generator = random.Random(21)
    return {f"image{n:03d}": tuple(generator.randrange(256) for _ in range(3)) for n in range(40)}


@pytest.fixture
def images(colours, tmp_path) -> Path:
    (tmp_path / "images" / "more").mkdir(parents=True)
    for number, (name, colour) in enumerate(colours.items()):
        path = tmp_path / "images" / ("more" if number % 3 else "") / f"{name}.png"
        path.write_bytes(picture(*colour))
        os.utime(path, ns=(STAMP, STAMP))
    return tmp_path / "images"


def job_of(images, output, **more) -> FeaturesJob:
    request = ExtractorRequest("resnet50-pool")
    options = with_policy({"shards": 4, "device": "cpu", **more})
    return FeaturesJob(images=open_images(images), output=str(output), extractor=request, **options)


@pytest.fixture
def extracted(images, tmp_path) -> Path:
    """Folder ``f`` with the features of ``images``."""
    extract_features(job_of(images, tmp_path / "f"), ONE)
    return tmp_path / "f"


def fresh(images: Path, tmp_path: Path) -> dict[str, bytes]:
    """The files of a run into a new folder."""
    extract_features(job_of(images, tmp_path / "g"), ONE)
    return tree(tmp_path / "g")


@pytest.fixture
def seen(monkeypatch) -> list[int]:
    """The sizes of the batches that go through the model."""
    sizes, extract = [], FakeExtractor.extract
    monkeypatch.setattr(FakeExtractor, "extract", lambda self, batch: sizes.append(len(batch)) or extract(self, batch))
    return sizes


def test_each_image_has_its_feature_in_the_shard_of_its_id_and_the_model_is_loaded_once(images, colours, tmp_path):
    manifest = extract_features(job_of(images, tmp_path / "f", batch_size=3), ONE)
    assert FakeExtractor.loaded == 1
    dataset = open_dataset(tmp_path / "f")
    for number in range(4):
        expected = [
            {"image_id": name, "feature": [float(part) for part in colour]}
            for name, colour in sorted(colours.items())
            if shard_of(name, 4) == number
        ]
        assert dataset.shard(number).to_pylist() == expected
    assert validate(tmp_path / "f") == []
    assert (manifest.rows, manifest.failed) == (40, 0)
    assert not (tmp_path / "f" / "_failures").exists()
    assert manifest.parameters["extractor"] == {"name": "resnet50-pool", "weights": "default", "precision": "fp32"}
    assert manifest.parameters["feature"] == {"name": "fake", "shape": [3], "dtype": "float32", "source": ""}
    whole = Listing.of(open_images(images).refs(), 1)
    content = sum(
        int(hashlib.sha256(f"{name}\0{hashlib.sha256(picture(*colour)).hexdigest()}".encode()).hexdigest(), 16)
        for name, colour in colours.items()
    )
    digests = {"listing": whole.shards[0], "content": f"{content % 2**256:064x}"}
    assert manifest.statistics == {"images": 40, "failed": 0, **digests}


@pytest.mark.slow
def test_one_process_writes_the_bytes_of_beam(images, tmp_path, monkeypatch):
    (images / "bad.png").write_bytes(b"")
    pipelines, run = [], runner.run_pipeline
    monkeypatch.setattr(runner, "run_pipeline", lambda *arguments, **options: pipelines.append(1) or run(*arguments, **options))
    made = {}
    for name, execution in (("here", ONE), ("beam", IN_BEAM)):
        extract_features(job_of(images, tmp_path / name), execution)
        made[name] = tree(tmp_path / name)
        assert len(pipelines) == (name == "beam")
        (tmp_path / name / "part-00002-of-00004.parquet").unlink()
        extract_features(job_of(images, tmp_path / name), execution)  # Makes the shard that is missing.
        assert tree(tmp_path / name) == made[name]
    assert made["here"] == made["beam"]
    assert len(pipelines) == 2


@pytest.mark.slow
def test_listing_in_parts_gives_the_same_bytes(images, tmp_path, monkeypatch):
    extract_features(job_of(images, tmp_path / "one"), ONE)
    monkeypatch.setattr(listing, "_PART_REFS", 15)
    sizes = []
    listed = ListingPart.refs

    def refs(part, source):
        part_refs = list(listed(part, source))
        sizes.append(len(part_refs))
        return part_refs

    monkeypatch.setattr(ListingPart, "refs", refs)
    extract_features(job_of(images, tmp_path / "parts"), Execution(beam_flags=("--runner=BundleBasedDirectRunner",)))
    assert tree(tmp_path / "parts") == tree(tmp_path / "one")
    assert sorted(sizes) == [10, 15, 15]


@pytest.mark.parametrize("execution", [ONE, IN_BEAM])
def test_failure_in_the_middle_keeps_finished_shards_and_nothing_half_written(images, tmp_path, monkeypatch, execution):
    extract, calls = FakeExtractor.extract, []

    def fail_later(extractor, batch):
        calls.append(len(batch))
        if len(calls) > 5:
            raise MemoryError("no more")
        return extract(extractor, batch)

    with monkeypatch.context() as patch:
        patch.setattr(FakeExtractor, "extract", fail_later)
        with pytest.raises(Exception, match="no more"):
            extract_features(job_of(images, tmp_path / "f", batch_size=3), execution)
    left = sorted(path.name for path in (tmp_path / "f").rglob("*.parquet"))
    assert left == ["part-00000-of-00004.parquet"]
    assert not list((tmp_path / "f").glob("*.tmp*"))
    assert extract_features(job_of(images, tmp_path / "f"), execution).rows == 40


def test_failures_are_rows_of_their_own_and_the_meter_counts_them(images, colours, tmp_path, monkeypatch):
    monkeypatch.setattr("pipelines.running.meter._WRITE_SECONDS", -1.0)
    (tmp_path / "meter").mkdir()
    meter = Meter(str(tmp_path / "meter"))
    (images / "empty.png").write_bytes(b"")
    (images / "page.jpg").write_bytes(b"<html>not found</html>")
    (images / "dangling.jpg").symlink_to(images / "none")
    manifest = extract_features(job_of(images, tmp_path / "f"), ONE, meter)
    assert {name: meter.total()[name] for name in ("images", "failed")} == {"images": 43, "failed": 3}
    failures = {row["key"]: row for row in open_dataset(tmp_path / "f").failures().to_pylist()}
    assert {key: (row["uri"], row["stage"], row["reason"]) for key, row in failures.items()} == {
        "empty": ("empty.png", "decode", "empty"),
        "page": ("page.jpg", "decode", "not_an_image"),
        "dangling": ("dangling.jpg", "read", "unreadable"),
    }
    assert manifest.failure_reasons == {"empty": 1, "not_an_image": 1, "unreadable": 1}
    assert manifest.rows == len(colours)
    assert str(images) not in "".join(row["message"] for row in failures.values())
    assert validate(tmp_path / "f") == []


def replace_image(path: Path, colour: tuple[int, int, int]) -> None:
    """Put another picture of the same size in place of one, a second later."""
    size = path.stat().st_size
    path.write_bytes(picture(*colour).ljust(size, b"\0"))
    assert path.stat().st_size == size
    os.utime(path, ns=(STAMP + 10**9, STAMP + 10**9))


def test_update_detects_a_replaced_image_of_the_same_size(images, extracted, tmp_path):
    before = tree(extracted)
    replace_image(images / "image000.png", (1, 2, 3))
    with pytest.raises(DatasetError, match=r"in 1 of 4 shards images are new, gone, .* Give --update"):
        extract_features(job_of(images, tmp_path / "f"), ONE)
    assert tree(extracted) == before
    extract_features(job_of(images, tmp_path / "f", update=True), ONE)
    assert open_dataset(extracted).get("image000")["feature"].tolist() == [1, 2, 3]
    assert tree(extracted) == fresh(images, tmp_path)


def test_overwrite_makes_everything_again_though_nothing_seems_to_have_changed(images, extracted, tmp_path):
    path = images / "image000.png"
    replace_image(path, (1, 2, 3))
    os.utime(path, ns=(STAMP, STAMP))
    extract_features(job_of(images, tmp_path / "f"), ONE)
    assert open_dataset(extracted).get("image000")["feature"].tolist() != [1, 2, 3], "neither size nor time has changed"
    extract_features(job_of(images, tmp_path / "f", overwrite=True), ONE)
    assert open_dataset(extracted).get("image000")["feature"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("record", [True, False])
def test_content_is_compared_on_request(images, extracted, tmp_path, seen, record):
    if not record:
        shutil.rmtree(extracted / ".records")
    for path in images.rglob("*.png"):
        os.utime(path, ns=(STAMP + 5, STAMP + 5))
    extract_features(job_of(images, tmp_path / "f", update=True, check_content=True), ONE)
    assert seen == [], "all bytes are the same"
    extract_features(job_of(images, tmp_path / "f"), ONE)  # The new times are on record: nothing is refused.
    path = images / "image000.png"
    replace_image(path, (1, 2, 3))
    os.utime(path, ns=(STAMP + 5, STAMP + 5))
    extract_features(job_of(images, tmp_path / "f", update=True), ONE)
    assert seen == [], "nothing but the bytes has changed"
    extract_features(job_of(images, tmp_path / "f", update=True, check_content=True), ONE)
    assert seen == [1]
    assert tree(extracted) == fresh(images, tmp_path)


def test_without_records_images_are_told_by_their_sizes(images, extracted, tmp_path):
    shutil.rmtree(extracted / ".records")
    for path in images.rglob("*.png"):
        os.utime(path, ns=(STAMP + 5, STAMP + 5))
    before = open_dataset(extracted).manifest
    assert extract_features(job_of(images, tmp_path / "f"), ONE) == before
    (images / "new.png").write_bytes(picture(1, 2, 3))
    extract_features(job_of(images, tmp_path / "f", update=True), ONE)
    extract_features(job_of(images, tmp_path / "g"), ONE)
    for folder in (extracted, tmp_path / "g"):
        shutil.rmtree(folder / ".records")
    assert tree(extracted) == tree(tmp_path / "g")


@pytest.mark.slow
@pytest.mark.parametrize("update", [{"keep_removed": True}, {"only_add": True}])
def test_update_keep_removed_keeps_rows(images, extracted, tmp_path, update):
    old = open_dataset(extracted)
    expected = {image_id: old.get(image_id)["feature"].tolist() for image_id in old.image_ids()}
    (images / "image000.png").unlink()
    replace_image(images / "image003.png", (1, 2, 3))
    (images / "new.png").write_bytes(picture(4, 5, 6))
    manifest = extract_features(job_of(images, tmp_path / "f", update=True, **update), ONE)
    expected["new"] = [4, 5, 6]
    if "only_add" not in update:
        expected["image003"] = [1, 2, 3]
    new = open_dataset(extracted)
    assert {image_id: new.get(image_id)["feature"].tolist() for image_id in new.image_ids()} == expected
    assert (manifest.statistics["images"], validate(extracted)) == (41, [])
    before = tree(extracted)
    assert extract_features(job_of(images, tmp_path / "f", update=True, **update), ONE) == manifest
    assert tree(extracted) == before
    extract_features(job_of(images, tmp_path / "f", update=True), ONE)
    assert tree(extracted) == fresh(images, tmp_path)


def test_update_retries_unreadable_images(images, tmp_path, monkeypatch):
    read = ImagesInFolder.read

    def refuse(self, ref):
        if ref.image_id == "image000":
            raise PermissionError(13, "Permission denied")
        return read(self, ref)

    monkeypatch.setattr(ImagesInFolder, "read", refuse)
    assert extract_features(job_of(images, tmp_path / "f"), ONE).failure_reasons == {"unreadable": 1}
    monkeypatch.setattr(ImagesInFolder, "read", read)
    extract_features(job_of(images, tmp_path / "f", update=True), ONE)
    assert tree(tmp_path / "f") == fresh(images, tmp_path)


@pytest.mark.parametrize(
    ("pattern", "part"), [("part-*", np.float32([255, 0, 0]).tobytes()), ("_failures/*", b"bytes")], ids=["shard", "failures"]
)
def test_rows_of_a_damaged_file_are_not_copied(images, tmp_path, pattern, part):
    for name, data in (("red", picture(255, 0, 0)), ("bad", b"")):
        (images / f"{name}.png").write_bytes(data)
    extract_features(job_of(images, tmp_path / "f", shards=1), ONE)
    [path] = (tmp_path / "f").glob(pattern)
    data = bytearray(path.read_bytes())
    data[data.index(part)] ^= 1
    path.write_bytes(data)
    (images / "new.png").write_bytes(picture(1, 2, 3))
    extract_features(job_of(images, tmp_path / "f", shards=1, update=True), ONE)
    extract_features(job_of(images, tmp_path / "g", shards=1), ONE)
    assert tree(tmp_path / "f") == tree(tmp_path / "g")


def test_update_extracts_new_images_and_equals_a_fresh_run(images, colours, tmp_path, seen):
    (images / "bad.png").write_bytes(b"")
    extract_features(job_of(images, tmp_path / "f", batch_size=3), ONE)
    inodes = {path.name: path.stat().st_ino for path in (tmp_path / "f").glob("part-*")}
    added = {"aaa": (1, 2, 3), "image0205": (4, 5, 6), "zzz": (7, 8, 9)}
    for name, colour in added.items():
        (images / f"{name}.png").write_bytes(picture(*colour))
    seen.clear()
    manifest = extract_features(job_of(images, tmp_path / "f", update=True), ONE)
    assert sum(seen) == 3, "only the new ones went through the model"
    assert (manifest.rows, manifest.failed) == (43, 1)
    touched = {f"part-{shard_of(name, 4):05d}-of-00004.parquet" for name in added}
    kept = {path.name for path in (tmp_path / "f").glob("part-*") if path.stat().st_ino == inodes[path.name]}
    assert kept == set(inodes) - touched
    assert kept, "a finished shard without new images stays as it is"
    assert tree(tmp_path / "f") == fresh(images, tmp_path)
    assert validate(tmp_path / "f") == []


def test_retry_failed_reads_only_failed_images(images, tmp_path, monkeypatch):
    for name in ("bad", "worse"):
        (images / f"{name}.png").write_bytes(b"")
    assert extract_features(job_of(images, tmp_path / "f"), ONE).failed == 2
    good = picture(9, 8, 7)
    monkeypatch.setattr(
        "pipelines.inputs.images.folders.ImagesInFolder.read", lambda self, ref: good if ref.image_id == "bad" else b""
    )
    assert extract_features(job_of(images, tmp_path / "f"), ONE).failed == 2, "without the option nothing is tried again"
    manifest = extract_features(job_of(images, tmp_path / "f", retry_failed=True), ONE)
    assert (manifest.rows, manifest.failed) == (41, 1)
    assert open_dataset(tmp_path / "f").get("bad")["feature"].tolist() == [9.0, 8.0, 7.0]
    assert open_dataset(tmp_path / "f").failures()["key"].to_pylist() == ["worse"]
    assert validate(tmp_path / "f") == []


def test_policy_contradicting_options_are_refused(images, tmp_path):
    with pytest.raises(UsageError, match=r"--overwrite replaces the dataset.*give one of them"):
        job_of(images, tmp_path / "f", overwrite=True, update=True)


@pytest.mark.slow
def test_transform_gives_the_numbers_of_its_shards_and_counts(images, tmp_path):
    (images / "empty.png").write_bytes(b"")
    job = job_of(images, tmp_path / "f")
    description = job.extractor.describe()
    parameters = {"feature": description.spec.to_json(), "extractor_fingerprint": description.fingerprint}
    output = OutputDataset(Folder(str(tmp_path / "f")), "features", parameters, shards=4)
    pipeline = beam.Pipeline(runner=beam.runners.portability.fn_api_runner.FnApiRunner())
    shards = pipeline | ExtractFeatures(job=job, output=output, finished=frozenset({1}))
    _ = shards | beam.combiners.ToList() | beam.Map(lambda found: (tmp_path / "found").write_text(str(sorted(found))))
    result = pipeline.run()
    result.wait_until_finish()
    assert (tmp_path / "found").read_text() == "[0, 2, 3]"
    counters = counts_of(result.metrics().query()["counters"])
    here = [name for name in (*[f"image{n:03d}" for n in range(40)], "empty") if shard_of(name, 4) != 1]
    assert (counters["images"], counters["shards"]) == (len(here), 3)
    assert counters["failed"] == counters["failed_empty"] == ("empty" in here)
    assert counters["failed_truncated"] == 0
    assert counters["bytes_written"] == sum(path.stat().st_size for path in (tmp_path / "f").glob("part-*"))
    assert {"decode_msec", "forward_msec", "wait_msec"} <= set(counters)


def test_unsupported_device_is_refused_before_replacing(images, extracted):
    before = tree(extracted)
    with pytest.raises(UsageError, match="is not on this host"):
        extract_features(job_of(images, extracted, shards=3, overwrite=True, device="cuda:7"), ONE)
    assert tree(extracted) == before


def test_worker_with_other_weights_than_planned_writes_nothing(images, tmp_path, monkeypatch):
    monkeypatch.setattr(ExtractorRequest, "load", lambda request, device: FakeExtractor(request.name, "1"))
    with pytest.raises(InputError, match="a worker's extractor differs from the launcher's \\(weights 'default'"):
        extract_features(job_of(images, tmp_path / "f"), ONE)
    assert not list((tmp_path / "f").glob("part-*"))


def test_changed_listing_is_an_error_and_the_next_run_resumes(images, extracted, tmp_path):
    """The launcher and a worker both list the images: a shard that lacks some must not count as whole."""
    job = job_of(images, tmp_path / "g")
    listing = list_images(job)
    (images / "image003.png").rename(tmp_path / "image003.png")
    shard = shard_of("image003", 4)
    with pytest.raises(InputError, match=rf"changed during the run: shard {shard} now has \d+ images.*finished shards"):
        FeaturesPlan(job, ONE, listing).run()
    assert not (tmp_path / "g" / "_manifest.json").exists()
    (tmp_path / "image003.png").rename(images / "image003.png")
    extract_features(job, ONE)
    assert tree(tmp_path / "g") == tree(extracted)


def test_folder_removed_while_reading_is_an_error(images, tmp_path, monkeypatch):
    read, left = ImagesInFolder.read, iter(range(25))

    def vanish(self, ref):
        if next(left, None) is None and images.exists():
            images.rename(tmp_path / "away")
        return read(self, ref)

    with monkeypatch.context() as patch:
        patch.setattr(ImagesInFolder, "read", vanish)
        with pytest.raises(InputError, match=r"disappeared during the run: restore them.*the same command"):
            extract_features(job_of(images, tmp_path / "f"), ONE)
    assert {path.name for path in (tmp_path / "f").glob("*")} - {".records"} < {
        f"part-0000{n}-of-00004.parquet" for n in range(4)
    }
    (tmp_path / "away").rename(images)
    assert extract_features(job_of(images, tmp_path / "f"), ONE).failed == 0
    assert validate(tmp_path / "f") == []


# --- skipped images --------------------------------------------------------------------------------------------------


SKIPPED = ("image003", "image011")


@pytest.fixture
def without_skipped(images, tmp_path) -> dict[str, bytes]:
    """The dataset of a folder without the skipped images."""
    shutil.copytree(images, tmp_path / "fewer")
    for image_id in SKIPPED:
        next((tmp_path / "fewer").rglob(f"{image_id}.png")).unlink()
    return fresh(tmp_path / "fewer", tmp_path)


@pytest.mark.parametrize("flags", [(), ("--shared-disk", "--", "--runner=FlinkRunner", "--job_endpoint=localhost:1")])
def test_command_takes_ids_and_a_file_and_names_unknown_ones(call, images, tmp_path, without_skipped, monkeypatch, flags):
    local = runner.run_pipeline
    monkeypatch.setattr(runner, "run_pipeline", lambda build, _execution, **_: local(build, IN_BEAM))
    (tmp_path / "skip.txt").write_bytes("\ufeffimage011\r\n\r\nä b,c\r\n".encode())
    options = ("--device", "cpu", "--shards", "4", "--skip", f"image003,@{tmp_path / 'skip.txt'}")
    code, out, err = call("features", images, tmp_path / "f", *options, *flags)
    assert (code, "38 rows in 4 shards" in out) == (0, True), err
    assert f"--skip names 1 image that '{images}' lacks, e.g. 'ä b,c'" in err
    assert tree(tmp_path / "f") == without_skipped
    with pytest.raises(InputError, match=r"absent.txt' does not exist: check the path"):
        read_skipped((f"@{tmp_path / 'absent.txt'}",))


def test_run_that_an_image_ended_goes_on_without_it(images, colours, tmp_path, without_skipped, monkeypatch):
    last, seen = shard_of("image003", 4), []
    preprocess = FakeExtractor.preprocess

    def crash(self, image):
        seen.append(image.getpixel((0, 0)))
        if seen[-1] == colours["image003"]:
            raise MemoryError
        return preprocess(self, image)

    monkeypatch.setattr(FakeExtractor, "preprocess", crash)
    with pytest.raises(MemoryError):
        extract_features(job_of(images, tmp_path / "f", skip=("image011",)), ONE)
    finished = {f"part-0000{shard}-of-00004.parquet" for shard in range(last)}
    assert finished == {path.name for path in (tmp_path / "f").glob("*.parquet")}
    seen.clear()
    extract_features(job_of(images, tmp_path / "f", skip=SKIPPED), ONE)
    assert tree(tmp_path / "f") == without_skipped
    assert set(seen) == {colours[name] for name in {*colours} - {*SKIPPED} if shard_of(name, 4) >= last}


def test_image_that_the_dataset_has_needs_an_update_which_drops_or_keeps_it(images, extracted):
    complete = tree(extracted)
    with pytest.raises(DatasetError, match=r"was made from other images: .* Give --update"):
        extract_features(job_of(images, extracted, skip=SKIPPED), ONE)
    assert tree(extracted) == complete
    for keep in ("keep_removed", "only_add"):
        extract_features(job_of(images, extracted, skip=SKIPPED, update=True, **{keep: True}), ONE)
        assert len(open_dataset(extracted).image_ids()) == 40
    fingerprint = open_dataset(extracted).fingerprint
    extract_features(job_of(images, extracted, skip=SKIPPED, update=True), ONE)
    assert not {*SKIPPED} & {*open_dataset(extracted).image_ids()}
    assert open_dataset(extracted).fingerprint == fingerprint
    extract_features(job_of(images, extracted, update=True), ONE)
    assert {name: data for name, data in tree(extracted).items() if name.endswith("parquet")} == {
        name: data for name, data in complete.items() if name.endswith("parquet")
    }


def test_listings_of_any_kind_and_the_dry_run_leave_the_images_out(images, colours, tmp_path):
    job = job_of(images, tmp_path / "f", skip=SKIPPED).opened()
    listing = list_images(job, keep=True)
    assert listing.count == plan_dry_run(job, listing).images == 38
    shared = listing.cached.share(Folder(str(tmp_path / "f")))
    (tmp_path / "f" / shared[0].name).unlink()  # Then the images are listed again.
    for kept in (listing, listing.cached.parts(), shared, ()):
        assert sorted(ref.image_id for ref in listed_refs(job, kept)) == sorted({*colours} - {*SKIPPED})


# --- the number of shards --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("most", "shards"), [(512 << 20, 16), (20 * 8192, 16), (8192, 64), (2 * 8192, 32)])
def test_number_of_shards_follows_from_images_and_width(images, tmp_path, monkeypatch, most, shards):
    monkeypatch.setattr("pipelines.features.planning.VECTOR_SHARD_BYTES", most)
    job = job_of(images, tmp_path / "f", shards="auto")
    assert list_images(job) == Listing.of(job.images.refs(), shards)
    assert plan_features(job, list_images(job)).shards == shards


@pytest.mark.parametrize(
    ("request_", "size", "shards"),
    [
        (ExtractorRequest("resnet50-pool"), 2048 * 4, 16),
        (ExtractorRequest("faster-rcnn-36", regions=RegionOptions(max_regions=100)), 100 * 2048 * 4, 64),
        (ExtractorRequest("resnet152-grid", dtype="float16"), 196 * 2048 * 2, 64),
        (ExtractorRequest("vgg19-10crop", keep_crops=True), 10 * 4096 * 4, 16),
    ],
)
def test_types_and_wide_features_decide_the_number_of_shards(request_, size, shards):
    bytes_ = FeaturesJob(images=None, output="f", extractor=request_).feature_bytes()
    assert bytes_ == size
    assert choose_shards(31_783 * bytes_, VECTOR_SHARD_BYTES) == shards


def test_resumed_and_updated_runs_keep_the_shard_count(images, extracted, tmp_path):
    (extracted / "_manifest.json").unlink()
    next(extracted.glob("part-*")).unlink()
    assert len(extract_features(job_of(images, extracted, shards="auto"), ONE).shards) == 4
    (images / "new.png").write_bytes(picture(1, 2, 3))
    assert len(extract_features(job_of(images, extracted, shards="auto", update=True), ONE).shards) == 4
    like = extract_features(job_of(images, tmp_path / "g", shards=f"like:{extracted}"), ONE)
    assert like == open_dataset(extracted).manifest
    assert len(extract_features(job_of(images, extracted, shards="auto", overwrite=True), ONE).shards) == 16


def test_oversized_shards_are_refused_before_writing(images, tmp_path, monkeypatch):
    monkeypatch.setattr(FeaturesJob, "feature_bytes", lambda job: 1 << 30)
    message = r"40 GiB in 4 shards make 10 GiB each, expected at most 4, .*give --shards 10 or more"
    with pytest.raises(UsageError, match=message):
        extract_features(job_of(images, tmp_path / "f"), ONE)
    assert not (tmp_path / "f").exists()
