"""How stores are reached and what their answers mean; tests/integration/test_overlapping_attempts.py writes to emulators."""

import re
from types import SimpleNamespace

import pytest

import schemas.storage.filesystems
from schemas.errors import DatasetError
from schemas.storage import object_store, s3
from schemas.storage.folder import Folder, object_at
from schemas.storage.object_store import bucket_of, has_tags, is_plain
from schemas.storage.s3 import S3Bucket
from schemas.storage.storage_errors import (
    NoSuchBucketError,
    StoreAccessError,
    StoreBusyError,
    StoreError,
    StoreUnreachableError,
)


@pytest.mark.parametrize(
    ("location", "bucket"),
    [
        ("s3://b", "s3://b"),
        ("s3://b/a b/ü%20?", "s3://b"),
        ("s3://key:secret@b/a?region=eu-west-1", "s3://key:secret@b?region=eu-west-1"),
    ],
)
def test_bucket_of_keeps_credentials_and_options(location, bucket):
    assert bucket_of(location) == bucket


@pytest.mark.parametrize(("missing", "tags"), [("", "s3 gs gcs"), ("botocore", "gs gcs"), ("google", "s3")])
def test_has_tags_needs_the_client_of_the_store(monkeypatch, missing, tags):
    monkeypatch.setattr(object_store, "_is_installed", lambda name: name.partition(".")[0] != missing)
    assert [scheme for scheme in ("s3", "gs", "gcs", "file") if has_tags(f"{scheme}://b/x")] == tags.split()
    assert not has_tags("/x")


@pytest.mark.parametrize(
    ("address", "folder", "name"),
    [
        ("s3://b/a.png", "s3://b", "a.png"),
        ("s3://b//a.png", "s3://b", "/a.png"),
        ("s3://b/x///a.png", "s3://b/x", "//a.png"),
        ("gs://b//x//../a b%20.png", "gs://b//x//..", "a b%20.png"),
        ("s3://b/x/", "s3://b/x", ""),
        ("s3://b/a\n?b=c", "s3://b", "a\n?b=c"),
    ],
)
def test_object_at_keeps_every_slash_of_a_key(address, folder, name):
    assert object_at(address) == (Folder(folder), name)
    assert Folder(folder).path_of(name) == address


def test_key_that_is_no_path_needs_the_client_of_the_store(no_settings, monkeypatch):
    plain = ["", "a", "a/b.c", "...", "a/..b", "a b", "%2E/x"]
    assert [key for key in (*plain, "/a", "a/", "a//b", ".", "a/./b", "a/..") if is_plain(key)] == plain
    monkeypatch.setattr(object_store, "has_tags", lambda location: False)
    for read in (Folder.read, Folder.open, Folder.stream, Folder.read_object, Folder.entry, Folder.children):
        with pytest.raises(DatasetError, match=r"'s3://b//a': only the client of the store can name .*imagepivot\[pipelines\]"):
            read(Folder("s3://b"), "/a")
    with pytest.raises(DatasetError, match="only the client"):
        Folder("s3://b//photos").kind()


def test_module_within_no_package_is_not_installed():
    assert object_store._is_installed.__wrapped__("schemas.storage.object_store")
    assert not object_store._is_installed.__wrapped__("no.such.module")


@pytest.fixture
def answers(monkeypatch):
    """A client whose every write gets the next of some answers: a status, or none for success."""

    class Client:
        def __init__(self):
            self.statuses, self.asked, self.writer, self.is_gone = [], [], "", False

        def put_object(self, **asked):
            self.asked.append({key: asked[key] for key in ("IfMatch", "IfNoneMatch") if key in asked})
            status = self.statuses.pop(0)
            if status:
                self.writer = asked["Metadata"]["imagepivot-writer"] if status == "lost" else ""
                self.is_gone = status == 404
                raise answer_of_s3(412 if status == "lost" else status)
            return {"ETag": "new"}

        def head_object(self, **asked):
            if self.is_gone:
                raise answer_of_s3(404)
            return {"ETag": "there", "Metadata": {"imagepivot-writer": self.writer}}

    client = Client()
    monkeypatch.setattr(s3, "_connect", lambda address: client)
    monkeypatch.setattr(object_store.time, "sleep", lambda seconds: None)
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
def test_put_to_s3(answers, replaces, statuses, tag, asked):
    answers.statuses = list(statuses)
    assert object_store.put(S3Bucket("s3://b"), "a", b"1", replaces) == tag
    assert answers.asked == asked


