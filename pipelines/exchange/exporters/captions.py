"""Which captions are exported, and reading them."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from schemas.dataset import Dataset
from schemas.errors import UsageError

__all__ = ["EVERYTHING", "Choice", "read_captions"]

_LABELS = ("language", "portion", "split")


@dataclass(frozen=True)
class Choice:
    """Which captions of a dataset are exported; an empty choice takes all.

    Attributes:
        language: only this language.
        portion: only this portion.
        splits: only these splits.
    """

    language: str = ""
    portion: str = ""
    splits: tuple[str, ...] = ()

    def of(self, label: str) -> tuple[str, ...]:
        """The values that are chosen of ``language``, ``portion`` or ``split``."""
        if label == "split":
            return self.splits
        value = self.language if label == "language" else self.portion
        return (value,) if value else ()


EVERYTHING = Choice()


def read_captions(dataset: Dataset, choice: Choice, *columns: str, one: tuple[str, ...] = ()) -> pa.Table:
    """The chosen captions, sorted by image id, language, portion and index; labels are plain strings.

    Args:
        dataset: a dataset of kind ``captions``.
        choice: which captions.
        columns: columns besides key and split.
        one: the labels of which only one value may be left, ``language`` or ``portion``.

    Raises:
        UsageError: a choice takes nothing, or leaves several values where one is needed.
    """
    tables, seen = [], {label: set[str]() for label in _LABELS}
    for table in dataset.shards(["image_id", "language", "portion", "index", "split", *columns]):
        for label in _LABELS:
            plain = table[label].cast(pa.string())
            seen[label].update(pc.unique(plain).to_pylist())
            table = table.set_column(table.schema.get_field_index(label), label, plain)
        for label in _LABELS:
            if choice.of(label):
                table = table.filter(pc.is_in(table[label], value_set=pa.array(choice.of(label), pa.string())))
        tables.append(table)
    for label in _LABELS:
        for value in choice.of(label):
            if value not in seen[label]:
                raise UsageError(
                    f"{dataset.folder.location!r} holds no captions of {label} {value!r}, only {', '.join(sorted(seen[label]))}"
                )
    captions = pa.concat_tables(tables)
    if not captions.num_rows:
        raise UsageError(f"{dataset.folder.location!r} holds no captions of this language, portion and split together")
    for label in one:
        values = sorted(pc.unique(captions[label]).to_pylist())
        if len(values) > 1:
            raise UsageError(f"the captions have several values of {label} ({', '.join(values)}): choose one with --{label}")
    return captions.sort_by([(name, "ascending") for name in ("image_id", "language", "portion", "index")])
