"""What ``imagepivot doctor`` finds out about stores and workers, which are processes of their own, and that it leaves nothing."""

from __future__ import annotations

import json
import os

import pytest

from pipelines.doctor.buckets import check_bucket
from schemas import stores
from schemas.storage import Folder
from tests.integration import clusters
from tests.integration.workload import MODEL
from tests.stores import PACKAGES, emulator, is_installed, use

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(300)]


def findings(done) -> dict[tuple[str, str], dict]:
    """Return the last finding of each subject, by group and subject."""
    return {(found["group"], found["subject"]): found for found in json.loads(done.stdout)["findings"]}


# --- stores ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["s3", "gs"])
def store(request):
    if not is_installed(request.param):
        pytest.skip(f"needs {PACKAGES[request.param]}")
    with emulator(request.param) as store, pytest.MonkeyPatch.context() as patch:
        use(store.environment, patch)
        yield store


def test_a_bucket_that_is_there(store, imagepivot):
    Folder(store.address("features")).write("_manifest.json", b"{}")
    found = findings(imagepivot("doctor", store.address("features"), "--json"))
    source = "environment variables" if store.scheme == "s3" else "none, requests are anonymous"
    assert found["storage", "credentials"]["values"]["source"] == source
    assert {name[1]: one["status"] for name, one in found.items() if name[0] == "storage" and name[1] != "speed"} == {
        "credentials": "ok",
        "bucket": "ok",
        "writing": "ok",
    }
    assert found["storage", "writing"]["values"] == {"conditions": True}
    speed = found["storage", "speed"]["values"]
    assert speed["bytes"] == 4 << 20
    assert min(speed["bytes_per_second_up"], speed["bytes_per_second_down"], speed["seconds_of_request"]) > 0
    assert "testing" not in json.dumps(list(found.values()))  # The keys of the emulator.
    assert Folder(store.address("")).names() == ["features/_manifest.json"]


def test_a_bucket_that_is_not_there(store, imagepivot):
    done = imagepivot("doctor", f"{store.scheme}://nowhere/x", code=1)
    assert "PROBLEM" in done.stdout
    assert "there is no bucket 'nowhere'" in done.stdout


def test_a_store_that_ignores_conditions(store, monkeypatch):
    put = stores.put
    monkeypatch.setattr(stores, "put", lambda *words, **_: put(*words[:3]))
    found = {finding.subject: finding for finding in check_bucket(store.address("x"), 1000)}
    assert (found["writing"].status, found["writing"].values) == ("note", {"conditions": False})
    assert Folder(store.address("x")).names() == []


def test_a_store_that_gives_back_something_else(store, monkeypatch):
    monkeypatch.setattr(Folder, "read", lambda folder, name: b"old")
    *_, speed = check_bucket(store.address("x"), 1000)
    assert (speed.status, speed.found) == ("problem", "what is read is not what was written")
    assert Folder(store.address("x")).names() == []


# --- workers -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def job_service(tmp_path_factory):
    with clusters.job_service(tmp_path_factory.mktemp("jobs"), OMP_NUM_THREADS="1", HF_TOKEN="hidden") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> str:
    import timm
    import torch

    path = tmp_path_factory.mktemp("weights") / "w.pth"
    torch.save(timm.create_model("test_resnet.r160_in1k", num_classes=0).state_dict(), path)
    return str(path)


def test_what_a_worker_finds(job_service, weights, imagepivot, tmp_path):
    place = tmp_path / "new" / "features"
    words = ("doctor", place, "--extractor", MODEL, "--weights", weights, "--shared-disk", "--json")
    found = findings(imagepivot(*words, "--", *job_service.flags))
    assert found["worker", "runner"]["status"] == "ok"
    worker = {name[1]: one for name, one in found.items() if name[0].startswith("worker: ")}
    # The worker's own temporary folder and variables, which are not those of this process.
    assert worker["temporary"]["values"]["folder"] == str(job_service.folder / "tmp")
    assert worker["Hugging Face"]["values"] == {"source": "HF_TOKEN"}
    assert worker["locks"]["status"] == "ok"
    assert worker["weights"]["values"]["fingerprint"] == found["weights", "weights"]["values"]["fingerprint"]
    assert worker["cores"]["values"]["total"] == os.cpu_count()
    assert worker["torch"]["status"] == "ok"
    assert ("devices", "torch") not in found
    assert list(tmp_path.iterdir()) == []


def test_a_worker_without_the_gpu_that_is_asked_for(job_service, imagepivot, tmp_path):
    words = ("doctor", tmp_path, "--device", "cuda", "--shared-disk")
    done = imagepivot(*words, "--", *job_service.flags, code=1)
    assert done.stdout.count("PROBLEM") == 1
    assert "worker: devices\n" in done.stdout
    assert "device 'cuda' is not on this host" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_worker_with_other_code(job_service, imagepivot, tmp_path, monkeypatch):
    monkeypatch.setattr("pipelines.running.first_worker._code", lambda: "other")
    done = imagepivot("doctor", tmp_path, "--shared-disk", "--", *job_service.flags, code=1)
    assert "the first worker cannot do the work: it has imagepivot" in done.stdout
    assert "with other code in it" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_workers_that_do_not_start(imagepivot, tmp_path):
    with clusters.job_service(tmp_path / "jobs") as cluster:
        flags = [flag for flag in cluster.flags if not flag.startswith("--environment_config")]
        place = tmp_path / "place"
        place.mkdir()
        nobody = "--environment_config=localhost:1"
        done = imagepivot("doctor", place, "--shared-disk", "--start-timeout", "3", "--", *flags, nobody, code=1)
    assert "PROBLEM" in done.stdout
    assert list(place.iterdir()) == []
