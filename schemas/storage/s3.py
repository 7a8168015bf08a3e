"""Buckets in S3 through botocore; whole objects are read through obstore."""

from __future__ import annotations

import base64
import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from schemas.storage import object_store
from schemas.storage.filesystems import store_settings
from schemas.storage.object_store import ANY, PART_BYTES, WRITER, Bucket, Entry, Page, RefusedError, Written
from schemas.storage.storage_errors import (
    NoSuchBucketError,
    StoreAccessError,
    StoreBusyError,
    StoreError,
    StoreUnreachableError,
)

_MAX_PARTS = 10_000
_CREDENTIALS_SECONDS = 300  # botocore refreshes its credentials; obstore asks for them again after this time.
_REFUSALS = (404, 409, 412, 501)
_BUSY = (429, 500, 502, 503, 504)
_REGION = "us-east-1"  # Default of the AWS tools; other stores ignore it.


class Settings(NamedTuple):
    """The connection settings of a bucket in S3, as pyarrow reads them.

    Attributes:
        endpoint: URL of the store; empty for AWS.
        anonymous: whether requests are not signed.
        keys: access key and secret key in the address.
    """

    bucket: str
    endpoint: str
    region: str
    anonymous: bool
    keys: tuple[str, str] | None


def settings_of(address: str) -> Settings:
    """Return the connection settings of the bucket at an address."""
    bucket, stored = store_settings(address)
    endpoint = stored["endpoint_override"]
    if endpoint and "://" not in endpoint:
        endpoint = f"{stored['scheme']}://{endpoint}"
    region = stored["region"] or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or _REGION
    keys = (stored["access_key"], stored["secret_key"]) if stored["access_key"] else None
    return Settings(bucket, endpoint, region, stored["anonymous"], keys)


