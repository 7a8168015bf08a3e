"""Buckets in S3 through botocore."""

from __future__ import annotations

import base64
import errno
import hashlib
import io
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

from schemas.storage import object_store
from schemas.storage.locations import BucketAddress, endpoint_of
from schemas.storage.object_store import ANY, PART_BYTES, WRITER, Bucket, FileInfo, Page, RefusedError
from schemas.storage.storage_errors import (
    NoSuchBucketError,
    StoreAccessError,
    StoreBusyError,
    StoreError,
    StoreUnreachableError,
)

ATTEMPTS = 7
"""Attempts of a request. The pauses between them are random, up to 1, 2, 4, ... seconds: half a minute in all, on average."""

_MAX_PARTS = 10_000
_PARALLEL_PARTS = 4
_REFUSALS = (404, 409, 412, 501)
_REGION = "us-east-1"  # Default of the AWS tools; other stores ignore it.


class S3Bucket(Bucket):
    """A bucket in S3 with ETags as tags."""

    def __init__(self, address: BucketAddress) -> None:
        with _s3_errors():
            self._client = _s3_client(address)
        self._is_anonymous = address.user == "anonymous"
        self._name = address.name
        self._store = address._replace(name="")

    def exists(self) -> bool:
        # Not HEAD: some stores respond to it without a length, as if the response was truncated.
        with suppress(NoSuchBucketError), _s3_errors(404):
            self._client.list_objects_v2(Bucket=self._name, MaxKeys=1)
            return True
        return False

    def page(self, prefix: str, *, after: str = "", by_folder: bool = False) -> Page:
        options: dict[str, Any] = {"ContinuationToken": after} if after else {}
        if by_folder:
            options["Delimiter"] = "/"
        with _s3_errors():
            page = self._client.list_objects_v2(Bucket=self._name, Prefix=prefix, MaxKeys=object_store.PAGE_OBJECTS, **options)
        objects = [_item_info(item["Key"], item["Size"], item) for item in page.get("Contents", ())]
        folders = [item["Prefix"] for item in page.get("CommonPrefixes", ())]
        return Page(objects, folders, page["NextContinuationToken"] if page["IsTruncated"] else "")

    def head(self, key: str) -> FileInfo | None:
        with _s3_errors(404):
            head = self._client.head_object(Bucket=self._name, Key=key)
            return _item_info(key, head["ContentLength"], head)._replace(writer=head["Metadata"].get(WRITER, ""))
        return None

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        part = {} if stop is None else {"Range": f"bytes={start}-{stop - 1}"}
        if (data := self._read_once(key, part)) is not None:
            return data
        content = self._get(key, **part)
        return None if content is None else content[0]

    def _read_once(self, key: str, headers: dict[str, str]) -> bytes | None:
        """Return the bytes of an object by one signed request; None if it fails.

        A call of botocore takes three times as much of the processor. It follows each failure: it retries, finds the region, and
        tells the reason.
        """
        from botocore.awsrequest import AWSRequest
        from botocore.exceptions import BotoCoreError

        client = self._client
        path = quote(f"{self._name}/{key}", safe="/~")
        request = AWSRequest("GET", f"{client.meta.endpoint_url.rstrip('/')}/{path}", headers)
        try:
            if not self._is_anonymous:
                client._request_signer.get_auth_instance("s3", client.meta.region_name, "s3v4").add_auth(request)
            response = client._endpoint.http_session.send(request.prepare())
        except BotoCoreError:
            return None
        return response.content if response.status_code == (206 if headers else 200) else None

    def read_tagged(self, key: str) -> tuple[bytes, str] | None:
        return self._get(key)

    def _get(self, key: str, **options: str) -> tuple[bytes, str] | None:
        with _s3_errors(404, 416) as statuses:
            response = self._client.get_object(Bucket=self._name, Key=key, **options)
            return response["Body"].read(), response["ETag"]
        return (b"", "") if statuses == [416] else None  # The range is behind the end.

    def write(self, key: str, data: bytes | Path, if_match: str | None, writer: str) -> str:
        # S3 checks the condition of a multipart upload when it completes.
        from botocore.exceptions import ClientError

        condition = {} if if_match == ANY else {"IfNoneMatch": "*"} if if_match is None else {"IfMatch": if_match}
        with _s3_errors():
            try:
                return self._upload(key, data, condition, writer)
            except ClientError as error:
                status, code = _status_of(error), _code_of(error)
                if code != "NoSuchUpload" and (not condition or status not in _REFUSALS or code == "NoSuchBucket"):
                    raise
                raise RefusedError(status) from error

    def copy(self, key: str, origin: Bucket, origin_key: str) -> bool:
        if not isinstance(origin, S3Bucket) or origin._store != self._store:
            return False
        with _s3_errors(404):
            self._client.copy_object(Bucket=self._name, Key=key, CopySource={"Bucket": origin._name, "Key": origin_key})
            return True
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), origin_key)

    def delete(self, key: str, if_match: str) -> None:
        condition = {} if if_match == ANY else {"IfMatch": if_match}
        with _s3_errors(404, 409, 412):
            self._client.delete_object(Bucket=self._name, Key=key, **condition)

    def _upload(self, key: str, data: bytes | Path, condition: dict[str, str], writer: str) -> str:
        client, size, metadata = self._client, object_store.size_of(data), {WRITER: writer}
        target = {"Bucket": self._name, "Key": key}
        if size <= PART_BYTES:
            return client.put_object(**target, **_body(data, 0, size), **condition, Metadata=metadata)["ETag"]
        upload = {**target, "UploadId": client.create_multipart_upload(**target, Metadata=metadata)["UploadId"]}
        part_bytes = max(PART_BYTES, -(-size // _MAX_PARTS))

        def send(part_number: int, start: int) -> dict[str, Any]:
            tag = client.upload_part(**upload, **_body(data, start, part_bytes), PartNumber=part_number)["ETag"]
            return {"PartNumber": part_number, "ETag": tag}

        try:
            with ThreadPoolExecutor(_PARALLEL_PARTS, thread_name_prefix="upload") as pool:
                parts = list(pool.map(send, count(1), range(0, size, part_bytes)))
            return client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts}, **condition)["ETag"]
        except BaseException:
            with suppress(Exception):  # The first error counts.
                client.abort_multipart_upload(**upload)
            raise


