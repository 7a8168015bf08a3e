import hashlib

import pytest

from pipelines.text.truecasers import Truecasers, load_truecasers, parse_truecaser, truecaser_name
from pipelines.text.truecasing import TruecaseModel
from schemas.errors import InputError, UsageError

EN = "dog (3/4) Dog (1)\nthe (2/2)\n"
DE = "Hund (5/5)\n"


@pytest.mark.parametrize("below", ["", "_truecaser", "truecaser"])  # The last: version 1 of the format.
def test_models_of_a_folder_or_of_a_dataset(tmp_path, below):
    folder = tmp_path / below
    folder.mkdir(exist_ok=True)
    (folder / "en.model").write_text(EN)
    (folder / "de.model").write_text(DE)
    (folder / "README").write_text("not a model")
    if below:
        (tmp_path / "_manifest.json").write_text("{}")
        (tmp_path / "xx.model").write_text("a folder with a folder '_truecaser' is a dataset: this is not read")
    assert load_truecasers(str(tmp_path)) == Truecasers({"en": EN, "de": DE})


def test_language_tags_are_normalized(tmp_path):
    (tmp_path / "PT-br.model").write_text(EN)
    assert list(load_truecasers(str(tmp_path)).texts) == ["pt-BR"]


def test_the_name_of_a_truecaser():
    assert truecaser_name("pt-BR") == "_truecaser/pt-BR.model"


def test_inputs_are_digests_in_the_order_of_languages():
    # By the names of version 1, since they are part of the fingerprint.
    text = "é (1/1)\n"
    assert Truecasers({"fr": text, "de": DE}).inputs() == [
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
def test_models_that_cannot_be_read(tmp_path, name, data, kind, message):
    if name:
        (tmp_path / "models" / name).parent.mkdir(parents=True)
        (tmp_path / "models" / name).write_bytes(data)
    with pytest.raises(kind, match=message):
        load_truecasers(str(tmp_path / "models"))


def test_a_file_is_parsed_once_until_it_changes(tmp_path, monkeypatch):
    parsed = []
    from_text = TruecaseModel.from_text

    def listening(text, source):
        parsed.append(text)
        return from_text(text, source)

    monkeypatch.setattr(TruecaseModel, "from_text", listening)
    for text in (EN, EN, EN + "a (1/1)\n"):
        (tmp_path / "en.model").write_text(text)
        assert load_truecasers(str(tmp_path)).texts == {"en": text}
    assert parsed == [EN, EN + "a (1/1)\n"]


def test_a_text_is_parsed_once():
    model = parse_truecaser(EN)
    assert dict(model.best) == {"dog": "dog", "the": "the"}
    assert dict(model.counts) == {"dog": 30, "Dog": 10, "the": 20}
    assert parse_truecaser(EN) is model