class S3Bucket(Bucket):
    """A bucket in S3 with ETags as tags; the address may have pyarrow's options."""

    def __init__(self, address: str) -> None:
        self._address = address

    @cached_property
    def _client(self) -> Any:  # Not needed to read whole objects.
        return _connect(self._address)

    def exists(self) -> bool:
        with _store_errors(404):
            self._client.head_bucket()
            return True
        return False

    def page(self, prefix: str, *, after: str, by_folder: bool) -> Page:
        options: dict[str, Any] = {"Prefix": prefix, "MaxKeys": object_store.PAGE_OBJECTS}
        if after:
            options["ContinuationToken"] = after
        if by_folder:
            options["Delimiter"] = "/"
        with _store_errors():
            page = self._client.list_objects_v2(**options)
        objects = [
            Entry(item["Key"], item["Size"], object_store.version_of(item["LastModified"]), item["ETag"])
            for item in page.get("Contents", ())
        ]
        folders = [item["Prefix"] for item in page.get("CommonPrefixes", ())]
        return Page(objects, folders, page["NextContinuationToken"] if page["IsTruncated"] else "")

    def head(self, key: str) -> Written | None:
        with _store_errors(404):
            head = self._client.head_object(Key=key)
            return Written(head["ETag"], head["Metadata"].get(WRITER, ""))
        return None

    def get(self, key: str) -> tuple[bytes, str] | None:
        if object_store.is_plain(key):
            with suppress(ValueError):  # obstore does not support control characters in keys.
                return _get_object(self._address, key)
        return self._get(key)

    def part(self, key: str, start: int, stop: int) -> bytes | None:
        content = self._get(key, Range=f"bytes={start}-{stop - 1}")
        return None if content is None else content[0]

    def _get(self, key: str, **options: str) -> tuple[bytes, str] | None:
        def get() -> tuple[bytes, str]:
            response = self._client.get_object(Key=key, **options)
            return response["Body"].read(), response["ETag"]

        with _store_errors(404):
            return object_store.repeat(get, _is_transient)
        return None

    def write(self, key: str, data: bytes | Path, replaces: str | None, writer: str) -> str:
        # S3 checks the condition of a multipart upload when it completes.
        from botocore.exceptions import ClientError

        condition = {} if replaces == ANY else {"IfNoneMatch": "*"} if replaces is None else {"IfMatch": replaces}
        with _store_errors():
            try:
                return self._upload(key, data, condition, writer)
            except ClientError as error:
                status, code = _status_of(error), _code_of(error)
                if code != "NoSuchUpload" and (not condition or status not in _REFUSALS or code == "NoSuchBucket"):
                    raise
                raise RefusedError(status) from error

    def delete(self, key: str, tag: str) -> None:
        with _store_errors(404, 409, 412):
            self._client.delete_object(Key=key, IfMatch=tag)

    def _upload(self, key: str, data: bytes | Path, condition: dict[str, str], writer: str) -> str:
        client, size, metadata = self._client, object_store.size_of(data), {WRITER: writer}
        if size <= PART_BYTES:
            return client.put_object(Key=key, **_body(object_store.read_part(data)), **condition, Metadata=metadata)["ETag"]
        upload = {"Key": key, "UploadId": client.create_multipart_upload(Key=key, Metadata=metadata)["UploadId"]}

        def send(part_number: int, part: bytes) -> dict[str, Any]:
            return {
                "PartNumber": part_number,
                "ETag": client.upload_part(**upload, **_body(part), PartNumber=part_number)["ETag"],
            }

        try:
            parts = object_store.upload_parts(data, max(PART_BYTES, -(-size // _MAX_PARTS)), send)
            return client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts}, **condition)["ETag"]
        except BaseException:
            with suppress(Exception):  # The first error counts.
                client.abort_multipart_upload(**upload)
            raise


def _status_of(error: Any) -> int:
    return error.response["ResponseMetadata"]["HTTPStatusCode"]


def _code_of(error: Any) -> str:
    return error.response["Error"].get("Code", "")


def _body(data: bytes) -> dict[str, Any]:
    digest = hashlib.md5(data, usedforsecurity=False).digest()
    return {"Body": data, "ContentMD5": base64.b64encode(digest).decode()}


def _connect(address: str) -> Any:
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.session import get_session

    settings = settings_of(address)
    options: dict[str, Any] = {"signature_version": UNSIGNED} if settings.anonymous else {}
    if settings.endpoint:
        options["s3"] = {"addressing_style": "path"}
    config = Config(
        connect_timeout=object_store.CONNECT_SECONDS,
        read_timeout=object_store.READ_SECONDS,
        retries={"mode": "standard", "total_max_attempts": 1},  # `_BucketClient` retries.
        max_pool_connections=64,
        request_checksum_calculation="when_required",  # S3-compatible stores support only MD5.
        response_checksum_validation="when_required",
        **options,
    )
    keys = dict(zip(("aws_access_key_id", "aws_secret_access_key"), settings.keys or (), strict=False))
    endpoint = {"endpoint_url": settings.endpoint} if settings.endpoint else {}
    client = get_session().create_client("s3", region_name=settings.region, config=config, **endpoint, **keys)
    return _BucketClient(client, settings.bucket)


def _get_object(address: str, key: str) -> tuple[bytes, str] | None:
    """Return content and tag of an object through obstore, which releases the GIL."""
    from obstore.exceptions import BaseError, GenericError, NotFoundError, PermissionDeniedError, UnauthenticatedError

    def get() -> tuple[bytes, str]:
        response = _obstore(address).get(key)
        return bytes(response.bytes()), response.meta["e_tag"] or ""

    try:
        # obstore does not retry a request with a truncated response.
        return object_store.repeat(get, lambda error: isinstance(error, GenericError))
    except (NotFoundError, FileNotFoundError):
        return None
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise StoreAccessError(errno.EACCES, os.strerror(errno.EACCES)) from error
    except BaseError as error:
        raise StoreUnreachableError(errno.EIO, "NETWORK_CONNECTION: the store does not answer") from error


@lru_cache(maxsize=64)
def _obstore(address: str) -> Any:
    """Return obstore's client for a bucket."""
    from obstore.store import S3Store

    settings = settings_of(address)
    options: dict[str, Any] = {"endpoint": settings.endpoint} if settings.endpoint else {}
    if settings.anonymous:
        options["skip_signature"] = True
    elif settings.keys:
        options |= dict(zip(("access_key_id", "secret_access_key"), settings.keys, strict=True))
    else:
        options["credential_provider"] = _credentials()
    return S3Store(
        settings.bucket,
        region=settings.region,
        client_options={
            "allow_http": True,
            "connect_timeout": timedelta(seconds=object_store.CONNECT_SECONDS),
            "timeout": timedelta(seconds=object_store.READ_SECONDS),
        },
        retry_config={
            "max_retries": object_store.MAX_ATTEMPTS - 1,
            "retry_timeout": timedelta(seconds=object_store.RETRY_SECONDS),
            "backoff": {
                "init_backoff": timedelta(seconds=object_store.FIRST_PAUSE),
                "max_backoff": timedelta(seconds=object_store.LONGEST_PAUSE),
                "base": 2,
            },
        },
        **options,
    )


def _credentials() -> Callable[[], dict[str, Any]]:
    """Return a provider of the credentials that botocore finds."""
    from botocore.session import get_session

    credentials = get_session().get_credentials()
    if credentials is None:
        raise StoreAccessError(errno.EACCES, os.strerror(errno.EACCES))

    def provide() -> dict[str, Any]:
        keys = credentials.get_frozen_credentials()
        return {
            "access_key_id": keys.access_key,
            "secret_access_key": keys.secret_key,
            "token": keys.token,
            "expires_at": datetime.now(UTC) + timedelta(seconds=_CREDENTIALS_SECONDS),
        }

    return provide


class _BucketClient:
    """A botocore client for one bucket that retries requests."""

    def __init__(self, client: Any, bucket: str) -> None:
        self._client = client
        self._bucket = bucket

    def __getattr__(self, name: str) -> Callable[..., Any]:
        request = getattr(self._client, name)
        return lambda **arguments: object_store.repeat(partial(request, Bucket=self._bucket, **arguments), _is_transient)


def _is_transient(error: Exception) -> bool:
    return _error_class(error) in (StoreBusyError, StoreUnreachableError)


def _error_class(error: Exception) -> type[StoreError] | None:
    """Return the class for an exception of botocore; None for any other exception."""
    from botocore import exceptions as boto
    from botocore.parsers import ResponseParserError

    if isinstance(error, boto.ClientError):
        status, code = _status_of(error), _code_of(error)
        if code == "NoSuchBucket":
            return NoSuchBucketError
        if status in (401, 403) or "Expired" in code:
            return StoreAccessError
        return StoreBusyError if status in _BUSY else StoreError
    if isinstance(error, (boto.ConnectionError, boto.HTTPClientError, boto.IncompleteReadError, ResponseParserError)):
        return StoreUnreachableError
    without_credentials = (boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError)
    if isinstance(error, (*without_credentials, boto.SSOError, boto.TokenRetrievalError)):
        return StoreAccessError
    return StoreError if isinstance(error, boto.BotoCoreError) else None


@contextmanager
def _store_errors(*expected: int) -> Iterator[None]:
    """Convert errors of botocore; a response with an expected status ends the block."""
    from botocore.exceptions import ClientError

    try:
        yield
    except Exception as error:
        store_error = _error_class(error)
        if store_error is None:
            raise
        is_expected = isinstance(error, ClientError) and _status_of(error) in expected
        if not is_expected or store_error is NoSuchBucketError:
            raise store_error(str(error)) from error