def _item_info(key: str, size: int, item: dict[str, Any]) -> FileInfo:
    return FileInfo(key, size, object_store.version_of(item["LastModified"]), item["ETag"])


def _status_of(error: Any) -> int:
    return error.response["ResponseMetadata"]["HTTPStatusCode"]


def _code_of(error: Any) -> str:
    return error.response["Error"].get("Code", "")


def _body(data: bytes | Path, start: int, size: int) -> dict[str, Any]:
    """Return a part of an upload, and its checksum."""
    with io.BytesIO(data) if isinstance(data, bytes) else data.open("rb") as file:
        file.seek(start)
        part = file.read(size)
    digest = hashlib.md5(part, usedforsecurity=False).digest()
    return {"Body": part, "ContentMD5": base64.b64encode(digest).decode()}


def _s3_client(address: BucketAddress) -> Any:
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.session import get_session

    options = dict(address.options)
    is_anonymous = address.user == "anonymous"
    keys = {"aws_access_key_id": address.user, "aws_secret_access_key": address.password}
    session = get_session()
    client = session.create_client(
        "s3",
        region_name=options.get("region") or os.environ.get("AWS_REGION") or session.get_config_variable("region") or _REGION,
        endpoint_url=endpoint_of(options) or None,
        verify=False if options.get("tls_verify_certificates") == "false" else options.get("tls_ca_file_path"),
        config=Config(
            connect_timeout=object_store.CONNECT_SECONDS,
            read_timeout=object_store.READ_SECONDS,
            # In the mode "standard" all requests share a budget, which a short cut of the network uses up.
            retries={"mode": "legacy", "total_max_attempts": ATTEMPTS},
            max_pool_connections=object_store.CONNECTIONS,
            request_checksum_calculation="when_required",  # S3-compatible stores support only MD5.
            response_checksum_validation="when_required",
            **({"signature_version": UNSIGNED} if is_anonymous else {}),
        ),
        **(keys if address.password else {}),
    )
    session = client._endpoint.http_session
    session.send = _receive_whole(session.send)
    return client


def _receive_whole(send: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a sender that rejects truncated responses, for the client to retry.

    botocore would return a response with truncated headers as empty, and does not retry one with a truncated body.
    """
    from botocore.exceptions import ConnectionClosedError

    def send_whole(request: Any) -> Any:
        request.stream_output = False  # The session receives the body.
        response = send(request)
        headers = response.headers
        length, is_answer = headers.get("content-length"), request.method != "HEAD"
        is_cut = length is None and "transfer-encoding" not in headers if response.status_code in (200, 206) else False
        if is_cut or (is_answer and length is not None and int(length) != len(response.content)):
            raise ConnectionClosedError(endpoint_url=request.url)
        response.raw = io.BytesIO(response.content)
        return response

    return send_whole


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
        return StoreBusyError if status == 429 or status >= 500 else StoreError
    if isinstance(error, (boto.ConnectionError, boto.HTTPClientError, ResponseParserError)):
        return StoreUnreachableError
    without_credentials = (boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError)
    if isinstance(error, (*without_credentials, boto.SSOError, boto.TokenRetrievalError, boto.ProfileNotFound)):
        return StoreAccessError
    return StoreError if isinstance(error, boto.BotoCoreError) else None


@contextmanager
def _s3_errors(*expected: int) -> Iterator[list[int]]:
    """Convert errors of botocore; an expected status ends the block.

    It is then in the yielded list.
    """
    from botocore.exceptions import ClientError

    statuses: list[int] = []
    try:
        yield statuses
    except Exception as error:
        store_error = _error_class(error)
        if store_error is None:
            raise
        is_expected = isinstance(error, ClientError) and _status_of(error) in expected
        if not is_expected or store_error is NoSuchBucketError:
            raise store_error(str(error)) from error
        statuses.append(_status_of(error))
