"""How S3 is reached and what its answers mean; tests/integration/test_overlapping_attempts.py writes to an emulator of it."""

import pytest

from schemas import stores
from schemas.stores import bucket_of, has_tags


@pytest.mark.parametrize(
    ("location", "bucket"),
    [
        ("s3://b", "s3://b"),
        ("s3://b/a b/ü%20?", "s3://b"),
        ("s3://key:secret@b/a?region=eu-west-1", "s3://key:secret@b?region=eu-west-1"),
    ],
)
def test_all_of_a_bucket_is_written_through_one_client(location, bucket):
    assert bucket_of(location) == bucket


def test_tags_are_s3s_where_botocore_is_installed(monkeypatch):
    assert [has_tags(location) for location in ("s3://b/x", "gs://b/x", "/x")] == [True, False, False]
    monkeypatch.setattr(stores, "find_spec", lambda name: None)
    assert not has_tags("s3://b/x")


@pytest.fixture
def answers(monkeypatch):
    """A client whose every write gets the next of some answers: a status, or none for success."""
    from botocore.exceptions import ClientError

    class Client:
        def __init__(self):
            self.statuses, self.asked, self.writer = [], [], ""

        def put_object(self, **asked):
            self.asked.append({key: asked[key] for key in ("IfMatch", "IfNoneMatch") if key in asked})
            status = self.statuses.pop(0)
            if status:
                self.writer = asked["Metadata"]["imagepivot-writer"] if status == "lost" else ""
                code = 412 if status == "lost" else status
                answer = {"Error": {"Code": "X", "Message": ""}, "ResponseMetadata": {"HTTPStatusCode": code}}
                raise ClientError(answer, "PutObject")
            return {"ETag": "new"}

        def head_object(self, **asked):
            return {"ETag": "there", "Metadata": {"imagepivot-writer": self.writer}}

    client = Client()
    monkeypatch.setattr(stores, "_client", lambda address: (client, "b"))
    monkeypatch.setattr(stores, "_key", lambda location, name: name)
    monkeypatch.setattr(stores, "_CONFLICT_SECONDS", 0)
    return client


@pytest.mark.parametrize(
    ("replaces", "statuses", "tag", "asked"),
    [
        ("", [None], "new", [{}]),
        (None, [None], "new", [{"IfNoneMatch": "*"}]),
        ("old", [412], None, [{"IfMatch": "old"}]),
        ("old", ["lost"], "there", [{"IfMatch": "old"}]),  # Our own write, whose answer was lost.
        ("old", [404, None], "new", [{"IfMatch": "old"}, {"IfNoneMatch": "*"}]),  # What it replaces was deleted.
        ("old", [409, 412], None, [{"IfMatch": "old"}] * 2),
        (None, [501, None], "new", [{"IfNoneMatch": "*"}, {}]),  # A store that knows no conditions.
    ],
)
def test_what_becomes_of_a_write(answers, replaces, statuses, tag, asked):
    answers.statuses = list(statuses)
    assert stores.put("s3://b/x", "a", b"1", replaces) == tag
    assert answers.asked == asked


def test_a_write_that_is_denied_is_an_error(answers):
    answers.statuses = [403]
    with pytest.raises(OSError, match="AWS Error ACCESS_DENIED"):
        stores.put("s3://b/x", "a", b"1", None)


def test_a_store_that_stays_busy_is_given_up(monkeypatch):
    from botocore.exceptions import ClientError

    now, calls = [0.0], []
    monkeypatch.setattr(stores.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(stores.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))

    def busy():
        calls.append(now[0])
        raise ClientError({"Error": {}, "ResponseMetadata": {"HTTPStatusCode": 503}}, "PutObject")

    with pytest.raises(ClientError, match="PutObject"):
        stores._patiently(busy)
    assert calls[:4] == [0.0, 0.25, 0.75, 1.75]
    assert 15 <= calls[-1] <= 19
