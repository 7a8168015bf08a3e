import gzip
import random
import re
from pathlib import Path

import pytest
import sacremoses

from pipelines.text import moses
from pipelines.text.moses import RECIPES, load_recipe, lower, normalize_punctuation, prepare, split_tokens, tokenize
from schemas.errors import UsageError

# Every expectation in the tables of this file was checked against the Perl scripts of Moses at commit 3a0631a.

LOWERED = [
    pytest.param("ΟΔΟΣ Σ ΣΟΣ.", "οδοσ σ σοσ.", id="sigma-is-never-final"),
    pytest.param("ὀδός", "ὀδός", id="final-sigma-in-the-text-stays"),
    pytest.param("İ", "i̇", id="dotted-i-gives-two-characters"),
    pytest.param("Straße ẞ", "straße ß", id="sharp-s-stays"),
    pytest.param(" \t\u2028 ", " \t\u2028 ", id="white-space"),
    pytest.param("", "", id="empty"),
]

NORMALIZED = [
    pytest.param("en", "", "", id="empty"),
    pytest.param("en", "  two  spaces  ", " two spaces ", id="runs-of-spaces"),
    pytest.param("en", "a\rb\r", "ab", id="cr-is-deleted"),
    pytest.param("en", "dogs( two )run", "dogs (two) run", id="brackets"),
    pytest.param("en", "a (two) .", "a (two).", id="punctuation-after-a-bracket"),
    pytest.param("en", "5 % : a ; b", "5%: a; b", id="percent-colon-semicolon"),
    pytest.param("en", "x % ٣ %", "x % ٣ %", id="digits-are-ascii"),
    pytest.param("en", "``so''", ' " so " ', id="backticks-and-doubled-apostrophes"),
    pytest.param("en", "„a“ b” c–d—e ´f", '"a" b" c-d - e \'f', id="quotes-dashes-accent"),
    pytest.param("en", "it’s o‘clock", "it's o'clock", id="single-quotes-between-ascii-letters"),
    pytest.param("en", "dogs’ ‘so ‚low", 'dogs" "so "low', id="lone-single-quotes-become-double"),
    pytest.param("fr", "l’œil, l’été, d’or", 'l"œil, l"été, d\'or', id="accented-letters-are-not-ascii"),
    pytest.param("en", "and… so", "and... so", id="ellipsis"),
    pytest.param("fr", "un «\xa0chien\xa0» ou «chat»", 'un "chien" ou "chat"', id="french-quotes"),
    pytest.param("fr", "un\xa0«\xa0chien\xa0»\xa0ici", 'un "chien" ici', id="french-quotes-keep-a-space"),
    pytest.param(
        "fr", "quoi\xa0? oui\xa0! ici\xa0: là\xa0; 5\xa0% nº\xa0 3", "quoi? oui! ici: là; 5% nº 3", id="no-break-spaces"
    ),
    pytest.param("de", "20\xa0ºC, 5\xa0cm,\xa0so", "20 ºC, 5 cm, so", id="no-break-space-units"),
    # Quotes and the comma or full stop beside them, by language.
    pytest.param("en", 'a "dog", a "cat". so', 'a "dog," a "cat." so', id="en-puts-it-inside"),
    pytest.param("de", 'ein "Hund," eine "Katze." so', 'ein "Hund", eine "Katze". so', id="de-puts-it-outside"),
    pytest.param("cs", 'ten "pes," ta "kočka." no "a", b', 'ten "pes," ta "kočka." no "a", b', id="cs-leaves-it"),
    pytest.param("cz", 'ten "pes," ta "kočka." no', 'ten "pes," ta "kočka." no', id="cz-leaves-it"),
    pytest.param("it", 'un "cane," un "gatto." no', 'un "cane", un "gatto". no', id="others-put-it-outside"),
    pytest.param("de", 'sie sagt: "ja."', 'sie sagt: "ja".', id="de-full-stop-at-the-line-end"),
    pytest.param("fr", "elle dit «oui.»", 'elle dit "oui".', id="fr-full-stop-at-the-line-end"),
    pytest.param("it", 'dice "si."  ', 'dice "si". ', id="it-full-stop-before-final-spaces"),
    pytest.param("en", 'she says "yes."', 'she says "yes."', id="en-full-stop-at-the-line-end"),
    pytest.param("de", 'so."<b>', 'so."<b>', id="not-before-an-angle-bracket"),
    pytest.param("de", "5\xa0000 ٣\xa0٣", "5,000 ٣\xa0٣", id="de-no-break-space-between-digits"),
    pytest.param("en", "5\xa0000", "5.000", id="en-no-break-space-between-digits"),
    pytest.param("en", "a\u2028b\x85c\u2003d", "a\u2028b\x85c\u2003d", id="other-white-space-stays"),
]

