import os
import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.inputs.images.base import ImageRef
from pipelines.inputs.images.folders import ImagesInFolder, ImageTable
from pipelines.inputs.images.opening import open_images
from schemas.errors import DatasetError, InputError, UsageError
from schemas.storage.folder import Folder
from tests.pipelines.inputs.reading import write, write_table


@pytest.fixture
def tree(tmp_path) -> Path:
    """A folder with images at several depths and files that are not images; each file contains its own path."""
    names = ["b.jpg", "a.JPEG", "x/c.png", "x/d.tar.gif", "x/y/e.webp", "x/y/é f.bmp", "z/g.tif", "z/h.TIFF"]
    names += ["notes.txt", "x/README", ".hidden.jpg", "x/._d.jpg"]
    for name in names:
        write(tmp_path / "tree" / name, name)
    return tmp_path / "tree"


def ref_of(path: Path, image_id: str, uri: str) -> ImageRef:
    status = path.stat()
    return ImageRef(image_id, uri, status.st_size, version=str(status.st_mtime_ns))


def listed(location, id_rule: str = "name") -> dict[str, str]:
    """Addresses by image id."""
    refs = list(open_images(location, id_rule=id_rule).refs())
    assert len({ref.image_id for ref in refs}) == len(refs)
    return {ref.image_id: ref.uri for ref in refs}


def test_folder_is_searched_to_every_depth(tree):
    expected = {"a": "a.JPEG", "b": "b.jpg", "c": "x/c.png", "d.tar": "x/d.tar.gif", "e": "x/y/e.webp", "é f": "x/y/é f.bmp"}
    assert listed(tree) == expected | {"g": "z/g.tif", "h": "z/h.TIFF"}
    assert set(listed(tree, id_rule="path")) == {"a", "b", "x/c", "x/d.tar", "x/y/e", "x/y/é f", "z/g", "z/h"}
    source = open_images(tree)
    for ref in source.refs():
        assert source.read(ref) == ref.uri.encode()
        assert ref.bytes == len(ref.uri.encode())
    assert pickle.loads(pickle.dumps(source)) == source


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.jpg", {"b.jpg", ".hidden.jpg"}),
        ("?.*", {"b.jpg", "a.JPEG"}),
        ("[ab].*", {"b.jpg", "a.JPEG"}),
        ("[!a].jpg", {"b.jpg"}),
        ("**/*.png", {"x/c.png"}),
        ("**/*.jpg", {"b.jpg", ".hidden.jpg", "x/._d.jpg"}),
        ("x/**", {"x/c.png", "x/d.tar.gif", "x/y/e.webp", "x/y/é f.bmp", "x/README", "x/._d.jpg"}),
        ("*", {"b.jpg", "a.JPEG", "notes.txt", ".hidden.jpg"}),
    ],
)
def test_pattern_selects_any_extension(tree, pattern, expected):
    root = tree / "x" if pattern.startswith("x/") else tree
    source = open_images(tree / pattern)
    paths = {str((root / ref.uri).relative_to(tree)) for ref in source.refs()}
    assert paths == expected


def test_pattern_may_be_relative_and_have_characters_of_regular_expressions(tree, monkeypatch):
    for name in ("a+b(1).jpg", "aab1.jpg", "a.b.jpg", "axb.jpg"):
        write(tree / "p" / name, "")
    assert set(listed(tree / "p/a+b(1)*")) == {"a+b(1)"}
    assert set(listed(tree / "p/a.b*")) == {"a.b"}
    monkeypatch.chdir(tree)
    assert set(listed("x/*.png")) == {"c"}
    assert set(listed("*.jpg")) == {"b", ".hidden"}
    assert open_images(tree / "a" / "*.jpg") == ImagesInFolder(Folder(str(tree / "a")), pattern=r"[^/]*\.jpg")
    with pytest.raises(InputError, match=r"the images .*/none' do not exist: check the path"):
        open_images("none")


def test_one_file_is_a_source_of_one_image(tree):
    source = open_images(tree / "x" / "d.tar.gif")
    (ref,) = source.refs()
    assert ref == ref_of(tree / "x" / "d.tar.gif", "d.tar", "d.tar.gif")
    assert source.read(ref) == b"x/d.tar.gif"


def test_folder_with_wildcards_in_its_name_is_opened(tmp_path):
    write(tmp_path / "set[1]" / "a.jpg", "")
    assert set(listed(tmp_path / "set[1]")) == {"a"}


