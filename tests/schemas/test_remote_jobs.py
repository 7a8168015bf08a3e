import json
import platform
import threading

import pytest

from schemas.dataset import open_dataset
from schemas.errors import DatasetError
from schemas.fingerprints import Identity
from schemas.manifest import Manifest
from schemas.output import PUBLISHING_NAME, Output, hold
from schemas.remote_jobs import JOB_NAME, RemoteJob, refuse_job
from schemas.storage import Folder
from schemas.survey import Survey
from schemas.tasks import Task, complete_task
from schemas.validation import validate
from schemas.writing import commit, write_dataset
from tests.builders import write_rows

ROW = {"image_id": "1", "language": "en", "portion": "x", "index": 0, "split": "train", "text": "a", "tokens": ["a"]}
FLAGS = ("--runner=FlinkRunner", "--job_endpoint=host:8099")


@pytest.fixture
def folder(tmp_path):
    return Folder(str(tmp_path / "out"))


def launched(work: str = "w") -> RemoteJob:
    return RemoteJob.of_launcher("FlinkRunner", FLAGS, work)


def test_of_several_launchers_one_gets_the_folder(folder):
    jobs = [launched() for _ in range(16)]
    together, won = threading.Barrier(len(jobs)), []

    def claim(job: RemoteJob) -> None:
        together.wait()
        if job.claim(folder):
            won.append(job)

    threads = [threading.Thread(target=claim, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [RemoteJob.read(folder)] == won
    assert folder.names() == [JOB_NAME]


def test_what_a_file_says_is_read_again(folder):
    job = launched()
    assert job.claim(folder)
    assert RemoteJob.read(folder) == job
    assert job.words == "a job of FlinkRunner"
    known = job.accepted(folder, "job-7", "http://page")
    assert RemoteJob.read(folder) == known
    assert (known.words, known.id, known.page, known.mark) == ("job 'job-7' of FlinkRunner", "job-7", "http://page", job.mark)
    content = json.loads(folder.read(JOB_NAME))
    assert {"runner", "flags", "version", "since", "user", "host"} <= content.keys()


def test_a_file_is_deleted_by_its_own_job_only(folder):
    mine, other = launched(), launched()
    mine.claim(folder)
    other.release(folder)
    assert mine.is_in(folder)
    assert not other.is_in(folder)
    mine.release(folder)
    mine.release(folder)
    assert RemoteJob.read(folder) is None


def test_a_launcher_that_is_gone_before_its_job_was_accepted(folder):
    job = launched()
    assert not job.lost_launcher
    gone = RemoteJob(**{**vars(job), "process": 2**22 + 1})  # More than any process has.
    assert gone.lost_launcher
    assert not RemoteJob(**{**vars(gone), "host": f"not-{platform.node()}"}).lost_launcher
    assert not gone.accepted(folder, "job-7").lost_launcher


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"format": "job 2"}', b'{"format": "job 1", "runner": 7}'])
def test_a_damaged_file_says_what_to_do(folder, content):
    folder.write(JOB_NAME, content)
    with pytest.raises(DatasetError, match=r"_job\.json is damaged .*delete the file when none of them does$"):
        RemoteJob.read(folder)


# --- in the folder of a dataset --------------------------------------------------------------------------------------


def test_a_folder_that_a_job_writes_is_no_dataset_yet(folder):
    launched().accepted(folder, "job-7")
    with pytest.raises(DatasetError, match=r"is not a dataset yet: job 'job-7' of FlinkRunner is at work on it, submitted by"):
        open_dataset(folder.location)


def test_who_cannot_ask_is_refused(folder):
    launched().accepted(folder, "job-7")
    output = Output(folder, Identity("captions", {}))
    expected = r"is being written by job 'job-7' of FlinkRunner, submitted by .* nothing was written.*_job\.json'$"
    with pytest.raises(DatasetError, match=expected):
        refuse_job(folder)
    with pytest.raises(DatasetError, match=expected):
        write_dataset(output, lambda number, shard: None)
    with pytest.raises(DatasetError, match=expected):
        write_dataset(output, lambda number, shard: None, overwrite=True)
    with pytest.raises(DatasetError, match=expected):
        complete_task(output, Task(0, 1), lambda finished: None)
    assert folder.names() == [JOB_NAME]


def test_the_commit_deletes_the_file(tmp_path):
    write_rows(tmp_path / "out", "captions", [ROW])
    folder = Folder(str(tmp_path / "out"))
    manifest = Manifest.read(folder)
    output = Output(folder, manifest.identity)
    Survey(output).uncommit([0])
    launched().accepted(folder, "job-7")
    commit(output)
    assert JOB_NAME not in folder.names()
    assert validate(folder.location) == []


def test_the_file_is_not_stray(tmp_path):
    """Who commits may be killed before it deletes the file."""
    write_rows(tmp_path / "out", "captions", [ROW])
    launched().claim(Folder(str(tmp_path / "out")))
    assert validate(tmp_path / "out") == []
    assert open_dataset(tmp_path / "out").manifest.rows == 1


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_launcher_that_leaves_does_not_take_the_workers_lock(folder, goes_on):
    job = launched()
    with hold(folder):
        folder.write(PUBLISHING_NAME, b"")
        if goes_on:
            job.claim(folder)
    assert folder.names() == ([PUBLISHING_NAME, JOB_NAME] if goes_on else [])
