"""S3 as ``pyarrow.fs`` does not offer it: objects with tags, and writes that replace only what has a certain tag, or nothing.

The store gives every object a tag (its ETag), which no other content gets. A write may name the tag of what it replaces: of any
number of writers at once that replace the same object, or none, exactly one succeeds. Large files go up in parts, side by side, and
the condition counts for the moment when the last one is there.

This takes botocore, which the extra ``pipelines`` installs; it is loaded here and nowhere else in `schemas`. Without it, and in
Google's store, whose client in pyarrow takes no conditions, there are no tags.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from schemas.filesystems import filesystem_of
from schemas.locations import STORE

__all__ = [
    "ANY",
    "PART_BYTES",
    "Settings",
    "StoredObject",
    "bucket_of",
    "delete",
    "has_tags",
    "objects",
    "put",
    "read",
    "settings_of",
    "tag_of",
]

ANY = ""
"""In place of the tag of what a write replaces: whatever is there."""

PART_BYTES = 16 << 20
"""What one request of an upload holds at least."""

_PARALLEL_PARTS = 4
_MOST_PARTS = 10_000
_PATIENCE_SECONDS = 15
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 4.0
_CONNECT_SECONDS, _READ_SECONDS = 10, 60
_CONFLICT_SECONDS = 0.2
_REFUSALS = (404, 409, 412, 501)
"""Answers to a write under a condition: nothing is there; a conflict; something else is there; unknown."""
_BUSY = (429, 500, 502, 503, 504)
_T = TypeVar("_T")
_REGION = "us-east-1"  # What AWS's own tools take where nothing names a region, as for endpoints of other makers.
_WRITER = "imagepivot-writer"


class Settings(NamedTuple):
    """How a bucket of S3 is reached, as pyarrow finds it in an address and the environment.

    Attributes:
        bucket: its name.
        endpoint: another address than the cloud's own; empty for that.
        region: its region.
        anonymous: whether requests are not signed.
        keys: access key and secret key, where the address holds them.
    """

    bucket: str
    endpoint: str
    region: str
    anonymous: bool
    keys: tuple[str, str] | None


class StoredObject(NamedTuple):
    """An object as a listing tells of it; the name is relative to the folder that is listed."""

    name: str
    size: int
    tag: str


def has_tags(location: str) -> bool:
    """Return whether objects of a store have tags here, and can be written under a condition."""
    return location.startswith("s3://") and find_spec("botocore") is not None


def bucket_of(location: str) -> str:
    """Return the address of the bucket of a location, with the options behind it."""
    scheme, bucket, _, options = cast("re.Match[str]", STORE.fullmatch(location)).groups(default="")
    return f"{scheme}://{bucket}{options}"


def settings_of(address: str) -> Settings:
    """Return how the bucket of S3 with an address is reached."""
    filesystem, bucket = filesystem_of(address)
    # What pickling would keep of a file system: pyarrow tells its settings in no other way.
    found = filesystem.__reduce__()[1][0]
    endpoint = found["endpoint_override"]
    if endpoint and "://" not in endpoint:
        endpoint = f"{found['scheme']}://{endpoint}"
    region = found["region"] or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or _REGION
    keys = (found["access_key"], found["secret_key"]) if found["access_key"] else None
    return Settings(bucket.rstrip("/"), endpoint, region, found["anonymous"], keys)


def objects(location: str) -> Iterator[StoredObject]:
    """Yield the objects below a folder, page by page."""
    client, bucket = _client(bucket_of(location))
    asked = {"Bucket": bucket, "Prefix": _key(location, "")}
    with _store_errors():
        while True:
            page = client.list_objects_v2(**asked)
            for found in page.get("Contents", ()):
                if not found["Key"].endswith("/"):  # Which some tools write in place of a folder.
                    yield StoredObject(found["Key"].removeprefix(asked["Prefix"]), found["Size"], found["ETag"])
            if not page["IsTruncated"]:
                return
            asked["ContinuationToken"] = page["NextContinuationToken"]


def tag_of(location: str, name: str) -> str | None:
    """Return the tag of an object; None if there is none."""
    head = _head(location, name)
    return None if head is None else head["ETag"]


def read(location: str, name: str) -> tuple[bytes, str] | None:
    """Return content and tag of an object; None if there is none."""
    from botocore.exceptions import ClientError

    client, bucket = _client(bucket_of(location))

    def get() -> tuple[bytes, str]:
        found = client.get_object(Bucket=bucket, Key=_key(location, name))
        return found["Body"].read(), found["ETag"]

    with _store_errors():
        try:
            return _patiently(get)
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] != 404 or error.response["Error"]["Code"] == "NoSuchBucket":
                raise
            return None


def put(location: str, name: str, data: bytes | Path, replaces: str | None = ANY) -> str | None:
    """Write an object, if the one that it replaces is still there.

    Args:
        location: the folder.
        name: name of the object in it.
        data: the content, or a file that holds it.
        replaces: tag of the object that is replaced; None to write a new one, `ANY` to replace whatever is there. Where an object
            with the tag has been deleted, a new one is written.

    Returns:
        The tag of what was written; None if something else is there.
    """
    from botocore.exceptions import ClientError

    writer = uuid.uuid4().hex
    with _store_errors():
        while True:
            condition = {} if replaces == ANY else {"IfNoneMatch": "*"} if replaces is None else {"IfMatch": replaces}
            try:
                return _upload(location, name, data, condition, writer)
            except ClientError as error:
                status, code = error.response["ResponseMetadata"]["HTTPStatusCode"], error.response["Error"]["Code"]
                if code != "NoSuchUpload" and (not condition or status not in _REFUSALS or code == "NoSuchBucket"):
                    raise
            # The answer to a write of our own may have been lost, and its repetition refused.
            head = _head(location, name)
            if head is not None and head["Metadata"].get(_WRITER) == writer:
                return head["ETag"]
            if status == 412:
                return None
            if status == 501:
                replaces = ANY  # A store of another maker, which knows no conditions.
            elif status == 409:
                time.sleep(_CONFLICT_SECONDS)  # Another write was under way: its outcome decides.
            elif condition:
                replaces = None


def delete(location: str, name: str, tag: str) -> None:
    """Delete an object if it still has a tag."""
    from botocore.exceptions import ClientError

    client, bucket = _client(bucket_of(location))
    with _store_errors():
        try:
            client.delete_object(Bucket=bucket, Key=_key(location, name), IfMatch=tag)
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] not in (404, 409, 412):
                raise


def _head(location: str, name: str) -> dict[str, Any] | None:
    from botocore.exceptions import ClientError

    client, bucket = _client(bucket_of(location))
    with _store_errors():
        try:
            return client.head_object(Bucket=bucket, Key=_key(location, name))
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
                raise
            return None


def _upload(location: str, name: str, data: bytes | Path, condition: dict[str, str], writer: str) -> str:
    client, bucket = _client(bucket_of(location))
    place = {"Bucket": bucket, "Key": _key(location, name)}
    size = len(data) if isinstance(data, bytes) else data.stat().st_size
    if size <= PART_BYTES:
        body = data if isinstance(data, bytes) else data.read_bytes()
        return client.put_object(**place, **_body(body), **condition, Metadata={_WRITER: writer})["ETag"]
    upload = {**place, "UploadId": client.create_multipart_upload(**place, Metadata={_WRITER: writer})["UploadId"]}
    try:
        bounds = range(0, size, max(PART_BYTES, -(-size // _MOST_PARTS)))

        def send(number: int) -> dict[str, Any]:
            part = _read(data, bounds[number - 1], bounds.step)
            return {"PartNumber": number, "ETag": client.upload_part(**upload, **_body(part), PartNumber=number)["ETag"]}

        with ThreadPoolExecutor(_PARALLEL_PARTS, thread_name_prefix="upload") as pool:
            parts = list(pool.map(send, range(1, len(bounds) + 1)))
        return client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts}, **condition)["ETag"]
    except BaseException:
        with suppress(Exception):  # What counts is why the upload failed.
            client.abort_multipart_upload(**upload)
        raise


def _read(data: bytes | Path, start: int, size: int) -> bytes:
    if isinstance(data, bytes):
        return data[start : start + size]
    with data.open("rb") as file:
        file.seek(start)
        return file.read(size)


def _body(data: bytes) -> dict[str, Any]:
    """Return a body with the digest that the store compares it with."""
    digest = hashlib.md5(data, usedforsecurity=False).digest()
    return {"Body": data, "ContentMD5": base64.b64encode(digest).decode()}


def _key(location: str, name: str) -> str:
    return f"{filesystem_of(location)[1]}/{name}".partition("/")[2]


@lru_cache(maxsize=64)
def _client(address: str) -> tuple[Any, str]:
    """Return a client for a bucket, and the bucket's name."""
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.session import get_session

    settings = settings_of(address)
    options: dict[str, Any] = {"signature_version": UNSIGNED} if settings.anonymous else {}
    if settings.endpoint:
        options["s3"] = {"addressing_style": "path"}
    config = Config(
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=_READ_SECONDS,
        retries={"mode": "standard", "total_max_attempts": 1},  # `_patiently` tries again.
        max_pool_connections=64,
        request_checksum_calculation="when_required",  # Stores of other makers know no others than MD5.
        response_checksum_validation="when_required",
        **options,
    )
    keys = dict(zip(("aws_access_key_id", "aws_secret_access_key"), settings.keys or (), strict=False))
    endpoint = {"endpoint_url": settings.endpoint} if settings.endpoint else {}
    client = get_session().create_client("s3", region_name=settings.region, config=config, **endpoint, **keys)
    return _PatientClient(client), settings.bucket


