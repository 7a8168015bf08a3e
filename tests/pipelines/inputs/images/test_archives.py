import pickle
import random
import tarfile
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.inputs.images.archives import ImagesInParquet, ImagesInTars
from pipelines.inputs.images.base import ImageRef
from pipelines.inputs.images.folders import ImagesInFolder, ImageTable
from pipelines.inputs.images.listing import Listing
from pipelines.inputs.images.opening import open_images
from schemas.errors import InputError
from tests.pipelines.inputs.reading import write_structs, write_tar

IMAGES = {f"{number:06d}": bytes([number]) * (number * 997 % 3000) for number in range(1, 40)}


def webdataset(images):
    members = {}
    for key, data in images.items():
        members |= {f"{key}.jpg": data, f"{key}.txt": b"a caption", f"{key}.json": b"{}"}
    return members.items()


@pytest.fixture
def shards(tmp_path):
    keys = list(IMAGES)
    for number, form in enumerate((tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)):
        write_tar(tmp_path / f"t/train-{number:05d}.tar", webdataset({key: IMAGES[key] for key in keys[number::3]}), form)
    return tmp_path / "t"


def contents(source):
    refs = list(source.refs())
    random.Random(3).shuffle(refs)
    files = {ref.image_id: source.read(ref) for ref in refs}
    assert len(files) == len(refs)
    return files


# --- tar -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["", "*.tar", "train-0000[0-2].tar"])
def test_tars_of_a_folder_or_a_pattern(shards, pattern):
    source = open_images(shards / pattern)
    assert isinstance(source, ImagesInTars)
    assert contents(source) == IMAGES
    assert pickle.loads(pickle.dumps(source)) == source
    assert contents(pickle.loads(pickle.dumps(source))) == IMAGES


def test_one_tar(shards):
    source = open_images(shards / "train-00001.tar")
    assert contents(source) == {key: IMAGES[key] for key in list(IMAGES)[1::3]}
    with tarfile.open(shards / "train-00001.tar") as tar:
        expected = [(m.name, m.size, m.offset_data) for m in tar.getmembers() if m.name.endswith(".jpg")]
    assert [(ref.uri, ref.bytes, ref.offset) for ref in source.refs()] == [
        (f"train-00001.tar/{name}", size, offset) for name, size, offset in expected
    ]


def test_open_images_detects_archive_kind_of_a_folder(shards):
    write_parquet(shards / "a.parquet", IMAGES)
    with pytest.raises(InputError, match=r"holds both 'a.parquet' and 'train-.*tar': choose with a pattern such as"):
        open_images(shards)
    (shards / "x").mkdir()
    (shards / "x" / "a.jpg").write_bytes(b"a")
    source = open_images(shards)
    assert isinstance(source, ImagesInFolder)
    assert [ref.image_id for ref in source.refs()] == ["a"]


def test_ids_are_names_or_paths_of_members(tmp_path):
    members = {"./a/x.y.jpg": b"1", "b/x.PNG": b"22", "b/._x.jpg": b"", "b/é.webp": b"3" * 5000, "b/notes.txt": b""}
    members["long/" * 40 + "name.jpg"] = b"4"
    path = write_tar(tmp_path / "a.tar", members.items(), tarfile.PAX_FORMAT)
    assert contents(open_images(path)) == {"x.y": b"1", "x": b"22", "é": b"3" * 5000, "name": b"4"}
    assert set(contents(open_images(path, id_rule="path"))) == {"a/x.y", "b/x", "b/é", "long/" * 40 + "name"}


def test_listing_of_a_tar_holds_no_members(tmp_path, monkeypatch):
    path = write_tar(tmp_path / "a.tar", {f"{number}.jpg": b"1" for number in range(50)}.items())
    held, following = [], tarfile.TarFile.next
    monkeypatch.setattr(tarfile.TarFile, "next", lambda tar: (held.append(len(tar.members)), following(tar))[1])
    assert len(list(open_images(path).refs())) == 50
    assert max(held) <= 1


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "a.tar.zst", "a.TAR.XZ"])
def test_compressed_tars_are_refused(tmp_path, name):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / name).write_bytes(b"x")
    for location in (tmp_path / "d", tmp_path / "d" / name, tmp_path / "d" / f"*{name}"):
        with pytest.raises(InputError, match=r"is a compressed tar.*Decompress it"):
            open_images(location)