def test_put_denied_is_an_error(answers):
    answers.statuses = [403]
    with pytest.raises(StoreAccessError, match="An error occurred"):
        object_store.put(S3Bucket("s3://b"), "a", b"1", None)


def answer_of_s3(status: int, code: str = "X"):
    from botocore.exceptions import ClientError

    return ClientError({"Error": {"Code": code, "Message": ""}, "ResponseMetadata": {"HTTPStatusCode": status}}, "Write")


def test_s3_expected_status_is_ignored_except_missing_bucket():
    with s3._store_errors(404, 412):
        raise answer_of_s3(404, "NoSuchKey")
    for status, code, kind in ((404, "NoSuchBucket", NoSuchBucketError), (409, "Conflict", StoreError)):
        with pytest.raises(kind, match=code), s3._store_errors(404, 412):
            raise answer_of_s3(status, code)


def test_failures_of_botocore_are_errors_by_class():
    from botocore import exceptions as boto

    for failure, kind in (
        (answer_of_s3(404, "NoSuchBucket"), NoSuchBucketError),
        (answer_of_s3(403, "AccessDenied"), StoreAccessError),
        (answer_of_s3(401), StoreAccessError),
        (answer_of_s3(400, "RequestExpired"), StoreAccessError),
        (answer_of_s3(429, "SlowDown"), StoreBusyError),
        (answer_of_s3(503, "SlowDown"), StoreBusyError),
        (answer_of_s3(416, "InvalidRange"), StoreError),
        (boto.NoCredentialsError(), StoreAccessError),
        (boto.TokenRetrievalError(provider="sso", error_msg="it has expired"), StoreAccessError),
        (boto.EndpointConnectionError(endpoint_url="x"), StoreUnreachableError),
        (boto.ReadTimeoutError(endpoint_url="x"), StoreUnreachableError),
        (boto.InvalidRegionError(region_name="x y"), StoreError),
    ):
        with pytest.raises(kind, match=re.escape(str(failure))) as caught, s3._store_errors():
            raise failure
        assert type(caught.value) is kind


def test_answers_of_google_are_errors_by_class():
    from google.api_core import exceptions as api
    from google.auth.exceptions import DefaultCredentialsError, TransportError
    from requests.exceptions import ConnectTimeout

    from schemas.storage import google_storage

    for failure, kind in (
        (api.NotFound("x"), NoSuchBucketError),
        (api.Forbidden("x"), StoreAccessError),
        (DefaultCredentialsError("x"), StoreAccessError),
        (api.RetryError("x", api.TooManyRequests("x")), StoreBusyError),
        (api.ServiceUnavailable("x"), StoreBusyError),
        (api.RetryError("x", ConnectTimeout("x")), StoreUnreachableError),
        (TransportError("x"), StoreUnreachableError),
        (ConnectTimeout("x"), StoreUnreachableError),
        (api.BadRequest("x"), StoreError),
    ):
        with pytest.raises(kind, match="x") as caught, google_storage._store_errors():
            raise failure
        assert type(caught.value) is kind


def test_busy_store_is_retried_until_the_limit(monkeypatch):
    from botocore.exceptions import ClientError

    now, calls = [0.0], []
    monkeypatch.setattr(object_store.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(object_store.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))

    def put_object(**asked):
        assert asked == {"Bucket": "b", "Key": "a"}
        calls.append(now[0])
        raise answer_of_s3(503)

    with pytest.raises(ClientError, match="Write"):
        s3._BucketClient(SimpleNamespace(put_object=put_object), "b").put_object(Key="a")
    assert calls[:4] == [0.0, 0.25, 0.75, 1.75]
    assert 15 <= calls[-1] <= 19


