import pytest

from pipelines.datasets.region_names import read_names
from schemas.errors import InputError


@pytest.mark.parametrize(
    "content",
    [
        b"yolk\ngray,grey\ndouble decker,double-decker\n",
        b"yolk\ngray,grey\ndouble decker,double-decker",
        b"yolk\r\ngray,grey\r\ndouble decker,double-decker\r\n",
        b"\xef\xbb\xbfyolk\ngray,grey\ndouble decker,double-decker\n\n\n",
    ],
    ids=["unix", "no newline at the end", "windows", "byte order mark and empty lines at the end"],
)
def test_read_names_keeps_lines_unchanged(tmp_path, content):
    (tmp_path / "names.txt").write_bytes(content)
    assert read_names(tmp_path / "names.txt", 3) == ("yolk", "gray,grey", "double decker,double-decker")


def test_names_may_have_any_letters_but_lines_end_at_newlines_only(tmp_path):
    (tmp_path / "names.txt").write_text("café\u2028bar\n木\n", encoding="utf-8")
    assert read_names(tmp_path / "names.txt", 2) == ("café\u2028bar", "木")


def test_released_files_of_visual_genome(visual_genome):
    classes, attributes = (
        read_names(visual_genome / f"{what}_vocab.txt", n) for what, n in (("objects", 1600), ("attributes", 400))
    )
    assert classes[:5] == ("yolk", "goal", "bathroom", "macaroni", "umpire")
    assert attributes[:3] == ("gray,grey", "multi colored,multi-colored,multicolored", "double decker,double-decker")


def test_count_must_fit(tmp_path):
    (tmp_path / "names.txt").write_text("yolk\ngoal\n")
    with pytest.raises(InputError, match=r"names\.txt' has 2 names, expected 1600"):
        read_names(tmp_path / "names.txt", 1600)
    (tmp_path / "names.txt").write_text("\n \n")
    with pytest.raises(InputError, match="has 0 names, expected 1"):
        read_names(tmp_path / "names.txt", 1)


def test_read_names_refuses_invalid_lists(tmp_path):
    (tmp_path / "names.txt").write_text("yolk\n\ngoal\n")
    with pytest.raises(InputError, match=r"line 2 of .*names\.txt' is empty"):
        read_names(tmp_path / "names.txt", 3)
    (tmp_path / "names.txt").write_bytes(b"PK\x03\x04\xff\xfe\n")
    with pytest.raises(InputError, match=r"names\.txt' is not UTF-8: line 1, column 5"):
        read_names(tmp_path / "names.txt", 1)
    with pytest.raises(InputError, match="cannot be read \\(No such file"):
        read_names(tmp_path / "missing.txt", 1)
    with pytest.raises(InputError, match="cannot be read \\(Is a directory"):
        read_names(tmp_path, 1)
