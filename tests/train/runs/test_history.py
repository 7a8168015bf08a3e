import json

import pytest

from schemas.errors import DatasetError
from schemas.reads import Reads
from schemas.storage.folder import Folder
from train.runs.history import History, Series, is_run, read_history


def retrieval(recall: float) -> dict:
    directions = {
        name: {"recall_at_1": recall, "recall_at_5": recall + 1, "recall_at_10": recall + 2, "median_rank": 3, "queries": 9}
        for name in ("image_to_text", "text_to_image")
    }
    return {**directions, "sum_of_recalls": 6 * recall + 6}


def step(number: int, loss: float, term: str, languages: list, rate: float) -> dict:
    losses = {"loss": loss, "terms": {term: loss}, "task": term[:3], "languages": languages}
    return {"event": "step", "step": number, **losses, "learning_rate": rate}


def timing(number: int, pairs: int, seconds: float, steps_per_second: float) -> dict:
    speed = {"steps_per_second": steps_per_second, "pairs_per_second": pairs / 20 * steps_per_second}
    return {"event": "timing", "step": number, "steps": 20, "pairs": pairs, "seconds": seconds, **speed}


ENTRIES = (
    {"event": "missing_features", "step": 0, "images": 3},
    step(10, 3.0, "c2c", [None, "de"], 0.1),
    step(20, 2.0, "c2i/en", ["en"], 0.2),
    {"event": "evaluation", "step": 20, "score": 50.0, "en": retrieval(1.0)},
    timing(20, 200, 3.0, 10.0),
    step(30, 1.0, "c2c", [None, None], 0.3),
    {"event": "evaluation", "step": 40, "score": 50.0, "en": retrieval(2.0), "de": retrieval(4.0)},
    timing(40, 100, 5.0, 5.0),
    {"event": "validation", "step": 40, "loss": 1.5, "terms": {"c2i/en": 1.5}},
    {
        "event": "chance",
        "step": 0,
        "en": {"images": 9, "text_to_image": {f"recall_at_{k}": 0.25 * k for k in (1, 5, 10)}, "sum_of_recalls": 4.0},
    },
)
HISTORY = History(ENTRIES)


def test_finished_run_is_known_by_the_file_of_its_results(tmp_path):
    """Results of a command are made anew after a change of what it looked for: files of the training alone must not count."""
    for name in ("log.jsonl", "last.pt", "best.pt"):
        (tmp_path / name).touch()
        reads = Reads()
        assert is_run(str(tmp_path))
    assert [location.rpartition("/")[2] for location in reads.locations] == ["best.pt"]


def test_series():
    assert HISTORY.losses() == {"c2c": Series((10, 30), (3.0, 1.0)), "c2i/en": Series((20,), (2.0,))}
    assert HISTORY.losses("validation") == {"c2i/en": Series((40,), (1.5,))}
    assert HISTORY.series("step", "loss") == Series((10, 20, 30), (3.0, 2.0, 1.0))
    assert HISTORY.series("step", "learning_rate") == Series((10, 20, 30), (0.1, 0.2, 0.3))
    assert HISTORY.languages == ("en", "de")
    assert HISTORY.series("evaluation", "en", "text_to_image", "recall_at_10") == Series((20, 40), (3.0, 4.0))
    assert HISTORY.series("evaluation", "de", "image_to_text", "recall_at_1") == Series((40,), (4.0,))
    assert HISTORY.series("evaluation", "en", "sum_of_recalls") == Series((20, 40), (12.0, 18.0))
    assert HISTORY.last_step == 40
    assert HISTORY.chance("en")["text_to_image"]["recall_at_5"] == 1.25
    assert HISTORY.chance("de") == {}


def test_of_equal_scores_the_first_is_the_best():
    assert HISTORY.best == ENTRIES[3]
    assert History(()).best is None


def test_speed_is_the_mean_over_all_laps():
    # 20 steps in 2 seconds and 20 in 4.
    assert HISTORY.speed == {"steps_per_second": pytest.approx(40 / 6), "pairs_per_second": pytest.approx(300 / 6)}
    assert History(ENTRIES[:3]).speed == {}


def test_table_has_a_row_for_each_step_and_evaluation_and_no_times():
    header, *rows = (line.split(",") for line in HISTORY.to_csv().splitlines())
    assert header[:9] == ["event", "step", "loss", "terms.c2c", "terms.c2i/en", "task", "languages", "learning_rate", "score"]
    assert header[9:12] == ["en.image_to_text.recall_at_1", "en.image_to_text.recall_at_5", "en.image_to_text.recall_at_10"]
    table = [dict(zip(header, row, strict=True)) for row in rows]
    assert [(row["event"], row["step"]) for row in table] == [
        *(("step", "10"), ("step", "20"), ("evaluation", "20"), ("step", "30"), ("evaluation", "40"), ("validation", "40"))
    ]
    assert [row["languages"] for row in table] == ["mixed de", "en", "", "mixed mixed", "", ""]
    assert [row["terms.c2i/en"] for row in table] == ["", "2.0", "", "", "", "1.5"]
    assert [row["de.sum_of_recalls"] for row in table] == ["", "", "", "", "30.0", ""]
    assert not [name for name in header if "second" in name or "images" in name]


def test_read_history_skips_an_unfinished_line(tmp_path):
    lines = "".join(json.dumps(entry) + "\n" for entry in ENTRIES)
    (tmp_path / "log.jsonl").write_text(lines + '{"event": "st')
    assert read_history(Folder(str(tmp_path))) == HISTORY
    (tmp_path / "log.jsonl").write_text(lines + "[]\n")
    with pytest.raises(DatasetError, match=rf"log\.jsonl, line {len(ENTRIES) + 1}, is damaged"):
        read_history(Folder(str(tmp_path)))
