import gzip
import shutil
from collections import Counter
from pathlib import Path

import apache_beam as beam
import pyarrow.parquet as pq
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.testing.util import assert_that, equal_to

from pipelines.inputs.captions.opening import open_captions
from pipelines.running.execution import Execution
from pipelines.running.meter import Meter
from pipelines.text import merge_sort
from pipelines.text.captions import CaptionsJob, prepare_captions
from pipelines.text.merge_sort import make_sorted_runs
from pipelines.text.moses import RECIPES, prepare
from pipelines.text.transforms import ReadCaptions, TokenizeCaptions
from schemas.dataset import open_dataset
from schemas.errors import InputError, UsageError
from schemas.keys import shard_of
from schemas.storage.folder import Folder
from schemas.writing.output import OutputDataset
from schemas.writing.validation import validate
from tests.beam import IN_BEAM
from tests.builders import tree
from tests.pipelines.text.captions import caption, random_captions, write_table

ONE = Execution(workers=1)


@pytest.fixture(scope="module")
def rows():
    return random_captions(1, 200)


@pytest.fixture
def table(rows, tmp_path) -> Path:
    return write_table(tmp_path / "captions.tsv", rows)


@pytest.fixture(scope="module")
def prepared(rows, tmp_path_factory) -> Path:
    """Folder of the captions of ``rows``, prepared once; tests that change it take a copy."""
    folder = tmp_path_factory.mktemp("captions")
    prepare_captions(job_of(write_table(folder / "captions.tsv", rows), folder / "c"), ONE)
    return folder / "c"


def job_of(table: Path, output: Path, **more) -> CaptionsJob:
    return CaptionsJob(source=open_captions("table", table), output=str(output), **{"shards": 4, **more})


def brute(rows, *, shard: int, shards: int = 4, recipe: str = "multi30k-lc") -> list[dict]:
    seen: Counter = Counter()
    expected = []
    for image_id, language, portion, _, split, text in rows:
        index = seen[image_id, language, portion]
        seen[image_id, language, portion] += 1
        values = (image_id, language, portion, index, split, text, prepare(text, language, RECIPES[recipe]))
        expected.append(dict(zip(("image_id", "language", "portion", "index", "split", "text", "tokens"), values, strict=True)))
    expected = [row for row in expected if shard_of(row["image_id"], shards) == shard]
    return sorted(expected, key=lambda row: (row["image_id"], row["language"], row["portion"], row["index"]))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["multi30k-lc", "raw"])
def test_prepare_captions_equals_a_plain_loop(rows, table, prepared, tmp_path, recipe):
    if recipe != "multi30k-lc":
        prepared = tmp_path / "c"
        prepare_captions(job_of(table, prepared, recipe=recipe), ONE)
    dataset = open_dataset(prepared)
    for number in range(4):
        assert dataset.shard(number).to_pylist() == brute(rows, shard=number, recipe=recipe)
    assert validate(prepared) == []
    assert dataset.manifest.rows == 200
    assert dataset.manifest.parameters["recipe"] == recipe
    assert [source["name"] for source in dataset.manifest.inputs] == ["captions.tsv"]


def test_statistics_in_the_manifest_are_those_of_a_plain_loop(rows, prepared):
    statistics = open_dataset(prepared).manifest.statistics
    for key, counts in statistics["captions"].items():
        portion, split, language = key.split("/")
        texts = [row.text for row in rows if (row.portion, row.split, row.language) == (portion, split, language)]
        tokens = sum(len(prepare(text, language, RECIPES["multi30k-lc"])) for text in texts)
        assert counts == {"captions": len(texts), "tokens": tokens}
    assert sum(counts["captions"] for counts in statistics["captions"].values()) == 200
    assert statistics["images"] == {
        split: len({row.image_id for row in rows if row.split == split}) for split in ("train", "val")
    }


@pytest.mark.slow
def test_selection_filters_captions(rows, table, tmp_path):
    selected = {"languages": ("de",), "portions": ("comparable",), "splits": ("val",)}
    manifest = prepare_captions(job_of(table, tmp_path / "c", **selected), ONE)
    expected = sorted(row.text for row in rows if (row.language, row.portion, row.split) == ("de", "comparable", "val"))
    assert sorted(open_dataset(tmp_path / "c").table()["text"].to_pylist()) == expected
    assert [manifest.parameters[name] for name in ("languages", "portions", "splits")] == [["de"], ["comparable"], ["val"]]


