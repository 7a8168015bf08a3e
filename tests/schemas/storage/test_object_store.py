"""How stores are reached and what their answers mean; tests/integration/test_overlapping_attempts.py writes to emulators."""

import io
import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from types import SimpleNamespace

import pyarrow as pa
import pytest

from schemas.errors import DatasetError, UsageError
from schemas.storage import object_store, s3
from schemas.storage.folder import Folder, _ObjectFile, object_at, open_bucket
from schemas.storage.google_storage import GoogleBucket
from schemas.storage.locations import split_address
from schemas.storage.s3 import S3Bucket
from schemas.storage.storage_errors import (
    NoSuchBucketError,
    RefusedError,
    StoreAccessError,
    StoreError,
    client_errors,
)
from tests.stores import KEYS, SETTINGS, MemoryBucket


@pytest.mark.parametrize(
    ("location", "address", "key"),
    [
        ("s3://b///", ("s3", "b", "", "", ()), ""),
        ("s3://b//a b/ü%20?/", ("s3", "b", "", "", ()), "/a b/ü%20?"),
        ("s3://key:s%2Fcret@b/a?region=eu-west-1", ("s3", "b", "key", "s/cret", (("region", "eu-west-1"),)), "a"),
        ("gcs://anonymous@b/a", ("gs", "b", "anonymous", "", ()), "a"),
        ("gs://b?scheme=http&project_id=p", ("gs", "b", "", "", (("scheme", "http"), ("project_id", "p"))), ""),
    ],
)
def test_split_address_into_bucket_and_key(location, address, key):
    assert split_address(location) == (address, key)


@pytest.mark.parametrize(
    ("location", "fault"),
    [
        ("s3://b?nope=1", "option 'nope' is unknown, expected region, scheme, endpoint_override, tls_ca_file_path, tls_verify"),
        ("s3://me:a/b@c/x", "its bucket has other characters than letters, digits, '.', '-' and '_': write / in a key as %2F"),
        ("s3://me@b", "before '@' there is neither ACCESS_KEY:SECRET_KEY nor anonymous"),
        ("abfs://b/x", "expected a path or an address of a store. Give a local path, gs://BUCKET/PATH or s3://BUCKET/PATH"),
    ],
)
def test_split_address_refuses_what_the_store_does_not_know(location, fault):
    shown = re.escape(re.sub("me.*@", "***@", location))
    with pytest.raises(UsageError, match=rf"^cannot understand the location '{shown}': .*{re.escape(fault)}"):
        Folder(location).names()


@pytest.mark.parametrize(("scheme", "missing"), [("s3", "botocore"), ("gs", "google.auth")])
def test_bucket_without_the_client_names_the_extra(monkeypatch, scheme, missing):
    open_bucket.cache_clear()
    for module in (missing, "botocore.config"):
        monkeypatch.setitem(sys.modules, module, None)
    says = rf"^cannot use the bucket 'b': {missing}\S* is missing, .*: pip install 'imagepivot\[stores\]'$"
    for use in (Folder.names, Folder.kind, lambda folder: folder.read("a"), lambda folder: folder.put("a", b"")):
        with pytest.raises(DatasetError, match=says):
            use(Folder(f"{scheme}://b/x"))


@pytest.mark.parametrize("buffer", [1, 7, 64, 1000])
def test_object_file_in_a_buffer_is_the_file(buffer):
    data = random.Random(buffer).randbytes(1000)

    def read(start, size):
        assert size == 0 or start + size <= 1000  # A store may refuse more.
        return data[start : start + size]

    reader = io.BufferedReader(pa.PythonFile(_ObjectFile(read, 1000), mode="r"), buffer)
    chance, position, parts = random.Random(0), 0, []
    for _ in range(50):
        if chance.random() < 0.3:
            position = reader.seek(chance.randrange(1100))
        parts.append((position, part := reader.read(chance.randrange(100))))
        position += len(part)
    assert all(data[start : start + len(part)] == part for start, part in parts)


@pytest.mark.parametrize(
    ("address", "folder", "name"),
    [
        ("s3://b//a.png", "s3://b", "/a.png"),
        ("s3://b/x///a.png", "s3://b/x", "//a.png"),
        ("gs://b//x//../a b%20.png", "gs://b//x//..", "a b%20.png"),
        ("s3://b/a\n?b=c", "s3://b", "a\n?b=c"),
    ],
)
def test_object_at_keeps_every_slash_of_a_key(address, folder, name):
    assert object_at(address) == (Folder(folder), name)
    assert Folder(folder).path_of(name) == address


