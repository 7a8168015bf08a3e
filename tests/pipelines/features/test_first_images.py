"""A process whose first images all fail alike stops; one of them that does not is enough to go on."""

from __future__ import annotations

import re

import numpy as np
import pytest

from pipelines.features.extraction import extract_features
from pipelines.features.inference import FIRST_IMAGES, FirstImages, Tally
from pipelines.features.shard_worker import ExtractorPool
from pipelines.jobs import FeaturesJob
from pipelines.running.execution import Execution
from schemas.errors import InputError
from schemas.failures import failure_row
from schemas.keys import shard_of
from schemas.storage.folder import Folder
from tests.builders import tree
from tests.fake_extractors import ColourExtractor, picture, use_colours
from tests.reuse import with_policy

ONE = Execution(workers=1)


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    use_colours(monkeypatch)


@pytest.fixture
def extract(tmp_path):
    """Extracts a table of images, of which those with bytes exist; gives the manifest."""

    def run(images: dict[str, bytes | None], *, output: str = "f", **options):
        lines = ["image_id,uri\n"]
        for image_id, data in images.items():
            lines.append(f"{image_id},{image_id}.png\n")
            path = tmp_path / f"{image_id}.png"
            if data is not None and not path.exists():  # Its time stays.
                path.write_bytes(data)
        (tmp_path / "images.csv").write_text("".join(lines))
        options = {"shards": 1, "device": "cpu", "batch_size": 7, **options}
        job = FeaturesJob(str(tmp_path / "images.csv"), str(tmp_path / output), **with_policy(options))
        return extract_features(job, ONE)

    return run


def gone(count: int, **others: bytes | None) -> dict[str, bytes | None]:
    """Return absent images ``g0000``, ... and others."""
    return {f"g{number:04d}": None for number in range(count)} | others


def test_first_200_images_fail_alike_is_an_error_that_names_count_message_cause_and_advice(extract, tmp_path):
    message = (
        r"^the first 200 images of a process all failed as 'unreadable' with one message, the last of them 'g0199' at "
        rf"'g0199\.png': .*No such file or directory: '{re.escape(str(tmp_path))}/g0199\.png'\. Probably this process has no "
        r"access, no network, or wrong addresses: .* run the same command again; finished shards are kept\. --skip leaves"
    )
    with pytest.raises(InputError, match=message):
        extract(gone(200, z=picture(1, 2, 3)))
    assert [name for name in Folder(str(tmp_path / "f")).names() if "part-" in name] == []


def test_one_image_of_the_first_200_is_enough(extract):
    manifest = extract(gone(199, h=picture(1, 2, 3), **{f"z{number}": None for number in range(300)}))
    assert (manifest.rows, manifest.failed) == (1, 499)


def test_two_messages_are_not_one(extract):
    manifest = extract(gone(199, h=b"no image", z=None))
    assert (manifest.rows, manifest.failed) == (0, 201)


def test_images_count_over_shards_and_finished_shards_are_kept(extract, tmp_path):
    images = gone(400)
    first = sum(shard_of(image_id, 3) == 0 for image_id in images)
    assert first < FIRST_IMAGES < first + sum(shard_of(image_id, 3) == 1 for image_id in images)
    with pytest.raises(InputError, match=r"^the first 200 images of a process all failed"):
        extract(images, shards=3)
    assert [name for name in Folder(str(tmp_path / "f")).names() if "part-" in name and name.endswith(".parquet")] == [
        "part-00000-of-00003.parquet"
    ]
    for name in [image_id for image_id in images if shard_of(image_id, 3)]:
        images[name] = picture(7, 7, 7)
    manifest = extract(images, shards=3)
    assert (manifest.rows, manifest.failed) == (400 - first, first)


@pytest.mark.parametrize("options", [{"retry_failed": True}, {"update": True}])
def test_failures_that_the_dataset_has_do_not_count_again(extract, tmp_path, options):
    images = gone(250, a=picture(1, 2, 3))
    extract(images)
    before = tree(tmp_path / "f")
    extract(images, **options)
    assert tree(tmp_path / "f") == before


def test_update_with_200_new_images_that_fail_alike_is_an_error_and_changes_no_row(extract, tmp_path):
    extract({"a": picture(1, 2, 3)})
    before = tree(tmp_path / "f")
    with pytest.raises(InputError, match=r"^the first 200 images of a process all failed"):
        extract(gone(200, a=None), update=True)
    assert {**before, **tree(tmp_path / "f")} == before


def test_values_that_are_not_finite_stop_the_process_too(extract, monkeypatch):
    monkeypatch.setattr(ColourExtractor, "extract", lambda self, batch: np.full((len(batch), 3), np.inf))
    with pytest.raises(InputError, match=r"all failed as 'not_finite' with one message, .* exceed its precision or the stored"):
        extract({f"a{number:03d}": picture(1, 1, 1) for number in range(210)})


def test_all_extractors_of_a_process_share_the_check_and_a_repeated_attempt_fails_again():
    pool = ExtractorPool([ColourExtractor(), ColourExtractor()], batch_size=1)
    with pool.extractor() as first, pool.extractor() as second:
        assert first.extractor is not second.extractor
        assert first.first_images is second.first_images
    check = FirstImages()
    failures = [failure_row(f"a{number}", "read", "unreadable", "HTTP 403", "https://h/a?sig=12ab") for number in range(200)]
    check.add(Tally(failures=failures[:199]), {})
    for _ in range(2):
        with pytest.raises(InputError, match=r"at 'https://h/a\?sig=\*\*\*': HTTP 403\. Probably"):
            check.add(Tally(failures=failures[199:]), {})
    check.add(Tally(images=1), {})  # The store responds again.
    check.add(Tally(failures=failures), {})
