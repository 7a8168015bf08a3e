"""Buckets in S3 through botocore."""

from __future__ import annotations

import errno
import io
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

from schemas.storage import object_store
from schemas.storage.locations import BucketAddress, endpoint_of
from schemas.storage.object_store import ANY, PART_BYTES, WRITER, Bucket, FileInfo, Page
from schemas.storage.storage_errors import RefusedError, client_errors

ATTEMPTS = 7
"""Attempts of a request. The pauses between them are random, up to 1, 2, 4, ... seconds: half a minute in all, on average."""

_MAX_PARTS = 10_000
_PARALLEL_PARTS = 4
_REGION = "us-east-1"  # Default of the AWS tools; other stores ignore it.


class S3Bucket(Bucket):
    """A bucket in S3 with ETags as tags."""

    def __init__(self, address: BucketAddress) -> None:
        from botocore import UNSIGNED
        from botocore.config import Config
        from botocore.httpsession import URLLib3Session
        from botocore.session import get_session
        from botocore.utils import get_environ_proxies

        super().__init__(address)
        options, session, is_anonymous = dict(address.options), get_session(), address.user == "anonymous"
        if address.password:
            session.set_credentials(address.user, address.password)
        self._credentials = None if is_anonymous else session.get_credentials()
        self._client = session.create_client(
            "s3",
            region_name=options.get("region")
            or os.environ.get("AWS_REGION")
            or session.get_config_variable("region")
            or _REGION,
            endpoint_url=endpoint_of(options) or None,
            config=Config(
                # In the mode "standard" all requests share a budget, which a short cut of the network uses up.
                retries={"mode": "legacy", "total_max_attempts": ATTEMPTS},
                request_checksum_calculation="when_required",  # Stores of other makers do not support them.
                response_checksum_validation="when_required",
                **({"signature_version": UNSIGNED} if is_anonymous else {}),
            ),
        )
        certificates = options.get("tls_ca_file_path") or session.get_config_variable("ca_bundle")
        certificates = certificates or os.environ.get("REQUESTS_CA_BUNDLE")
        self._http = URLLib3Session(
            verify=options.get("tls_verify_certificates") != "false" and (certificates or True),
            proxies=get_environ_proxies(self._client.meta.endpoint_url),
            timeout=(object_store.CONNECT_SECONDS, object_store.READ_SECONDS),
            max_pool_connections=object_store.CONNECTIONS,
        )
        self._client.meta.events.register("before-send.s3", self._send)

    def _send(self, request: Any, **event: Any) -> Any:
        """Send a request in place of the client, and receive the whole response.

        The client would return one with truncated headers as empty, and does not retry one with a truncated body.
        """
        from botocore.exceptions import ConnectionClosedError

        request.stream_output = False  # The session receives the body.
        response = self._http.send(request)
        headers = response.headers
        length, is_answer = headers.get("content-length"), request.method != "HEAD"
        is_cut = length is None and "transfer-encoding" not in headers if response.status_code in (200, 206) else False
        if is_cut or (is_answer and length is not None and int(length) != len(response.content)):
            raise ConnectionClosedError(endpoint_url=request.url)
        response.raw = io.BytesIO(response.content)
        return response

    def page(self, prefix: str, *, after: str = "", by_folder: bool = False) -> Page:
        options: dict[str, Any] = {"ContinuationToken": after} if after else {}
        if by_folder:
            options["Delimiter"] = "/"
        with client_errors():
            page = self._client.list_objects_v2(Bucket=self.name, Prefix=prefix, MaxKeys=object_store.PAGE_OBJECTS, **options)
        objects = [_item_info(item["Key"], item["Size"], item) for item in page.get("Contents", ())]
        folders = [item["Prefix"] for item in page.get("CommonPrefixes", ())]
        return Page(objects, folders, page["NextContinuationToken"] if page["IsTruncated"] else "")

    def head(self, key: str) -> FileInfo:
        with client_errors():
            head = self._client.head_object(Bucket=self.name, Key=key)
        return _item_info(key, head["ContentLength"], head)._replace(writer=head["Metadata"].get(WRITER, ""))

    def read(self, key: str, start: int = 0, size: int | None = None) -> bytes:
        """Return the bytes of an object by one signed request.

        A call of the client takes twice as much of the processor. It follows each failure: it retries, finds the region, and
        tells the reason.
        """
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.exceptions import BotoCoreError

        meta, part = self._client.meta, {} if size is None else {"Range": f"bytes={start}-{start + size - 1}"}
        request = AWSRequest("GET", f"{meta.endpoint_url.rstrip('/')}/{quote(f'{self.name}/{key}', safe='/~')}", part)
        with suppress(BotoCoreError):
            if self._credentials is not None:
                S3SigV4Auth(self._credentials.get_frozen_credentials(), "s3", meta.region_name).add_auth(request)
            response = self._send(request.prepare())
            if response.status_code == (206 if part else 200):
                return response.content
            if response.status_code == 404 and b"<Code>NoSuchKey</Code>" in response.content:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        with client_errors():
            return self._client.get_object(Bucket=self.name, Key=key, **part)["Body"].read()

    def write(self, key: str, data: bytes | Path, if_match: str | None, writer: str) -> str:
        condition = {} if if_match == ANY else {"IfNoneMatch": "*"} if if_match is None else {"IfMatch": if_match}
        with client_errors(RefusedError):
            return self._upload(key, data, condition, {WRITER: writer})

    def copy(self, key: str, origin: Bucket, origin_key: str) -> None:
        with client_errors():
            self._client.copy_object(Bucket=self.name, Key=key, CopySource={"Bucket": origin.name, "Key": origin_key})

    def delete(self, key: str, if_match: str) -> None:
        with client_errors():
            self._client.delete_object(Bucket=self.name, Key=key, **({} if if_match == ANY else {"IfMatch": if_match}))

    def _upload(self, key: str, data: bytes | Path, condition: dict[str, str], metadata: dict[str, str]) -> str:
        client, size, target = self._client, object_store.size_of(data), {"Bucket": self.name, "Key": key}
        if size <= PART_BYTES:
            return client.put_object(**target, Body=_part(data, 0, size), **condition, Metadata=metadata)["ETag"]
        # S3 checks the condition of a multipart upload when it completes.
        upload = {**target, "UploadId": client.create_multipart_upload(**target, Metadata=metadata)["UploadId"]}
        part_bytes = max(PART_BYTES, -(-size // _MAX_PARTS))

        def send(part_number: int, start: int) -> dict[str, Any]:
            tag = client.upload_part(**upload, Body=_part(data, start, part_bytes), PartNumber=part_number)["ETag"]
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


def _part(data: bytes | Path, start: int, size: int) -> bytes:
    """Return a part of an upload."""
    with io.BytesIO(data) if isinstance(data, bytes) else data.open("rb") as file:
        file.seek(start)
        return file.read(size)