def test_truncated_tar_is_refused_at_any_length(tmp_path):
    path = write_tar(tmp_path / "a.tar", {"a.jpg": b"1" * 700, "b.jpg": b"2" * 100, "c.jpg": b"3" * 5}.items())
    whole = path.read_bytes()
    with tarfile.open(path) as tar:
        end = tar.getmembers()[-1].offset_data + 512
    for size in [0, 1, 300, 512, 600, 1500, 1536, 1537, 1900, 2048, 2060, 2559, 2560, end - 100, end, end + 100]:
        path.write_bytes(whole[:size])
        with pytest.raises(InputError, match=r"a.tar' is not a whole tar: at byte \d+: .*Was it cut short"):
            list(open_images(path).refs())
    path.write_bytes(whole[: end + 512])
    assert len(list(open_images(path).refs())) == 3
    for content, message in (
        (whole[:1536] + b"\xff" * 64 + whole[1600:], "at byte 1536: found neither a member nor the end mark of a tar"),
        (b"no tar at all" * 100, "at byte 0"),
    ):
        path.write_bytes(content)
        with pytest.raises(InputError, match=f"not a whole tar: {message}"):
            list(open_images(path).refs())


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("b.jpg", tarfile.LNKTYPE, r"'b.jpg' is a link or a sparse file.*--hard-dereference"),
        ("é.jpg", tarfile.REGTYPE, "and its name is not UTF-8: rename it and pack it again"),
    ],
)
def test_tar_with_links_or_non_utf8_names_is_refused(tmp_path, name, kind, message):
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.USTAR_FORMAT, encoding="latin-1") as tar:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, "a.jpg"
        tar.addfile(info)
    with pytest.raises(InputError, match=message):
        list(open_images(tmp_path / "a.tar").refs())


def test_read_of_truncated_member_fails(tmp_path):
    path = write_tar(tmp_path / "a.tar", [("a.jpg", b"1" * 700)])
    source = open_images(path)
    (ref,) = source.refs()
    path.write_bytes(path.read_bytes()[:900])
    with pytest.raises(OSError, match="the archive ends before the image does"):
        source.read(ref)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="No such file"):
        source.read(ref)


def test_listing_digest_ignores_offsets():
    refs = [ImageRef("a", "x.tar/a.jpg", 5), ImageRef("b", "x.tar/b.jpg", 7)]
    moved = [ref._replace(offset=512) for ref in refs]
    assert Listing.of(moved, 4) == Listing.of(refs, 4)
    # The digest of this list from before there were offsets.
    assert Listing.of(refs, 1).shards == ("60330d5cbdc6691a8bf6adb80152ed3acb5848f810efbce4fd0e3568657c3d69",)


# --- Parquet ---------------------------------------------------------------------------------------------------------


def write_parquet(path, images, *, ids="image_id", column="image", group=4, struct=False):
    values = [{"bytes": data, "path": f"some/{key}.jpg"} for key, data in images.items()] if struct else list(images.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"other": list(range(len(images))), ids: list(images), column: values}), path, row_group_size=group)
    return path


@pytest.mark.parametrize("column", ["bytes", "image", "image_bytes", "jpg"])
@pytest.mark.parametrize("ids", ["image_id", "id", "key", "__key__"])
def test_columns_of_images_and_ids(tmp_path, column, ids):
    source = open_images(write_parquet(tmp_path / "a.parquet", IMAGES, ids=ids, column=column))
    assert isinstance(source, ImagesInParquet)
    assert contents(source) == IMAGES


@pytest.mark.parametrize("pattern", ["", "*.parquet", "**/p-*.parquet"])
def test_parquet_files_of_a_folder_or_a_pattern(tmp_path, pattern):
    keys = list(IMAGES)
    for number in range(3):
        write_parquet(tmp_path / f"p-{number}.parquet", {key: IMAGES[key] for key in keys[number::3]}, struct=number == 1)
    source = open_images(tmp_path / pattern)
    assert contents(source) == IMAGES
    assert pickle.loads(pickle.dumps(source)) == source
    assert contents(pickle.loads(pickle.dumps(source))) == IMAGES