TOKENIZED = [
    pytest.param("en", "5,300 cats,dogs,5,a", "5,300 cats , dogs , 5 , a", id="commas"),
    pytest.param("en", "5,", "5 ,", id="comma-at-the-end-after-a-number"),
    pytest.param("en", "it's 1990's dogs' 'so'", "it &apos;s 1990 &apos;s dogs &apos; &apos; so&apos;", id="en"),
    pytest.param("fr", "l'été d'un 5'a 's", "l&apos; été d&apos; un 5 &apos; a &apos; s", id="fr-contractions"),
    pytest.param("it", "l'uomo", "l&apos; uomo", id="it-contractions"),
    pytest.param("ga", "d'fhear", "d&apos; fhear", id="ga-contractions"),
    pytest.param("de", "geht's", "geht &apos; s", id="de-apostrophes"),
    pytest.param("de", "& | < > ' \" [ ]", "&amp; &#124; &lt; &gt; &apos; &quot; &#91; &#93;", id="escaping"),
    pytest.param("en", "&amp;", "&amp; amp ;", id="entities-in-the-text-are-text"),
    pytest.param("en", "Mr. Lee in St. Paul. The No. 5, No. Yes.", "Mr. Lee in St. Paul . The No. 5 , No . Yes .", id="prefix"),
    pytest.param("en", "mr. Lee vs. Ann", "mr . Lee vs. Ann", id="prefixes-are-case-sensitive"),
    pytest.param("en", "runs wild. for it. Then", "runs wild. for it . Then", id="full-stop-before-lower-case"),
    pytest.param("en", "the U.S. Then 3.5. Then a.m.", "the U.S. Then 3.5 . Then a.m.", id="dots-inside-words"),
    pytest.param("en", "Rs. Five", "Rs . Five", id="newer-prefix-is-not-known"),
    pytest.param("de", "z.B. das Nr. 5 bzw. Das d. h. 3. Mal", "z.B. das Nr. 5 bzw. Das d. h. 3. Mal", id="de-prefixes"),
    pytest.param("en", "he said 'so.'", "he said &apos; so . &apos; ", id="trailing-space-after-full-stop-and-quote"),
    pytest.param("en", ".", ".", id="a-full-stop"),
    pytest.param("en", "  a \t b\xa0c\u2028d\u3000e\x85f\x0bg  ", "a b c d e f g", id="white-space"),
    pytest.param("en", "a\u200bb", "a \u200b b", id="zero-width-space-is-a-token"),
    pytest.param("en", "\ufeffa dog", "\ufeff a dog", id="bom-is-a-token"),
    pytest.param("en", "a\x1cb \x1d c\x1e\x1fd", "ab cd", id="separators-are-deleted"),
    pytest.param("en", "a\x00b \x01 c\x1b", "ab c", id="control-characters-are-deleted"),
    pytest.param("en", "a\rb\r", "a b", id="cr-is-white-space"),
    pytest.param("xx", "Mr. Lee, it's", "Mr. Lee , it &apos; s", id="unknown-language-has-english-prefixes-only"),
    pytest.param("en", "e\u0301te a\u0301. b", "e \u0301 te a \u0301 . b", id="combining-accents-are-tokens"),
    pytest.param("en", "ԱԲ աբ. 𐐀𐐨. 𐐨", "ԱԲ աբ . 𐐀𐐨. 𐐨", id="armenian-and-deseret"),
    pytest.param("en", "ქართული. დიდი. Ქართული", "ქართული. დიდი . Ქართული", id="georgian-case"),
    pytest.param("en", "犬が走る。한국어", "犬が走る 。 한국어", id="han-kana-hangul"),
    pytest.param("ja", "犬が走る。한국어", "犬が走る 。 한국어", id="ja-keeps-words"),
    pytest.param("hi", "कुत्ता क़िला", "कुत \u094d ता क \u093c िला", id="hi-virama-and-nukta-are-tokens"),
    pytest.param("bn", "দুই কুকুর", "দুই কুকুর", id="bn-vowel-signs"),
    pytest.param("th", "ภาษาไทย น้ำ", "ภาษาไทย น \u0e49 ำ", id="th-tone-marks-are-tokens"),
    pytest.param("ar", "كلب، ١٬٢٣ ٣,٤", "كلب ، ١ ٬ ٢٣ ٣,٤", id="ar-digits"),
    pytest.param("he", "שָׁלוֹם", "שָׁלוֹם", id="he-points"),
    # Blank lines are printed as they are; lines of deleted characters are not blank.
    pytest.param("en", "", "", id="empty"),
    pytest.param("en", " \t\x0b\x0c\r \xa0\x85\u2028\u3000", " \t\x0b\x0c\r \xa0\x85\u2028\u3000", id="blank-looking"),
    pytest.param("en", "\x1c", "", id="only-a-separator"),
    pytest.param("en", "  \x1d  ", "", id="separator-and-spaces"),
]


