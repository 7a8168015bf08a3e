import json

import pytest
from PIL import Image
from typer.testing import CliRunner

import extractors
from pipelines.commands import app as cli
from tests.fake_extractors import use_colours

OPTIONS = ("--device", "cpu", "--shards", "2", "--workers", "1")


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    use_colours(monkeypatch)


@pytest.fixture
def features(call, tmp_path):
    """Runs the command in this process; gives exit code, standard output and standard error."""
    return lambda images, *options: call("features", images, tmp_path / "f", *OPTIONS, *options)


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    Image.new("RGB", (2, 2), (1, 2, 3)).save(folder / "a.png")
    Image.new("RGB", (2, 2), (4, 5, 6)).save(folder / "b.jp2")
    for name in ("[c].psd", "a.txt", "b.txt"):
        (folder / name).touch()
    (folder / "more").symlink_to(tmp_path)
    return folder


NOTES = "skipped: 3 files (.txt 2, .psd 1), e.g. '[c].psd'; 1 linked folder, e.g. 'more' (links are not followed)\n"


@pytest.mark.parametrize("options", [("--dry-run",), (), ("--log-json",)], ids=["plan", "run", "log"])
def test_skipped_files_are_named(features, images, options):
    code, out, err = features(images, *options)
    assert not code
    if "--log-json" in options:
        events = [json.loads(line) for line in err.splitlines()]
        err = "".join(f"{event['message']}\n" for event in events if event["event"] == "remark")
    assert NOTES in err
    assert "skipped: " not in out


def test_update_counts_new_changed_and_removed_images(features, images):
    features(images)
    Image.new("RGB", (2, 2), (7, 8, 9)).save(images / "c.png")
    Image.new("RGB", (3, 3), (1, 2, 3)).save(images / "a.png")
    (images / "b.jp2").unlink()
    code, out, _ = features(images, "--update")
    assert (code, out.splitlines()[1]) == (0, "update: 1 new, 1 changed, 1 removed, 0 kept")
    assert features(images, "--update")[1].splitlines()[1] == "update: 0 new, 0 changed, 0 removed, 2 kept"


@pytest.mark.slow
def test_extractors_are_listed():
    listed = json.loads(CliRunner().invoke(cli.app, ["extractors", "--json"]).stdout)
    assert listed == [entry.to_json() for entry in extractors.list_extractors()]
