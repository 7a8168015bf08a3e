import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from schemas.dataset import open_dataset
from schemas.errors import InputError, UsageError
from schemas.vocabulary import SPECIALS
from train.data.captions import Captions
from train.evaluation.metrics import bidirectional_ranks
from train.evaluation.relevance import RelevanceCollector
from train.evaluation.relevance_files import read_relevance
from train.evaluation.scores import evaluate
from train.jobs import EvaluateJob

IMAGES = [391895, 60623, 483108, 384213]
# Ids of COCO's captions, five of each image in order.
CAPTION_IDS = {image: [100 * image + number for number in (3, 9, 4, 1, 7)] for image in IMAGES}
WORDS = (*SPECIALS, *(f"{image}a{index}" for image in sorted(IMAGES) for index in range(5)), "&apos;s")


def text_of(image: int, index: int) -> str:
    """Return a caption as files have it; its tokens are ``<start>``, ``<unk>``, a word, ``&apos;s`` and ``<end>``."""
    return f"Unknown {image}A{index}'s"


@pytest.fixture
def captions(new_captions) -> Captions:
    """Five captions of each image, without the last one of the second image."""
    keys = [(f"COCO_val2014_{image:012d}", "en", "comparable", index) for image in sorted(IMAGES) for index in range(5)]
    every = new_captions([(*key, [1, 3, 4 + row, len(WORDS) - 1, 2]) for row, key in enumerate(keys)])
    return every.select(np.delete(np.arange(20), 9))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Files in the layouts of eccv-caption's data, and of COCO's and Karpathy's captions."""
    rng = np.random.default_rng(0)
    every = [caption for ids in CAPTION_IDS.values() for caption in ids]
    for name, queries in (("eccv", 3), ("cxc", 4)):
        to_captions = {image: list({*CAPTION_IDS[image], *map(int, rng.choice(every, 3))}) for image in IMAGES[:queries]}
        owner = {caption: image for image, ids in CAPTION_IDS.items() for caption in ids}
        to_images = {caption: list({owner[caption], *map(int, rng.choice(IMAGES, 2))}) for caption in every[::queries]}
        (tmp_path / f"{name}_image_to_caption.json").write_text(json.dumps(to_captions))
        (tmp_path / f"{name}_caption_to_image.json").write_text(json.dumps(to_images))
    annotations = [
        {"image_id": image, "id": CAPTION_IDS[image][index], "caption": text_of(image, index)}
        for index in range(5)
        for image in IMAGES
    ]
    coco = {"images": [], "annotations": annotations}
    (tmp_path / "captions_val2014.json").write_text(json.dumps(coco))
    sentences = {
        image: [{"sentid": caption, "raw": text_of(image, index)} for index, caption in enumerate(ids)]
        for image, ids in CAPTION_IDS.items()
    }
    karpathy = {"images": [{"cocoid": image, "sentences": sentences[image]} for image in IMAGES]}
    (tmp_path / "dataset_coco.json").write_text(json.dumps(karpathy))
    return tmp_path


@pytest.mark.parametrize("annotations", ["captions_val2014.json", "dataset_coco.json"])
def test_measures_equal_those_of_eccv_caption(annotations, captions, files):
    from eccv_caption._metrics import compute_eccv_metrics, compute_r_at_k

    locations = [str(files / "eccv_image_to_caption.json"), str(files / "cxc_caption_to_image.json")]
    definitions = read_relevance(locations, str(files / annotations), WORDS)
    assert list(definitions) == ["eccv", "cxc"]
    scores = torch.from_numpy(np.random.default_rng(1).permutation(4 * 19).reshape(4, 19) / 100).float()
    images = [int(name[-12:]) for name in captions.image_ids]
    keys = [CAPTION_IDS[images[image]][index] for image, index in zip(captions.images, captions.indices, strict=True)]
    retrieved = {
        "image_to_caption": {
            image: [keys[n] for n in np.argsort(-row)] for image, row in zip(images, scores.numpy(), strict=True)
        },
        "caption_to_image": {
            key: [images[n] for n in np.argsort(-row)] for key, row in zip(keys, scores.numpy().T, strict=True)
        },
    }
    pairs = {name: definition(captions, np.arange(19), np.arange(4)) for name, definition in definitions.items()}
    collector = RelevanceCollector(lambda rows, columns: scores[rows][:, columns], pairs, (4, 19), scores.device)
    bidirectional_ranks(collector, torch.arange(4), torch.from_numpy(captions.images).long())
    for name, measures in collector.summarize().items():
        for direction, found in zip(("image_to_caption", "caption_to_image"), measures.values(), strict=True):
            stored = json.loads((files / f"{name}_{direction}.json").read_text())
            right = {int(key): items for key, items in stored.items() if int(key) in retrieved[direction]}
            expected = compute_eccv_metrics(retrieved[direction], right)
            recalls = [compute_r_at_k(retrieved[direction], right, cutoff) for cutoff in (1, 5, 10)]
            assert found.values[:3] == pytest.approx([100 * recall for recall in recalls], abs=1e-12)
            assert found.r_precision == pytest.approx(100 * expected["eccv_rprecision"], abs=1e-12)
            assert found.map_at_r == pytest.approx(100 * expected["eccv_map_at_r"], abs=1e-12)
            assert found.queries == len(right)
            assert 0 < found.map_at_r < 100


