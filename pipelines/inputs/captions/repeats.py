"""Advice for sources in which two images would get one id, or one image occurs twice."""

from __future__ import annotations

from pipelines.inputs.ids import IdRule, id_of_path

_RENAME = "rename one of them, here and on the disk, or write a table with ids of your own (--format table)"


def advice_apart(first: str, second: str, ids: IdRule) -> str:
    """Return what keeps two images apart that have one id, by their paths, as the end of a message."""
    helps = ids == "name" and id_of_path(first, "path") != id_of_path(second, "path")
    return f"make ids of whole paths with --id-rule path, or {_RENAME}" if helps else _RENAME


def path_advice(ids: IdRule) -> str:
    """Return the end of the message that a caption key occurs twice, for a source whose image ids are file names."""
    apart = "make ids of whole paths with --id-rule path, or " if ids == "name" else ""
    return (
        "If both describe one image, remove one of them, or read one split with --splits; if they describe two, "
        f"{apart}{_RENAME}"
    )
