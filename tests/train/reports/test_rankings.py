import numpy as np
import pytest

from tests.train.trainings import encode_row
from train.data.splits import open_data
from train.evaluation.evaluation import embed_images, no_progress, rank_folds
from train.reports.figure_examples import choose_examples
from train.reports.rankings import rank_captions, rank_examples, ranked
from train.runs.run import open_run


@pytest.mark.parametrize("seed", range(5))
def test_order_by_counting(seed):
    """The place of the right score is the number of wrong ones that are not below it; the others are in descending order."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 5, 30).astype(np.float32)
    for right in range(30):
        order = ranked(scores, right).tolist()
        assert sorted(order) == list(range(30))
        assert order.index(right) == sum(scores[n] >= scores[right] for n in range(30) if n != right)
        assert list(scores[order]) == sorted(scores, reverse=True)


def test_no_number_is_worst_for_the_model():
    nan = np.nan
    assert ranked(np.array([1.0, nan, 3.0]), 2).tolist() == [1, 2, 0]
    assert ranked(np.array([1.0, nan, 3.0]), 1).tolist() == [2, 0, 1]


@pytest.fixture(params=["cosine", "order"])
def opened(request, toy, write_run):
    """Open an untrained run, its test data, four examples and the embedded images."""
    run = open_run(write_run(similarity=request.param))
    data = open_data(toy.captions, toy.features, split="test", portions=dict.fromkeys(("en", "de"), ("comparable",)))
    examples, _ = choose_examples(data.captions, run.vocabulary.tokens, count=4, seed=0)
    return run, data, examples, embed_images(run.model, data.features)


def test_images_are_ranked_as_an_evaluation_does(opened):
    run, data, examples, images = opened
    captions = data.captions
    rankings = rank_examples(run.model, captions, images, examples, top=3)
    assert [(ranking.example, ranking.caption.key.language) for ranking in rankings] == [
        (number, language) for number in (1, 2, 3, 4) for language in captions.language_names
    ]
    ranks = {language: rank_folds([(run.model, data)], language, 1)[0][1] for language in ("en", "de")}
    for ranking in rankings:
        language, row = ranking.caption.key.language, ranking.caption.row
        assert ranking.rank == ranks[language].text_to_image[captions.rows_of(language).tolist().index(row)]
        assert ranking.images == 9
        assert len(ranking.hits) == 3
        # Each score once more, from one caption at a time.
        scores = run.model.scores(images, encode_row(run.model, captions, row, language))[:, 0].tolist()
        best = sorted(range(9), key=lambda n: -scores[n])[:3]
        assert [hit.image_id for hit in ranking.hits] == [captions.image_ids[n] for n in best]
        assert [hit.score for hit in ranking.hits] == pytest.approx([scores[n] for n in best], abs=1e-5)
        assert ranking.right.image_id == ranking.caption.key.image_id
        assert ranking.right.score == pytest.approx(scores[captions.image_ids.index(ranking.right.image_id)], abs=1e-5)
        assert (ranking.rank == 1) == (ranking.hits[0].image_id == ranking.right.image_id)


def test_captions_are_ranked_as_an_evaluation_does(opened):
    run, data, examples, images = opened
    captions = data.captions
    found = list(rank_captions(run.model, captions, images, examples, top=3, on_progress=no_progress))
    assert [(row.language, row.image_id) for row in found] == [
        (language, example.image_id) for language in captions.language_names for example in examples
    ]
    ranks = {language: rank_folds([(run.model, data)], language, 1)[0][1] for language in ("en", "de")}
    for row in found:
        image, rows = captions.image_ids.index(row.image_id), captions.rows_of(row.language)
        assert row.rank == ranks[row.language].image_to_text[image]
        scores = {
            captions.ids()[n]: run.model.scores(images, encode_row(run.model, captions, n, row.language))[image, 0].item()
            for n in rows.tolist()
        }
        assert [scores[name] for name, _ in row.hits] == pytest.approx(sorted(scores.values())[::-1][:3], abs=1e-5)
        assert [is_right for _, is_right in row.hits] == [name.startswith(f"{row.image_id}/") for name, _ in row.hits]


def test_only_images_with_captions_in_the_language_are_ranked(opened):
    run, data, _, images = opened
    german = data.captions.languages == data.captions.language_names.index("de")
    captions = data.captions.select(~german | (data.captions.images % 2 == 0))
    examples, _ = choose_examples(captions, run.vocabulary.tokens, count=9, seed=0)
    rankings = rank_examples(run.model, captions, images, examples, top=20)
    assert {ranking.caption.key.language: ranking.images for ranking in rankings} == {"de": 5, "en": 9}
    for ranking in rankings:
        found = {hit.image_id for hit in ranking.hits}
        assert found == set(captions.image_ids[:: 2 if ranking.caption.key.language == "de" else 1])
