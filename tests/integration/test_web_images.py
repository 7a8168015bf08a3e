from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from schemas.dataset import open_dataset
from schemas.writing.validation import validate
from tests.fake_extractors import picture
from tests.pipelines.inputs.conftest import no_proxies  # noqa: F401
from tests.web_server import Handler, serve

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_proxies")]

EXTRACT = ("--extractor", "timm:test_resnet.r160_in1k", "--weights", "random:0", "--shards", "2", "--workers", "1")


def image(colour: int) -> bytes:
    """Return a picture as long as any other: only its ETag tells that it has changed."""
    return picture(colour, 0, 0, size_wh=(64, 64)).ljust(1000, b"\0")


def tagged(body: bytes) -> Callable[[Handler], None]:
    """Return a page whose ETag is the digest of its body."""
    return lambda handler: handler.answer(200, body, ETag=f'"{hashlib.sha256(body).hexdigest()}"')


def files_of(folder: Path) -> dict[str, bytes]:
    """Return manifest and shards, without records and failures."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_update_fetches_what_has_another_etag(imagepivot, tmp_path):
    table, out, private = tmp_path / "images.csv", tmp_path / "out", "--allow-private-addresses"
    with serve() as site:
        site.pages = {f"/{number}.png": tagged(image(number)) for number in range(5)}
        rows = [f"image{number},{site.address(f'/{number}.png')}\n" for number in range(6)]
        table.write_text("image_id,uri\n" + "".join(rows))
        assert "6 inputs failed: 6 unreadable" in imagepivot("features", table, out, *EXTRACT, code=3).stderr
        assert site.connections == 0
        imagepivot("features", table, out, *EXTRACT, "--retry-failed", private, "--max-failures", "1")
        dataset = open_dataset(out)
        assert (sorted(dataset.image_ids()), dataset.manifest.failed) == ([f"image{number}" for number in range(5)], 1)
        (tmp_path / "folder").mkdir()
        for number in range(5):
            (tmp_path / "folder" / f"image{number}.png").write_bytes(image(number))
        imagepivot("features", tmp_path / "folder", tmp_path / "local", *EXTRACT)
        imagepivot("diff", out, tmp_path / "local")
        before = dataset.get("image2")["feature"].tolist()
        site.pages["/2.png"], site.pages["/5.png"] = tagged(image(200)), tagged(image(5))
        imagepivot("features", table, out, *EXTRACT, private, "--max-failures", "1")
        assert open_dataset(out).manifest == dataset.manifest, "to go on, addresses are enough"
        site.requests.clear()
        imagepivot("features", table, out, *EXTRACT, "--update", private)
        updated = open_dataset(out)
        assert sorted(updated.image_ids()) == [f"image{number}" for number in range(6)]
        assert updated.get("image2")["feature"].tolist() != before
        assert {path for method, path, _ in site.requests if method == "GET"} == {"/2.png", "/5.png"}
        assert validate(out) == []
        imagepivot("features", table, tmp_path / "fresh", *EXTRACT, private)
        assert files_of(out) == files_of(tmp_path / "fresh")
        drawing = ("view", out, table, "--image", "image3", "-o", tmp_path / "view.png")
        imagepivot(*drawing, private)
        assert "is not public" in imagepivot(*drawing, "--overwrite", code=1).stderr
