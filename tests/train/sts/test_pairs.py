from pathlib import Path

import pytest

from schemas.errors import InputError
from train.sts.pairs import StsPairs, read_sts

INPUT = 'A dog runs.\tA dog sleeps.\nTwo cats.\tSome cats\tMSRvid\textra\n"A" bird\tA bird\'s "nest\n'


@pytest.fixture
def task(tmp_path) -> Path:
    (tmp_path / "STS.input.images.txt").write_text(INPUT)
    (tmp_path / "STS.gs.images.txt").write_text("2.400\n\n0\n")
    return tmp_path


def test_read_sts_of_two_files_skips_blank_scores(task):
    expected = StsPairs(
        name="images",
        location=str(task / "STS.input.images.txt"),
        scores=(2.4, 0.0),
        first=("A dog runs.", '"A" bird'),
        second=("A dog sleeps.", "A bird's \"nest"),
        lines=(1, 3),
        unscored=1,
    )
    for places in (task, task / "STS.input.images.txt", [task / "STS.gs.images.txt"], sorted(task.iterdir())):
        assert read_sts(places) == [expected]
    assert len(expected) == 2
    assert expected.sentences == ("A dog runs.", "A dog sleeps.", '"A" bird', "A bird's \"nest")


@pytest.mark.parametrize(
    ("name", "text", "lines", "unscored"),
    [
        ("a.tsv", "score\tsentence1\tsentence2\n1.5\tone\ttwo\n\tthree\tfour\n4\tfive\tsix\n", (2, 4), 1),
        ("a.tsv", "index\tSentence2\tSentence1\tnote\tSCORE\r\n7\ttwo\tone\t\t1.5\r\n8\tsix\tfive\tx\t4\r\n", (2, 3), 0),
        ("a.tsv", "1.5\tone\ttwo\n\tthree\tfour\n4\tfive\tsix", (1, 3), 1),
        ("a.csv", "main-captions\tMSRvid\t2012test\t0024\t1.5\tone\ttwo\nm\tf\ty\t01\t4\tfive\tsix\tsource\n", (1, 2), 0),
    ],
)
def test_tables_with_and_without_a_header(tmp_path, name, text, lines, unscored):
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    (pairs,) = read_sts(tmp_path)
    assert (pairs.scores, pairs.first, pairs.second) == ((1.5, 4.0), ("one", "five"), ("two", "six"))
    assert (pairs.name, pairs.lines, pairs.unscored) == ("a", lines, unscored)


def test_folder_holds_several_and_equal_names_are_told_apart(task, tmp_path):
    (task / "b.tsv").write_text("1\tone\ttwo\n")
    (task / "README.md").write_text("not pairs")
    (task / "STS.gs.ALL.txt").write_text("1\n")
    for year in ("2014", "2015"):
        (tmp_path / year / "test").mkdir(parents=True)
        for kind in ("input", "gs"):
            source = task / f"STS.{kind}.images.txt"
            (tmp_path / year / "test" / source.name).write_bytes(source.read_bytes())
    assert [pairs.name for pairs in read_sts(task)] == ["images", "b"]
    years = [tmp_path / year / "test" for year in ("2014", "2015")]
    assert [pairs.name for pairs in read_sts([*years, task / "b.tsv"])] == ["2014/test/images", "2015/test/images", "b"]
    (task / "b.csv").write_text("1\tone\ttwo\n")
    assert [pairs.name for pairs in read_sts([task / "b.tsv", task / "b.csv"])] == [str(task / "b.tsv"), str(task / "b.csv")]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"STS.input.x.txt": "one\ttwo\n", "STS.gs.x.txt": "1\n2\n"}, r"x\.txt' has 1 lines and '.*STS\.gs\.x\.txt' has 2: "),
        ({"STS.input.x.txt": "a\tb\none two\n", "STS.gs.x.txt": "1\n2\n"}, r"x\.txt', line 2: expected two .*found 'one two'"),
        ({"STS.input.x.txt": "a\tb\n", "STS.gs.x.txt": "nan\n"}, r"line 1: expected a number .*found 'nan'"),
        ({"x.tsv": "score\tsentence1\tsentence2\n1\ta\tb\n2\ta\n"}, r"x\.tsv', line 3: expected 3 columns .*found 2: '2\\ta'"),
        ({"x.tsv": "1\ta\t \n"}, r"x\.tsv', line 1: expected two sentences, found an empty one"),
        ({"x.tsv": "gut\tein\tzwei\n"}, r"line 1: expected .*found 'gut\\tein\\tzwei'"),
    ],
)
def test_read_sts_error_names_file_and_line(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        read_sts(tmp_path)
