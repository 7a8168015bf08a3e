"""The captions that are exported."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.exchange.jobs import ExportJob
from schemas.dataset import open_dataset
from schemas.errors import UsageError


def read_captions(job: ExportJob, *columns: str, unique: tuple[str, ...] = ()) -> pa.Table:
    """Read the chosen captions, sorted by image id, language, portion and index; labels are plain strings.

    Args:
        job: names the dataset and its captions.
        columns: columns besides key and split.
        unique: labels, ``language`` or ``portion``, of which only one value may remain.

    Raises:
        UsageError: a choice matches nothing, or leaves several values where one is needed.
    """
    dataset = open_dataset(job.captions, kind="captions")
    chosen = {
        "language": (job.language,) if job.language else (),
        "portion": (job.portion,) if job.portion else (),
        "split": job.splits,
    }
    tables, seen = [], {label: set[str]() for label in chosen}
    for table in dataset.shards(["image_id", "language", "portion", "index", "split", *columns]):
        for label in chosen:
            plain = table[label].cast(pa.string())
            seen[label].update(pc.unique(plain).to_pylist())
            table = table.set_column(table.schema.get_field_index(label), label, plain)
        for label in chosen:
            if chosen[label]:
                table = table.filter(pc.is_in(table[label], value_set=pa.array(chosen[label], pa.string())))
        tables.append(table)
    for label in chosen:
        for value in chosen[label]:
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
