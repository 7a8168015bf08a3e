"""Buckets of Google Cloud Storage, through Google's own client; see `schemas.storage.object_store`."""

from __future__ import annotations

import io
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from schemas.storage.filesystems import store_settings
from schemas.storage.object_store import (
    ANY,
    PAGE_OBJECTS,
    PART_BYTES,
    RETRIES,
    TEMPORARY_MARK,
    WRITER,
    Bucket,
    Entry,
    Page,
    RefusedError,
    Written,
    in_parts,
    size_of,
    version_of,
)
from schemas.storage.storage_errors import (
    NoSuchBucketError,
    StoreAccessError,
    StoreBusyError,
    StoreError,
    StoreUnreachableError,
)

_MOST_SOURCES = 32
"""Objects that the store puts together in one request."""

_FIELDS = "items(name,size,generation,updated),prefixes,nextPageToken"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_CONNECTIONS = 64
_PARALLEL_DELETES = 8


class GoogleBucket(Bucket):
    """A bucket of Google Cloud Storage; tags are generations.

    A large file goes up in parts, which are objects of their own under temporary names, side by side. The store then puts them
    together under the name that is meant, and to that the condition belongs: its uploads in parts after S3's manner take none.
    """

    def __init__(self, address: str) -> None:
        with _store_errors():
            self._client, self._bucket = _client(address)
        self._patient = {"timeout": (RETRIES.connect_seconds, RETRIES.read_seconds), "retry": _retry()}

    def exists(self) -> bool:
        """Whether there is such a bucket."""
        with _store_errors():
            return self._bucket.exists(**self._patient)

    def page(self, prefix: str, *, after: str, by_folder: bool) -> Page:
        """Return a page of a listing, see `Bucket.page`."""
        with _store_errors():
            found = self._client.list_blobs(
                self._bucket,
                prefix=prefix,
                delimiter="/" if by_folder else None,
                page_token=after or None,
                page_size=PAGE_OBJECTS,
                fields=_FIELDS,
                **self._patient,
            )
            blobs = list(next(found.pages, ()))
        objects = [Entry(blob.name, blob.size, version_of(blob.updated), str(blob.generation)) for blob in blobs]
        return Page(objects, sorted(found.prefixes), found.next_page_token or "")

    def head(self, key: str) -> Written | None:
        """Return what an object is; None if there is none."""
        with _store_errors():
            blob = self._bucket.get_blob(key, **self._patient)
        return None if blob is None else Written(str(blob.generation), (blob.metadata or {}).get(WRITER, ""))

    def get(self, key: str) -> tuple[bytes, str] | None:
        """Return content and tag of an object; None if there is none."""
        from google.api_core.exceptions import NotFound

        while (found := self.head(key)) is not None:
            with _store_errors():
                try:
                    return self._bucket.blob(key, generation=int(found.tag)).download_as_bytes(**self._patient), found.tag
                except NotFound:
                    continue  # Replaced or deleted since.
        return None

    def part(self, key: str, start: int, stop: int) -> bytes | None:
        """Return a range of the bytes of an object; None if there is no object."""
        from google.api_core.exceptions import NotFound

        with _store_errors():
            try:
                return self._bucket.blob(key).download_as_bytes(start=start, end=stop - 1, **self._patient)
            except NotFound:
                return None

    def write(self, key: str, data: bytes | Path, replaces: str | None, writer: str) -> str:
        """Write an object, see `Bucket.write`."""
        from google.api_core.exceptions import PreconditionFailed

        condition = {} if replaces == ANY else {"if_generation_match": int(replaces or 0)}
        blob = self._blob(key)
        blob.metadata = {WRITER: writer}
        with _store_errors():
            try:
                if size_of(data) <= PART_BYTES:
                    self._send(blob, data if isinstance(data, bytes) else data.read_bytes(), condition)
                else:
                    self._send_parts(blob, data, condition)
            except PreconditionFailed as error:
                raise RefusedError(412) from error
        return str(blob.generation)

    def delete(self, key: str, tag: str) -> None:
        """Delete an object if it still has a tag."""
        from google.api_core.exceptions import NotFound, PreconditionFailed

        with _store_errors(), suppress(NotFound, PreconditionFailed):
            self._bucket.delete_blob(key, if_generation_match=int(tag), **self._patient)

    def _blob(self, key: str) -> Any:
        blob = self._bucket.blob(key)
        blob.content_type = "application/octet-stream"
        return blob

    def _send(self, blob: Any, data: bytes, condition: dict[str, int]) -> None:
        blob.upload_from_file(io.BytesIO(data), size=len(data), checksum="crc32c", **condition, **self._patient)

    def _send_parts(self, blob: Any, data: bytes | Path, condition: dict[str, int]) -> None:
        folder, _, name = blob.name.rpartition("/")
        stem = f"{folder}{'/' if folder else ''}.{name}{TEMPORARY_MARK}{uuid.uuid4().int >> 64}"
        made: list[Any] = []

        def temporary() -> Any:
            made.append(self._blob(f"{stem}{len(made):05d}"))
            return made[-1]

        try:
            parts = [temporary() for _ in range(-(-size_of(data) // PART_BYTES))]
            in_parts(data, PART_BYTES, lambda number, part: self._send(parts[number - 1], part, {}))
            while len(parts) > _MOST_SOURCES:
                groups = [parts[start : start + _MOST_SOURCES] for start in range(0, len(parts), _MOST_SOURCES)]
                parts = [self._join(temporary(), group, {}) for group in groups]
            self._join(blob, parts, condition)
        finally:
            with ThreadPoolExecutor(_PARALLEL_DELETES, thread_name_prefix="upload") as pool:
                list(pool.map(self._discard, made))

    def _join(self, blob: Any, parts: Sequence[Any], condition: dict[str, int]) -> Any:
        from google.api_core.exceptions import NotFound

        try:
            blob.compose(list(parts), **condition, **self._patient)
        except NotFound as error:  # Another command clears the folder, or has committed it.
            raise RefusedError(404) from error
        return blob

    def _discard(self, part: Any) -> None:
        with suppress(Exception):  # What counts is what became of the upload; the next run deletes what is left.
            part.delete(**self._patient)


def _client(address: str) -> tuple[Any, Any]:
    """Return a client for a bucket, and the bucket."""
    import google.auth
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import storage
    from requests import exceptions
    from requests.adapters import HTTPAdapter

    class Adapter(HTTPAdapter):
        """Takes no answer whose headers broke off: it would count as an empty one."""

        def send(self, *arguments: Any, **options: Any) -> Any:
            answer = super().send(*arguments, **options)
            if answer.status_code in (200, 206) and not {"content-length", "transfer-encoding"} & {
                *map(str.lower, answer.headers)
            }:
                raise exceptions.ConnectionError("the answer broke off", request=answer.request)
            return answer

    name, settings = store_settings(address)
    endpoint = settings["endpoint_override"]
    options = {"api_endpoint": f"{settings['scheme']}://{endpoint}"} if endpoint else None
    credentials = AnonymousCredentials() if settings["anonymous"] else google.auth.default(scopes=[_SCOPE])[0]
    client = storage.Client(project="none", credentials=credentials, client_options=options)  # No object is in a project.
    client._bucket_metadata_cache = None  # It asks for the bucket in the background, for the sake of traces.
    for scheme in ("http://", "https://"):
        client._http.mount(scheme, Adapter(pool_connections=_CONNECTIONS, pool_maxsize=_CONNECTIONS))
    return client, client.bucket(name)


def _retry() -> Any:
    """Return when and how often a request is sent again: what Google's client says, and whenever an answer breaks off."""
    from google.cloud.storage.retry import DEFAULT_RETRY
    from requests.exceptions import RequestException

    known = DEFAULT_RETRY._predicate
    patient = DEFAULT_RETRY.with_predicate(lambda error: known(error) or isinstance(error, RequestException))
    return patient.with_delay(RETRIES.first_pause, RETRIES.longest_pause, 2.0).with_timeout(RETRIES.seconds)


@contextmanager
def _store_errors() -> Iterator[None]:
    """Turn errors of Google's client into ours."""
    from google.api_core.exceptions import Forbidden, GoogleAPICallError, NotFound, RetryError, Unauthorized
    from google.auth.exceptions import GoogleAuthError, TransportError
    from requests.exceptions import RequestException

    try:
        yield
    except (RequestException, RetryError, TransportError) as error:
        is_busy = isinstance(getattr(error, "cause", None), GoogleAPICallError)  # Of the last try: else there was no answer.
        raise (StoreBusyError if is_busy else StoreUnreachableError)(str(error)) from error
    except (Forbidden, Unauthorized, GoogleAuthError) as error:
        raise StoreAccessError(str(error)) from error
    except NotFound as error:
        raise NoSuchBucketError(str(error)) from error
    except GoogleAPICallError as error:
        raise (StoreBusyError if (error.code or 0) >= 500 else StoreError)(str(error)) from error
