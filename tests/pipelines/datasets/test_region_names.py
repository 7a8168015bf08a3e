import pytest

from pipelines.datasets.region_names import read_names
from schemas.errors import InputError


@pytest.mark.parametrize("end", ["", "\n", "\n\n\n"])
def test_read_names_keeps_lines_unchanged(tmp_path, end):
    names = ("yolk", "gray,grey", "double decker,double-decker", "café\u2028bar", "木")
    (tmp_path / "names.txt").write_text("\n".join(names) + end, encoding="utf-8")
    assert read_names(tmp_path / "names.txt", 5) == names


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"yolk\ngoal\n", r"names\.txt' has 2 names, expected 1600"),
        (b"yolk\n\ngoal\n", r"line 2 of .*names\.txt' is empty"),
        (b"PK\x03\x04\xff\xfe\n", r"names\.txt' is not UTF-8: line 1, column 5"),
    ],
)
def test_read_names_refuses_invalid_lists(tmp_path, content, message):
    (tmp_path / "names.txt").write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_names(tmp_path / "names.txt", 1600)


def test_released_files_of_visual_genome(visual_genome):
    classes, attributes = (
        read_names(visual_genome / f"{what}_vocab.txt", n) for what, n in (("objects", 1600), ("attributes", 400))
    )
    assert classes[:5] == ("yolk", "goal", "bathroom", "macaroni", "umpire")
    assert attributes[:3] == ("gray,grey", "multi colored,multi-colored,multicolored", "double decker,double-decker")
