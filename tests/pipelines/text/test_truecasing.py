from __future__ import annotations

import hashlib
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable

import pytest

from pipelines.text.truecasing import TruecaseModel, count_forms, load_truecasers, truecase, truecaser_inputs
from schemas.errors import InputError, UsageError

CAPTIONS = [
    "The dog sees a Dog .",
    "A dog and a Dog and a dog in Berlin .",
    "Berlin : The dog is in Berlin !",
    "&quot; The US &quot; sees us in the US .",
    "Zwei",
]
# What train-truecaser.perl makes of the captions; the order of lines and alternatives is random there.
PERL_MODEL = """\
&quot; (1/1)
Berlin (2/2)
in (3/3)
the (1/1)
is (1/1)
a (3/3)
dog (4/6) Dog (2)
and (2/2)
US (2/3) us (1)
sees (2/2)
"""
SORTED_MODEL = "".join(sorted(PERL_MODEL.splitlines(keepends=True), key=str.lower))

# The caption, and what counts, in tenths. Checked against the Perl.
COUNTED = [
    pytest.param("", {}, id="empty"),
    pytest.param("The dog Runs", {"dog": 10, "Runs": 10}, id="first-word-is-no-evidence"),
    pytest.param("the dog", {"dog": 10}, id="first-word-in-lower-case"),
    pytest.param("3pm Dog", {"Dog": 10}, id="first-word-begins-with-a-digit"),
    pytest.param("Dog", {}, id="only-word"),
    pytest.param("dog", {}, id="only-word-in-lower-case"),
    pytest.param("Dog .", {}, id="a-full-stop-is-a-second-word"),
    pytest.param('" Dog', {}, id="a-quote-is-a-second-word"),
    pytest.param("the A . The A : The A ? The A ! The", {"A": 40}, id="sentence-ends"),
    pytest.param("the A ; The A", {"A": 20, "The": 10}, id="no-sentence-end"),
    pytest.param("( [ \" ' &apos; &quot; &#91; &#93; The A", {"A": 10}, id="delayed-start"),
    pytest.param("( ( [", {}, id="nothing-but-a-delayed-start"),
    pytest.param("( 3 The", {"The": 10}, id="word-without-case-ends-the-start"),
    pytest.param('A . " The', {"The": 10}, id="no-delay-in-mid-line"),
    pytest.param("A . 3 The", {"The": 10}, id="number-behind-a-full-stop"),
    pytest.param("A . . The", {}, id="two-sentence-ends"),
    pytest.param("A &quot; The", {"&quot;": 10, "The": 10}, id="entities-are-words"),
    pytest.param("A ª ʰ Ⅷ 中 - 3 B", {"B": 10}, id="letters-without-case"),
    pytest.param("A ǅ ĸ É ß", {"ǅ": 10, "ĸ": 10, "É": 10, "ß": 10}, id="cased"),
    pytest.param("ǅx", {}, id="title-case-is-a-capital"),
]

# Best forms: dog, US, Berlin, is, the. Known: Dog, us. Checked against the Perl.
TRUECASED = [
    pytest.param("", "", id="empty"),
    pytest.param("The dog", "the dog", id="first-word-takes-the-best-form"),
    pytest.param("Dog IS", "dog is", id="first-word-though-its-form-is-known"),
    pytest.param("us and Dog", "US and Dog", id="known-form-stays-in-mid-line"),
    pytest.param("The DOG in BERLIN Sees uS", "the dog in Berlin sees US", id="unknown-form-of-a-known-type"),
    pytest.param("Xyz Xyz", "Xyz Xyz", id="unknown-type-stays"),
    pytest.param("a . Dog : Dog ? Dog ! Dog , Dog", "a . dog : dog ? dog ! dog , Dog", id="sentence-ends"),
    pytest.param(
        "( [ \" ' &apos; &quot; &#91; &#93; Dog Dog", "( [ \" ' &apos; &quot; &#91; &#93; dog Dog", id="delayed-start"
    ),
    pytest.param('a . " ( Dog', 'a . " ( dog', id="delayed-start-in-mid-line"),
    pytest.param("a ( Dog", "a ( Dog", id="delayed-start-does-not-start"),
    pytest.param("- Dog", "- Dog", id="other-signs-end-the-start"),
]


