"""Pages as a reader without styles sees them: elements, text and pictures."""

import base64
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


class Page(HTMLParser):
    """Elements of a page with their attributes, and its text without tags and style."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text, self._tag = "", ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self._tag = tag

    def handle_data(self, data):
        self.text += "" if self._tag == "style" else data

    def all(self, name: str) -> list[dict]:
        return [attributes for tag, attributes in self.elements if tag == name]

    @property
    def photos(self) -> dict[str, np.ndarray]:
        """Pixels of the pictures of images, by the id with which their alternative text begins."""
        photos = [image for image in self.all("img") if image["src"].startswith("data:image/jpeg")]
        return {image["alt"].partition(":")[0]: pixels_of(image["src"]) for image in photos}


def width_of(path: Path) -> float:
    """Return the width of a PNG of 300 pixels per inch, a PDF or an SVG in inches, after a check of its header."""
    data = path.read_bytes()
    if path.suffix == ".png":
        with Image.open(io.BytesIO(data), formats=["PNG"]) as picture:
            assert picture.info["dpi"] == pytest.approx((300, 300), abs=0.1)
            return picture.width / 300
    pattern = rb"\A%PDF-1.*/MediaBox \[ 0 0 ([\d.]+) " if path.suffix == ".pdf" else rb'\A<\?xml .*<svg [^>]*width="([\d.]+)pt"'
    return float(re.match(pattern, data, re.DOTALL)[1]) / 72


def pixels_of(address: str) -> np.ndarray:
    header, _, data = address.partition(",")
    assert header == "data:image/jpeg;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


def colour_of(image_id: str) -> tuple[int, int, int]:
    """Return the colour of an image's picture."""
    return tuple(np.random.default_rng(list(image_id.encode())).integers(0, 256, 3).tolist())


def write_photos(folder: Path, image_ids) -> Path:
    """Write a picture of one colour for each image."""
    folder.mkdir()
    for image_id in image_ids:
        Image.new("RGB", (40, 30), colour_of(image_id)).save(folder / f"{image_id}.png")
    return folder