@pytest.mark.parametrize(("text", "expected"), LOWERED)
def test_lower(text: str, expected: str) -> None:
    assert lower(text) == expected


@pytest.mark.parametrize(("language", "text", "expected"), NORMALIZED)
def test_normalize_punctuation(language: str, text: str, expected: str) -> None:
    assert normalize_punctuation(text, language) == expected


@pytest.mark.parametrize("language", ["en", "de", "fr", "cs", "es", "it"])
def test_normalizer_skips_unchanged_text_only(language: str) -> None:
    rng = random.Random(f"normalizer {language}")
    alphabet = "ab E9 ٣ .,'`´’‘‚\"„«»…–—%:;?!()<\xa0º\r\tcmné"
    skipped = 0
    for _ in range(20_000):
        text = "".join(rng.choices(alphabet, k=rng.randint(1, 6)))
        if moses._NORMALIZABLE.search(text) is None:
            skipped += 1
            expected = text + "\n"
            for pattern, replacement in moses._normalizer_rules(language):
                expected = pattern.sub(replacement, expected)
            assert text == expected[:-1]
    assert skipped > 1000


@pytest.mark.parametrize(("language", "text", "expected"), TOKENIZED)
def test_tokenize(language: str, text: str, expected: str) -> None:
    assert tokenize(text, language) == expected