@pytest.fixture
def google(monkeypatch):
    """A bucket of Google's store with one object, and who wrote it, in which every write gets the next of some answers."""
    from google.api_core.exceptions import NotFound, PreconditionFailed

    from schemas.storage.google_storage import GoogleBucket

    class Bucket:
        def __init__(self):
            self.failures, self.conditions, self.there = [], [], (7, "another")

    class Blob:
        name, metadata, generation = "a", None, None

        def upload_from_file(self, file, *, if_generation_match=None, **rest):
            bucket.conditions.append(if_generation_match)
            failure = bucket.failures.pop(0) if bucket.failures else ""
            if failure == "lost":
                bucket.there = (8, self.metadata["imagepivot-writer"])
            if failure == "deleted":
                bucket.there = None
            if failure:
                raise PreconditionFailed("conditionNotMet")
            self.generation = 9

        def compose(self, parts, *, if_generation_match=None, **rest):
            bucket.conditions.append(if_generation_match)
            if bucket.failures and bucket.failures.pop(0) == "no parts":
                raise NotFound("part")
            self.generation = 9

    bucket = Bucket()

    def get_blob(key, **rest):
        if bucket.there is None:
            return None
        found = Blob()
        found.generation, found.metadata = bucket.there[0], {"imagepivot-writer": bucket.there[1]}
        return found

    bucket.blob, bucket.get_blob = lambda key: Blob(), get_blob
    monkeypatch.setattr("schemas.storage.google_storage._client", lambda address: (None, bucket))
    bucket.front = GoogleBucket("gs://b")
    return bucket


@pytest.mark.parametrize(
    ("data", "replaces", "failures", "tag", "conditions"),
    [
        (b"1", "", [], "9", [None]),
        (b"1", None, [], "9", [0]),
        (b"1", None, ["there"], None, [0]),
        (b"1", "7", [], "9", [7]),
        (b"1", "6", ["there"], None, [6]),
        (b"1", "7", ["lost"], "8", [7]),  # Our own write, whose answer was lost.
        (b"1", "7", ["deleted"], "9", [7, 0]),  # What it replaces was deleted.
        # In parts, which another command may delete.
        (b"123", "6", [], "9", [None, None, 6]),
        (b"123", "6", ["", "", "no parts"], None, [None, None, 6]),  # Something else is there: it is looked at first.
        (b"123", None, ["", "", "no parts"], None, [None, None, 0]),
        (b"123", "", ["", "", "no parts"], "9", [None, None, None] * 2),
    ],
)
def test_put_to_google(google, monkeypatch, data, replaces, failures, tag, conditions):
    monkeypatch.setattr("schemas.storage.google_storage.PART_BYTES", 2)
    google.failures = list(failures)
    assert object_store.put(google.front, "a", data, replaces) == tag
    assert google.conditions == conditions


@pytest.fixture
def no_settings(monkeypatch, tmp_path):
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "PROFILE", "REGION", "DEFAULT_REGION"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    for clear in (caches := (schemas.storage.filesystems._connect.cache_clear, s3._obstore.cache_clear)):
        clear()
    yield
    for clear in caches:
        clear()


def test_endpoint_and_region_are_those_of_pyarrow(no_settings, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    store = s3._obstore("s3://b?region=eu-west-1")
    assert store.config["bucket"] == "b"
    assert (store.config["endpoint"], store.config["region"]) == ("http://127.0.0.1:1", "eu-west-1")
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    assert s3._obstore("s3://b").config["region"] == "eu-north-1"
    assert s3._obstore("s3://key:secret@b").config["access_key_id"] == "key"


def test_credentials_are_found_as_the_tools_of_the_cloud_find_them(no_settings, monkeypatch, tmp_path):
    (tmp_path / "credentials").write_text(
        "[work]\naws_access_key_id = id\naws_secret_access_key = secret\naws_session_token = t\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "work")
    found = s3._credentials()()
    assert (found["access_key_id"], found["secret_access_key"], found["token"]) == ("id", "secret", "t")
    assert found["expires_at"].tzinfo is not None


def test_without_credentials_access_is_denied(no_settings):
    with pytest.raises(StoreAccessError, match="Permission denied"):
        s3._credentials()
