"""The documentation site in a browser, opened from the disk."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
BROWSER = shutil.which("chromium") or "/usr/bin/chromium"
SEARCHED = ("clip", "jax", "lance", "siglip", "zero")  # Words that the search finds.
TO_SERVE = "404.html"  # Only a server shows it: its addresses begin at the server's root.

# Elements that stick out of the window, and are in no box that scrolls.
OUTSIDE = """() => {
    const width = document.documentElement.clientWidth;
    const isBox = element => /auto|scroll/.test(getComputedStyle(element).overflowX);
    const scrolls = element => element && (isBox(element) || scrolls(element.parentElement));
    return [...document.querySelectorAll(".md-content *")]
        .filter(element => element.getBoundingClientRect().right > width + 1 && !scrolls(element.parentElement))
        .map(element => `${element.tagName}: ${element.textContent.slice(0, 60)}`);
}"""

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the site, without a server."""
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is missing: it is in the extra dev")
    if not Path(BROWSER).is_file():
        pytest.skip("no Chromium is installed")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_the_window_without_console_errors(site: Path, browser: Any, width: int, scheme: str) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    # The next page ends a request for the icon.
    page.on("requestfailed", lambda request: errors.append(request.url) if request.failure != "net::ERR_ABORTED" else None)
    faults = {}
    paths = [path for path in sorted(site.rglob("*.html")) if path.name != TO_SERVE]
    for path in paths:
        page.goto(path.as_uri(), wait_until="load")
        scrolled = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        broken = page.evaluate("[...document.images].filter(image => !image.naturalWidth).map(image => image.src)")
        if faulty := [*errors, *broken, *page.evaluate(OUTSIDE), *([f"{scrolled} pixels too wide"] if scrolled > 0 else [])]:
            faults[str(path.relative_to(site))] = faulty
        errors.clear()
    page.close()
    assert faults == {}
    assert len(paths) > 50


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("word", SEARCHED)
def test_search_finds_a_word_on_the_disk(site: Path, browser: Any, word: str, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto((site / "how-to/install.html").as_uri())
    if width < 1000:
        page.locator("label[for=__search].md-header__button").click()
    page.locator("input.md-search__input").click()
    page.keyboard.type(word)
    marks = page.locator(".md-search-result__item mark")
    marks.first.wait_for()
    assert word in {text.lower() for text in marks.all_inner_texts()}
    page.close()