def test_links_to_files_are_followed_and_broken_ones_are_listed(tmp_path):
    (tmp_path / "target.png").write_bytes(b"12345")
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "good.png").symlink_to(tmp_path / "target.png")
    (tmp_path / "images" / "bad.png").symlink_to(tmp_path / "nowhere")
    refs = sorted(open_images(tmp_path / "images").refs())
    assert refs == [ImageRef("bad", "bad.png", -1), ref_of(tmp_path / "target.png", "good", "good.png")]


def test_non_utf8_file_name_is_refused_unless_skipped(tmp_path):
    for name in (b"ok\xff.txt", b"a.jpg"):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).touch()
    assert set(listed(tmp_path)) == {"a"}
    Path(os.fsdecode(os.fsencode(tmp_path / "ok") + b"\xff.jpg")).touch()
    with pytest.raises(InputError, match=r"'ok\\udcff.jpg', and its name is not UTF-8: rename it"):
        list(open_images(tmp_path).refs())


# --- tables ----------------------------------------------------------------------------------------------------------

ROWS = [{"image_id": "one", "uri": "x/c.png"}, {"image_id": "two", "uri": "b.jpg"}]


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.jsonl", "t.parquet", "t.csv.gz"])
def test_table_gives_ids_and_addresses_relative_to_itself(tree, name):
    source = open_images(write_table(tree / name, ROWS))
    assert isinstance(source, ImageTable)
    assert list(source.refs()) == [ref_of(tree / "x/c.png", "one", "x/c.png"), ref_of(tree / "b.jpg", "two", "b.jpg")]
    assert [source.read(ref) for ref in source.refs()] == [b"x/c.png", b"b.jpg"]
    assert pickle.loads(pickle.dumps(source)) == source


def test_columns_may_have_other_names(tree):
    path = write(tree / "t.csv", "img,file\none,x/c.png\ntwo,b.jpg\n")
    source = open_images(path, columns={"image_id": "img", "uri": "file"})
    assert list(source.refs()) == [ref_of(tree / "x/c.png", "one", "x/c.png"), ref_of(tree / "b.jpg", "two", "b.jpg")]
    assert pickle.loads(pickle.dumps(source)) == source
    with pytest.raises(InputError, match=r"has no column 'image_id'; .* --columns image_id=\.\.\.,uri=\.\.\."):
        list(open_images(path).refs())


@pytest.mark.parametrize(
    "options", [{"columns": {"uri": "file"}}, {"quoting": "none"}, {"allow_private_addresses": True}, {"user_agent": "a"}]
)
def test_options_of_a_table_are_refused_for_a_folder(tree, options):
    with pytest.raises(UsageError, match="a table of addresses"):
        open_images(tree, **options)


def test_table_of_images_has_a_dialect(tree):
    (tree / "t.csv").write_text('image_id;uri\n"one;x/c.png\ntwo;b.jpg\nthree";b.jpg\n')
    with pytest.raises(InputError, match=r"row 1 \(line 2\): a value in quotes holds the delimiter ';' and a line end"):
        list(open_images(tree / "t.csv").refs())
    ids = [ref.image_id for ref in open_images(tree / "t.csv", quoting="none").refs()]
    assert ids == ['"one', "two", 'three"']


def test_numbers_are_image_ids_as_text(tmp_path):
    pq.write_table(pa.table({"image_id": [7, 0], "uri": ["a", "b"]}), tmp_path / "t.parquet")
    assert [ref.image_id for ref in open_images(tmp_path / "t.parquet").refs()] == ["7", "0"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "image_id,uri\na,b.jpg\nx,\n", r"row 2 \(line 3\): 'uri' is ''"),
        ("t.jsonl", '{"image_id": "a", "uri": null}\n', "line 1: 'uri' is None"),
        ("t.jsonl", '{"image_id": "a", "uri": 5}\n', "line 1: 'uri' is 5, expected"),
    ],
)
def test_table_row_without_a_value_is_named(tmp_path, name, text, message):
    with pytest.raises(InputError, match=message):
        list(open_images(write(tmp_path / name, text)).refs())


def test_read_of_unreadable_files_raises_oserror(tree):
    source = open_images(write_table(tree / "t.csv", ROWS))
    with pytest.raises(OSError, match="No such file"):
        source.read(ImageRef("a", "none.jpg"))
    with pytest.raises(DatasetError, match="a part of the path is a file"):
        source.read(ImageRef("a", "b.jpg/none.jpg"))
