"""The commands against object stores: S3 by moto's server, Google Cloud Storage by an emulator, each a process on loopback."""

import posixpath
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.inputs.captions.base import EVERYTHING
from pipelines.inputs.captions.opening import open_captions
from pipelines.inputs.images.opening import open_images
from schemas.dataset import open_dataset
from schemas.errors import InputError
from schemas.storage.folder import Folder
from schemas.writing.file_names import PROBE_NAME
from schemas.writing.validation import validate
from tests.builders import stored
from tests.integration.processes import start, wait_for
from tests.pipelines.inputs.reading import write_tar
from tests.stores import untagged

pytest.importorskip("timm", reason="a small model of timm's makes many runs possible")

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def upload(folder: Path, location: str) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            Folder(location).put(str(path.relative_to(folder)), path.read_bytes())


ROWS = [(f"image{number}", language, text) for number in range(8) for language, text in (("en", "A dog."), ("de", "Ein Hund."))]


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("table") / "captions.csv"
    lines = [f"{image},{language},{text},train\n" for image, language, text in ROWS]
    path.write_text("image_id,language,text,split\n" + "".join(lines))
    return path


@pytest.fixture(scope="module")
def local(table, imagepivot, tmp_path_factory) -> Path:
    """Captions, vocabulary and encoding of the table, made in local folders."""
    folder = tmp_path_factory.mktemp("local")
    text(imagepivot, table, str(folder))
    return folder


def text(imagepivot, table, folder, workers="1"):
    arguments = ("--format", "table", "--shards", "2", "--workers", workers)
    imagepivot("captions", table, f"{folder}/captions", *arguments)
    imagepivot("vocabulary", f"{folder}/captions", f"{folder}/vocabulary", "--min-count", "1", "--workers", "1")
    imagepivot("encode", f"{folder}/captions", f"{folder}/vocabulary", f"{folder}/encoded", "--workers", "1")


def test_text_is_the_same_as_in_local_folders(store, table, local, imagepivot):
    folder = store.address("text of wörkers")
    upload(table.parent, f"{folder}/raw")
    text(imagepivot, f"{folder}/raw/captions.csv", folder, workers="2")
    for kind in ("captions", "vocabulary", "encoded"):
        assert untagged(stored(f"{folder}/{kind}")) == untagged(stored(local / kind))
        assert validate(f"{folder}/{kind}") == []
    assert open_dataset(f"{folder}/captions").manifest == open_dataset(local / "captions").manifest
    assert "16" in imagepivot("inspect", f"{folder}/captions", "--rows", "1").stdout
    imagepivot("validate", f"{folder}/encoded")


# Keys that clients which normalize paths would read as the key before, and keys that look encoded.
KEYS = (
    *("keys/a.png", "keys//a.png", "keys///a.png", "keys/./a.png", "keys/x/../a.png", "/a.png", "//a.png", "a.png", "./b.png"),
    *("keys/a b.png", "keys/a%20b.png", "keys/a+b.png", "keys/a%2Bb.png", "keys/a?b.png", "keys/a?b=c.png", "keys/a#b.png"),
    *(
        "keys/\N{DOG}.png",
        "keys/\u00e9.png",
        "keys/e\u0301.png",
        "keys/a\\b.png",
        "keys/a\tb.png",
        "keys/a;b&c.png",
        "keys/ .png",
        "keys/x*[1]~'`|<>^{}.png",
    ),
)


def keys_of(store) -> list[str]:
    """Keys that a store keeps apart: Google's emulator and versitygw store objects as files."""
    if store.maker == "s3":
        return [*KEYS, "../c.png"]
    if store.maker == "versitygw":
        return [key for key in KEYS if posixpath.normpath(f"./{key}") == key]
    return [
        key for key in KEYS if ".." not in key and key not in ("keys/a.png", "a.png", "//a.png", "keys///a.png", "keys/./a.png")
    ]


def test_keys_are_names_and_not_paths(store, tmp_path):
    root, keys = Folder(store.address("")), keys_of(store)
    for key in keys:
        root.put(key, key.encode())
    assert set(root.names()) >= set(keys)
    lines = "".join(f'{number},"{store.address(key)}"\n' for number, key in enumerate(keys))
    (tmp_path / "table.csv").write_text(f"image_id,uri\n{lines}")
    table = open_images(tmp_path / "table.csv")
    assert [table.read(ref) for ref in table.refs()] == [key.encode() for key in keys]
    for key in keys:
        stored = (
            root.read(key),
            root.open(key).read(),
            root.read(key, 0, 99),
        )
        assert set(stored) == {key.encode()}
        assert root.stat(key)[:2] == (key, len(key.encode()))
        if "?b=c" not in key:  # The options of an address.
            assert Folder(store.address(key)).kind() == "file"
    assert root.stat("keys//b.png") is root.stat("//a") is None
    assert store.maker == "versitygw" or root.stat("//") is None  # Its whole bucket.
    deleted = "/a.png" if "/a.png" in keys else "a.png"
    root.delete(deleted)
    root.delete("/never.png")
    assert set(keys) - set(root.names()) == {deleted}


