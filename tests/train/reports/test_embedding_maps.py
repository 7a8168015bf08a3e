import numpy as np
import pytest

from tests.train.trainings import encode_row
from train.data.splits import open_data
from train.evaluation.evaluation import embed_images
from train.reports import embedding_maps
from train.reports.embedding_maps import map_embeddings
from train.reports.figure_examples import choose_examples
from train.runs.run import open_run


@pytest.fixture
def mapped(toy, write_run, monkeypatch):
    """Map with a plane of the first two numbers of each vector, which tells the vectors apart; return also run and data."""
    monkeypatch.setattr(embedding_maps, "plane_of", lambda vectors, **_: vectors[:, :2])
    run = open_run(write_run())
    data = open_data(toy.captions, toy.features, split="test", portions=dict.fromkeys(("en", "de"), ("comparable",)))
    images = embed_images(run.model, data.features)

    def make(most: int, seed: int = 0, count: int = 2):
        examples, _ = choose_examples(data.captions, run.vocabulary.tokens, count=count, seed=seed)
        return map_embeddings(run.model, data.captions, images, examples, max_images=most, seed=seed), examples

    return make, run, data


def test_points_are_those_of_images_and_their_first_captions(mapped):
    make, run, data = mapped
    found, _ = make(9)
    captions = data.captions
    assert found.image_ids == captions.image_ids
    assert found.languages == captions.language_names
    assert found.points.shape == (3, 9, 2)
    np.testing.assert_allclose(found.points[0], embed_images(run.model, data.features).values[:, :2])
    for image in range(9):
        for number, language in enumerate(captions.language_names, start=1):
            rows = [n for n in captions.rows_of(language).tolist() if captions.images[n] == image]
            row = min(rows, key=lambda n: captions.indices[n])
            vector = encode_row(run.model, captions, row, language).values[0, :2]
            np.testing.assert_allclose(found.points[number, image], vector, atol=1e-6)


def test_examples_are_among_the_images_and_numbered(mapped):
    make, _, _ = mapped
    for seed in range(5):
        found, examples = make(4, seed)
        assert len(found.image_ids) == 4
        assert sorted(found.image_ids) == list(found.image_ids)
        assert {found.image_ids[place]: number for place, number in found.numbers.items()} == {
            example.image_id: example.number for example in examples
        }
    assert len({make(4, seed)[0].image_ids for seed in range(8)}) > 1
    assert make(4, 3)[0].image_ids == make(4, 3)[0].image_ids
    assert len(make(2, count=5)[0].image_ids) == 5  # All examples, though they are more.
