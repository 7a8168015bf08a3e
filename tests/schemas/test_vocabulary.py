import pytest

from schemas.vocabulary import END, PAD, SPECIALS, START, UNK, Vocabulary

COUNTS = {"de": {"Hund": 4, "und": 2, "Schnee": 1, "taxi": 2}, "en": {"dog": 4, "and": 3, "taxi": 2, "snow": 1}}


def tokens(counts, **kwargs):
    return list(Vocabulary.from_counts(counts, **kwargs).tokens[4:])


def test_specials_come_first_and_never_move():
    assert (PAD, START, END, UNK) == (0, 1, 2, 3)
    assert SPECIALS == ("<pad>", "<start>", "<end>", "<unk>")
    assert Vocabulary.from_counts({}, min_count=1).tokens == SPECIALS
    assert Vocabulary.from_counts(COUNTS, min_count=1).tokens[:4] == SPECIALS


@pytest.mark.parametrize(
    ("scope", "min_count", "kept"),
    [
        # A token is kept when its count is exactly the threshold.
        ("language", 4, ["Hund", "dog"]),
        ("language", 3, ["Hund", "dog", "and"]),
        ("language", 2, ["Hund", "dog", "taxi", "and", "und"]),
        ("language", 5, []),
        # taxi: 2 in each language, 4 in both together.
        ("joint", 4, ["Hund", "dog", "taxi"]),
        ("joint", 3, ["Hund", "dog", "taxi", "and"]),
        ("joint", 5, []),
    ],
)
def test_threshold(scope, min_count, kept):
    assert tokens(COUNTS, min_count=min_count, scope=scope) == kept


def test_order_is_count_descending_then_code_point():
    counts = {"x": {"b": 2, "a": 2, "B": 2, "ä": 2, "Z": 5, "z": 2, "10": 2, "9": 2, "\U0001f600": 2, "\uffee": 2, "a'": 2}}
    expected = ["Z", "10", "9", "B", "a", "a'", "b", "z", "ä", "\uffee", "\U0001f600"]
    assert tokens(counts, min_count=1) == expected
    assert tokens({"x": dict(reversed(counts["x"].items()))}, min_count=1) == expected


def test_counts_keep_all_languages_of_a_kept_token():
    vocabulary = Vocabulary.from_counts({"en": {"taxi": 5}, "de": {"taxi": 1}}, min_count=5)
    assert vocabulary.counts[4] == {"en": 5, "de": 1}
    assert list(vocabulary.counts[4]) == ["de", "en"]
    assert vocabulary.counts[:4] == ({}, {}, {}, {})


@pytest.mark.parametrize("special", SPECIALS)
def test_from_counts_drops_tokens_spelled_like_specials(special):
    vocabulary = Vocabulary.from_counts({"en": {special: 9, "dog": 1}}, min_count=1)
    assert vocabulary.tokens == (*SPECIALS, "dog")
    assert vocabulary.counts == ({}, {}, {}, {}, {"en": 1})
    assert vocabulary.encode([special, "dog", special]) == [START, UNK, 4, UNK, END]


def test_encode_and_decode():
    vocabulary = Vocabulary.from_counts(COUNTS, min_count=2)
    assert vocabulary.encode(["dog", "and", "Hund", "cat"]) == [1, 5, 7, 4, 3, 2]
    assert vocabulary.encode(["Dog"]) == [START, UNK, END]
    assert vocabulary.encode([]) == [START, END]
    assert vocabulary.encode(["dog", "<unk>"]) == [START, 5, UNK, END]
    assert vocabulary.decode([1, 5, 7, 4, 3, 2, 0]) == ["<start>", "dog", "and", "Hund", "<unk>", "<end>", "<pad>"]


@pytest.mark.parametrize(
    ("max_length", "expected"),
    [(0, [1, 2]), (1, [1, 5, 2]), (3, [1, 5, 4, 5, 2]), (4, [1, 5, 4, 5, 4, 2]), (99, [1, 5, 4, 5, 4, 2])],
)
def test_captions_are_cut_at_max_length(max_length, expected):
    vocabulary = Vocabulary.from_counts(COUNTS, min_count=4)
    assert vocabulary.encode(["dog", "Hund", "dog", "Hund"], max_length=max_length) == expected


def test_line_of_the_text_is_the_id():
    vocabulary = Vocabulary.from_counts({"de": {"Schnäuzer": 2, "«": 1, "\u2028": 1}}, min_count=1)
    assert vocabulary.to_text() == "<pad>\n<start>\n<end>\n<unk>\nSchnäuzer\n«\n\u2028\n"
    lines = vocabulary.to_text().encode().decode().split("\n")[:-1]
    assert {token: number for number, token in enumerate(lines)} == vocabulary.ids


def test_table_holds_it_all():
    vocabulary = Vocabulary.from_counts(COUNTS, min_count=2)
    table = vocabulary.table
    assert table["id"].to_pylist() == list(range(9))
    assert table["token"].to_pylist() == [*SPECIALS, "Hund", "dog", "taxi", "and", "und"]
    assert table["count"].to_pylist() == [0, 0, 0, 0, 4, 4, 4, 3, 2]
    assert table["counts"].to_pylist()[4:7] == [[("de", 4)], [("en", 4)], [("de", 2), ("en", 2)]]
    assert Vocabulary.from_table(table) == vocabulary


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        (("<unk>", "<pad>", "<start>", "<end>"), "a vocabulary begins with"),
        ((*SPECIALS, "dog", "dog"), "a token occurs twice in the vocabulary"),
    ],
)
def test_vocabulary_checks_itself(tokens, problem):
    with pytest.raises(ValueError, match=problem):
        Vocabulary(tokens)
