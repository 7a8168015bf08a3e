from __future__ import annotations

import hashlib
import io
from collections.abc import Callable

import pytest
from PIL import Image

from schemas.dataset import open_dataset
from schemas.writing.validation import validate
from tests.web_server import Handler, serve

pytestmark = pytest.mark.slow

EXTRACT = ("--extractor", "timm:test_resnet.r160_in1k", "--weights", "random:0", "--shards", "2", "--workers", "1")


def picture(colour: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (64, 64), (colour, 0, 0)).save(file, "PNG")
    return file.getvalue()


def tagged(body: bytes) -> Callable[[Handler], None]:
    """Return a page whose ETag is the digest of its body."""
    return lambda handler: handler.answer(200, body, ETag=f'"{hashlib.sha256(body).hexdigest()}"')


@pytest.mark.cluster
def test_table_of_addresses(imagepivot, tmp_path, monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    table, out = tmp_path / "images.csv", tmp_path / "out"
    with serve() as site:
        site.pages = {f"/{number}.png": tagged(picture(number)) for number in range(5)}
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
        before = dataset.get("image2")["feature"].tolist()
        site.pages["/2.png"], site.pages["/5.png"] = tagged(picture(200)), tagged(picture(5))
        imagepivot("features", table, out, *EXTRACT, "--allow-private-addresses", "--max-failures", "1")
        assert open_dataset(out).manifest == dataset.manifest, "to go on, addresses are enough"
        site.requests.clear()
        imagepivot("features", table, out, *EXTRACT, "--update", "--allow-private-addresses")
        updated = open_dataset(out)
        assert sorted(updated.image_ids()) == [f"image{number}" for number in range(6)]
        assert updated.get("image2")["feature"].tolist() != before
        fetched = {path for method, path, _ in site.requests if method == "GET"}
        assert fetched == {"/2.png", "/5.png"}, "by the ETags nothing else has changed"
        imagepivot("features", table, tmp_path / "fresh", *EXTRACT, "--allow-private-addresses")
        assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == {
            path.name: path.read_bytes() for path in (tmp_path / "fresh").iterdir() if path.is_file()
        }
        site.pages["/2.png"] = tagged(picture(2))
        site.pages.pop("/5.png")
        imagepivot("features", table, out, *EXTRACT, "--update", "--allow-private-addresses", "--max-failures", "1")
        drawing = ("--image", "image3", "-o", tmp_path / "view.png")
        imagepivot("view", out, table, *drawing, "--allow-private-addresses")
        assert "is not public" in imagepivot("view", out, table, *drawing, "--overwrite", code=1).stderr
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert "its connections cannot be checked" in imagepivot("features", table, out, *EXTRACT, code=2).stderr