# sacremoses takes seconds to compile the letters of zh and ja.
@pytest.mark.parametrize(
    "language",
    [
        *("en", "de", "fr", "cs", "es", "it", "pl", "ko"),
        pytest.param("zh", marks=pytest.mark.slow),
        pytest.param("ja", marks=pytest.mark.slow),
    ],
)
def test_tokenize_equals_sacremoses_on_random_lines(language: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(f"tokenizer {language}")
    words = ["Mr", "No", "No.", "5", "5,300", "3.5", "it's", "l'été", "œil", "U.S.", "z.B.", "např", "vs", "a", "Ein"]
    # sacremoses has these letters for these languages only; the Perl has them for all.
    words += {"zh": ["中文"], "ja": ["中文"], "ko": ["한국"]}.get(language, [])
    marks = [" "] * 12 + list(".,.,'\"`-()[]&|<>%:;?!$€°😀\u200b\xa0\t\u2028\x01") + ["...", "..", ".'", "' "]
    theirs = sacremoses.MosesTokenizer(lang=language)
    # sacremoses turns its string of letters into a set for every word with a full stop, some 70 ms each in ja, ko and zh.
    letters = frozenset(theirs.IsAlpha)
    monkeypatch.setattr(theirs, "isanyalpha", lambda text: not letters.isdisjoint(text))
    for _ in range(500):
        line = "".join(rng.choice(words if rng.random() < 0.4 else marks) for _ in range(rng.randint(1, 20)))
        if not line.isspace():
            assert tokenize(line, language) == theirs.tokenize(line, return_str=True), repr(line)


def test_primary_subtag_decides() -> None:
    assert normalize_punctuation('"ja."', "de-CH") == normalize_punctuation('"ja."', "de") == '"ja".'
    assert tokenize("l'eau bzw. Das", "fr-CA") == tokenize("l'eau bzw. Das", "fr") == "l&apos; eau bzw . Das"
    assert tokenize("bzw. Das", "de-CH") == "bzw. Das"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", []),
        ("\xa0\u2028 \t", []),
        ("a . &apos; ", ["a", ".", "&apos;"]),
        (" a  b ", ["a", "b"]),
        ("a\xa0b\tc d", ["a\xa0b\tc", "d"]),
    ],
)
def test_split_tokens(line: str, expected: list[str]) -> None:
    assert split_tokens(line) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("multi30k-lc", ["der", "hund", "sagt", ":", "&quot;", "ja", "&quot;", "."]),
        ("moses-truecase", ["Der", "Hund", "sagt", ":", "&quot;", "Ja", ".", "“"]),
        ("raw", ["Der", "Hund", "sagt:", '"Ja.“']),
    ],
)
def test_prepare(name: str, expected: list[str]) -> None:
    assert prepare('Der Hund\xa0 sagt: "Ja.“', "de", load_recipe(name)) == expected


@pytest.mark.parametrize(
    ("name", "steps", "tokenizer"),
    [
        ("multi30k-lc", {"lowercase": True, "normalize": True, "truecase": False}, "moses"),
        ("raw", {"lowercase": False, "normalize": False, "truecase": False}, "whitespace"),
    ],
)
def test_parameters_hold_token_options(name: str, steps: dict[str, bool], tokenizer: str) -> None:
    of_moses = {"moses_commit": "3a0631a", "sacremoses": sacremoses.__version__, "escape": True}
    expected = {"recipe": name, "tokenizer": tokenizer, **steps, **(of_moses if tokenizer == "moses" else {})}
    assert load_recipe(name).parameters().to_json() == expected


def test_unknown_recipe_is_refused_with_the_known_names_and_the_closest() -> None:
    message = "unknown recipe 'multi30k': expected one of moses-truecase, multi30k-lc, raw; did you mean 'multi30k-lc'?"
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        load_recipe("multi30k")


# The official files of Multi30K: raw caption in, line of the tok file out, compared as bytes.


def _lines(path: Path) -> list[str]:
    data = path.read_bytes()
    lines = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8").split("\n")
    assert lines.pop() == "", f"{path} does not end with a line end"
    return lines


TASK1 = [
    ("task1", split, f"{split}.{language}", f"{split}.lc.norm.tok.{language}", language)
    for split in ("val", "test_2016_flickr")
    for language in ("en", "de", "fr", "cs")
]
TASK2 = [
    ("task2", split, f"{split}.{number}.{language}", f"{split}.lc.norm.tok.{number}.{language}", language)
    for split in ("val", "test_2016")
    for number in range(1, 6)
    for language in ("en", "de")
]


@pytest.mark.parametrize(
    ("task", "split", "raw", "tok", "language"), [pytest.param(*p, id=f"{p[0]}-{p[2]}") for p in TASK1 + TASK2]
)
def test_official_tok_files(multi30k: Path, task: str, split: str, raw: str, tok: str, language: str) -> None:
    captions = _lines(multi30k / "data" / task / "raw" / f"{raw}.gz")
    official = _lines(multi30k / "data" / task / "tok" / tok)
    assert len(captions) == len(official) == (1014 if split == "val" else 1000)
    ours = [tokenize(normalize_punctuation(lower(caption), language), language) for caption in captions]
    differing = [(i, a, b) for i, (a, b) in enumerate(zip(ours, official, strict=True), start=1) if a != b]
    assert differing == []
    tokens = [prepare(caption, language, RECIPES["multi30k-lc"]) for caption in captions]
    assert tokens == [line.split() for line in official]
