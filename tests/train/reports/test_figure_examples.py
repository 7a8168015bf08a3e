import pytest

from schemas.errors import UsageError
from train.reports.figure_examples import choose_examples, first_captions

WORDS = ["<pad>", "<start>", "<end>", "<unk>", "dog", "Hund", "&quot;"]
ROWS = [
    ("a", "de", "comparable", 0, [1, 5, 2]),
    ("a", "en", "comparable", 1, [1, 4, 2]),
    ("a", "en", "comparable", 0, [1, 4, 6, 3, 2]),
    ("b", "en", "comparable", 0, [1, 4, 2]),
    ("c/d", "de", "comparable", 1, [1, 5, 2]),
    ("c/d", "de", "translation", 0, [1, 5, 2]),
    ("c/d", "en", "comparable", 0, [1, 4, 2]),
    ("e", "de", "comparable", 0, [1, 5, 2]),
    ("e", "en", "comparable", 0, [1, 4, 2]),
]


def test_images_are_drawn_from_those_with_captions_in_all_languages(new_captions):
    captions = new_captions(ROWS)
    drawn = {
        tuple(example.image_id for example in choose_examples(captions, WORDS, count=2, seed=seed)[0]) for seed in range(20)
    }
    assert drawn == {("a", "c/d"), ("a", "e"), ("c/d", "e")}
    examples, rule = choose_examples(captions, WORDS, count=9, seed=3)
    assert [(example.number, example.image_id, example.image) for example in examples] == [
        (1, "a", 0),
        (2, "c/d", 2),
        (3, "e", 3),
    ]
    assert rule.startswith("3 of the 3 images of split train with captions in de, en, drawn with seed 3")
    assert examples == choose_examples(captions, WORDS, count=9, seed=3)[0]


def test_first_caption_of_each_language_is_shown(new_captions):
    captions = new_captions(ROWS)
    examples, _ = choose_examples(captions, WORDS, count=9, seed=0)
    keys = [[str(caption.key) for caption in example.captions] for example in examples]
    assert keys == [
        ["a/de/comparable/0", "a/en/comparable/0"],
        ["c/d/de/comparable/1", "c/d/en/comparable/0"],
        ["e/de/comparable/0", "e/en/comparable/0"],
    ]
    english = examples[0].captions[1]
    assert (english.tokens, english.text) == (("<start>", "dog", "&quot;", "<unk>", "<end>"), 'dog " <unk>')
    assert first_captions(captions, 1) == [3]


def test_captions_can_be_named(new_captions):
    captions = new_captions(ROWS)
    names = ["e/en/comparable/0", "c/d/de/translation/0", "e/de/comparable/0", "e/en/comparable/0"]
    examples, rule = choose_examples(captions, WORDS, count=1, seed=0, caption_ids=names)
    assert [[str(caption.key) for caption in example.captions] for example in examples] == [[names[0], names[2]], [names[1]]]
    assert rule == "captions that were named"


@pytest.mark.parametrize(
    "name", ["a", "a/en/comparable/2", "a/fr/comparable/0", "x/en/comparable/0", "a/en/translation/0", "a/en/comparable/x"]
)
def test_unknown_caption_id_is_refused(new_captions, name):
    with pytest.raises(UsageError, match=r"--caption-ids names .* such as 'a/de/comparable/0'"):
        choose_examples(new_captions(ROWS), WORDS, count=1, seed=0, caption_ids=[name])
