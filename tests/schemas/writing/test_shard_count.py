import pytest

from schemas.errors import UsageError
from schemas.keys import check_shards_request
from schemas.storage.folder import Folder
from schemas.writing.shard_count import TEXT_SHARD_BYTES, VECTOR_SHARD_BYTES, check_shard_bytes, choose_shards, known_shards
from tests.builders import write_rows

GIB = 1 << 30
CAPTION = {"language": "en", "portion": "comparable", "index": 0, "split": "train", "text": "x", "tokens": ["x"]}


@pytest.fixture
def captions(tmp_path):
    write_rows(tmp_path / "captions", "captions", [{"image_id": str(n), **CAPTION} for n in range(3)], shards=6)
    return tmp_path / "captions"


@pytest.mark.parametrize(
    ("size", "target", "shards"),
    [
        (31_014 * 2048 * 4, VECTOR_SHARD_BYTES, 16),  # Multi30K
        (123_287 * 36 * 2048 * 4, VECTOR_SHARD_BYTES, 128),  # Regions of COCO
        (50_000_000 * 100, TEXT_SHARD_BYTES, 128),
        *((0, 100, 16), (16 * 100, 100, 16), (16 * 100 + 1, 100, 32)),
    ],
)
def test_choose_shards_doubles_beyond_the_target(size, target, shards):
    assert choose_shards(size, target) == shards


# --- what is asked for -----------------------------------------------------------------------------------------------


FORMS = "a number such as 64, 'auto', or 'like:D"


@pytest.mark.parametrize(
    ("shards", "expected"),
    [
        *((shards, FORMS) for shards in ("", "many", "like:", "like", "64")),
        *((shards, rf"{FORMS}.*: did you mean 'auto'\?$") for shards in ("AUTO", "atuo", "autos")),
        *((shards, "1 to 99,999") for shards in (0, 100_000)),
    ],
)
def test_check_shards_request_refuses_invalid_requests(shards, expected):
    with pytest.raises(UsageError, match=f"--shards is {shards!r}, expected {expected}"):
        check_shards_request(shards)


# --- what is known ---------------------------------------------------------------------------------------------------


def known(shards, folder, *, overwrite=False):
    return known_shards(shards, Folder(str(folder)), overwrite=overwrite)


def test_folder_keeps_its_number_complete_or_not(captions, tmp_path):
    assert known("auto", tmp_path / "new") is None
    assert not (tmp_path / "new").exists()
    assert (known("auto", captions), known("auto", captions, overwrite=True), known(5, captions)) == (6, None, 5)
    (captions / "_manifest.json").unlink()
    for number in range(1, 6):
        (captions / f"part-{number:05d}-of-00006.parquet").unlink()
    assert known("auto", captions) == 6


def test_known_shards_like_ignores_the_folder(captions, tmp_path):
    assert known(f"like:{captions}", tmp_path / "new") == 6
    write_rows(tmp_path / "other", "captions", [], shards=2)
    assert known(f"like:{tmp_path / 'other'}", captions) == 2


# --- shards that are too large ---------------------------------------------------------------------------------------


def test_shards_of_more_than_4_gib_are_refused_unless_the_folder_has_them(captions, tmp_path):
    for shards, folder in ((9, tmp_path), (6, captions)):
        check_shard_bytes(shards, 36 * GIB, Folder(str(folder)))
    says = r"^36 GiB in 5 shards make 7.2 GiB each, expected at most 4, .*give --shards 9 or more, o"
    with pytest.raises(UsageError, match=says):
        check_shard_bytes(5, 36 * GIB, Folder(str(captions)))
