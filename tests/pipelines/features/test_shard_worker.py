"""Workers of shards: several GPUs in a process, without one; access to images; first images that all fail alike."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import apache_beam as beam
import pyarrow.parquet as pq
import pytest
import torch
from apache_beam.testing.util import assert_that, equal_to
from PIL import Image

from pipelines.features.extraction import extract_features
from pipelines.features.inference import FirstImages, Tally
from pipelines.features.planning import list_images, plan_features
from pipelines.features.shard_worker import ExtractorPool, check_worker, devices_of_worker
from pipelines.features.transforms import ExtractFeatures
from pipelines.inputs.images.base import ImageRef
from pipelines.inputs.images.folders import ImageTable
from pipelines.inputs.images.listing import Listing
from pipelines.inputs.images.opening import open_images
from pipelines.jobs import FeaturesJob
from pipelines.running.execution import Accelerator, Execution
from pipelines.running.runner import run_pipeline
from schemas.errors import DatasetError, InputError, UsageError
from schemas.failures import failure_row
from schemas.storage.folder import Folder
from schemas.storage.storage_errors import StoreAccessError
from tests.beam import IN_BEAM
from tests.builders import tree
from tests.fake_extractors import ColourExtractor, picture, use_colours
from tests.reuse import with_policy

# --- devices ---------------------------------------------------------------------------------------------------------


REMOTE = Execution(beam_flags=("--runner=FlinkRunner",), shared_disk=True, accelerator=Accelerator("nvidia-l4"))


@pytest.fixture
def job(tmp_path, monkeypatch):
    use_colours(monkeypatch)
    (tmp_path / "images").mkdir()
    for number in range(24):
        Image.new("RGB", (2, 2), (number, 0, 0)).save(tmp_path / "images" / f"{number}.png")
    return FeaturesJob(images=open_images(str(tmp_path / "images")), output=str(tmp_path / "f"), shards=6, batch_size=1)


def test_device_beside_the_gpus_of_the_workers_is_refused(job):
    for device in ("cpu", "cuda:0"):
        with pytest.raises(UsageError, match=f"^--device is '{device}', and --gpu 'nvidia-l4' runs the model on all GPUs"):
            extract_features(replace(job, device=device), REMOTE)


@pytest.mark.parametrize(
    ("device", "gpus", "worker", "own", "expected"),
    [
        ("auto", 4, "6", 0, ("cuda:2",)),
        ("auto", 0, "1", 0, ("auto",)),
        ("cuda:1", 4, "0", 0, ("cuda:1",)),
        ("auto", 8, "sdk-0-7", 3, ("cuda:0", "cuda:1", "cuda:2")),
    ],
)
def test_workers_take_the_gpus_in_turn_or_have_all_of_a_machine(job, monkeypatch, device, gpus, worker, own, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert devices_of_worker(replace(job, device=device), worker, own) == expected


def test_no_worker_falls_back_to_its_cpu(job, monkeypatch):
    """The device is that of a GPU in what the workers get, although none was named."""
    checks = []
    monkeypatch.setattr("pipelines.features.extraction.run_job", lambda job: checks.append(job.check_worker))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    extract_features(job, REMOTE)
    with pytest.raises(UsageError, match=r"device 'cuda:0' is not on this host: torch.cuda.is_available\(\) is False"):
        checks[0]()


def test_pool_lends_an_extractor_to_one_shard_at_a_time():
    pool = ExtractorPool([ColourExtractor(), ColourExtractor()], batch_size=1)
    with ThreadPoolExecutor(1) as threads, ExitStack() as third:
        with pool.extractor() as first, pool.extractor():
            waiting = threads.submit(third.enter_context, pool.extractor())
            with pytest.raises(TimeoutError):
                waiting.result(0.05)
        assert waiting.result(30).first_images is first.first_images


@pytest.mark.slow
def test_shards_of_a_process_with_two_gpus(job, monkeypatch):
    devices = []
    monkeypatch.setattr("extractors.ExtractorRequest.load", lambda request, device: devices.append(device) or ColourExtractor())
    output = plan_features(job, list_images(job))
    transform = ExtractFeatures(job, output, accelerator=Accelerator("nvidia-l4", 2))

    def build(pipeline: beam.Pipeline) -> None:
        assert_that(pipeline | transform, equal_to(range(6)))

    run_pipeline(build, IN_BEAM)
    assert devices == ["cuda:0", "cuda:1"]
    rows = [row for shard in range(6) for row in pq.read_table(output.folder.local_path / output.name(shard)).to_pylist()]
    assert {row["image_id"]: row["feature"][0] for row in rows} == {str(number): number for number in range(24)}


# --- access to images ------------------------------------------------------------------------------------------------


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


# --- the first images ------------------------------------------------------------------------------------------------


@pytest.fixture
def extract(tmp_path, monkeypatch):
    """Extracts a table of images, of which those with bytes exist; gives the manifest."""
    use_colours(monkeypatch)

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
        return extract_features(job, Execution(workers=1))

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