@pytest.mark.slow
def test_all_pairs_of_the_package_are_found_in_its_captions(new_captions, tmp_path):
    data = Path(find_spec("eccv_caption").origin).parent / "data"
    owners = json.loads((data / "original_caption_to_image.json").read_text())
    items = [{"image_id": image, "id": int(caption), "caption": "A word."} for caption, (image,) in owners.items()]
    annotations = {"annotations": items}
    (tmp_path / "captions_val2014.json").write_text(json.dumps(annotations))
    names = tuple(f"COCO_val2014_{image:012d}" for image in sorted({image for (image,) in owners.values()}))
    captions = new_captions([(name, "en", "comparable", index, [len(SPECIALS)]) for name in names for index in range(5)])
    locations = [str(data / f"{name}_image_to_caption.json") for name in ("eccv", "cxc")]
    definitions = read_relevance(locations, str(tmp_path / "captions_val2014.json"), (*SPECIALS, "word"))
    for name, definition in definitions.items():
        pairs = definition(captions, np.arange(25_000), np.arange(5_000))
        for direction, (queries, found) in zip(("image_to_caption", "caption_to_image"), pairs, strict=True):
            stored = json.loads((data / f"{name}_{direction}.json").read_text())
            assert len(queries) == sum(map(len, stored.values()))
            # Two right captions of ECCV Caption are not among the five of their images.
            assert (found < 0).sum() == (2 if (name, direction) == ("eccv", "image_to_caption") else 0)
            assert len(np.unique(queries)) == len(stored)
            assert len(np.unique(np.stack([queries, found])[:, found >= 0], axis=1).T) == (found >= 0).sum()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("mine_image_to_caption.json", "{}", "mine_caption_to_image.json' does not exist"),
        ("eccv_image_to_caption.json", '{"1": 5}', "expected a list"),
        ("captions_val2014.json", '{"annotations": [{"image_id": 1, "id": 5}]}', r"texts of captions \(KeyError"),
    ],
)
def test_files_of_another_layout_are_refused(name, content, message, files):
    (files / name).write_text(content)
    location = files / name if name != "captions_val2014.json" else files / "cxc_image_to_caption.json"
    with pytest.raises(InputError, match=message):
        read_relevance([str(location)], str(files / "captions_val2014.json"), WORDS)


def test_files_of_one_name_are_refused(files, tmp_path):
    both = [str(files / "eccv_image_to_caption.json"), str(files / "eccv_caption_to_image.json")]
    assert list(read_relevance(both, str(files / "dataset_coco.json"), WORDS)) == ["eccv"]
    for name in ("eccv", "captions"):
        other = str(tmp_path / "other" / f"{name}_caption_to_image.json")
        with pytest.raises(UsageError, match=f"other/{name}_caption_to_image.json', but '{name}' already names correct items"):
            read_relevance([*both, other], str(files / "dataset_coco.json"), WORDS)


@pytest.fixture
def cxc(files):
    return read_relevance([str(files / "cxc_image_to_caption.json")], str(files / "dataset_coco.json"), WORDS)["cxc"]


