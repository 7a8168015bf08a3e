"""Buckets in Google Cloud Storage through google-cloud-storage."""

import os
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from schemas.storage import object_store
from schemas.storage.locations import BucketAddress, endpoint_of
from schemas.storage.object_store import ANY, PART_BYTES, WRITER, Bucket, FileInfo, Page
from schemas.storage.storage_errors import NoSuchBucketError, client_errors

_FIELDS = "items(name,size,generation,updated),prefixes,nextPageToken"


class GoogleBucket(Bucket):
    """A bucket in Google Cloud Storage with generations as tags.

    Large files are uploaded in sequential parts: parallel ones have no conditions in the XML API, and would
    be temporary objects in the JSON API.
    """

    def __init__(self, address: BucketAddress) -> None:
        import google.auth
        from google.auth.credentials import AnonymousCredentials
        from google.auth.transport.requests import AuthorizedSession
        from google.cloud import storage
        from google.cloud.storage.retry import DEFAULT_RETRY
        from requests.adapters import HTTPAdapter

        self.name, self.store, options = address.name, address._replace(name=""), dict(address.options)
        endpoint, size = endpoint_of(options).rstrip("/"), object_store.CONNECTIONS
        # The client finds the emulator in the environment.
        is_anonymous = address.user == "anonymous" or (not endpoint and "STORAGE_EMULATOR_HOST" in os.environ)
        session = AuthorizedSession(
            AnonymousCredentials() if is_anonymous else google.auth.default(scopes=storage.Client.SCOPE)[0]
        )
        session.hooks["response"].append(_check_headers)
        for scheme in ("http://", "https://"):
            session.mount(scheme, HTTPAdapter(pool_connections=size, pool_maxsize=size))
        # Otherwise it requests the bucket in the background, for tracing.
        os.environ.setdefault("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")
        self._client = storage.Client(
            project=options.get("project_id", "none"),  # Objects need no project.
            credentials=session.credentials,
            client_options={"api_endpoint": endpoint} if endpoint else None,
            _http=session,
        )
        self._bucket = self._client.bucket(self.name)
        retry = DEFAULT_RETRY.with_delay(0.25, 4.0, 2.0).with_timeout(float(options.get("retry_limit_seconds", 15)))
        self._options = {"timeout": (object_store.CONNECT_SECONDS, object_store.READ_SECONDS), "retry": retry}

    def pages(self, prefix: str, *, by_folder: bool = False) -> Iterator[Page]:
        listing = self._client.list_blobs(
            self._bucket,
            prefix=prefix,
            delimiter="/" if by_folder else None,
            page_size=object_store.PAGE_OBJECTS,
            fields=_FIELDS,
            **self._options,
        )
        with client_errors(NoSuchBucketError):
            for page in listing.pages:
                yield Page([_blob_info(blob) for blob in page], sorted(page.prefixes), not listing.next_page_token)

    def head(self, key: str) -> FileInfo | None:
        with client_errors():
            blob = self._bucket.get_blob(key, **self._options)
        return _blob_info(blob) if blob is not None else None

    def read(self, key: str, start: int = 0, size: int | None = None) -> bytes:
        part = {} if size is None else {"start": start, "end": start + size - 1}
        with client_errors():
            return self._bucket.blob(key).download_as_bytes(**part, **self._options)

    def write(self, key: str, file: pa.NativeFile, if_match: str | None, writer: str) -> str:
        blob = self._bucket.blob(key, chunk_size=PART_BYTES)
        blob.metadata = {WRITER: writer}
        with client_errors(NoSuchBucketError):
            blob.upload_from_file(
                file,
                size=file.size(),
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
    writer = (blob.metadata or {}).get(WRITER, "")
    return object_store.object_info(blob.name, blob.size, blob.updated, str(blob.generation), writer)


def _check_headers(response: Any, **options: Any) -> None:
    """Raise an error that the client retries, if headers are truncated."""
    from requests import exceptions

    if object_store.is_cut(response.status_code, response.headers):
        raise exceptions.ConnectionError("the answer broke off", request=response.request)
