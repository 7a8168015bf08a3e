"""``imagepivot publish``: bring a copy of a dataset up to date for its readers.

Files that differ are copied, on the side of the store where both folders are in one, and the manifest last. An update of the
dataset itself removes its manifest until its end; readers of the copy notice it only while changed files are copied.
"""

from dataclasses import dataclass, replace

from pipelines.running.meter import Meter
from schemas.dataset import open_dataset
from schemas.errors import DatasetError, UsageError
from schemas.manifest import MANIFEST_NAME, FileEntry, Manifest
from schemas.storage.folder import Folder
from schemas.writing.locks import lock_folder

UNFINISHED = ".unfinished-copy"
"""File in the target from the first copy to the manifest: a killed copy may have left files that the old manifest does not know."""


@dataclass(frozen=True)
class Publication:
    """What `publish` has done.

    Attributes:
        copied: number of files copied, without the manifest.
        bytes: their size.
        kept: number of files that the target had.
        deleted: number of its files that the dataset no longer has.

    Examples:
        >>> imagepivot.publish("features", "build/published").copied
        2
    """

    copied: int
    bytes: int
    kept: int
    deleted: int


def publish(source: str, target: str, meter: Meter = Meter()) -> Publication:
    """Copy what differs of a dataset to a folder that readers use.

    Each copied file counts as one of ``files`` of the meter.

    Raises:
        UsageError: both folders are the same.
        DatasetError: the source is no dataset, or changes meanwhile; the target holds anything else than a dataset of its kind.
    """
    dataset = open_dataset(source)
    origin, folder = dataset.folder, Folder(target)
    if origin.path_of("") == folder.path_of(""):
        raise UsageError(f"{target!r} is the dataset itself: give another folder")
    entries = _entries_by_path(dataset.manifest)
    with lock_folder(folder):
        stored = _stored_entries(folder, dataset.manifest.kind)
        todo = [entry for path, entry in entries.items() if stored.get(path) != entry]
        if todo or not stored:
            folder.put(UNFINISHED, b"")
        folder.map(lambda entry: _copy(origin, folder, entry, meter), todo)
        content = origin.read(MANIFEST_NAME)
        if Manifest.from_json(content.decode(), origin.path_of(MANIFEST_NAME)) != dataset.manifest:
            raise DatasetError(f"{source!r} changed while it was copied: publish it again")
        if folder.stat(MANIFEST_NAME) is None or folder.read(MANIFEST_NAME) != content:
            folder.put(MANIFEST_NAME, content)
        obsolete = [path for path in stored if path not in entries]
        folder.map(folder.delete, [*obsolete, UNFINISHED])
    return Publication(len(todo), sum(entry.bytes for entry in todo), len(entries) - len(todo), len(obsolete))


def _entries_by_path(manifest: Manifest) -> dict[str, FileEntry]:
    return {entry.path: entry for entry in (*manifest.shards, *manifest.failures, *manifest.files)}


def _stored_entries(folder: Folder, kind: str) -> dict[str, FileEntry]:
    """Return the files of the target, with their sizes; none without a whole copy.

    Raises:
        DatasetError: it holds anything else than a dataset of the kind.
    """
    sizes = {file.name: file.size for file in folder.list()}
    if UNFINISHED in sizes:
        return {}
    if MANIFEST_NAME not in sizes:
        if others := sorted(name for name in sizes if not name.startswith(".") and "/" not in name):
            raise DatasetError(
                f"{folder.location!r} holds {others[0]!r} and is no dataset: give an empty folder, or an earlier copy"
            )
        return {}
    manifest = Manifest.read(folder)
    if manifest.kind != kind:
        raise DatasetError(
            f"{folder.location!r} holds {manifest.kind}, expected {kind}: give an empty folder, or an earlier copy"
        )
    return {path: replace(entry, bytes=sizes.get(path, -1)) for path, entry in _entries_by_path(manifest).items()}


def _copy(origin: Folder, folder: Folder, entry: FileEntry, meter: Meter) -> None:
    """Copy a file, and compare its size.

    Raises:
        DatasetError: it is missing, or has another size than in the manifest.
    """
    try:
        folder.copy(entry.path, origin)
    except FileNotFoundError:
        raise DatasetError(f"{origin.path_of(entry.path)} is missing: the dataset changes, or validate it") from None
    stored = folder.stat(entry.path)
    if stored is None or stored.size != entry.bytes:
        raise DatasetError(
            f"{origin.path_of(entry.path)} has {stored and stored.size} bytes, not {entry.bytes}: the "
            "dataset changes, or validate it"
        )
    meter.add(files=1)
