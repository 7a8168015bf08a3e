import socket

import pytest

import imagepivot
from extractors import ExtractorRequest
from pipelines.doctor import diagnosis
from pipelines.doctor.diagnosis import DoctorJob, diagnose
from pipelines.running.execution import Execution
from schemas.errors import UsageError

PORTABLE = Execution(beam_flags=("--runner=PortableRunner", "--job_endpoint=localhost:1"))
DATAFLOW = Execution(beam_flags=("--runner=DataflowRunner", "--project=p"))


@pytest.fixture
def offline(monkeypatch):
    """No network: whoever asks for an address or a connection fails."""

    def refuse(*_, **__):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_without_a_job_this_machine_is_looked_at_without_a_network(offline):
    found = diagnose()
    assert found.works, found.to_text()
    groups = [finding.group for finding in found.findings]
    assert list(dict.fromkeys(groups)) == ["installation", "machine", "credentials", "weights", "devices"]
    subjects = {finding.subject for finding in found.findings}
    assert {"imagepivot", "packages", "extras", "cores", "memory", "open files", "temporary", "torch"} <= subjects


def test_folders_are_looked_at_in_their_order(tmp_path, offline):
    (tmp_path / "file").write_text("")
    job = DoctorJob(locations=(str(tmp_path / "new"), str(tmp_path / "file")))
    found = [finding for finding in diagnose(job).findings if finding.group == "storage"]
    assert [(finding.subject, finding.status) for finding in found[:-1] if finding.subject != "space"] == [
        ("folder", "ok"),
        ("locks", "ok"),
        ("writing", "ok"),
    ]
    assert found[-1].status == "problem"
    assert "a part of the path is a file" in found[-1].found
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("measure", "size"), [(False, 4 << 20), (True, 64 << 20)])
def test_more_is_written_to_measure(monkeypatch, tmp_path, measure, size):
    sizes = []
    monkeypatch.setattr(diagnosis, "check_folder", lambda location, size: iter(sizes.append(size) or ()))
    list(diagnosis._check_location(str(tmp_path), measure=measure))
    assert sizes == [size]


@pytest.mark.parametrize("location", ["https://host/x", "hdfs://host/x"])
def test_a_location_that_nothing_can_be_written_to(location):
    found = diagnose(DoctorJob(locations=(location,)))
    assert not found.works
    assert f"cannot write to {location!r}: give a local folder" in found.findings[-1].found


def test_a_key_with_a_slash_is_not_shown():
    found = diagnose(DoctorJob(locations=("s3://AKIA:wJ/alr@bucket/x",))).findings[-1]
    assert found.status == "problem"
    assert (
        found.found
        == "the key in 's3://***@bucket/x' holds what stands for something else: write / as %2F, @ as %40 and ? as %3F"
    )


def test_images_that_do_not_exist(tmp_path):
    found = diagnose(DoctorJob(images=str(tmp_path / "none")))
    assert not found.works
    assert "do not exist: check the path" in found.findings[-1].found


def test_extras_that_a_job_needs():
    assert diagnosis._needed_extras(DoctorJob()) == {}
    timm = ExtractorRequest("timm:resnet18")
    assert diagnosis._needed_extras(DoctorJob(extractor=timm, images="x")) == {
        "extractors": "extractor 'timm:resnet18'",
        "timm": "extractor 'timm:resnet18'",
        "pipelines": "reading images",
    }
    assert set(diagnosis._needed_extras(DoctorJob(locations=("x",), execution=DATAFLOW))) == {"pipelines", "gcp"}
    assert diagnosis._staged_extras(DoctorJob(locations=("x",), execution=DATAFLOW, extractor=timm)) == (
        "pipelines",
        "extractors",
        "timm",
    )


def test_workers_need_a_place_to_write_to():
    with pytest.raises(UsageError, match="LOCATION is missing: the workers of PortableRunner write what they find"):
        DoctorJob(execution=PORTABLE)


