"""Features of images behind web addresses, from the command line."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from schemas.dataset import open_dataset
from schemas.validation import validate
from tests.web_server import serve

pytestmark = pytest.mark.slow

EXTRACT = ("--extractor", "timm:test_resnet.r160_in1k", "--weights", "random:0", "--shards", "2", "--workers", "1")


def picture(colour: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (64, 64), (colour, 0, 0)).save(file, "PNG")
    return file.getvalue()


def test_a_table_of_addresses(imagepivot, tmp_path, monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    table, out = tmp_path / "images.csv", tmp_path / "out"
    with serve() as site:
        site.pages = {f"/{number}.png": picture(number) for number in range(5)}
        rows = [f"image{number},{site.address(f'/{number}.png')}\n" for number in range(6)]
        table.write_text("image_id,uri\n" + "".join(rows))

        refused = imagepivot("features", table, out, *EXTRACT, code=3)
        assert "6 inputs failed: 6 unreadable" in refused.stderr
        assert (open_dataset(out).manifest.failed, site.connections) == (6, 0)

        again = ("--retry-failed", "--allow-private-addresses")
        imagepivot("features", table, out, *EXTRACT, *again, "--max-failures", "1")
        dataset = open_dataset(out)
        assert (sorted(dataset.image_ids()), dataset.manifest.failed) == ([f"image{number}" for number in range(5)], 1)
        assert validate(out) == []
        folder = tmp_path / "folder"
        folder.mkdir()
        for number in range(5):
            (folder / f"image{number}.png").write_bytes(picture(number))
        imagepivot("features", folder, tmp_path / "local", *EXTRACT)
        imagepivot("diff", out, tmp_path / "local")
        drawing = ("--image", "image3", "-o", tmp_path / "view.png")
        imagepivot("view", out, table, *drawing, "--allow-private-addresses")
        assert "is not public" in imagepivot("view", out, table, *drawing, "--overwrite", code=1).stderr
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert "what a proxy connects to cannot be checked" in imagepivot("features", table, out, *EXTRACT, code=2).stderr
