from __future__ import annotations

import json

import numpy as np
import pytest
import typer

from schemas.errors import InputError, UsageError
from train.commands import figures, options
from train.reports import figures as reports
from train.reports.figures import Figures


@pytest.fixture
def command(capsys, monkeypatch):
    """Run the command, mounted with a function that reads pictures; return its standard output and standard error."""
    for console in (options.console, options.notes):
        monkeypatch.setattr(console, "_width", 80)

    def run(*arguments: object, read=None) -> tuple[str, str]:
        app = typer.Typer(pretty_exceptions_enable=False)

        @app.callback()
        def mount(context: typer.Context) -> None:
            if read is not None:
                context.meta[figures.PICTURES] = read

        app.add_typer(figures.app)
        app(["figures", *map(str, arguments)], standalone_mode=False)
        printed = capsys.readouterr()
        return printed.out, printed.err

    return run


@pytest.fixture
def asked(monkeypatch) -> list:
    """The jobs that reach the work, which is left out."""
    jobs = []

    def draw(job, read, count, *, made_from):
        assert made_from == job.made_from()
        jobs.append((job, read))
        return Figures(("map.png", "figures.json"), {}, "a rule", (), None, ())

    monkeypatch.setattr(reports, "draw_figures", draw)
    return jobs


def test_every_option_reaches_the_job(command, asked):
    options = "--images photos --only map,retrieval --split val --languages de,en --portion translation --examples 3 --top 7"
    more = "--points 50 --caption-ids a/en/comparable/0,b/de/comparable/1 --seed 9 --device cpu --memory-map maps"
    out, _ = command(
        *("r", "o", "--captions", "c", "--features", "f", "--token-features", "t"),
        *options.split(),
        *more.split(),
        "--allow-missing-features",
    )
    assert vars(asked[0][0]) == {
        "run": "r",
        "output": "o",
        "captions": "c",
        "features": "f",
        "images": "photos",
        "only": ("map", "retrieval"),
        "split": "val",
        "languages": ("de", "en"),
        "portion": "translation",
        "examples": 3,
        "top": 7,
        "points": 50,
        "caption_ids": ("a/en/comparable/0", "b/de/comparable/1"),
        "seed": 9,
        "device": "cpu",
        "memory_map": "maps",
        "allow_missing_features": True,
        "token_features": "t",
    }
    assert asked[0][1] is None
    assert out == "examples: a rule\nwritten: o/map.png, o/figures.json\n"


def test_pictures_are_read_by_the_function_of_the_application(command, asked):
    calls = []
    options = [
        "--id-rule",
        "path",
        "--columns",
        "image_id=file",
        "--delimiter",
        ";",
        "--quoting",
        "none",
        "--allow-private-addresses",
    ]
    command("r", "o", "--captions", "c", "--features", "f", *options, read=lambda *given, **more: calls.append((given, more)))
    asked[0][1]("photos", ["a", "b"])
    more = {"ids": "path", "columns": "image_id=file", "delimiter": ";", "quoting": "none", "allow_private_addresses": True}
    assert calls == [(("photos", ["a", "b"]), more)]


@pytest.mark.slow
def test_figures_of_a_run(command, write_run, toy, tmp_path):
    def read(location, image_ids, **options):
        table = {"columns": "", "delimiter": "", "quoting": "auto"}
        assert (location, options) == ("photos", {"ids": "name", **table, "allow_private_addresses": False})
        return {name: (np.zeros((8, 8, 3), np.uint8), (8, 8)) for name in image_ids}

    data = ["--captions", toy.captions, "--features", toy.features, "--split", "test", "--device", "cpu", "--examples", 1]
    run, output = write_run(), tmp_path / "figures"
    out, err = command(run, output, *data, "--images", "photos", "--top", 2, read=read)
    lines = out.splitlines()
    assert lines[0].startswith("examples: 1 of the 9 images of split test with captions in de, en, drawn with seed 0")
    content = json.loads((output / "figures.json").read_text())
    assert lines[1:3] == [f"1 {row['language']} rank {row['rank']} of 9: {row['text']}" for row in content["retrieval"]]
    assert lines[3:] == [f"written: {output}/retrieval.png, {output}/map.png, {output}/figures.json"]
    assert "no attention: " in err
    assert "no pictures" not in err
    before = {path: path.stat().st_mtime_ns for path in output.iterdir()}
    assert "is up to date" in command(run, output, *data, "--images", "photos", "--top", 2, read=read)[1]
    assert {path: path.stat().st_mtime_ns for path in output.iterdir()} == before
    assert "no pictures: ids of images stand for them" in command(run, output, *data, "--only", "retrieval")[1]
    with pytest.raises(UsageError, match="reading images needs pip install"):
        command(run, output, *data, "--images", "photos")


def test_a_missing_package_shows_before_the_work(command, asked, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    with pytest.raises(ImportError, match="sklearn"):
        command("r", "o", "--captions", "c", "--features", "f")
    assert asked == []


@pytest.mark.slow
def test_the_application_reads_images_as_for_features(write_run, toy, tmp_path):
    """Mounted in the whole command, with images in a folder, and in a table whose columns have other names."""
    from PIL import Image

    from pipelines.commands.app import app

    (tmp_path / "photos").mkdir()
    rows = ["file,uri"]
    for number in range(9):
        Image.new("RGB", (20, 10), (number, 0, 0)).save(tmp_path / "photos" / f"test-{number:03d}.png")
        rows.append(f"test-{number:03d},photos/test-{number:03d}.png")
    (tmp_path / "photos.csv").write_text("\n".join(rows) + "\n")
    data = ["--captions", toy.captions, "--features", toy.features, "--split", "test", "--device", "cpu", "--only", "retrieval"]
    run, files = write_run(), []
    for name, more in {"photos": [], "photos.csv": ["--columns", "image_id=file"]}.items():
        output = tmp_path / f"figures-of-{name}"
        arguments = ["figures", run, str(output), *data, "--examples", "1", "--images", str(tmp_path / name), *more]
        app(arguments, standalone_mode=False)
        files.append((output / "retrieval.png").read_bytes())
    assert files[0] == files[1]
    app(["figures", run, str(tmp_path / "without"), *data, "--examples", "1"], standalone_mode=False)
    assert (tmp_path / "without" / "retrieval.png").read_bytes() != files[0]
    (tmp_path / "photos" / "test-004.png").unlink()
    names = ["--caption-ids", "test-004/en/comparable/0", "--images", str(tmp_path / "photos")]
    with pytest.raises(InputError, match=r"image 'test-004' is not among the images in .*photos"):
        app(["figures", run, str(tmp_path / "lacking"), *data, *names], standalone_mode=False)
