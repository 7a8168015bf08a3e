import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from schemas.dataset import Dataset, open_dataset
from schemas.errors import DatasetError
from schemas.features import FeatureSpec
from schemas.fingerprints import sha256_of_json
from schemas.storage.folder import Folder
from schemas.writing.validation import validate
from tests.train.conftest import write_dataset
from tests.train.trainings import encode_ids, rewrite
from train.evaluation.embedding import embed
from train.evaluation.search import embed_gallery
from train.jobs import EmbedJob
from train.models.retrieval_model import ImageBatch
from train.runs.checkpoints import BEST, read_checkpoint, weights_digest, write_checkpoint
from train.runs.run import open_run


@pytest.fixture
def folder(write_run) -> str:
    return write_run()


@pytest.fixture
def run(folder):
    return open_run(folder)


def listing_of(source: Dataset) -> str:
    """The sum of the digests of the source's files, modulo 2**256."""
    files = sorted(Path(source.folder.location).glob("part-*.parquet"))
    return f"{sum(int(hashlib.sha256(path.read_bytes()).hexdigest(), 16) for path in files) % (1 << 256):064x}"


def key_of(row) -> tuple:
    return tuple(row[name] for name in ("image_id", "language", "portion", "index"))


def vectors_of(run, features: Dataset, **options) -> np.ndarray:
    """The embeddings of all images, in one batch."""
    with torch.no_grad():
        return run.model.encode_images(ImageBatch(torch.from_numpy(features.numpy(**options)))).values.numpy()


@pytest.fixture
def changed(toy, tmp_path) -> str:
    """The toy's features with the same fingerprint: some other images, and other vectors of the same."""
    rows = open_dataset(toy.features).table().to_pylist()[5:]
    rows += [{"image_id": f"new-{n}", "feature": rows[n]["feature"]} for n in range(3)]
    for row in rows:
        row["feature"] = [value + 0.5 for value in row["feature"]]
    fingerprint = write_dataset(tmp_path / "changed", "features", rows, parameters={}, spec=FeatureSpec("toy", (8,)))
    assert fingerprint == open_dataset(toy.features).fingerprint
    return str(tmp_path / "changed")


@pytest.fixture
def job(folder, toy, tmp_path) -> EmbedJob:
    return EmbedJob(run=folder, output=str(tmp_path / "out"), features=toy.features, captions=toy.captions, device="cpu")


@pytest.mark.parametrize("l2", [False, True])
def test_every_image_has_its_embedding(write_run, toy, tmp_path, l2):
    folder, output = Folder(write_run(l2=l2)), tmp_path / "out"
    stored = read_checkpoint(folder, BEST)
    model = {**stored.model, "images.bias": torch.ones(6)}  # Without a bias, vectors do not depend on the norms of features.
    write_checkpoint(folder, BEST, replace(stored, model=model))
    run = open_run(folder.location)
    (manifest,) = embed(EmbedJob(run.folder.location, str(output), features=toy.features))
    assert (manifest.kind, (output / "captions").exists()) == ("features", False)
    written, features = open_dataset(output / "images", kind="features"), open_dataset(toy.features)
    assert validate(output / "images") == []
    assert written.image_ids() == features.image_ids()
    assert (written.spec.name, written.spec.shape) == ("run", (6,))
    np.testing.assert_allclose(written.numpy(), vectors_of(run, features, l2=l2), atol=1e-6)


@pytest.mark.slow
def test_every_caption_of_a_known_language_has_its_embedding(run, toy, job):
    manifest = embed(job)[1]
    written = open_dataset(f"{job.output}/captions", kind="embeddings")
    assert validate(f"{job.output}/captions") == []
    rows = {key_of(row): row for row in open_dataset(toy.captions).table().to_pylist()}
    known = {key: row for key, row in rows.items() if key[1] in ("en", "de")}
    keys = written.table().drop_columns("embedding").to_pylist()
    assert {key_of(row): row["split"] for row in keys} == {key: row["split"] for key, row in known.items()}
    listing = listing_of(open_dataset(toy.captions))
    assert manifest.statistics == {"captions": len(known), "captions_left_out": len(rows) - len(known), "listing": listing}
    for row, embedding in zip(keys, written.numpy("embedding"), strict=True):
        expected = encode_ids(run.model, known[key_of(row)]["token_ids"], row["language"])
        np.testing.assert_allclose(embedding, expected.numpy(), atol=1e-6)