class RefusingBucket(MemoryBucket):
    """A bucket whose writes get the next of some answers: the status of a refusal, ``lost`` for a lost success, or none."""

    def __init__(self, answers):
        super().__init__()
        self.answers, self.conditions, self.writer = list(answers), [], "another"

    def head(self, key):
        return None if (info := super().head(key)) is None else info._replace(writer=self.writer)

    def write(self, key, file, if_match, writer):
        self.conditions.append(if_match)
        answer = self.answers.pop(0)
        if answer == "lost":
            self.writer = writer
        if answer == 404:
            self.objects.clear()
        if answer is not None:
            raise RefusedError("conditionNotMet", 412 if answer == "lost" else answer)
        return super().write(key, file, object_store.ANY, writer)


@pytest.mark.parametrize(
    ("replaces", "answers", "tag", "conditions"),
    [
        ("", [None], "2", [""]),
        (None, [None], "2", [None]),
        ("1", [412], None, ["1"]),
        ("1", ["lost"], "1", ["1"]),  # Our own write, whose answer was lost.
        ("1", [404, None], "2", ["1", None]),  # What it replaces was deleted.
        ("1", [409, 412], None, ["1", "1"]),
        (None, [501, None], "2", [None, ""]),  # A store that knows no conditions.
    ],
)
def test_put_after_refusals(monkeypatch, replaces, answers, tag, conditions):
    monkeypatch.setattr(object_store.time, "sleep", lambda seconds: None)
    bucket = RefusingBucket(answers)
    bucket.objects["a"] = b"0", "1"
    next(bucket._writes)
    assert object_store.put(bucket, "a", b"1", replaces) == tag
    assert bucket.conditions == conditions


@pytest.mark.parametrize(("replaces", "status"), [("", 403), ("", 404), ("", 409), (None, 404)])
def test_put_refused_for_other_reasons_is_an_error(replaces, status):
    with pytest.raises(RefusedError, match="conditionNotMet"):
        object_store.put(RefusingBucket([status]), "a", b"1", replaces)


def test_writer_of_a_write_to_s3_is_read_again():
    """Also its conditions, which an emulator may ignore."""
    stored = {}
    head = {"ContentLength": 1, "LastModified": datetime(2026, 1, 1, tzinfo=UTC), "ETag": "e"}
    client = SimpleNamespace(
        put_object=lambda **asked: stored.update(asked) or {"ETag": "e"},
        head_object=lambda **asked: {**head, "Metadata": stored["Metadata"]},
    )
    bucket = S3Bucket(split_address("s3://b")[0])
    bucket._client = client
    for if_match, condition in ((None, {"IfNoneMatch": "*"}), ("old", {"IfMatch": "old"}), ("", {})):
        stored.clear()
        assert bucket.write("a", pa.BufferReader(b"1"), if_match, "me") == "e"
        assert stored == {"Bucket": "b", "Key": "a", "Body": b"1", "Metadata": {"imagepivot-writer": "me"}, **condition}
    assert (bucket.head("a").tag, bucket.head("a").writer) == ("e", "me")


def test_writer_of_a_write_to_google_is_read_again(monkeypatch):
    asked = []
    blob = SimpleNamespace(name="a", metadata=None, generation=7, size=1, updated=datetime(2026, 1, 1, tzinfo=UTC))
    blob.upload_from_file = lambda file, **options: asked.append(options.get("if_generation_match"))
    store = SimpleNamespace(blob=lambda key, **options: blob, get_blob=lambda key, **options: blob)
    monkeypatch.setattr("google.cloud.storage.Client", lambda **options: SimpleNamespace(bucket=lambda name: store))
    bucket = GoogleBucket(split_address("gs://anonymous@b")[0])
    assert bucket.head("a").writer == ""
    assert [bucket.write("a", pa.BufferReader(b"1"), if_match, "me") for if_match in (None, "7", "")] == ["7"] * 3
    assert asked == [0, 7, None]
    assert (bucket.head("a").tag, bucket.head("a").writer) == ("7", "me")


def answer_of_s3(status: int, code: str = "X"):
    from botocore.exceptions import ClientError

    return ClientError({"Error": {"Code": code, "Message": ""}, "ResponseMetadata": {"HTTPStatusCode": status}}, "Write")


def test_missing_objects_are_not_found_except_in_missing_buckets():
    for status, code, kind in (
        (404, "NoSuchKey", FileNotFoundError),
        (404, "NoSuchBucket", NoSuchBucketError),
        (409, "Conflict", RefusedError),
        (416, "InvalidRange", EOFError),
    ):
        with pytest.raises(kind) as caught, client_errors():
            raise answer_of_s3(status, code)
        assert type(caught.value) is kind
        assert (caught.value.__cause__ is None) == (kind is FileNotFoundError)  # Failures of images quote the cause.
    with pytest.raises(RefusedError, match="NoSuchUpload") as refused, client_errors(RefusedError):
        raise answer_of_s3(404, "NoSuchUpload")
    assert refused.value.status == 404
    from google.api_core.exceptions import PreconditionFailed

    with pytest.raises(RefusedError, match="conditionNotMet") as refused, client_errors(NoSuchBucketError):
        raise PreconditionFailed("conditionNotMet")
    assert refused.value.status == 412


