"""Ten times the items cost ten times as much and no more, by simulation, and what limits a launcher."""

import tracemalloc
from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from extractors import ExtractorRequest
from pipelines.features.planning import list_images, plan_features
from pipelines.features.ref_chunks import chunk_refs
from pipelines.features.transforms import ExtractFeatures
from pipelines.inputs.images.folders import ImagesInFolder
from pipelines.inputs.images.listing import Listing
from pipelines.jobs import FeaturesJob
from pipelines.running.execution import Accelerator, Execution
from pipelines.running.preflight import PreflightCheck
from pipelines.running.runner import MAX_GRAPH_BYTES
from pipelines.running.transforms import CommitDataset
from schemas.fingerprints import fingerprint_of, sha256_of_bytes
from schemas.keys import MAX_SHARDS, shard_name
from schemas.manifest import Manifest, ShardEntry
from schemas.parameters import CaptionsParameters
from schemas.storage.folder import Folder
from schemas.writing.shard_count import MAX_CHOSEN
from tests.simulation import Cost, Images, captions, features, images, vocabulary

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

MORE = 1.15
"""What an item of ten times as many may cost, relative to one of the fewer."""

LISTED_BYTES = 32
"""Memory of a launcher for each image that it lists."""

KEPT_BYTES = 24
"""Bytes of its temporary file for each image."""

PASSED_BYTES = {"image": 16, "caption": 1}
"""Memory of the launcher of a local run for each image or caption that it passes from worker to worker."""

PASSED_REF_BYTES = 60
"""Bytes of a reference that workers exchange, with the greatest number of shards that is chosen."""

GRAPH_BYTES = 100
"""Bytes of a pipeline for each shard."""

MANIFEST_BYTES = 500
"""Bytes of a manifest for each shard."""


def compare(few: list[Cost], many: list[Cost]) -> None:
    """Check that an item costs no more calls of functions and no more bytes where there are more of them."""
    for less, more in zip(few, many, strict=True):
        assert (less.phase, 10 * less.items) == (more.phase, more.items)
        for what in ("calls", "bytes"):
            one, ten = getattr(less, what) / less.items, getattr(more, what) / more.items
            assert ten <= MORE * one, (less.phase, what, one, ten)
        assert more.calls > 0


def test_cost_of_an_image_is_flat(tmp_path):
    costs = {}
    for count, shards in ((20_000, 4), (200_000, 40)):
        folder = tmp_path / str(count)
        folder.mkdir()
        costs[count] = [*images(count, shards, folder), *features(count, shards, folder)]
        assert all(cost.passed <= PASSED_BYTES["image"] * count for cost in costs[count])
        assert costs[count][0].bytes <= KEPT_BYTES * count
    compare(*costs.values())


def test_references_stay_small_with_many_shards():
    count = 24 * MAX_CHOSEN  # Fewer than in a batch of a long listing.
    chunks = chunk_refs(Images(count).refs(), MAX_CHOSEN)
    assert 0 < sum(len(chunk) for _, chunk in chunks) <= PASSED_REF_BYTES * count


def test_cost_of_a_caption_is_flat(tmp_path):
    costs = {}
    for count, shards in ((50_000, 8), (500_000, 80)):
        folder = tmp_path / str(count)
        folder.mkdir()
        costs[count] = captions(count, shards, folder)
        assert all(cost.passed <= PASSED_BYTES["caption"] * count for cost in costs[count])
    compare(*costs.values())


def test_vocabulary_cost_is_independent_of_shards():
    few, many = (vocabulary(2_000, shards)[1].items for shards in (100, 1000))
    assert few == many == 2_000


def peak_of_listing(count: int, folder: Path) -> int:
    job = FeaturesJob(Images(count), str(folder), ExtractorRequest("resnet50-pool"))
    tracemalloc.start()
    try:
        assert list_images(job, keep=True).count == count
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_launcher_memory_per_image_is_bounded(tmp_path):
    list_images(FeaturesJob(Images(10), str(tmp_path), ExtractorRequest("resnet50-pool")))  # Imports what it needs.
    few, many = (
        peak_of_listing(count, tmp_path) for count in (100_000, 300_000)
    )  # More than what is gathered before it is written.
    assert (many - few) / 200_000 <= LISTED_BYTES


@pytest.mark.parametrize("shards", [16, MAX_CHOSEN, MAX_SHARDS])
def test_pipeline_of_many_shards_can_be_submitted(shards):
    job = FeaturesJob(
        ImagesInFolder(Folder("gs://bucket/photos")),
        "gs://bucket/f",
        ExtractorRequest("resnet50-pool", weights="random:0"),
        shards=shards,
    )
    digests = tuple(sha256_of_bytes(b"%d" % number) for number in range(shards))
    output = plan_features(job, Listing((50_000,) * shards, digests, digests))
    accelerator = Accelerator("nvidia-l4")
    pipeline = beam.Pipeline(runner=FnApiRunner(), options=Execution(beam_flags=("--runner=DataflowRunner",)).to_options())
    check = PreflightCheck(output.folder)
    _ = (
        pipeline
        | "ExtractFeatures" >> ExtractFeatures(job, output, check=check, accelerator=accelerator)
        | "CommitDataset" >> CommitDataset(output, libraries=job.libraries())
    )
    size = pipeline.to_runner_api().ByteSize()
    assert size < MAX_GRAPH_BYTES
    assert size < 60_000 + GRAPH_BYTES * shards


def test_manifest_of_any_number_of_shards_is_written_and_read():
    parameters = CaptionsParameters(text=None).to_json()
    sizes = []
    for shards in (1000, MAX_SHARDS):
        entries = tuple(
            ShardEntry(shard_name(number, shards), 1 << 29, f"{number:064x}", 1000, f"{number:064x}")
            for number in range(shards)
        )
        fingerprint = fingerprint_of("captions", parameters, (), shards)
        manifest = Manifest("captions", fingerprint, parameters, (), {}, entries)
        text = manifest.to_json()
        assert Manifest.from_json(text, "here") == manifest
        sizes.append(len(text) / shards)
    assert max(sizes) <= MANIFEST_BYTES
    assert sizes[1] <= sizes[0]
