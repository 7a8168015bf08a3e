"""The preflight check reads images as the worker may; it fails where no image can be read for one reason."""

from __future__ import annotations

import re

import pytest

from pipelines.features.planning import list_images
from pipelines.features.shard_worker import check_worker
from pipelines.inputs.images.base import ImageRef
from pipelines.inputs.images.folders import ImageTable
from pipelines.inputs.images.listing import Listing
from pipelines.jobs import FeaturesJob
from schemas.errors import DatasetError, InputError
from schemas.storage.storage_errors import StoreAccessError
from tests.fake_extractors import ColourExtractor, picture, use_colours


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Checks a worker for a table of addresses; a missing file is named in no other way than by its address."""
    use_colours(monkeypatch)

    def run(*addresses: str) -> None:
        rows = (f"image{number:03d},{address}\n" for number, address in enumerate(addresses))
        (tmp_path / "t.csv").write_text("image_id,uri\n" + "".join(rows))
        job = FeaturesJob(str(tmp_path / "t.csv"), str(tmp_path / "f"), device="cpu", shards=2).opened()
        check_worker(job, ColourExtractor().fingerprint, 0, list_images(job).samples)

    (tmp_path / "good.png").write_bytes(picture(1, 2, 3))
    return run


@pytest.mark.parametrize("count", [1, 40, 1000])
def test_images_that_are_all_missing_fail_the_check_with_address_and_cause(check, tmp_path, count):
    tried = {1: "1 image", 40: "6 images", 1000: "8 images"}[count]
    last = {1: 0, 40: 31, 1000: 511}[count]
    place = re.escape(str(tmp_path))
    message = (
        rf"^it cannot read the images of '{place}/t\.csv': {tried} from all parts of the list failed with one message, the last is "
        rf"'image{last:03d}' at '{last}\.png': .*No such file or directory: '{place}/{last}\.png'\. Check that the identity of"
    )
    with pytest.raises(InputError, match=message):
        check(*(f"{number}.png" for number in range(count)))


@pytest.mark.parametrize("good", [0, 1, 3, 7, 31])
def test_one_image_that_can_be_read_passes_whichever_it_is(check, good):
    check(*("good.png" if number == good else f"{number}.png" for number in range(40)))


def test_different_faults_are_no_fault_of_the_worker(check, tmp_path):
    (tmp_path / "folder").mkdir()
    check("a.png", "folder", "b.png", "c.png")


def test_refused_access_is_named_with_the_stores_answer_and_without_secrets(check, monkeypatch):
    def refuse(_images, ref):
        try:
            raise StoreAccessError("HTTP 403 for https://me:pw@host/1.jpg?sig=12ab")
        except OSError as error:
            raise DatasetError(f"cannot use 's3://b': {StoreAccessError.advice} ({error})") from error

    monkeypatch.setattr(ImageTable, "read", refuse)
    with pytest.raises(InputError) as caught:
        check("https://u:secret@host/0.jpg?sig=12ab", "https://u:secret@host/1.jpg?sig=12ab")
    message = str(caught.value)
    assert "at 'https://***@host/1.jpg?sig=***': cannot use 's3://b': access denied: check the credentials" in message
    assert not re.search("secret|pw|12ab", message)


def test_samples_are_from_all_parts_of_a_list_of_any_length():
    refs = [ImageRef(f"{number:05d}", "") for number in range(5000)]
    listing = Listing.of(iter(refs), 16)
    assert listing.samples == listing.folded(4).samples == tuple(refs[2**power - 1] for power in range(5, 13))
    assert Listing.of([], 4).samples == ()