def _sum(captions: Iterable[list[str]]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for tokens in captions:
        for form, weight in count_forms(tokens):
            counts[form] += weight
    return counts


MODEL = TruecaseModel.from_counts(_sum(caption.split() for caption in CAPTIONS))


@pytest.mark.parametrize(("caption", "expected"), COUNTED)
def test_count_forms(caption: str, expected: dict[str, int]) -> None:
    assert _sum([caption.split()]) == expected


@pytest.mark.parametrize(("caption", "expected"), TRUECASED)
def test_truecase(caption: str, expected: str) -> None:
    assert truecase(caption.split(" ") if caption else [], MODEL) == expected.split()


def test_final_sigma_is_one_type_with_the_others() -> None:
    model = TruecaseModel.from_counts({"ΟΔΟΣ": 10, "Οδοσ": 20})
    assert model.best == {"οδοσ": "Οδοσ"}
    assert truecase(["a", "ΟδΟΣ"], model) == ["a", "Οδοσ"]


def test_best_form_has_the_highest_count_then_the_smallest_code_points() -> None:
    counts = {"us": 330, "US": 330, "Us": 330, "coke": 130, "Coke": 129, "élan": 10, "Élan": 10}
    expected = {"us": "US", "coke": "coke", "élan": "Élan"}
    for order in (sorted(counts), sorted(counts, reverse=True)):
        model = TruecaseModel.from_counts({form: counts[form] for form in order})
        assert model.best == expected
        assert model.to_text() == "coke (13/25.9) Coke (12.9)\nUS (33/99) Us (33) us (33)\nÉlan (1/2) élan (1)\n"


def test_to_text_equals_the_sorted_model_of_the_perl_trainer() -> None:
    assert MODEL.to_text() == SORTED_MODEL
    assert TruecaseModel.from_text(PERL_MODEL) == MODEL
    assert TruecaseModel.from_text(SORTED_MODEL) == MODEL


def test_model_file_keeps_tenths() -> None:
    model = TruecaseModel.from_counts({"Zwei": 1, "Drei": 12, "drei": 3, "Vier": 10, "vier": 1000})
    text = "Drei (1.2/1.5) drei (0.3)\nvier (100/101) Vier (1)\nZwei (0.1/0.1)\n"
    assert model.to_text() == text
    assert TruecaseModel.from_text(text) == model


def test_floating_point_noise_of_the_perl_is_rounded_to_tenths() -> None:
    model = TruecaseModel.from_text("The (3431.4/7118.99999999999) the (2040) THE (1647.60000000001)\n")
    assert model.counts == {"The": 34314, "the": 20400, "THE": 16476}


def test_from_text_keeps_best_forms() -> None:
    text = "us (3/9) US (3) Us (3)\n"
    model = TruecaseModel.from_text(text)
    assert model.best == {"us": "us"}
    assert truecase(["US", "US"], model) == ["us", "US"]
    assert model.to_text() == "us (3/9) US (3) Us (3)\n"


def test_models_load_without_a_final_line_end_and_from_an_empty_file() -> None:
    assert TruecaseModel.from_text(SORTED_MODEL.removesuffix("\n")) == MODEL
    assert TruecaseModel.from_text("") == TruecaseModel.from_counts({})
    assert TruecaseModel.from_counts({}).to_text() == ""


def test_forms_may_hold_brackets_and_odd_separators() -> None:
    model = TruecaseModel.from_counts({"(a/b)": 10, "(A/B)": 20, "x\x85y": 10, "x\x1cy": 10})
    assert TruecaseModel.from_text(model.to_text()) == model


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("dog", "expected 'best (count/total) other (count) ...'"),
        (" dog (4/4)", "expected 'best (count/total) other (count) ...'"),
        ("dog (4/6) Dog (x)", "expected ' other (count)' at column 10"),
        ("dog (4/6) Dog (2)\r", "expected ' other (count)' at column 18"),
        ("dog (4/6) dog (2)", "the line has the form 'dog' twice"),
        ("dog (4/6) Cat (2)", "expected forms of one word, 'dog' in lower case, found one of 'cat'"),
        ("A (1/1)", "an earlier line also has forms of 'a'"),
    ],
)
def test_broken_model_line_is_named(line: str, problem: str) -> None:
    message = f"models/truecase.en, line 2: {problem}; the line is {line!r}; train the model again or copy it again"
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        TruecaseModel.from_text(f"a (3/3)\n{line}\nin (1/1)\n", source="models/truecase.en")


# A second implementation of both programs, to compare with.


def reference_counts(captions: list[str]) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    delayed = ["(", "[", '"', "'", "&apos;", "&quot;", "&#91;", "&#93;"]
    for caption in captions:
        words = caption.split()
        start = next((i for i, word in enumerate(words) if word not in delayed), len(words))
        for i in range(start, len(words)):
            word = words[i]
            if not any(unicodedata.category(c) in ("Ll", "Lu", "Lt") for c in word):
                continue
            if i == start or words[i - 1] in (".", ":", "?", "!"):
                continue
            forms = counts.setdefault("".join(c.lower() for c in word), {})
            forms[word] = forms.get(word, 0) + 10
    return counts