class _PatientClient:
    """A client whose calls are made again where the network or the store fails."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(_patiently, getattr(self._client, name))


def _patiently(function: Callable[..., _T], **arguments: Any) -> _T:
    """Call a function again, with longer and longer pauses, while the network is cut or the store is busy, up to a limit."""
    from botocore.exceptions import ClientError, HTTPClientError, IncompleteReadError
    from botocore.parsers import ResponseParserError

    until, pause = time.monotonic() + _PATIENCE_SECONDS, _FIRST_PAUSE
    while True:
        try:
            return function(**arguments)
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] not in _BUSY or time.monotonic() >= until:
                raise
        except (HTTPClientError, IncompleteReadError, ResponseParserError):
            if time.monotonic() >= until:
                raise
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


@contextmanager
def _store_errors() -> Iterator[None]:
    """Turn errors of botocore into OSErrors in the words of pyarrow's, which `schemas.filesystems` knows."""
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, IncompleteReadError, NoCredentialsError
    from botocore.parsers import ResponseParserError

    try:
        yield
    except ClientError as error:
        code = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", error.response["Error"]["Code"]).upper()
        status = error.response["ResponseMetadata"]["HTTPStatusCode"]
        meaning = {401: "ACCESS_DENIED ", 403: "ACCESS_DENIED ", 503: "UNAVAILABLE "}.get(status, "")
        raise OSError(f"AWS Error {meaning}{code}: {error}") from error
    except NoCredentialsError as error:
        raise OSError(f"AWS Error ACCESS_DENIED: {error}") from error
    except (HTTPClientError, IncompleteReadError, ResponseParserError) as error:
        raise OSError(f"AWS Error NETWORK_CONNECTION: {error}") from error
    except BotoCoreError as error:
        raise OSError(f"AWS Error: {error}") from error