def test_captions_of_other_texts_or_images_have_no_pairs(captions, cxc):
    assert cxc(captions, np.arange(19), np.arange(4)) is not None
    assert cxc(replace(captions, image_ids=("a", "b", "c1", "d")), np.arange(19), np.arange(4)) is None
    moved = np.where(captions.token_ids > 3, 4 + (captions.token_ids - 3) % (len(WORDS) - 5), captions.token_ids)
    assert cxc(replace(captions, token_ids=moved), np.arange(19), np.arange(4)) is None  # Those of the next caption.
    unknown = np.where(captions.token_ids > 3, 3, captions.token_ids)
    assert cxc(replace(captions, token_ids=unknown), np.arange(19), np.arange(4)) is None
    vectors = replace(cxc, words=SPECIALS)  # They have no text.
    assert vectors(captions, np.arange(19), np.arange(4)) is not None
    assert vectors(replace(captions, language_names=("de",)), np.arange(19), np.arange(4)) is None


def test_images_of_one_number_are_refused(captions, cxc):
    first, *names = captions.image_ids
    same = replace(captions, image_ids=(first, first.replace("val", "train"), *names[1:]))
    with pytest.raises(UsageError, match=rf"the images '{first}' and 'COCO_train2014_.* end in the same number"):
        cxc(same, np.arange(19), np.arange(4))
    unnamed = replace(captions, image_ids=(first, "a1", "b1", names[2]))  # No number of an annotation.
    assert cxc(unnamed, np.arange(19), np.arange(4)) is not None


def test_items_and_queries_listed_twice_count_once(captions, files, cxc):
    path = files / "cxc_image_to_caption.json"
    stored = json.loads(path.read_text())
    twice = {key: items * 2 for key, items in stored.items()} | {f"0{key}": items[::-1] for key, items in stored.items()}
    path.write_text(json.dumps(twice))
    again = read_relevance([str(path)], str(files / "dataset_coco.json"), WORDS)["cxc"]
    expected, found = (definition(captions, np.arange(19), np.arange(4))[0] for definition in (cxc, again))
    assert [indices.tolist() for indices in found] == [indices.tolist() for indices in expected]


def test_correct_items_of_files_need_annotations_and_one_gallery():
    job = EvaluateJob("run", "captions", "features", relevance=("a_image_to_caption.json",), annotations="b.json")
    for change in ({"annotations": ""}, {"folds": 5}):
        with pytest.raises(UsageError, match="--relevance needs --annotations, and one gallery"):
            replace(job, **change)


def test_evaluate_adds_measures_of_files(write_run, toy, tmp_path):
    ids = {image: [10 * image + number for number in range(3)] for image in range(9)}
    words, captions = open_dataset(toy.vocabulary).vocabulary().tokens, open_dataset(toy.captions)
    texts = {
        (int(row["image_id"][-3:]), row["index"]): " ".join(words[token_id] for token_id in row["token_ids"])
        for row in captions
        if (row["split"], row["language"], row["portion"]) == ("test", "en", "comparable")
    }
    karpathy = [
        {"cocoid": image, "sentences": [{"sentid": caption, "raw": texts[image, index]} for index, caption in enumerate(own)]}
        for image, own in ids.items()
    ]
    (tmp_path / "dataset.json").write_text(json.dumps({"images": karpathy}))
    images = {caption: [image] for image, own in ids.items() for caption in own}
    for name in ("own", "queries"):
        (tmp_path / f"{name}_image_to_caption.json").write_text(json.dumps(ids))
        (tmp_path / f"{name}_caption_to_image.json").write_text(json.dumps(images))
    locations = tuple(str(tmp_path / f"{name}_caption_to_image.json") for name in ("own", "queries"))
    files = {"relevance": locations, "annotations": str(tmp_path / "dataset.json")}
    job = EvaluateJob(write_run(), toy.captions, toy.features, ("test",), **files)
    scores = evaluate(job)
    assert {score.language for score in scores if len(score.relevance) > 1} == {"en"}
    assert {score.language for score in scores} == {"en", "de"}
    score = next(score for score in scores if (score.language, score.portion) == ("en", "comparable"))
    assert list(score.relevance) == ["captions", "own", "queries"]
    assert score.relevance["own"] == score.relevance["queries"] == score.relevance["captions"]
    with pytest.raises(UsageError, match=r"own_caption_to_image\.json' has no correct items among .* of split test"):
        evaluate(replace(job, languages=("de",)))
    before = job.made_from()
    (tmp_path / "own_image_to_caption.json").write_text(json.dumps({**ids, 9: [1]}))
    assert job.made_from() != before