def test_parquet_without_paths_builds_ids_of_file_and_row(tmp_path):
    for number in range(2):
        rows = [(f"{number}{row}".encode(), None) for row in range(3)]
        write_structs(tmp_path / "data" / f"train-0000{number}-of-00002.parquet", rows)
    found = contents(open_images(tmp_path))
    assert found == {
        f"train-0000{number}-of-00002-00000{row}": f"{number}{row}".encode() for number in range(2) for row in range(3)
    }
    assert contents(open_images(tmp_path, id_rule="path")) == {f"data/{key}": data for key, data in found.items()}
    # The ids belong to the rows, however the files are chosen or their rows grouped.
    assert contents(open_images(tmp_path / "data" / "*-00001-*.parquet")).keys() <= found.keys()
    path = tmp_path / "data" / "train-00001-of-00002.parquet"
    pq.write_table(pq.read_table(path), path, row_group_size=1)
    assert contents(open_images(tmp_path)) == found


def test_parquet_ids_with_and_without_paths_are_unique(tmp_path):
    rows = [(b"0", "x/a.jpg"), (b"1", None), (b"2", ""), (b"3", "t-000001.jpg"), (b"4", "t-000001_.png"), (b"5", "t-7.jpg")]
    path = write_structs(tmp_path / "t.parquet", rows)
    expected = {"a": b"0", "t-000001__": b"1", "t-000002": b"2", "t-000001": b"3", "t-000001_": b"4", "t-7": b"5"}
    assert contents(open_images(path)) == expected
    write_structs(path, [(data, place if place and "t" in place else None) for data, place in rows])
    assert contents(open_images(path)) == {**{key: data for key, data in expected.items() if key != "a"}, "t-000000": b"0"}


@pytest.mark.parametrize("row", [{}, {"path": None}])
def test_struct_without_paths(tmp_path, row):
    pq.write_table(pa.table({"image": [{"bytes": b"x", **row}, {"bytes": b"y", **row}]}), tmp_path / "a.parquet")
    assert contents(open_images(tmp_path)) == {"a-000000": b"x", "a-000001": b"y"}


def test_parquet_null_struct_has_an_id_and_no_image(tmp_path):
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pq.write_table(pa.table({"image": pa.array([None, {"bytes": b"y", "path": "y.jpg"}], kind)}), tmp_path / "a.parquet")
    source = open_images(tmp_path)
    first, second = source.refs()
    assert (first.image_id, second.image_id) == ("a-000000", "y")
    with pytest.raises(OSError, match="the row holds no image"):
        source.read(first)


def test_parquet_numeric_ids_become_text(tmp_path):
    pq.write_table(pa.table({"id": [7, 0], "image": [b"x", b"y"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"image_id": ["a"], "uri": ["a.jpg"], "image": [b""]}), tmp_path / "t.parquet")
    assert isinstance(open_images(tmp_path / "t.parquet"), ImageTable)
    version = str((tmp_path / "a.parquet").stat().st_mtime_ns)
    assert list(open_images(tmp_path / "a.parquet").refs()) == [
        ImageRef("7", "a.parquet/0", offset=0, version=version),
        ImageRef("0", "a.parquet/1", offset=1, version=version),
    ]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"name": ["a"], "image": [b"x"]}, "no column of image ids; its columns are 'name', 'image'"),
        ({"image_id": ["a", None], "image": [b"x", b"y"]}, "row 2: image_id is None, expected text or a whole number"),
        ({"image_id": [1.5], "image": [b"x"]}, "row 1: image_id is 1.5"),
        ({"image_id": ["a"], "image": ["text"]}, "no column of image bytes; its columns are 'image_id', 'image'"),
    ],
)
def test_parquet_without_required_values_is_refused(tmp_path, table, message):
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=message):
        list(open_images(tmp_path / "*.parquet").refs())


def test_broken_parquet_files(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", IMAGES)
    source = open_images(path)
    ref = next(source.refs())
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match="is not a whole Parquet file"):
        list(source.refs())
    with pytest.raises(OSError, match=r"broken, or was changed|Couldn't|Parquet"):
        source.read(ref)


def test_parquet_read_in_threads(tmp_path, read):
    path = write_parquet(tmp_path / "a.parquet", IMAGES, group=10)
    source = open_images(path)
    refs, wrong = list(source.refs()), []

    def work(seed):
        generator = random.Random(seed)
        wrong.extend(ref for ref in generator.choices(refs, k=200) if source.read(ref) != IMAGES[ref.image_id])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(source.read, refs[:10] * 8)) == [IMAGES[ref.image_id] for ref in refs[:10] * 8]
        assert read == {("a.parquet", 0): 1}
        list(pool.map(work, range(8)))
    assert wrong == []
