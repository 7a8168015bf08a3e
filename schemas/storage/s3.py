"""Buckets in S3 through botocore."""

import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from typing import Any

import pyarrow as pa

from schemas.storage import object_store
from schemas.storage.locations import BucketAddress, endpoint_of
from schemas.storage.object_store import ANY, PART_BYTES, WRITER, Bucket, FileInfo, Page, object_info
from schemas.storage.storage_errors import RefusedError, client_errors

ATTEMPTS = 7
"""Attempts of a request. The pauses between them are random, up to 1, 2, 4, ... seconds: half a minute in all, on average."""

_PARALLEL_PARTS = 4
# What a whole response has, by operation; a store may send the length before its other headers.
_ANSWERS = {"PutObject": "ETag", "UploadPart": "ETag", "HeadObject": "LastModified", "ListObjectsV2": "IsTruncated"}


class S3Bucket(Bucket):
    """A bucket in S3 with ETags as tags."""

    def __init__(self, address: BucketAddress) -> None:
        from botocore import UNSIGNED
        from botocore.config import Config
        from botocore.session import get_session

        self.name, self.store = address.name, address._replace(name="")
        options, session, is_anonymous = dict(address.options), get_session(), address.user == "anonymous"
        if address.password:
            session.set_credentials(address.user, address.password)
        self._client = session.create_client(
            "s3",
            region_name=options.get("region") or os.environ.get("AWS_REGION"),
            endpoint_url=endpoint_of(options) or None,
            verify=False if options.get("tls_verify_certificates") == "false" else options.get("tls_ca_file_path"),
            config=Config(
                # In the mode "standard" all requests share a budget, which a short cut of the network uses up.
                retries={"mode": "legacy", "total_max_attempts": ATTEMPTS},
                connect_timeout=object_store.CONNECT_SECONDS,
                read_timeout=object_store.READ_SECONDS,
                max_pool_connections=object_store.CONNECTIONS,
                request_checksum_calculation="when_required",  # Stores of other makers do not support them.
                response_checksum_validation="when_required",
                **({"signature_version": UNSIGNED} if is_anonymous else {}),
            ),
        )
        self._client.meta.events.register("needs-retry.s3", _receive)

    def pages(self, prefix: str, *, by_folder: bool = False) -> Iterator[Page]:
        listing = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self.name,
            Prefix=prefix,
            Delimiter="/" if by_folder else "",
            PaginationConfig={"PageSize": object_store.PAGE_OBJECTS},
        )
        with client_errors():
            for page in listing:
                items, folders = page.get("Contents", ()), page.get("CommonPrefixes", ())
                objects = [object_info(item["Key"], item["Size"], item["LastModified"], item.get("ETag", "")) for item in items]
                yield Page(objects, [folder["Prefix"] for folder in folders], not page["IsTruncated"])

    def head(self, key: str) -> FileInfo | None:
        with suppress(FileNotFoundError), client_errors():
            head = self._client.head_object(Bucket=self.name, Key=key)
            tag, writer = head.get("ETag", ""), head["Metadata"].get(WRITER, "")
            return object_info(key, head["ContentLength"], head["LastModified"], tag, writer)
        return None

    def read(self, key: str, start: int = 0, size: int | None = None) -> bytes:
        part = {} if size is None else {"Range": f"bytes={start}-{start + size - 1}"}
        with client_errors():
            return self._client.get_object(Bucket=self.name, Key=key, **part)["Body"].read()

    def write(self, key: str, file: pa.NativeFile, if_match: str | None, writer: str) -> str:
        client, target, metadata = self._client, {"Bucket": self.name, "Key": key}, {WRITER: writer}
        condition = {} if if_match == ANY else {"IfNoneMatch": "*"} if if_match is None else {"IfMatch": if_match}

        def send(part_number: int, start: int) -> dict[str, Any]:
            part = client.upload_part(**upload, Body=file.read_at(PART_BYTES, start), PartNumber=part_number)
            return {"PartNumber": part_number, "ETag": part["ETag"]}

        with client_errors(RefusedError):
            if file.size() <= PART_BYTES:
                return client.put_object(**target, Body=file.read(), **condition, Metadata=metadata)["ETag"]
            upload = {**target, "UploadId": client.create_multipart_upload(**target, Metadata=metadata)["UploadId"]}
            try:
                with ThreadPoolExecutor(_PARALLEL_PARTS, thread_name_prefix="upload") as pool:
                    parts = list(pool.map(send, count(1), range(0, file.size(), PART_BYTES)))
                # S3 checks the condition of a multipart upload when it completes.
                return client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts}, **condition)["ETag"]
            except BaseException:
                with suppress(Exception):  # The first error counts.
                    client.abort_multipart_upload(**upload)
                raise

    def copy(self, key: str, origin: Bucket, origin_key: str) -> None:
        with client_errors():
            self._client.copy_object(Bucket=self.name, Key=key, CopySource={"Bucket": origin.name, "Key": origin_key})

    def delete(self, key: str, if_match: str) -> None:
        with client_errors():
            self._client.delete_object(Bucket=self.name, Key=key, **({} if if_match == ANY else {"IfMatch": if_match}))


def _receive(response: Any, operation: Any, attempts: int, **event: Any) -> float | None:
    """Receive the whole response, and return the pause before a retry if it broke off.

    The client would return one with truncated headers as empty, and does not retry one with a truncated body.
    """
    from botocore.exceptions import BotoCoreError, ConnectionClosedError
    from botocore.retryhandler import delay_exponential

    if response is None:
        return None  # The client has the rules for failed connections.
    answer, parsed = response
    is_error, expected = answer.status_code >= 300, _ANSWERS.get(operation.name, "ResponseMetadata")
    with suppress(BotoCoreError):
        if is_error or (expected in parsed and not object_store.is_cut(answer.status_code, answer.headers)):
            if "Body" in parsed:
                parsed["Body"] = io.BytesIO(parsed["Body"].read())
            return None
    if attempts == ATTEMPTS:
        raise ConnectionClosedError(endpoint_url=answer.url)
    return delay_exponential("rand", 2, attempts)