@pytest.mark.slow
def test_captions_without_tokens_are_counted_failures(rows, tmp_path, monkeypatch):
    monkeypatch.setattr("pipelines.running.meter._WRITE_SECONDS", -1.0)
    (tmp_path / "meter").mkdir()
    meter = Meter(str(tmp_path / "meter"))
    more = [caption("img1", portion="comparable", text=" "), caption("new", "de", split="val", text="")]
    manifest = prepare_captions(job_of(write_table(tmp_path / "t.tsv", [*rows, *more]), tmp_path / "c"), ONE, meter)
    assert +meter.total() == {"captions": 202, "failed": 2, "failed_empty_caption": 2, "shards": 4}
    failures = {row["key"]: row["message"] for row in open_dataset(tmp_path / "c").failures().to_pylist()}
    index = sum(row[:3] == ("img1", "en", "comparable") for row in rows)
    assert failures == {
        f"img1/en/comparable/{index}": "the caption ' ' of split 'train' holds no token",
        "new/de/translation/0": "the caption '' of split 'val' holds no token",
    }
    assert (manifest.rows, manifest.failed, dict(manifest.failure_reasons)) == (200, 2, {"empty_caption": 2})
    assert validate(tmp_path / "c") == []


@pytest.mark.slow
def test_finished_shards_are_kept(table, prepared, tmp_path):
    shutil.copytree(prepared, tmp_path / "c")
    before = tree(tmp_path / "c")
    kept = tmp_path / "c" / "part-00002-of-00004.parquet"
    stamp = kept.stat()
    for name in ("_manifest.json", "part-00000-of-00004.parquet"):
        (tmp_path / "c" / name).unlink()
    prepare_captions(job_of(table, tmp_path / "c"), ONE)
    assert tree(tmp_path / "c") == before
    assert (kept.stat().st_mtime_ns, kept.stat().st_ino) == (stamp.st_mtime_ns, stamp.st_ino)


# --- pieces ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch):
    """Limits so small that each block is a gathering of its own, cut into many pieces."""
    monkeypatch.setattr("pipelines.inputs.tables._BATCH_ROWS", 30)
    monkeypatch.setattr(merge_sort, "GATHERED_BYTES", 1)
    monkeypatch.setattr(merge_sort, "RUN_BYTES", 500)
    monkeypatch.setattr(merge_sort, "MERGED_BYTES", 1)
    monkeypatch.setattr("pipelines.text.caption_shards._REPORT_ROWS", 3)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("execution", [ONE, IN_BEAM], ids=["places", "bytes"])
def test_prepare_captions_is_independent_of_run_size(table, prepared, tmp_path, monkeypatch, execution):
    made = []
    monkeypatch.setattr(
        "pipelines.text.caption_shards.make_sorted_runs",
        lambda *args, **more: (made.append(piece) or piece for piece in make_sorted_runs(*args, **more)),
    )
    prepare_captions(job_of(table, tmp_path / "c"), execution)
    assert len(made) > 7 * 4
    assert {isinstance(content, bytes) for _, (_, content) in made} == {execution is IN_BEAM}
    assert tree(tmp_path / "c") == tree(prepared)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("execution", [ONE, IN_BEAM], ids=["places", "bytes"])
def test_resumed_run_learns_truecasers_from_all_captions(rows, table, tmp_path, execution):
    prepare_captions(job_of(table, tmp_path / "c", recipe="moses-truecase"), execution)
    before = tree(tmp_path / "c")
    for name in ("_manifest.json", "part-00001-of-00004.parquet", "_truecaser/en.model"):
        (tmp_path / "c" / name).unlink()
    prepare_captions(job_of(table, tmp_path / "c", recipe="moses-truecase"), execution)
    assert tree(tmp_path / "c") == before


@pytest.mark.slow
def test_runs_of_a_killed_run_are_deleted(table, prepared, tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / ".captions-0a.tmp-1").write_bytes(b"left")
    prepare_captions(job_of(table, tmp_path / "c"), ONE)
    assert tree(tmp_path / "c") == tree(prepared)


