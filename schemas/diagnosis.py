"""What a folder is that is not a dataset, and which folders to give instead."""

from __future__ import annotations

from collections.abc import Sequence

from schemas.storage.folder import Folder

_RUN_FILES = frozenset({"best.pt", "last.pt", "log.jsonl"})
_MOST_NAMED = 5


def diagnose(folder: Folder, manifest_names: Sequence[str]) -> str:
    """Say why a folder without a manifest is not a dataset, and what to do: the message of an error.

    Args:
        folder: the folder; it is listed, and so are the folders in it.
        manifest_names: file names of a manifest, the current one first.

    Raises:
        DatasetError: the folder cannot be listed.
    """
    manifest_name = manifest_names[0]
    start = f"{folder.location!r} is not a dataset"
    kind = folder.kind()
    if kind == "file":
        return f"{start} but a file: give the folder of a dataset"
    if kind == "nothing":
        return f"{start}: it holds no {manifest_name}, because it does not exist. Check the path"
    files = set(folder.children())
    if "config.toml" in files and files & _RUN_FILES:
        return (
            f"{start} but a run of imagepivot train, which imagepivot evaluate, embed and search take: give the folder of one of "
            "the datasets that it was trained on"
        )
    datasets = [name for name in folder.folders() if not set(folder.children(name)).isdisjoint(manifest_names)]
    if datasets:
        named = ", ".join(repr(folder.path_of(name)) for name in datasets[:_MOST_NAMED])
        more = f" or another of its {len(datasets)}" if len(datasets) > _MOST_NAMED else ""
        return f"{start} but a folder of datasets: give {'one of ' if len(datasets) > 1 else ''}{named}{more}"
    if any(name.startswith("part-") for name in files):
        return (
            f"{start}: it holds no {manifest_name}, which is written last, but shards. Run the command that writes it again to "
            "finish it, or copy the whole folder again"
        )
    return (
        f"{start}: it holds no {manifest_name}. Either the path is wrong or the run that writes it has not ended; run its command "
        "again to finish it"
    )