def test_same_run_gives_the_same_bytes_and_resumes(job):
    def content() -> dict[str, bytes]:
        root = Path(job.output)
        return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}

    embed(job)
    first = content()
    kept = Path(job.output, "captions", "part-00001-of-00003.parquet")
    stamp = kept.stat().st_mtime_ns
    for name in ("captions/_manifest.json", "captions/part-00002-of-00003.parquet"):
        Path(job.output, name).unlink()
    embed(job)
    assert content() == first
    assert kept.stat().st_mtime_ns == stamp
    shutil.rmtree(job.output)
    embed(job)
    assert content() == first


def test_another_model_is_another_dataset(run, write_run, job):
    embed(job)
    other = open_run(write_run("other", seed=1))
    assert weights_digest(other.model.state_dict()) != weights_digest(run.model.state_dict())
    with pytest.raises(DatasetError, match="holds another dataset"):
        embed(EmbedJob(other.folder.location, job.output, features=job.features))


def test_embed_after_content_change_is_refused(run, job, changed):
    embed(job)
    before = open_dataset(f"{job.output}/images").image_ids()
    with pytest.raises(DatasetError, match=r"images' was made from other content than '.*changed' now: 3 of 3 shards"):
        embed(replace(job, features=changed))
    assert open_dataset(f"{job.output}/images").image_ids() == before
    for name in ("_manifest.json", "part-00002-of-00003.parquet"):  # As left by an interrupted command.
        Path(job.output, "images", name).unlink()
    with pytest.raises(DatasetError, match="now: 2 of 3 shards differ"):
        embed(replace(job, features=changed))
    embed(replace(job, features=changed, overwrite=True))
    written, features = open_dataset(f"{job.output}/images"), open_dataset(changed)
    assert written.image_ids() == features.image_ids() != before
    np.testing.assert_allclose(written.numpy(), vectors_of(run, features), atol=1e-6)


def test_embeddings_chosen_by_captions_depend_on_all_captions(toy, job, tmp_path):
    chosen = replace(job, splits=("test",), allow_missing_features=True)
    embed(chosen)
    fewer = rewrite(toy.captions, tmp_path / "fewer", lambda rows: [row for row in rows if row["image_id"] != "test-000"])
    with pytest.raises(DatasetError, match=r"images' was made from other content than '.*features' and '.*fewer' now: 3 of 3"):
        embed(replace(chosen, captions=fewer))


def test_damaged_shards_are_written_again_when_they_are_verified(job):
    embed(job)
    path = Path(job.output, "captions", "part-00001-of-00003.parquet")
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    embed(job)
    assert path.read_bytes() != whole
    embed(replace(job, verify=True))
    assert path.read_bytes() == whole


def test_embed_with_foreign_data_is_refused(run, toy, other_toy, tmp_path):
    with pytest.raises(DatasetError, match="encoded with another vocabulary"):
        embed(EmbedJob(run.folder.location, str(tmp_path / "o"), features=toy.features, captions=other_toy.captions))
    with pytest.raises(DatasetError, match="comes from another extractor"):
        embed(EmbedJob(run.folder.location, str(tmp_path / "o"), features=other_toy.features))
    with pytest.raises(DatasetError, match="holds encoded, expected features"):
        embed(EmbedJob(run.folder.location, str(tmp_path / "o"), features=toy.captions))
    assert not (tmp_path / "o").exists()


def test_shard_without_images_has_no_embeddings(run, toy, tmp_path):
    features = open_dataset(rewrite(toy.features, tmp_path / "few", lambda rows: rows[:2], shards=7))
    assert 0 in [shard.rows for shard in features.manifest.shards]
    embed(EmbedJob(run.folder.location, str(tmp_path / "o"), features=str(tmp_path / "few")))
    assert validate(tmp_path / "o" / "images") == []
    assert open_dataset(tmp_path / "o" / "images").image_ids() == features.image_ids()
    gallery = embed_gallery(run, str(tmp_path / "few"))
    assert list(gallery.image_ids) == features.image_ids()
    assert gallery.embeddings.shape == (2, 6)


