import re
from dataclasses import replace

import pytest

from schemas.errors import UsageError
from train.config.sections import from_toml, load_config


@pytest.fixture
def write(tmp_path):
    """Write files by their paths; return the first one."""

    def write(**files: str) -> str:
        paths = []
        for name, text in files.items():
            path = tmp_path / f"{name.replace('__', '/')}.toml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            paths.append(str(path))
        return paths[0]

    return write


def test_extends_paths_are_relative_to_the_file(write, tmp_path, monkeypatch):
    first = write(
        runs__mine='extends = "../bases/wide.toml"\n[loss]\nmargin = 0.3\n[data]\nportions = { de = ["translation"], en = ["x"] }',
        bases__wide='extends = "deeper/narrow.toml"\n[model]\nembed_dim = 64\n[loss]\nmargin = 0.4',
        bases__deeper__narrow='extends = "kadar2018/bilingual-c2c"\n[model]\nembed_dim = 32\nword_dim = 8',
    )
    monkeypatch.chdir("/")
    config, preset = load_config(first), load_config("kadar2018/bilingual-c2c")
    assert (config.loss.margin, config.model.embed_dim, config.model.word_dim) == (0.3, 64, 8)
    # A value is replaced, not mixed with the preset's.
    assert config.data == replace(preset.data, portions={"de": ("translation",), "en": ("x",)})
    assert config.loss.c2c_probability == preset.loss.c2c_probability
    # An absolute path, and one in a text without a file.
    assert from_toml(f'extends = "{first}"\n[model]\nword_dim = 9', "text").model.word_dim == 9
    monkeypatch.chdir(tmp_path)
    assert load_config("runs/mine.toml") == from_toml('extends = "runs/mine.toml"', "text") == config


def test_circular_extends_is_refused(write, tmp_path):
    first = write(a='extends = "folder/b.toml"', folder__b='extends = "../c.toml"', c='extends = "./folder/../folder/b.toml"')
    a, b, c = (str(tmp_path / name) for name in ("a.toml", "folder/b.toml", "c.toml"))
    message = f"^{re.escape(f'{a}: extends goes round in a circle: {a} -> {b} -> {c} -> {b}. Take')}"
    with pytest.raises(UsageError, match=message):
        load_config(first)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a": 'extends = "b.toml"', "b": 'extends = "demmo"'}, "{0}/b.toml extends 'demmo', but there is no preset 'demmo'"),
        ({"a": 'extends = "b.toml"', "b__x": ""}, "{0}/a.toml extends 'b.toml', but there is no file '{0}/b.toml'"),
    ],
)
def test_missing_or_invalid_base_is_refused(write, tmp_path, files, message):
    with pytest.raises(UsageError, match=f"^{re.escape(message.format(tmp_path))}"):
        load_config(write(**files))