def reference_truecase(line: str, best: dict[str, str], known: set[str]) -> str:
    forms = []
    start = True
    for word in line.split():
        kind = "".join(c.lower() for c in word)
        if start and kind in best:
            forms.append(best[kind])
        elif word in known:
            forms.append(word)
        else:
            forms.append(best.get(kind, word))
        if word in (".", ":", "?", "!"):
            start = True
        elif word not in ("(", "[", '"', "'", "&apos;", "&quot;", "&#91;", "&#93;"):
            start = False
    return " ".join(forms)


def _random_captions(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    words = "The the THE a A Dog dog DOG Ж ж ǅ ǆ ªb ª ΑΣ ας ασ İ ß ẞ 3pm 3 中文 A中 &amp; ,"
    marks = ". . : ? ! ( [ \" ' &apos; &quot; &#91; &#93;"
    choices = (words + " " + marks).split(" ")
    captions = []
    for _ in range(count):
        tokens = [
            rng.choice(choices) if rng.random() < 0.85 else "".join(rng.choices("aAbB.éÉσΣς1'", k=rng.randint(1, 6)))
            for _ in range(rng.randint(0, 12))
        ]
        captions.append(" ".join(tokens))
    return captions


@pytest.mark.slow
def test_equals_the_reference_on_random_captions() -> None:
    captions = _random_captions(seed=11, count=5000)
    model = TruecaseModel.from_counts(_sum(c.split(" ") if c else [] for c in captions))
    reference = reference_counts(captions)
    assert model.counts == {form: count for forms in reference.values() for form, count in forms.items()}
    best = {kind: min(forms, key=lambda form: (-forms[form], form)) for kind, forms in reference.items()}
    assert model.best == best
    assert TruecaseModel.from_text(model.to_text()) == model
    known = {form for forms in reference.values() for form in forms}
    for caption in captions + _random_captions(seed=12, count=5000):
        tokens = caption.split(" ") if caption else []
        assert " ".join(truecase(tokens, model)) == reference_truecase(caption, best, known), repr(caption)


EN = "dog (3/4) Dog (1)\nthe (2/2)\n"
DE = "Hund (5/5)\n"


@pytest.mark.parametrize("below", ["", "_truecaser"])
def test_models_of_a_folder_or_of_a_dataset(tmp_path, below):
    folder = tmp_path / below
    folder.mkdir(exist_ok=True)
    (folder / "en.model").write_text(EN)
    (folder / "de.model").write_text(DE)
    (folder / "PT-br.model").write_text(EN)
    (folder / "README").write_text("not a model")
    if below:
        (tmp_path / "_manifest.json").write_text("{}")
        (tmp_path / "xx.model").write_text("a folder with a folder '_truecaser' is a dataset: this is not read")
    assert load_truecasers(str(tmp_path)) == {"en": EN, "de": DE, "pt-BR": EN}


def test_inputs_are_digests_in_the_order_of_languages():
    # Without the underscore of their folder: the names are part of the fingerprint.
    text = "é (1/1)\n"
    assert truecaser_inputs({"fr": text, "de": DE}) == [
        {"name": "truecaser/de.model", "bytes": len(DE), "sha256": hashlib.sha256(DE.encode()).hexdigest()},
        {"name": "truecaser/fr.model", "bytes": len(text) + 1, "sha256": hashlib.sha256(text.encode()).hexdigest()},
    ]


@pytest.mark.parametrize(
    ("name", "data", "kind", "message"),
    [
        *(
            (name, EN.encode(), InputError, r"holds no LANGUAGE.model, such as en.model: give the folder of a captions dataset")
            for name in ("", "en.txt", "sub/en.model")
        ),
        ("en.model", b"the (2/2)\ndog (3/4)\n", InputError, r"en\.model, line 2: the counts add up to 3, expected the total 4"),
        ("de.model", "schön (1/1)\n".encode("latin-1"), InputError, r"de\.model' is not UTF-8"),
        ("my_model.model", EN.encode(), UsageError, "'my_model' is not a language tag"),
    ],
)
def test_load_truecasers_of_broken_models_fails(tmp_path, name, data, kind, message):
    if name:
        (tmp_path / "models" / name).parent.mkdir(parents=True)
        (tmp_path / "models" / name).write_bytes(data)
    with pytest.raises(kind, match=message):
        load_truecasers(str(tmp_path / "models"))
