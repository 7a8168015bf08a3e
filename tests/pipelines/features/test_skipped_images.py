"""Images that are left out count as not there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipelines.features.dry_run import plan_dry_run
from pipelines.features.extraction import extract_features
from pipelines.features.planning import list_images
from pipelines.features.ref_chunks import listed_refs
from pipelines.inputs.ids import read_skipped
from pipelines.jobs import FeaturesJob
from pipelines.running import runner
from pipelines.running.execution import Execution
from schemas.dataset import open_dataset
from schemas.errors import DatasetError, InputError
from schemas.keys import shard_of
from schemas.storage.folder import Folder
from tests.beam import IN_BEAM
from tests.builders import tree
from tests.fake_extractors import ColourExtractor, picture, use_colours
from tests.reuse import with_policy

ONE = Execution(workers=1)
SKIPPED = ("i03", "i11")


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    use_colours(monkeypatch)


@pytest.fixture
def images(tmp_path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(20):
        (folder / f"i{number:02d}.png").write_bytes(picture(number, 0, 0))
    return folder


@pytest.fixture
def expected(images, tmp_path) -> dict[str, bytes]:
    """The dataset of a folder without the images."""
    shutil.copytree(images, tmp_path / "fewer")
    for image_id in SKIPPED:
        (tmp_path / "fewer" / f"{image_id}.png").unlink()
    extract_features(job_of(tmp_path / "fewer", tmp_path / "expected"), ONE)
    return tree(tmp_path / "expected")


def job_of(images: Path, output: Path, **options) -> FeaturesJob:
    return FeaturesJob(str(images), str(output), **with_policy({"shards": 4, "device": "cpu", **options}))


@pytest.mark.parametrize("flags", [(), ("--shared-disk", "--", "--runner=FlinkRunner", "--job_endpoint=localhost:1")])
def test_command_takes_ids_and_a_file_and_names_unknown_ones(call, images, tmp_path, expected, monkeypatch, flags):
    local = runner.run_pipeline
    monkeypatch.setattr(runner, "run_pipeline", lambda build, _execution, **_: local(build, IN_BEAM))
    (tmp_path / "skip.txt").write_bytes("\ufeffi11\r\n\r\nä b,c\r\n".encode())
    options = ("--device", "cpu", "--shards", "4", "--skip", f"i03,@{tmp_path / 'skip.txt'}")
    code, out, err = call("features", images, tmp_path / "f", *options, *flags)
    assert (code, "18 rows in 4 shards" in out) == (0, True), err
    assert f"--skip names 1 image that '{images}' lacks, e.g. 'ä b,c'" in err
    assert tree(tmp_path / "f") == expected
    with pytest.raises(InputError, match=r"absent.txt' does not exist: check the path"):
        read_skipped((f"@{tmp_path / 'absent.txt'}",))


def test_run_that_an_image_ended_goes_on_without_it(images, tmp_path, expected, monkeypatch):
    last = shard_of("i03", 4)
    preprocess = ColourExtractor.preprocess

    def crash(self, image):
        if image.getpixel((0, 0)) == (3, 0, 0):
            raise MemoryError
        return preprocess(self, image)

    monkeypatch.setattr(ColourExtractor, "preprocess", crash)
    with pytest.raises(MemoryError):
        extract_features(job_of(images, tmp_path / "f", skip=("i11",)), ONE)
    finished = {f"part-0000{shard}-of-00004.parquet" for shard in range(last)}
    assert finished == {name for name in Folder(str(tmp_path / "f")).names() if name.endswith(".parquet") and "/" not in name}
    seen = []
    monkeypatch.setattr(
        ColourExtractor, "preprocess", lambda self, image: seen.append(image.getpixel((0, 0))[0]) or preprocess(self, image)
    )
    extract_features(job_of(images, tmp_path / "f", skip=SKIPPED), ONE)
    assert tree(tmp_path / "f") == expected
    todo = {number for number in range(1, 20) if number not in (3, 11) and shard_of(f"i{number:02d}", 4) >= last}
    assert {*seen} - {0} == todo  # The first pixel of the sample is 0, too.


def test_image_that_the_dataset_has_needs_an_update_which_drops_or_keeps_it(images, tmp_path):
    extract_features(job_of(images, tmp_path / "f"), ONE)
    complete = tree(tmp_path / "f")
    with pytest.raises(DatasetError, match=r"was made from other images: .* Give --update"):
        extract_features(job_of(images, tmp_path / "f", skip=SKIPPED), ONE)
    assert tree(tmp_path / "f") == complete
    for keep in ("keep_removed", "only_add"):
        extract_features(job_of(images, tmp_path / "f", skip=SKIPPED, update=True, **{keep: True}), ONE)
        assert len(open_dataset(tmp_path / "f").image_ids()) == 20
    fingerprint = open_dataset(tmp_path / "f").fingerprint
    extract_features(job_of(images, tmp_path / "f", skip=SKIPPED, update=True), ONE)
    assert not {*SKIPPED} & {*open_dataset(tmp_path / "f").image_ids()}
    assert open_dataset(tmp_path / "f").fingerprint == fingerprint
    extract_features(job_of(images, tmp_path / "f", update=True), ONE)
    assert {name: data for name, data in tree(tmp_path / "f").items() if name.endswith("parquet")} == {
        name: data for name, data in complete.items() if name.endswith("parquet")
    }


def test_listings_of_any_kind_and_the_dry_run_leave_the_images_out(images, tmp_path):
    job = job_of(images, tmp_path / "f", skip=SKIPPED).opened()
    listing = list_images(job, keep=True)
    assert listing.count == plan_dry_run(job, listing).images == 18
    shared = listing.cached.share(Folder(str(tmp_path / "f")))
    (tmp_path / "f" / shared[0].name).unlink()  # Then the images are listed again.
    for kept in (listing, listing.cached.parts(), shared, ()):
        assert sorted(ref.image_id for ref in listed_refs(job, kept)) == sorted(
            {f"i{number:02d}" for number in range(20)} - {*SKIPPED}
        )


def test_skipping_all_images_is_an_error(images, tmp_path):
    with pytest.raises(InputError, match="no images found in"):
        list_images(job_of(images, tmp_path / "f", skip=tuple(f"i{number:02d}" for number in range(20))))
