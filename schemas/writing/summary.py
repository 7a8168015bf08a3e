"""What a whole dataset was made from, in one small file beside its records.

With it a run recognises a complete dataset in a store from a listing, the manifest and this file, whatever the number of shards.
Like the records it is not part of the dataset; where it is missing or says something else, a run looks at each shard.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from schemas.fingerprints import canonical_json, sha256_of_json
from schemas.manifest import Manifest
from schemas.storage.folder import Entry, Folder

__all__ = ["SUMMARY_NAME", "is_summarised", "write_summary"]

SUMMARY_NAME = ".records/dataset.json"


def write_summary(
    folder: Folder, manifest: Manifest, listings: Sequence[str], states: Sequence[str], stored: Mapping[str, Entry]
) -> None:
    """Write the summary of a dataset whose manifest is about to be written.

    Args:
        folder: the folder of the dataset.
        manifest: the manifest.
        listings: of each shard the digest of what it is made from, as its footer says; empty where it does not.
        states: of each shard the state of its record.
        stored: what the folder holds.
    """
    content = {
        "manifest": sha256_of_json(manifest.to_json()),
        "listings": sha256_of_json(listings),
        "states": sha256_of_json(states),
        "tags": _digest_of_tags(manifest, stored),
    }
    folder.write(SUMMARY_NAME, f"{canonical_json(content)}\n".encode())


def is_summarised(
    folder: Folder,
    manifest: Manifest,
    listings: Sequence[str] | None,
    states: Sequence[str] | None,
    stored: Mapping[str, Entry],
) -> bool:
    """Whether the summary says that a folder was committed with this manifest, and made from these inputs; None is any."""
    try:
        content = json.loads(folder.read(SUMMARY_NAME))
        return (
            content["manifest"] == sha256_of_json(manifest.to_json())
            and (listings is None or content["listings"] == sha256_of_json(listings))
            and (states is None or content["states"] == sha256_of_json(states))
            and content.get("tags", "") in ("", _digest_of_tags(manifest, stored))
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _digest_of_tags(manifest: Manifest, stored: Mapping[str, Entry]) -> str:
    """Return a digest of the tags of shards and failures; empty where a store gives none."""
    tags = [stored[entry.path].tag for entry in (*manifest.shards, *manifest.failures) if entry.path in stored]
    return sha256_of_json(tags) if any(tags) else ""