def test_locations_with_slashes_in_front_of_keys(store):
    if store.maker == "versitygw":
        pytest.skip("the keys /a and a are one file of this store")
    for key in ("/p/a.png", "/p//b.png", "/only.png", "/p/captions.csv"):
        Folder(store.address("")).put(key, b"image_id,text\nx,a dog\n")

    def ids(path: str) -> list[str]:
        return sorted(ref.image_id for ref in open_images(store.address(path), id_rule="path").refs())

    assert (ids("/p"), ids("/p/*.png"), ids("/p//b.png")) == (["/b", "a"], ["a"], ["/b"])
    assert ids("/*.png") == ids("/only.png") == ["/only"]
    assert Folder(store.address("/p")).children() == ["a.png", "captions.csv"]
    captions = open_captions("table", store.address("/p/captions.csv"))
    (part,) = captions.parts(EVERYTHING)
    assert [caption.text for caption in captions.read(part, EVERYTHING)] == ["a dog"]
    for missing in ("/photos", "/p//a.png"):
        with pytest.raises(InputError, match="do not exist: check the path"):
            ids(missing)


@pytest.fixture(scope="module")
def pictures(photos, tmp_path_factory) -> Path:
    """Six photographs, and the same as a tar and as Parquet."""
    folder = tmp_path_factory.mktemp("pictures")
    chosen = sorted((photos / "images").iterdir())[:6]
    for path in chosen:
        (folder / "photos").mkdir(exist_ok=True)
        (folder / "photos" / path.name).write_bytes(path.read_bytes())
    write_tar(folder / "tars" / "a.tar", [(path.name, path.read_bytes()) for path in chosen])
    (folder / "parquet").mkdir()
    columns = {"image_id": [path.stem for path in chosen], "image": [path.read_bytes() for path in chosen]}
    pq.write_table(pa.table(columns), folder / "parquet" / "a.parquet", row_group_size=2)
    return folder


SMALL = ("--extractor", "timm:test_resnet.r160_in1k", "--weights", "random:0", "--device", "cpu")


def dataset_in(location) -> dict[str, bytes]:
    """Return the files of a dataset. Records name the modification times of the images, which differ from place to place."""
    return {name: data for name, data in stored(location).items() if name.startswith(("_", "part-"))}


def records_of(names) -> list[str]:
    return [f".records/{name.removesuffix('.parquet')}.jsonl" for name in names]


def features(imagepivot, images, output, **options):
    return imagepivot("features", images, output, *SMALL, "--shards", "2", **options)


def test_features_of_images_in_a_bucket(store, pictures, imagepivot, tmp_path):
    bucket = store.address("images")
    upload(pictures, bucket)
    lines = [f"{path.stem},{bucket}/photos/{path.name}\n" for path in (pictures / "photos").iterdir()]
    Folder(bucket).put("table/t.csv", ("image_id,uri\n" + "".join(lines)).encode())
    features(imagepivot, pictures / "photos", tmp_path / "photos")
    expected = open_dataset(tmp_path / "photos")
    sources = {"folder": "photos", "pattern": "pho*/*", "table": "table/t.csv", "tar": "tars", "parquet": "parquet"}
    if store.scheme == "gs":  # The others list and read in the same ways as these two.
        sources = {name: sources[name] for name in ("folder", "tar")}
    for name, source in sources.items():
        output = store.address(f"features/{name}")
        features(imagepivot, f"{bucket}/{source}", output)
        assert validate(output) == []
        extracted = open_dataset(output)
        assert extracted.image_ids() == expected.image_ids()
        assert extracted.numpy().tobytes() == expected.numpy().tobytes()
        image_ids = expected.image_ids()[::-1] * 2
        assert extracted.take(image_ids)["feature"].tobytes() == np.tile(expected.numpy()[::-1], (2, 1)).tobytes()
    assert dataset_in(store.address("features/folder")) == dataset_in(tmp_path / "photos")