def test_a_runner_whose_workers_do_not_see_the_folder(tmp_path):
    found = diagnose(DoctorJob(locations=(str(tmp_path),), execution=DATAFLOW))
    assert not found.works
    assert "is a path on this machine, and the workers of DataflowRunner run on others" in found.findings[-1].found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_job_service_that_does_not_answer(tmp_path):
    flags = (*PORTABLE.beam_flags, "--job_server_timeout=1")
    job = DoctorJob(locations=(str(tmp_path / "new"),), execution=Execution(beam_flags=flags, shared_disk=True))
    found = diagnose(job).findings[-1]
    assert (found.group, found.status) == ("worker", "problem")
    assert "the job service 'localhost:1' does not answer within 1 seconds" in found.found
    assert list(tmp_path.iterdir()) == []


def test_a_template_starts_no_worker(tmp_path):
    flags = (*DATAFLOW.beam_flags, "--template_location=gs://b/t")
    found = diagnose(DoctorJob(locations=(str(tmp_path),), execution=Execution(beam_flags=flags))).findings[-1]
    assert "a template starts no worker" in found.found


@pytest.mark.slow
def test_a_model_that_runs_elsewhere_is_not_looked_for_here(monkeypatch, tmp_path):
    job = DoctorJob(locations=(str(tmp_path),), execution=PORTABLE, device="cuda", measure=True, images="photos")
    monkeypatch.setattr(diagnosis, "_check_workers", lambda job, fingerprint: iter(()))
    found = diagnose(job)
    assert found.works, found.to_text()
    assert not {"devices", "rates"} & {finding.group for finding in found.findings}


def test_weights_of_a_worker_are_compared(monkeypatch, tmp_path):
    import pipelines.doctor.cluster as cluster
    from pipelines.doctor.findings import Finding

    job = DoctorJob(locations=("somewhere",), images="photos", execution=PORTABLE, extractor=ExtractorRequest("x", "w.pth"))
    asked = []

    def check_cluster(execution, location, examine, extras):
        asked.append((execution, location, examine.args[0]))
        return iter([Finding("worker: weights", "weights", "ok", "fit", values={"fingerprint": "b"})])

    monkeypatch.setattr(cluster, "check_cluster", check_cluster)
    monkeypatch.chdir(tmp_path)
    same = list(diagnosis._check_workers(job, "b"))
    other = list(diagnosis._check_workers(job, "a"))
    assert [finding.status for finding in same] == ["ok"]
    assert [finding.status for finding in other] == ["ok", "problem"]
    assert other[1].values == {"here": "a", "there": "b"}
    execution, location, theirs = asked[0]
    assert (execution, location, theirs.execution) == (PORTABLE, "somewhere", None)
    assert theirs.locations == (str(tmp_path / "somewhere"),)
    assert theirs.images == str(tmp_path / "photos")
    assert theirs.extractor.weights == str(tmp_path / "w.pth")


@pytest.mark.parametrize(("gpus", "status"), [(1, ["ok", "problem"]), (2, ["ok"]), (4, ["ok"])])
def test_a_worker_with_fewer_gpus_than_are_asked_for(monkeypatch, gpus, status):
    import pipelines.doctor.cluster as cluster
    from pipelines.doctor.findings import Finding
    from pipelines.running.accelerators import Accelerator

    jobs = []

    def check_cluster(execution, location, examine, extras):
        jobs.append(examine.args[0])
        return iter([Finding("worker: devices", "torch", "ok", "there", values={"gpus": gpus})])

    monkeypatch.setattr(cluster, "check_cluster", check_cluster)
    execution = Execution(beam_flags=DATAFLOW.beam_flags, accelerator=Accelerator("nvidia-l4", 2))
    found = list(diagnosis._check_workers(DoctorJob(locations=("gs://b/x",), execution=execution), ""))
    assert [finding.status for finding in found] == status
    assert jobs[0].device == "cuda"


def test_the_front_door_has_it():
    assert imagepivot.diagnose is diagnose
    assert imagepivot.DoctorJob is DoctorJob
