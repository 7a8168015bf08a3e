import os
import shutil
from pathlib import Path

import pytest

from pipelines.datasets.publishing import UNFINISHED, publish
from schemas.errors import DatasetError, UsageError
from schemas.storage.folder import Folder
from schemas.writing.validation import validate
from tests.builders import tree
from tests.fake_extractors import picture, use_colours


@pytest.fixture
def update(call, tmp_path, monkeypatch):
    """Write features of pictures of these numbers, of which negative ones are broken, and return the folder."""
    use_colours(monkeypatch)

    def run(*numbers: int) -> str:
        shutil.rmtree(tmp_path / "images", ignore_errors=True)
        (tmp_path / "images").mkdir()
        for number in numbers:
            (tmp_path / "images" / f"{number}.png").write_bytes(picture(number, 0, 0) if number >= 0 else b"text")
        options = ("--device", "cpu", "--shards", "8", "--update", "--max-failures", "9", "--workers", "1")
        assert call("features", tmp_path / "images", tmp_path / "f", *options)[0] == 0
        return str(tmp_path / "f")

    return run


def content(folder) -> dict[str, bytes]:
    """The files of a dataset, without records and locks."""
    return {name: data for name, data in tree(Path(folder)).items() if not name.startswith(".")}


def test_copy_follows_the_dataset_and_copies_what_differs(update, tmp_path):
    source, target = update(1, 2, 3, 4, -5), tmp_path / "t"
    first = publish(source, str(target))
    assert (first.copied, first.kept, first.deleted) == (9, 0, 0)  # A file of failures.
    assert content(target) == content(source)
    assert not (target / UNFINISHED).exists()
    before = {path: path.stat().st_mtime_ns for path in target.rglob("*") if path.is_file()}
    assert publish(source, str(target)).copied == 0
    assert {path: path.stat().st_mtime_ns for path in target.rglob("*") if path.is_file()} == before
    update(1, 2, 3, 4, 6)
    old = {path: path.stat().st_mtime_ns for path in target.glob("part-*")}
    later = publish(source, str(target))
    assert (later.copied, later.kept, later.deleted) in {(1, 7, 1), (2, 6, 1)}  # By the shards of 5 and 6.
    assert sum(path.stat().st_mtime_ns != time for path, time in old.items()) == later.copied
    assert content(target) == content(source)
    assert validate(target) == []


def test_killed_copy_is_begun_again(update, tmp_path, monkeypatch):
    source, target = update(1, 2, 3), tmp_path / "t"
    publish(source, str(target))
    old, whole = content(target), Folder.copy
    update(1, 2, 3, *range(10, 30))

    def stop(folder, name, origin):
        if name.startswith("part-00005"):
            raise KeyboardInterrupt
        whole(folder, name, origin)

    monkeypatch.setattr(Folder, "copy", stop)
    with pytest.raises(KeyboardInterrupt):
        publish(source, str(target))
    assert (target / "_manifest.json").read_bytes() == old["_manifest.json"]
    monkeypatch.setattr(Folder, "copy", whole)
    update(1, 2, 3)  # The old manifest is right again, the shards beside it are not.
    assert publish(source, str(target)).kept == 0
    assert content(target) == content(source) == old


def test_dataset_that_changes_meanwhile_is_an_error_and_the_old_copy_keeps_its_manifest(update, tmp_path, monkeypatch):
    source, target = update(1, 2, 3), tmp_path / "t"
    publish(source, str(target))
    manifest, whole = (target / "_manifest.json").read_bytes(), Folder.copy
    update(1, 2, 4)
    changes = iter([(1, 2, 5)])

    def change(folder, name, origin):
        whole(folder, name, origin)
        for numbers in changes:
            update(*numbers)

    monkeypatch.setattr(Folder, "copy", change)
    with pytest.raises(DatasetError, match=r"changed while it was copied|the dataset changes, or validate it"):
        publish(source, str(target))
    assert (target / "_manifest.json").read_bytes() == manifest
    publish(source, str(target))
    assert content(target) == content(source)


def test_other_targets_are_refused(update, call, tmp_path):
    source = update(1, 2)
    with pytest.raises(UsageError, match="is the dataset itself: give another folder"):
        publish(source, f"{source}/")
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "mine.txt").write_text("mine")
    code, _, err = call("publish", source, tmp_path / "t")
    assert (code, "holds 'mine.txt' and is no dataset: give an empty folder, or an earlier copy" in err) == (1, True)
    assert tree(tmp_path / "t") == {"mine.txt": b"mine"}
    (tmp_path / "c.tsv").write_text("image_id\ttext\na\tone\n")
    assert call("captions", tmp_path / "c.tsv", tmp_path / "c", "--format", "table", "--workers", "1")[0] == 0
    before = tree(tmp_path / "c")
    with pytest.raises(DatasetError, match="holds captions, expected features"):
        publish(source, str(tmp_path / "c"))
    assert tree(tmp_path / "c") == before


@pytest.mark.parametrize(
    ("spoil", "message"), [(Path.unlink, "is missing"), (lambda path: os.truncate(path, 9), "has 9 bytes")]
)
def test_missing_or_truncated_shard_is_an_error_in_the_source_and_copied_to_the_target(update, tmp_path, spoil, message):
    source = update(1, 2)
    spoil(tmp_path / "f" / "part-00003-of-00008.parquet")
    with pytest.raises(DatasetError, match=rf"part-00003-of-00008.parquet {message}.*: the dataset changes, or validate it"):
        publish(source, str(tmp_path / "t"))
    assert not (tmp_path / "t" / "_manifest.json").exists()
    source = update(1, 2)
    publish(source, str(tmp_path / "t"))
    spoil(tmp_path / "t" / "part-00003-of-00008.parquet")
    assert publish(source, str(tmp_path / "t")).copied == 1
    assert content(tmp_path / "t") == content(source)
