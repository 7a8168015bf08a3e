import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from schemas.escapes import to_json
from train.evaluation.protocols import PROTOCOLS, match_protocol
from train.evaluation.scores import evaluate
from train.reports.score_report import score_table
from train.runs.run import open_run

FLICKR = [f"{1000092795 + number}" for number in range(1_000)]
COCO = [f"COCO_val2014_{number:012d}" for number in range(5_000)]


@pytest.mark.parametrize(
    ("split", "image_ids", "captions", "folds", "name"),
    [
        ("test", FLICKR, 5_000, 1, "flickr30k-1k"),
        ("test", [f"{image_id}_0a1b2c3d4e" for image_id in FLICKR], 5_000, 1, "flickr8k-1k"),
        ("test", COCO, 25_010, 1, "coco-5k"),
        ("test", COCO, 25_000, 1, "coco-5k"),
        ("test", COCO, 25_010, 5, "coco-1k-5fold"),
        ("testall", [f"testall-{number}" for number in range(5_000)], 25_000, 5, "coco-1k-5fold"),
        ("test", COCO[:1_000], 1_000, 1, "xtd10"),
        ("test_2016", FLICKR, 5_000, 1, "multi30k-2016"),
        ("test_2016_flickr", FLICKR, 1_000, 1, "multi30k-2016"),
        ("test_2017_flickr", FLICKR, 1_000, 1, "multi30k-2017"),
        ("test_2017_mscoco", COCO[:461], 461, 1, "multi30k-coco"),
        ("test_2018_flickr", [*FLICKR, *map(str, range(71))], 1_071, 1, "multi30k-2018"),
    ],
)
def test_protocol_with_its_numbers_is_named(split, image_ids, captions, folds, name):
    match = match_protocol(split, image_ids, captions, folds)
    assert (match.protocol.name, match.differences) == (name, ())
    assert match.remark.startswith(f"{name}, {len(image_ids):,} images")
    fewer = match_protocol(split, image_ids[1:], captions, folds)
    assert (fewer.protocol.name, fewer.differences) == (name, (f"{len(image_ids) - 1:,} of {len(image_ids):,} images",))


@pytest.mark.parametrize(
    ("split", "image_ids", "captions"),
    [
        ("test", ["scene-1", "scene-2"], 10),
        ("test", [*FLICKR[1:], "mine"], 5_000),
        ("val", FLICKR, 5_000),
    ],
)
def test_other_data_have_no_protocol(split, image_ids, captions):
    assert match_protocol(split, image_ids, captions) is None


def test_folds_and_captions_of_another_number_are_differences():
    match = match_protocol("test_2016", FLICKR, 4_999, 5)
    assert match.remark == "not multi30k-2016: 4,999 of 5,000 captions, folds 5, expected 1"
    assert match_protocol("test", COCO, 24_000, 5).remark == "not coco-1k-5fold: 24,000 of 25,000 or 25,010 captions"


@pytest.mark.parametrize(
    ("task", "name"),
    [("Any2AnyRetrieval/Flickr30kT2I", "flickr30k-1k"), ("Any2AnyMultilingualRetrieval/Multi30kT2I", "multi30k-2016")],
)
def test_numbers_equal_the_statistics_of_mteb(task, name):
    pytest.importorskip("mteb", reason="needs mteb: pip install 'imagepivot[mteb]'")
    path = Path(find_spec("mteb").origin).parent / f"descriptive_stats/Image/{task}Retrieval.json"
    statistics = json.loads(path.read_text())["test"]
    statistics = statistics.get("hf_subset_descriptive_stats", {}).get("de", statistics)
    numbers = [(protocol.images, *protocol.captions) for protocol in PROTOCOLS if protocol.name == name]
    assert (statistics["num_documents"], statistics["num_queries"]) in numbers


def test_score_states_the_protocol_and_how_the_data_differ(write_run, multi30k, toy):
    run = open_run(write_run(languages=("en", "de", "fr")))
    scores = evaluate(run, captions=multi30k.captions, features=multi30k.features, languages=["fr"])
    remark = "not multi30k-2016: 9 of 1,000 images, 9 of 1,000 captions"
    assert f"split test_2016_flickr: {remark}" in score_table(scores, title="").notes
    assert json.loads(to_json(scores[0].to_dict()))["protocol"] == {
        "name": "multi30k-2016",
        "images": 1_000,
        "captions": [1_000],
        "folds": 1,
        "source": "Elliott et al. 2016, task 1",
        "differences": ["9 of 1,000 images", "9 of 1,000 captions"],
    }
    (score,) = evaluate(run, captions=toy.captions, features=toy.features, splits=["test"], languages=["fr"])
    assert score.protocol is None
    assert score.to_dict()["protocol"] is None
