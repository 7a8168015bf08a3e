"""Pictures of the pages, drawn again from a built demo: ``make screenshots``.

Usage: ``python -m tests.screenshots build/demo``. Debian's Chromium opens the report; ``docs/images`` receives the pictures.
"""

import io
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

CHROMIUM = "/usr/bin/chromium"
IMAGES = Path(__file__).parents[1] / "docs" / "images"
WIDTH, HEIGHT = 1100, 760
CHAPTERS = {"report-errors": "retrieval", "report-features": "features"}
"""Names of pictures, with the first word of the chapter that each one shows."""


def show(page: Page, chapter: str) -> None:
    """Scroll to the heading of a chapter."""
    heading = page.locator("h2").filter(has_text=chapter).first
    heading.evaluate("heading => heading.scrollIntoView()")


def write(picture: Image.Image, name: str, width: int = WIDTH) -> None:
    """Write a picture of at most this width in 256 colours: half the bytes."""
    picture = picture.convert("RGB")
    picture.thumbnail((width, width), Image.Resampling.LANCZOS)
    picture.quantize(256, kmeans=2).save(IMAGES / f"{name}.png", optimize=True)


def main(demo: Path) -> None:
    write(Image.open(demo / "figures/retrieval.png"), "search", 900)
    with sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto((demo / "report.html").absolute().as_uri())
        for name, chapter in CHAPTERS.items():
            show(page, chapter)
            write(Image.open(io.BytesIO(page.screenshot())), name)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
