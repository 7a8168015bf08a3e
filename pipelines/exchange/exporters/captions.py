"""Choosing the captions that are exported, and reading them."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from schemas.dataset import open_dataset
from schemas.errors import UsageError

__all__ = ["CaptionChoice", "read_captions"]

_LABELS = ("language", "portion", "split")


@dataclass(frozen=True)
class CaptionChoice:
    """The captions of a dataset that a layout takes; an empty value selects all. Base of the layouts with captions.

    Attributes:
        captions: folder of a captions dataset.
        language: only captions of this language.
        portion: only captions of this portion.
        splits: only captions of these splits.
    """

    captions: str = ""
    language: str = ""
    portion: str = ""
    splits: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.captions and (self.language or self.portion or self.splits):
            raise UsageError("--language, --portion and --splits choose captions: give their dataset with --captions")

    def chosen(self, label: str) -> tuple[str, ...]:
        """Return the chosen values of ``language``, ``portion`` or ``split``; none if all are taken."""
        if label == "split":
            return self.splits
        value = self.language if label == "language" else self.portion
        return (value,) if value else ()


def read_captions(choice: CaptionChoice, *columns: str, unique: tuple[str, ...] = ()) -> pa.Table:
    """Read the chosen captions, sorted by image id, language, portion and index; labels are plain strings.

    Args:
        choice: the dataset and its captions.
        columns: columns besides key and split.
        unique: labels, ``language`` or ``portion``, of which only one value may remain.

    Raises:
        UsageError: a choice matches nothing, or leaves several values where one is needed.
    """
    dataset = open_dataset(choice.captions, kind="captions")
    tables, seen = [], {label: set[str]() for label in _LABELS}
    for table in dataset.shards(["image_id", "language", "portion", "index", "split", *columns]):
        for label in _LABELS:
            plain = table[label].cast(pa.string())
            seen[label].update(pc.unique(plain).to_pylist())
            table = table.set_column(table.schema.get_field_index(label), label, plain)
        for label in _LABELS:
            if choice.chosen(label):
                table = table.filter(pc.is_in(table[label], value_set=pa.array(choice.chosen(label), pa.string())))
        tables.append(table)
    for label in _LABELS:
        for value in choice.chosen(label):
            if value not in seen[label]:
                raise UsageError(
                    f"{dataset.folder.location!r} holds no captions of {label} {value!r}, only {', '.join(sorted(seen[label]))}"
                )
    captions = pa.concat_tables(tables)
    if not captions.num_rows:
        raise UsageError(f"{dataset.folder.location!r} holds no captions of this language, portion and split together")
    for label in unique:
        values = sorted(pc.unique(captions[label]).to_pylist())
        if len(values) > 1:
            raise UsageError(f"the captions have several values of {label} ({', '.join(values)}): choose one with --{label}")
    return captions.sort_by([(name, "ascending") for name in ("image_id", "language", "portion", "index")])