@pytest.mark.slow
def test_runs_are_deleted_before_the_manifest(table, tmp_path, monkeypatch):
    seen = []
    put = Folder.put

    def watched(folder, name, *content, **condition):
        seen.append((name, sorted(path.name for path in folder.local_path.glob(".captions-*"))))
        return put(folder, name, *content, **condition)

    monkeypatch.setattr(Folder, "put", watched)
    prepare_captions(job_of(table, tmp_path / "c"), ONE)
    assert seen[-1] == ("_manifest.json", [])
    assert any(left for _, left in seen[:-1]), "the pieces were there before"


@pytest.mark.slow
def test_transforms_in_a_custom_pipeline(table, prepared, tmp_path):
    parameters = open_dataset(prepared).manifest.parameters
    output = OutputDataset(folder=Folder(str(tmp_path / "c")), kind="captions", parameters=parameters, shards=4)
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        pieces = pipeline | ReadCaptions(open_captions("table", table), shards=4)
        shards = pieces | TokenizeCaptions(output, RECIPES["multi30k-lc"])
        assert_that(shards, equal_to(range(4)))
    for number in range(4):
        made = pq.read_table(tmp_path / "c" / output.name(number))
        assert made.equals(open_dataset(prepared).shard(number))


def test_prepare_captions_refuses_an_unused_truecaser(table, tmp_path):
    with pytest.raises(UsageError, match="recipe 'multi30k-lc' does not truecase: leave --truecaser out"):
        prepare_captions(job_of(table, tmp_path / "c", truecaser="models"), ONE)
    assert not (tmp_path / "c").exists()


def test_prepare_captions_refuses_more_captions_of_an_image_than_int16(tmp_path):
    (tmp_path / "train_caps.txt").write_text("a dog\n" * 32_769)
    (tmp_path / "train_ids.txt").write_text("x\n" * 32_769)
    with pytest.raises(InputError, match="image 'x' has more than 32,768 captions"):
        prepare_captions(CaptionsJob(source=open_captions("scan", tmp_path), output=str(tmp_path / "c"), shards=1), ONE)


# --- the number of shards --------------------------------------------------------------------------------------------


def shards_of(source, output, **more) -> int:
    return len(prepare_captions(CaptionsJob(source=source, output=str(output), recipe="raw", **more), ONE).shards)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "most"), [("t.tsv", 1 << 26), ("t.tsv", 400), ("t.tsv.gz", 400)])
def test_number_of_shards_follows_from_the_bytes_of_the_files(tmp_path, rows, monkeypatch, name, most):
    """A table of 7 to 12 kB; compressed, it has about 3 kB that count four times."""
    plain = write_table(tmp_path / "t.tsv", rows)
    table = tmp_path / name
    if name.endswith(".gz"):
        table.write_bytes(gzip.compress(plain.read_bytes()))
    size = table.stat().st_size * (4 if name.endswith(".gz") else 1)
    monkeypatch.setattr("pipelines.text.captions.TEXT_SHARD_BYTES", most)
    expected = next(number for number in (16, 32, 64) if size <= number * most)
    assert shards_of(open_captions("table", table), tmp_path / "c") == expected


@pytest.mark.slow
def test_captions_keep_the_number_of_their_folder_and_follow_other_datasets(tmp_path, rows):
    source = open_captions("table", write_table(tmp_path / "t.tsv", rows))
    assert shards_of(source, tmp_path / "c", shards=3) == 3
    assert shards_of(source, tmp_path / "c") == 3
    assert shards_of(source, tmp_path / "d", shards=f"like:{tmp_path / 'c'}") == 3
    assert shards_of(source, tmp_path / "c", overwrite=True) == 16


def test_too_large_shards_are_refused(tmp_path, rows, monkeypatch):
    monkeypatch.setattr("schemas.writing.shard_count._MAX_BYTES", 1000)
    with pytest.raises(UsageError, match=r"in 1 shards make .* expected at most .*: give --shards [0-9]+ or more, or auto"):
        shards_of(open_captions("table", write_table(tmp_path / "t.tsv", rows)), tmp_path / "c", shards=1)