BUSY, UNREACHABLE = "it is busy or down: run", "it cannot be reached: check the network"


def assert_is(error: StoreError, expected: type[StoreError] | str) -> None:
    """Compare an error with its class, or with the beginning of its advice."""
    if isinstance(expected, str):
        assert type(error) is StoreError
        assert error.advice.startswith(expected)
    else:
        assert (type(error), error.advice) == (expected, expected.advice)


def test_failures_of_clients_are_errors_by_class():
    from botocore import exceptions as boto
    from google.api_core import exceptions as api
    from google.auth.exceptions import DefaultCredentialsError
    from requests.exceptions import ConnectTimeout

    for failure, kind in (
        (answer_of_s3(404, "NoSuchBucket"), NoSuchBucketError),
        (answer_of_s3(403, "AccessDenied"), StoreAccessError),
        (answer_of_s3(404, "InvalidAccessKeyId"), StoreAccessError),
        (answer_of_s3(503, "SlowDown"), BUSY),
        (answer_of_s3(400, "InvalidArgument"), StoreError),
        (boto.NoCredentialsError(), StoreAccessError),
        (boto.EndpointConnectionError(endpoint_url="x"), UNREACHABLE),
        (api.NotFound("x"), NoSuchBucketError),
        (api.Forbidden("x"), StoreAccessError),
        (DefaultCredentialsError("x"), StoreAccessError),
        (api.ServiceUnavailable("x"), BUSY),
        (api.RetryError("x", ConnectTimeout("x")), UNREACHABLE),
        (api.BadRequest("x"), StoreError),
    ):
        with pytest.raises(StoreError, match=re.escape(str(failure))) as caught, client_errors(NoSuchBucketError):
            raise failure
        assert_is(caught.value, kind)


@pytest.fixture
def no_settings(monkeypatch, tmp_path):
    for name in (*SETTINGS, *KEYS, "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    open_bucket.cache_clear()
    yield
    open_bucket.cache_clear()


def client_of(location):
    with Folder(location)._at() as (bucket, _):
        return bucket._client


def certificates_of(location):
    return client_of(location)._endpoint.http_session._verify


def test_options_of_an_address_of_s3(no_settings, monkeypatch):
    def settings(location):
        client = client_of(location)
        return client.meta.endpoint_url, client.meta.region_name

    keys = "s3://key:secret@b"
    assert settings(keys) == ("https://s3.amazonaws.com", "us-east-1")
    assert settings(f"{keys}?region=eu-west-1") == ("https://s3.eu-west-1.amazonaws.com", "eu-west-1")
    assert settings(f"{keys}?endpoint_override=h:9&scheme=http") == ("http://h:9", "us-east-1")
    assert settings(f"{keys}?endpoint_override=h:9") == ("https://h:9", "us-east-1")
    assert settings(f"{keys}?endpoint_override=http%3A%2F%2Fh:9&region=x") == ("http://h:9", "x")
    assert certificates_of(f"{keys}?tls_verify_certificates=false") is False
    assert certificates_of(f"{keys}?tls_ca_file_path=%2Fca.pem") == "/ca.pem"
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    for variable in ("REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE"):
        monkeypatch.setenv(variable, f"/{variable}.pem")
        assert certificates_of(f"{keys}?scheme={variable}") == f"/{variable}.pem"
    open_bucket.cache_clear()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    assert settings(keys) == ("http://127.0.0.1:1", "eu-north-1")
    assert settings(f"{keys}?endpoint_override=h:9&region=x") == ("https://h:9", "x")


def test_process_has_one_client_for_a_bucket_which_retries(no_settings):
    with ThreadPoolExecutor(8) as pool:
        (client,) = set(pool.map(client_of, [f"s3://key:secret@b/{number}" for number in range(8)]))
    assert client.meta.config.retries["total_max_attempts"] == s3.ATTEMPTS


def test_options_of_an_address_of_google(no_settings, monkeypatch):
    def endpoint(location):
        return client_of(location)._connection.API_BASE_URL

    anonymous = "gs://anonymous@b"
    assert endpoint(anonymous) == "https://storage.googleapis.com"
    assert endpoint(f"{anonymous}?endpoint_override=h:9&scheme=http") == "http://h:9"
    limited = open_bucket(split_address(f"{anonymous}?retry_limit_seconds=3")[0])
    assert limited._options["retry"].timeout == 3
    open_bucket.cache_clear()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    assert endpoint("gs://b") == "http://127.0.0.1:1"
    assert endpoint(f"{anonymous}?endpoint_override=h:9") == "https://h:9"


def test_without_credentials_access_is_denied(no_settings):
    with pytest.raises(DatasetError, match=r"access denied: check the credentials .*Unable to locate credentials"):
        Folder("s3://b").names()