def test_published_copy_is_made_by_the_store(store, small_features, tmp_path, imagepivot, monkeypatch):
    source, copy = store.address("published/f"), store.address("published/copy")
    assert "2 files copied" in imagepivot("publish", small_features, source).stdout
    opened, read = [], Folder.open
    monkeypatch.setattr(Folder, "open", lambda folder, name: opened.append(name) or read(folder, name))
    assert "2 files copied" in imagepivot("publish", source, copy).stdout
    assert set(opened) <= {"_manifest.json"}  # No shard was downloaded.
    assert dataset_in(copy) == dataset_in(source) == dataset_in(small_features)
    assert "0 files copied" in imagepivot("publish", copy, source).stdout
    imagepivot("publish", copy, tmp_path / "back")
    assert dataset_in(tmp_path / "back") == dataset_in(small_features)


def test_tasks_of_an_array_job(store, pictures, imagepivot, tmp_path):
    bucket, output = store.address("array/photos"), store.address("array/features")
    upload(pictures / "photos", bucket)
    features(imagepivot, bucket, tmp_path / "local")
    task = ("features", bucket, output, *SMALL, "--shards", "2", "--task")
    with start(*task, "0/2", folder=tmp_path / "0") as one, start(*task, "0/2", folder=tmp_path / "1") as copy:
        told = {(done.returncode, done.stdout) for done in (one.wait(), copy.wait())}
    assert told == {(0, "1 of 2 shards are done; missing 1: run task 1 of 2 again\n")}
    for index in (1, 1, 0):
        assert "features: 6 rows in 2 shards" in imagepivot(*task, f"{index}/2").stdout
        assert untagged(stored(output)) == untagged(stored(tmp_path / "local"))
    assert validate(output) == []


def test_killed_run_leaves_whole_objects_and_resumes(store, pictures, imagepivot, tmp_path):
    bucket, output = store.address("killed/photos"), store.address("killed/features")
    upload(pictures / "photos", bucket)
    options = (*SMALL, "--shards", "24", "--batch-size", "1")
    imagepivot("features", bucket, tmp_path / "local", *options)
    expected = dataset_in(tmp_path / "local")
    with start("features", bucket, output, *options, folder=tmp_path / "process") as run:
        wait_for(lambda: set(Folder(output).names()) - {PROBE_NAME} or not run.runs)
        assert run.runs, "the run ended before it could be killed"
        run.send(signal.SIGKILL)
        run.wait()
    left = dataset_in(output)
    assert "_manifest.json" not in left
    assert {name: expected[name] for name in left} == left
    imagepivot("features", bucket, output, *options)
    assert dataset_in(output) == expected
    assert not set(Folder(output).names()) - set(expected) - set(records_of(expected))


def test_missing_bucket_is_reported(store, table, imagepivot, tmp_path):
    missing = f"{store.scheme}://no-such-bucket/x"
    done = imagepivot("captions", table, missing, "--format", "table", code=1)
    assert f"cannot use '{missing}': there is no such bucket: check its name, or create it first" in done.stderr
    assert f"the images '{missing}' do not exist" in features(imagepivot, missing, tmp_path / "f", code=1).stderr
    assert missing in imagepivot("inspect", missing, code=1).stderr


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[int, bytes]:
    """Two checkpoints of a small model, as bytes."""
    import timm
    import torch

    path, checkpoints = tmp_path_factory.mktemp("checkpoints") / "w.pth", {}
    for seed in (1, 2):
        torch.manual_seed(seed)
        torch.save(timm.create_model("test_resnet.r160_in1k", num_classes=0).state_dict(), path)
        checkpoints[seed] = path.read_bytes()
    return checkpoints


def test_weights_in_a_bucket(store, pictures, checkpoints, imagepivot, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    bucket = Folder(store.address("weights of wörkers"))
    for seed, data in checkpoints.items():
        (tmp_path / f"{seed}.pth").write_bytes(data)
        bucket.put("w.pth", data)
        for output, weights in (("file", tmp_path / f"{seed}.pth"), ("bucket", bucket.path_of("w.pth")), ("again", None)):
            extract = (*SMALL[:2], "--weights", weights or bucket.path_of("w.pth"), *SMALL[4:], "--shards", "1")
            imagepivot("features", pictures / "photos", tmp_path / f"{output}{seed}", *extract, "--workers", "1")
        assert stored(tmp_path / f"bucket{seed}") == stored(tmp_path / f"file{seed}")
        cached = [path for path in (tmp_path / "cache/hub/checkpoints").iterdir() if path.suffix == ".pth"]
        assert sorted(path.read_bytes() for path in cached) == sorted(checkpoints[n] for n in range(1, seed + 1))
    assert open_dataset(tmp_path / "file1").fingerprint != open_dataset(tmp_path / "file2").fingerprint
    done = imagepivot(
        "features", pictures / "photos", tmp_path / "no", *SMALL[:2], "--weights", bucket.path_of("no.pth"), code=1
    )
    assert f"there are no weights '{bucket.path_of('no.pth')}': check the bucket and the key" in done.stderr
