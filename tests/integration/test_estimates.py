"""The requests of an estimate, against those that a proxy counts before emulators of the stores."""

import io
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

from extractors import ExtractorRequest
from pipelines.estimates.estimate import Estimate, Requests, Work
from pipelines.features.extract import extract_features
from pipelines.features.job import FeaturesJob
from pipelines.inputs.images import open_images
from pipelines.running.execution import Execution
from schemas.storage import Folder
from tests.fake_extractors import use_colours
from tests.stores import PACKAGES, emulator, far_away, is_installed, use

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(300)]

IMAGES = 40


@pytest.fixture(scope="module", params=["s3", "gs"])
def store(request):
    if not is_installed(request.param):
        pytest.skip(f"no emulator: pip install '{PACKAGES[request.param]}'")
    with emulator(request.param) as store, far_away(store, 0.0) as far:
        yield far


def counted(store) -> Requests:
    """Return what the store has been asked since this was called last."""
    writes = reads = 0
    for request in store.asked().all:
        path = request.path.partition("?")[0]
        is_listing = request.method == "GET" and path.rstrip("/").endswith(("/o", "/bucket"))
        if request.method in ("PUT", "POST") or is_listing:
            writes += 1
        elif request.method != "DELETE":
            reads += 1
    return Requests(writes, reads)


def test_a_run_takes_the_requests_that_are_estimated(store, monkeypatch):
    use(store.environment, monkeypatch)
    use_colours(monkeypatch)
    photos = Folder(store.address("photos"))

    def draw(number: int) -> None:
        data = io.BytesIO()
        Image.new("RGB", (8, 8), (number, 0, 0)).save(data, "png")
        photos.write(f"{number:03d}.png", data.getvalue())

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(draw, range(IMAGES)))
    for shards in (4, 24):
        output = store.address(f"features-{shards}")
        store.asked()
        job = FeaturesJob(
            open_images(photos.location), output, ExtractorRequest("resnet50-pool", weights="random:0"), "cpu", shards=shards
        )
        extract_features(job, Execution(workers=1))
        asked = counted(store)
        work = Work("features", "images", IMAGES, shards, photos.location, output, row_bytes=12)
        estimated = Estimate(work).requests
        assert asked == estimated
