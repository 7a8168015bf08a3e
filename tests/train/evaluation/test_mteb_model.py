"""A run in MTEB: tasks of `mteb.mocks`, and one with captions of the toy, all from memory."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import imagepivot
from schemas.errors import DatasetError, UsageError
from tests.train.trainings import ALL_PORTIONS
from train.data.splits import open_data
from train.evaluation import scores

pytestmark = pytest.mark.slow


class ToyExtractor:
    """Extractor of the toy's features: an image's red is the row of its image."""

    class description:  # noqa: N801
        kind = "features"

    def __init__(self, features: np.ndarray, fingerprint: str) -> None:
        self.features, self.fingerprint, self.spec = features, fingerprint, imagepivot.FeatureSpec("toy", features.shape[1:])

    def preprocess(self, image: Image.Image) -> torch.Tensor:
        assert image.mode == "RGB"
        return torch.from_numpy(np.array(image))

    def collate(self, images):
        return torch.stack(list(images))

    def extract_columns(self, batch):
        return {"feature": self.features[batch[:, 0, 0, 0].numpy()]}


def tokenize(text, language, recipe, truecaser):
    assert (recipe.recipe, truecaser) == ("raw", "")
    return text.split()


def open_with(folder, tokenize):
    """Open a run that tokenizes by a function."""
    return replace(imagepivot.open_run(folder), tokenize=tokenize)


def evaluate(model, task):
    import mteb

    (result,) = mteb.evaluate(model, [task], cache=None, show_progress_bar=False, co2_tracker=False).task_results
    return result.scores["test"][0]


@pytest.fixture(params=["cosine", "order"])
def run(request, write_run):
    options = {"similarity": "order"} if request.param == "order" else {}
    return open_with(write_run(request.param, **options), tokenize)


def mock_task(name: str, data):
    """Return a task of `mteb.mocks` with other data."""
    from mteb.mocks import mock_tasks

    task = getattr(mock_tasks, name)()
    task.dataset, task.data_loaded = data, True
    return task


def retrieval_task(name: str, queries: dict, corpus: dict, relevant: dict[str, list[str]]):
    from datasets import Dataset

    right = {query: dict.fromkeys(items, 1) for query, items in relevant.items()}
    sides = {"queries": Dataset.from_dict(queries), "corpus": Dataset.from_dict(corpus)}
    return mock_task(name, {"default": {"test": {**sides, "relevant_docs": right, "top_ranked": None}}})


def test_retrieval_in_mteb_equals_evaluate(run, toy):
    from mteb.models import EncoderProtocol

    data = open_data(toy.captions, toy.features, split="test", portions={"en": ["comparable"]})
    captions, tokens = data.captions, run.vocabulary.tokens
    texts = [
        " ".join(tokens[token] for token in captions.token_ids[start + 1 : end - 1])
        for start, end in zip(captions.offsets, captions.offsets[1:], strict=False)
    ]
    pictures = [Image.new("RGB", (2, 2), (row, 0, 0)) for row in range(9)]
    model = imagepivot.mteb_model(run, ToyExtractor(data.features[:], run.fingerprints["extractor"]), language="en")
    assert isinstance(model, EncoderProtocol)
    text_ids, image_ids = [f"c{n}" for n in range(len(texts))], [f"i{n}" for n in range(9)]
    text, image = {"id": text_ids, "text": texts}, {"id": image_ids, "image": pictures}
    owner = {text_ids[n]: [image_ids[row]] for n, row in enumerate(captions.images)}
    own = {name: [text_ids[n] for n in np.flatnonzero(captions.images == row)] for row, name in enumerate(image_ids)}
    to_image = evaluate(model, retrieval_task("MockAny2AnyRetrievalT2ITask", text, image, owner))
    to_text = evaluate(model, retrieval_task("MockAny2AnyRetrievalI2TTask", image, text, own))
    similarities = model.similarity(model.encode([image], prompt_type=None), model.encode([text], prompt_type=None))
    assert len(torch.unique(similarities)) == similarities.numel()
    options = {"splits": ["test"], "languages": ["en"], "portions": ["comparable"]}
    (score,) = scores.evaluate(run, captions=toy.captions, features=toy.features, **options)
    relevance = score.relevance["captions"]
    for found, expected in ((to_image, relevance["text_to_image"]), (to_text, relevance["image_to_text"])):
        assert found["ndcg_at_10"] == round(expected.ndcg_at_10 / 100, 5)
        assert found["hit_rate_at_1"] == round(expected.recall_at_1 / 100, 5)
        assert 0 < found["ndcg_at_10"] < 1


def test_similarity_of_texts_in_mteb_is_that_of_the_run(run):
    from datasets import Dataset
    from mteb.types import PromptType

    sentences = [["en1 en2", "en3", "en4 en5 en6", "en7"], ["en2", "en3 en9", "en20", "en7 en8"]]
    data = Dataset.from_dict({"sentence1": sentences[0], "sentence2": sentences[1], "score": [5, 4, 0, 3]})
    task = mock_task("MockSTSTask", {"test": data})
    model = imagepivot.mteb_model(run, ToyExtractor(np.ones((1, 8), np.float32), run.fingerprints["extractor"]))
    for name, batch in (("query", {"text": ["en1"]}), ("document", {"image": [Image.new("RGB", (2, 2))]})):
        model.encode([batch], prompt_type=PromptType(name))  # An earlier task, whose modalities do not matter.
    found = evaluate(model, task)
    first, second = (model.encode([{"text": texts}]) for texts in sentences)
    assert first.shape == (4, run.model.width)
    cosines = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(first, second, strict=True)]
    assert found["cosine_pearson"] == pytest.approx(np.corrcoef(cosines, [5, 4, 0, 3])[0, 1], abs=1e-5)
    plain = [
        a @ b if run.config.model.similarity == "cosine" else -(np.maximum(0, b - a) ** 2).sum()
        for a, b in zip(first, second, strict=True)
    ]
    assert model.similarity_pairwise(first, second).tolist() == pytest.approx(plain, abs=1e-6)
    assert found["pearson"] == pytest.approx(np.corrcoef(plain, [5, 4, 0, 3])[0, 1], abs=1e-5)


def test_language_is_that_of_the_subset_or_the_chosen_one(write_run):
    languages = []

    def spy(text, language, recipe, truecaser):
        languages.append(language)
        return text.split()

    run = open_with(write_run(), spy)
    batch = [{"text": ["en1"]}]
    imagepivot.mteb_model(run).encode(batch, hf_subset="de")
    imagepivot.mteb_model(run).encode(batch, hf_subset="default")
    imagepivot.mteb_model(run, language="de").encode(batch, hf_subset="en-de")
    assert languages == ["de", "en", "de"]
    names = {imagepivot.mteb_model(run, language=language).mteb_model_meta.revision for language in ("de", "en")}
    assert len(names) == 2
    with pytest.raises(UsageError, match=r"--language is 'fr', but .* knows only en, de"):
        imagepivot.mteb_model(run, language="fr")


def test_features_of_another_extractor_are_refused(write_run):
    with pytest.raises(DatasetError, match=r"was trained on features of another extractor, .* than 'toy'"):
        imagepivot.mteb_model(imagepivot.open_run(write_run()), ToyExtractor(np.zeros((9, 8), np.float32), "0" * 64))


def test_text_with_an_image_is_refused(write_run):
    model = imagepivot.mteb_model(imagepivot.open_run(write_run()))
    with pytest.raises(UsageError, match="a run embeds a text or an image, not both"):
        model.encode([{"image": [Image.new("RGB", (2, 2))], "text": ["en1"]}])


def test_front_door_tokenizes_and_extracts(write_run, toy):
    recipe = imagepivot.load_recipe("multi30k-lc").parameters().to_json()
    run = replace(imagepivot.open_run(write_run(l2=True)), captions={"text": recipe})
    features = open_data(toy.captions, toy.features, split="test", portions=ALL_PORTIONS).features
    model = imagepivot.mteb_model(run, ToyExtractor(features[:], run.fingerprints["extractor"]))
    assert np.array_equal(model.encode([{"text": ["En1, EN2"]}]), model.encode([{"text": ["en1 , en2"]}]))
    gallery = imagepivot.embed_gallery(run, toy.features)
    rows = [
        gallery.image_ids.index(image_id)
        for image_id in open_data(toy.captions, toy.features, split="test", portions=ALL_PORTIONS).captions.image_ids
    ]
    images = [Image.new("P", (2, 2), 0) for _ in range(9)]
    for row, image in enumerate(images):
        image.putpalette([row, 0, 0])
    found = model.encode([{"image": images[:4]}, {"image": images[4:]}])
    assert found == pytest.approx(gallery.embeddings[rows].numpy(), abs=1e-6)
