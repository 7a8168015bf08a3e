"""How many requests object stores are asked, and how many at once, by a proxy that counts and delays them."""

import io
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from extractors import ExtractorRequest
from pipelines.features.extraction import extract_features
from pipelines.inputs.images.opening import open_images
from pipelines.jobs import FeaturesJob
from pipelines.running.execution import Execution
from schemas.manifest import MANIFEST_NAME
from schemas.storage.folder import Folder, open_bucket
from schemas.writing.dataset_writer import commit, write_dataset
from schemas.writing.output import OutputDataset
from schemas.writing.output_state import OutputState
from schemas.writing.reuse_policy import ReusePolicy
from tests.fake_extractors import use_colours
from tests.pipelines.inputs.reading import write_tar
from tests.stores import Requests, far_away, use

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SECONDS = 0.1  # Long enough that what can be under way at once is, on a busy machine, too.
IMAGES, SHARDS = 48, 12
LARGE = 3 << 20
PAGE = 20


@pytest.fixture(scope="module")
def running(near):
    with far_away(near, SECONDS) as far:
        yield near, far


@pytest.fixture
def store(running, monkeypatch):
    use(running[1].environment, monkeypatch)
    return running[1]


def upload(location: str, files: dict[str, bytes]) -> None:
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda item: Folder(location).put(*item), files.items()))


def test_image_reads_take_one_request_each_and_run_concurrently(store):
    files = {f"{number:02d}.jpg": os.urandom(1000 + number) for number in range(IMAGES)}
    files["large.jpg"] = os.urandom(LARGE)
    upload(store.address("photos"), files)
    source = open_images(store.address("photos"))
    store.asked()
    refs = list(source.refs())
    assert [request.method for request in store.asked().all] == ["GET"]  # The listing, which tells the versions, too.
    assert all(ref.version for ref in refs)
    assert source.has_versions
    with ThreadPoolExecutor(source.parallel_reads) as pool:
        read = dict(zip((ref.uri for ref in refs), pool.map(source.read, refs), strict=True))
    asked = store.asked()
    assert read == files
    assert len(asked) == len(files)
    assert {request.method for request in asked.all} == {"GET"}
    assert asked.at_once >= 12  # Of 32: a busy machine starts threads slowly.


@pytest.fixture
def small_pages(monkeypatch):
    """Stores send a thousand objects at most; emulators would take long to hold as many."""
    monkeypatch.setattr("schemas.storage.object_store.PAGE_OBJECTS", PAGE)


def listed_in(store, folders: dict[str, int]) -> tuple[list[str], list[str], Requests]:
    """Put objects into folders; return their names, those that a listing gives, and what the store was asked for it."""
    folder = Folder(store.address(f"listed/{'-'.join(map(str, folders.values()))}"))
    names = [f"{name}{number:03d}.jpg" for name, count in folders.items() for number in range(count)]
    upload(folder.location, dict.fromkeys(names, b"x"))
    store.asked()
    found = [entry.name for entry in folder.list()]
    return sorted(names), sorted(found), store.asked()


def test_listing_requests_each_page_once(store, small_pages):
    names, found, asked = listed_in(store, {"": 2 * PAGE + 3})
    assert found == names
    assert len(asked) == 3
    assert asked.at_once == 1
    entries = Folder(store.address(f"listed/{2 * PAGE + 3}")).list()
    next(entries)
    entries.close()
    assert len(store.asked()) == 2  # One page is asked for in advance.