# --- a selection -----------------------------------------------------------------------------------------------------


def rows_of(folder):
    return {key_of(row): row["embedding"] for row in open_dataset(folder)}


@pytest.mark.slow
def test_only_some_splits_and_languages(run, toy, job, tmp_path):
    embed(job)
    everything = rows_of(f"{job.output}/captions")
    chosen = replace(job, output=str(tmp_path / "some"), splits=("test", "val"), languages=("de",))
    images, captions = embed(chosen)
    for name in ("images", "captions"):
        assert validate(f"{chosen.output}/{name}") == []
    source = open_dataset(toy.captions).table().to_pylist()
    expected = {key_of(row) for row in source if row["split"] in ("val", "test") and row["language"] == "de"}
    found = rows_of(f"{chosen.output}/captions")
    assert set(found) == expected
    for key, embedding in found.items():
        np.testing.assert_allclose(embedding, everything[key], atol=1e-6)
    left_out, listing = len(source) - len(expected), listing_of(open_dataset(toy.captions))
    assert captions.statistics == {"captions": len(expected), "captions_left_out": left_out, "listing": listing}
    # Images follow their splits, not the languages of their captions.
    dataset = open_dataset(f"{chosen.output}/images")
    assert set(dataset.image_ids()) == {row["image_id"] for row in source if row["split"] in ("val", "test")}
    captions_digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(Path(toy.captions).glob("part-*"))]
    listings = [
        sha256_of_json([hashlib.sha256(path.read_bytes()).hexdigest(), sha256_of_json(captions_digests)])
        for path in sorted(Path(toy.features).glob("part-*"))
    ]
    listing = f"{sum(int(digest, 16) for digest in listings) % (1 << 256):064x}"
    assert images.statistics == {"images": 21, "images_left_out": 40, "listing": listing}
    before = open_dataset(f"{job.output}/images")
    for row in dataset:
        np.testing.assert_allclose(row["feature"], before.get(row["image_id"])["feature"], atol=1e-6)


@pytest.mark.slow
def test_another_selection_is_another_dataset(run, toy, job):
    embed(job)
    whole = [open_dataset(f"{job.output}/{name}").fingerprint for name in ("images", "captions")]
    with pytest.raises(DatasetError, match=r"holds another dataset .selection\.splits: stored nothing, now \['val'\]"):
        embed(replace(job, splits=("val",)))
    images, captions = embed(replace(job, splits=("val", "test"), overwrite=True))
    assert (images.parameters["selection"], captions.parameters["selection"]) == ({"splits": ["test", "val"]},) * 2
    assert [entry["name"] for entry in images.inputs] == ["features", "encoded"]
    again = embed(replace(job, splits=("test", "val")))
    assert [manifest.fingerprint for manifest in again] == [images.fingerprint, captions.fingerprint]
    # The languages choose captions only.
    other, german = embed(replace(job, splits=("test", "val"), languages=("de",), overwrite=True))
    assert other.fingerprint == images.fingerprint
    assert len({*whole, images.fingerprint, captions.fingerprint, german.fingerprint}) == 5


def test_missing_features_of_a_split_are_refused_or_reported(job, gappy, caplog):
    some = replace(job, features=gappy.features, splits=("test", "val"))
    for split in (("test",), ("val", "test")):
        with pytest.raises(DatasetError, match=r"[12] of (9|12) images of split '(test|val)': (test-004|val-002)"):
            embed(replace(some, splits=split))
    assert not Path(job.output).exists()
    embed(replace(some, allow_missing_features=True))
    assert caplog.messages == [
        "not embedded for lack of features: 1 of 9 images of split 'test': test-004",
        "not embedded for lack of features: 2 of 12 images of split 'val': val-002, val-009",
    ]
    written = open_dataset(f"{job.output}/images")
    assert len(written) == 9 + 12 - 3
    assert not {"test-004", "val-002", "val-009"} & set(written.image_ids())
    # Captions need no features.
    assert "test-004" in open_dataset(f"{job.output}/captions").table(["image_id"])["image_id"].to_pylist()
