"""Buckets in Google Cloud Storage through google-cloud-storage."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from schemas.storage import object_store
from schemas.storage.locations import BucketAddress, endpoint_of
from schemas.storage.object_store import ANY, PART_BYTES, WRITER, Bucket, FileInfo, Page
from schemas.storage.storage_errors import NoSuchBucketError, client_errors

_FIELDS = "items(name,size,generation,updated),prefixes,nextPageToken"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_RETRY_SECONDS = 15


class GoogleBucket(Bucket):
    """A bucket in Google Cloud Storage with generations as tags.

    Large files are uploaded in sequential parts: parallel ones have no conditions in the XML API, and would be temporary objects
    in the JSON API.
    """

    def __init__(self, address: BucketAddress) -> None:
        from google.cloud.storage.retry import DEFAULT_RETRY

        super().__init__(address)
        options = dict(address.options)
        self._client = _google_client(options, is_anonymous=address.user == "anonymous")
        self._bucket = self._client.bucket(self.name)
        retry = DEFAULT_RETRY.with_delay(0.25, 4.0, 2.0).with_timeout(float(options.get("retry_limit_seconds", _RETRY_SECONDS)))
        self._options = {"timeout": (object_store.CONNECT_SECONDS, object_store.READ_SECONDS), "retry": retry}

    def page(self, prefix: str, *, after: str = "", by_folder: bool = False) -> Page:
        with client_errors(NoSuchBucketError):
            listing = self._client.list_blobs(
                self._bucket,
                prefix=prefix,
                delimiter="/" if by_folder else None,
                page_token=after or None,
                page_size=object_store.PAGE_OBJECTS,
                fields=_FIELDS,
                **self._options,
            )
            blobs = list(next(listing.pages, ()))
        return Page([_blob_info(blob) for blob in blobs], sorted(listing.prefixes), listing.next_page_token or "")

    def head(self, key: str) -> FileInfo:
        blob = self._bucket.blob(key)
        with client_errors():
            blob.reload(**self._options)
        return _blob_info(blob)._replace(writer=(blob.metadata or {}).get(WRITER, ""))

    def read(self, key: str, start: int = 0, size: int | None = None) -> bytes:
        part = {} if size is None else {"start": start, "end": start + size - 1}
        with client_errors():
            return self._bucket.blob(key).download_as_bytes(**part, **self._options)

    def write(self, key: str, data: bytes | Path, if_match: str | None, writer: str) -> str:
        blob = self._bucket.blob(key, chunk_size=PART_BYTES)
        blob.metadata = {WRITER: writer}
        with client_errors(NoSuchBucketError), io.BytesIO(data) if isinstance(data, bytes) else data.open("rb") as file:
            blob.upload_from_file(
                file,
                size=object_store.size_of(data),
                content_type="application/octet-stream",
                checksum="crc32c",
                **_condition(if_match),
                **self._options,
            )
        return str(blob.generation)

    def copy(self, key: str, origin: Bucket, origin_key: str) -> None:
        source, token = self._client.bucket(origin.name).blob(origin_key), ""
        with client_errors():
            while token is not None:  # A large object takes several requests.
                token, _, _ = self._bucket.blob(key).rewrite(source, token=token or None, **self._options)

    def delete(self, key: str, if_match: str) -> None:
        with client_errors():
            self._bucket.delete_blob(key, **_condition(if_match), **self._options)


def _condition(if_match: str | None) -> dict[str, int]:
    return {} if if_match == ANY else {"if_generation_match": int(if_match or 0)}


def _blob_info(blob: Any) -> FileInfo:
    return FileInfo(blob.name, blob.size, object_store.version_of(blob.updated), str(blob.generation))


def _google_client(options: Mapping[str, str], *, is_anonymous: bool) -> Any:
    """Return a client, without credentials for STORAGE_EMULATOR_HOST."""
    import google.auth
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage
    from requests import exceptions
    from requests.adapters import HTTPAdapter

    class Adapter(HTTPAdapter):
        """Rejects a response with truncated headers; requests would return it as empty."""

        def send(self, *arguments: Any, **options: Any) -> Any:
            response = super().send(*arguments, **options)
            headers = {name.lower() for name in response.headers}
            if response.status_code in (200, 206, 308) and headers.isdisjoint({"content-length", "transfer-encoding"}):
                raise exceptions.ConnectionError("the answer broke off", request=response.request)
            return response

    endpoint, emulator = endpoint_of(options), os.environ.get("STORAGE_EMULATOR_HOST", "")
    if not endpoint and emulator:
        endpoint, is_anonymous = emulator if "://" in emulator else f"http://{emulator}", True
    credentials = AnonymousCredentials() if is_anonymous else google.auth.default(scopes=[_SCOPE])[0]
    client = storage.Client(
        project=options.get("project_id", "none"),  # Objects need no project.
        credentials=credentials,
        client_options={"api_endpoint": endpoint.rstrip("/")} if endpoint else None,
    )
    client._bucket_metadata_cache = None  # It requests the bucket in the background, for tracing.
    for scheme in ("http://", "https://"):
        client._http.mount(scheme, Adapter(pool_connections=object_store.CONNECTIONS, pool_maxsize=object_store.CONNECTIONS))
    return client