def test_large_folders_are_listed_side_by_side(store, small_pages):
    folders = {"": 3, "a/": 2 * PAGE, "b/": 2 * PAGE, "b/deep/": 5, "c d/": PAGE, "ü/": 1}
    names, found, asked = listed_in(store, folders)
    assert found == names
    assert asked.at_once >= 3
    # A page of everything, the names of the folders; two pages of each large one, and what lies in what.
    assert len(asked) <= 2 + sum(-(-count // PAGE) + 2 for count in folders.values())


def test_many_small_folders_are_listed_together(store, small_pages):
    names, found, asked = listed_in(store, {f"{number:02d}/": 1 for number in range(3 * PAGE)})
    assert found == names
    assert len(asked) == 3


@pytest.mark.parametrize("source", ["photos", "tars"])
def test_run_lists_and_reads_a_bucket_once(running, monkeypatch, tmp_path, source):
    use(running[0].environment, monkeypatch)
    use_colours(monkeypatch)
    folder, images = Folder(running[0].address(f"run/{source}")), {}
    for number in range(24):
        data = io.BytesIO()
        Image.effect_noise((100, 100), number).save(data, "png")
        images[f"{number:02d}.png"] = data.getvalue()
    if source == "tars":
        images = {"a.tar": write_tar(tmp_path / "a.tar", images.items()).read_bytes()}
    upload(folder.location, images)
    far = running[1]
    use(far.environment, monkeypatch)
    images_of = open_images(far.address(f"run/{source}"))
    far.asked()
    job = FeaturesJob(
        images_of, str(tmp_path / "f"), ExtractorRequest("resnet50-pool", weights="random:0"), device="cpu", shards=8
    )
    manifest = extract_features(job, Execution(workers=1))
    asked = far.asked()
    assert manifest.statistics["images"] == 24
    assert open_bucket.cache_info().misses == 1  # The process has made one client.
    listings = [request for request in asked.all if request.path.partition("?")[0].endswith(("/o", "/bucket", "/bucket/"))]
    assert len(listings) == 1
    if source == "photos":
        assert len(asked) == 1 + 24
    else:
        assert asked.answered <= 2.2 * sum(map(len, images.values()))


def test_upload_goes_in_large_parts(store):
    folder = Folder(store.address("large"))
    store.asked()
    folder.put("small", b"x")
    assert len(store.asked().all) == 1
    data = os.urandom(40 << 20)
    folder.put("large", data)
    asked = store.asked()
    assert folder.read("large") == data
    parts = sorted(request.size for request in asked.all if request.size >= 1 << 20)
    assert len(parts) == 3
    assert parts[1:] == [16 << 20] * 2
    # S3 is told of the upload's beginning and end, Google's store of its beginning.
    assert len(asked) == len(parts) + {"s3": 2, "gs": 1}[store.scheme]
    assert asked.at_once >= {"s3": 2, "gs": 1}[store.scheme]  # S3 gets parts in parallel: 3, or 2 on a busy machine.
    assert folder.names() == ["large", "small"]


def test_parts_of_an_upload_under_a_condition_count_together(store):
    if store.maker == "s3":
        pytest.skip("the emulator of S3 does not look at If-Match when an upload in parts ends")
    folder, data = Folder(store.address("condition")), [bytes([number]) * (17 << 20) for number in range(3)]
    first = folder.put("large", data[0], None)
    assert folder.put("large", data[1], None) is None
    second = folder.put("large", data[1], first)
    assert second not in (None, first)
    assert folder.put("large", data[2], first) is None
    assert (folder.read("large"), folder.stat("large").tag) == (data[1], second)
    assert folder.names() == ["large"]
    folder.delete("large", first)
    assert folder.stat("large").tag == second
    folder.delete("large", second)
    assert folder.names() == []


def output_of(location: str, shards: int, listings=None, version_digests=None) -> OutputDataset:
    parameters = {"feature": {"name": "random", "shape": [4], "dtype": "float32", "source": ""}}
    return OutputDataset(
        Folder(location), "features", parameters, shards=shards, listings=listings, version_digests=version_digests
    )


def write(location: str, shards: int = SHARDS) -> OutputDataset:
    """Write a dataset of which every other shard has a failure."""
    listings = tuple(f"{number:064d}" for number in range(shards))
    output = output_of(location, shards, listings, listings[::-1])

    def write_feature_shard(number, shard):
        values = pa.FixedSizeListArray.from_arrays(pa.array(np.full(4, number, np.float32)), type=output.schema.field(1).type)
        shard.write(pa.table([pa.array([f"i{number}"]), values], schema=output.schema))
        shard.statistics = {"images": 1, "listing": listings[number]}
        shard.version_digest = output.version_digests[number]
        if number % 2:
            row = {"key": f"f{number}", "uri": "u", "stage": "decode", "reason": "truncated", "message": "m"}
            shard.add_failures([row])

    write_dataset(output, write_feature_shard)
    return output


@pytest.fixture
def dataset(running, monkeypatch, request):
    """A dataset behind the proxy, which has not seen its requests."""
    use(running[0].environment, monkeypatch)
    dataset = write(running[0].address(request.node.originalname))
    use(running[1].environment, monkeypatch)
    return dataset


def test_complete_dataset_is_recognised_from_a_listing_its_manifest_and_a_small_read_a_shard(dataset, store):
    store.asked()
    assert OutputState(dataset).committed_manifest() is not None
    asked = store.asked()
    assert not [request.path for request in asked.all if ".parquet" in request.path]
    assert len(asked) == 1 + (1 + SHARDS)
    assert asked.at_once >= SHARDS // 2


def test_digests_are_compared_with_verify(dataset):
    name = dataset.name(2)
    data = bytearray(dataset.folder.read(name))
    data[10] ^= 1
    dataset.folder.put(name, bytes(data))
    assert OutputState(dataset).committed_manifest() is None  # Its tag has changed.
    assert OutputState(dataset, ReusePolicy(verify=True)).committed_manifest() is None
    assert OutputState(dataset, ReusePolicy(verify=True)).finished_shards() == set(range(SHARDS)) - {2}


def test_finished_shards_take_one_request_each(dataset, store):
    dataset.folder.delete(MANIFEST_NAME)
    store.asked()
    state = OutputState(dataset)
    state.check_compatible()
    assert state.finished_shards() == state.intact_shards() == set(range(SHARDS))
    asked = store.asked()
    assert len(asked) - 1 <= SHARDS
    assert asked.at_once >= SHARDS // 2
    assert not [request for request in asked.all if request.path.endswith(".parquet") and "list-type" not in request.path]


def test_commit_reads_no_shard_again(dataset, store):
    before = dataset.folder.read(MANIFEST_NAME)
    dataset.folder.delete(MANIFEST_NAME)
    store.asked()
    commit(dataset)
    asked = store.asked()
    assert dataset.folder.read(MANIFEST_NAME) == before
    assert not [request for request in asked.all if ".parquet" in request.path]
    assert len(asked) - 1 <= SHARDS + 3  # The listing; and the manifest is written.
