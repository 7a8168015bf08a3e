"""Pages in headless Chromium, as people open them from a disk.

`IMAGEPIVOT_AXE` names the file axe.min.js of axe-core, which checks accessibility; without it that check is skipped.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest

from schemas.dataset import open_dataset

pytestmark = pytest.mark.cluster

CHROMIUM = Path("/usr/bin/chromium")
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]


@pytest.fixture(scope="module")
def browser():
    if not CHROMIUM.exists():
        pytest.skip(f"no {CHROMIUM}: apt install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    with playwright.sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser):
    """Open a page; return it with the requests that are no data of its own, and the messages of its console."""
    contexts = []

    def visit(place: Path | str, **options):
        contexts.append(browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options}))
        page, requests, messages = contexts[-1].new_page(), [], []
        page.on("request", lambda request: requests.append(request.url) if not request.url.startswith("data:") else None)
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.goto(place if isinstance(place, str) else place.as_uri())
        return page, requests, messages

    yield visit
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def folder(demo, imagepivot, tmp_path_factory):
    """Folder with the sheet of a scene's captions in two languages, and the report of the whole demo."""
    build, folder = demo.folder / "build" / "demo", tmp_path_factory.mktemp("pages")
    rows = [row for row in open_dataset(build / "captions").table().to_pylist() if row["image_id"] == "scene-00000"]
    texts = {row["language"]: row["text"] for row in rows if row["portion"] == "translation"}
    images = ("--images", build / "scenes" / "images", "--output")
    data = ("--features", build / "features", "--captions", build / "captions", "--language", "en,de")
    imagepivot("search", build / "run", texts["en"], texts["de"], *data, "--top", 5, *images, folder / "found.html", cwd=folder)
    imagepivot("duplicates", build / "features", build / "captions", "--output", folder / "duplicates.csv", cwd=folder)
    names = [build / name for name in ("captions", "vocabulary", "encoded", "features", "regions", "run", "evaluation")]
    imagepivot("report", *names, "--duplicates", folder / "duplicates.csv", *images, folder / "report.html", cwd=folder)
    return folder


def test_image_finds_itself_and_what_its_vector_finds(demo, imagepivot, tmp_path):
    build = demo.folder / "build" / "demo"
    query = (
        "search",
        build / "run",
        "--image",
        build / "scenes" / "images" / "scene-00003.jpg",
        "--features",
        build / "features",
    )
    weights = build / "efficientnet-lite0.pth"
    hits = json.loads(imagepivot(*query, "--weights", weights, "--top", 24, "--json", cwd=tmp_path).stdout)
    imagepivot("embed", build / "run", tmp_path / "e", "--features", build / "features", cwd=tmp_path)
    vectors = open_dataset(tmp_path / "e" / "images")
    values, ids = vectors.numpy(), vectors.image_ids()
    scores = dict(zip(ids, (values @ values[ids.index("scene-00003")]).tolist(), strict=True))
    assert [hit["image_id"] for hit in hits] == sorted(ids, key=lambda image_id: -scores[image_id])
    assert [hit["score"] for hit in hits] == pytest.approx([scores[hit["image_id"]] for hit in hits], abs=1e-4)
    assert hits[0]["image_id"] == "scene-00003"
    done = imagepivot(*query, "--weights", "random:0", cwd=tmp_path, code=2)
    assert "with other weights or options than --weights 'random:0'" in done.stderr


@pytest.fixture(scope="module")
def server(demo):
    """Address of a live report of the demo."""
    build = demo.folder / "build" / "demo"
    names = [build / name for name in ("captions", "encoded", "features", "run")]
    words = ["report", *names, "--images", build / "scenes" / "images", "--serve", "--address", "127.0.0.1:0"]
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-m", "imagepivot", *map(str, words)], cwd=root, stdout=subprocess.PIPE, text=True
    )
    yield process.stdout.readline().removeprefix("serving: ").strip().rstrip("/")
    process.terminate()
    process.wait(30)


def test_keyboard_alone_searches_and_finds_the_scene(demo, server, visit):
    rows = open_dataset(demo.folder / "build" / "demo" / "captions").table().to_pylist()
    key = {"image_id": "scene-00000", "language": "de", "portion": "translation"}
    text = next(row["text"] for row in rows if key.items() <= row.items())
    page, requests, messages = visit(f"{server}/")

    def focus(name: str) -> None:
        for _ in range(50):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.name || document.activeElement.textContent").startswith(name):
                return
        raise AssertionError(f"no way to {name}")

    focus("query")
    page.keyboard.type(text)
    focus("language")
    page.keyboard.type("de")
    with page.expect_navigation():
        focus("search")
        page.keyboard.press("Enter")
    found = f"{server}/search?query={quote(text, safe='').replace('%20', '+')}&language=de"
    assert requests == [f"{server}/", found]
    assert text in page.locator("main").text_content()
    pictures = page.locator("ul.strip img")
    ids = [pictures.nth(index).get_attribute("alt").partition(":")[0] for index in range(pictures.count())]
    assert "scene-00000" in ids
    assert pictures.nth(ids.index("scene-00000")).evaluate("image => image.naturalWidth") > 0
    with page.expect_navigation():
        focus("more")
        page.keyboard.press("Enter")
    assert requests[2:] == [f"{server}/search?like={ids[0]}"]
    assert page.locator("ul.strip img").count() == 23  # All images but itself.
    assert messages == []


def test_scene_asked_for_is_found_with_its_picture(folder, visit):
    page, requests, messages = visit(folder / "found.html")
    assert requests == [(folder / "found.html").as_uri()]
    assert messages == []
    strips = page.locator("ul.strip")
    assert strips.count() == 2
    for number in range(2):
        pictures = strips.nth(number).locator("img")
        ids = [pictures.nth(index).get_attribute("alt").partition(":")[0] for index in range(pictures.count())]
        assert "scene-00000" in ids
        picture = pictures.nth(ids.index("scene-00000"))
        assert picture.evaluate("image => image.complete && image.naturalWidth") > 0
        assert picture.bounding_box()["height"] > 0


def test_report_loads_nothing_and_shows_all_its_pictures(folder, visit):
    page, requests, messages = visit(folder / "report.html")
    assert requests == [(folder / "report.html").as_uri()]
    assert messages == []
    sizes = page.evaluate("[...document.images].map(image => image.naturalWidth)")
    assert len(sizes) > 20
    assert min(sizes) > 0
    for title in ("captions", "vocabulary", "features", "regions", "duplicates"):
        assert page.locator("h2", has_text=f"{title}: ").count() == 1
    assert page.locator("svg.map image").count() > 0


@pytest.fixture(params=["found.html", "report.html", "/", "/browse"])
def place(request, folder, server):
    """Files and addresses of all pages."""
    return server + request.param if request.param.startswith("/") else folder / request.param


@pytest.mark.parametrize("width", [320, 390])
def test_page_fits_a_phone(place, visit, width):
    page, _, _ = visit(place, viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_is_accessible(place, visit, scheme):
    axe = Path(os.environ.get("IMAGEPIVOT_AXE", ""))
    if not axe.is_file():
        pytest.skip("no axe-core: make pages-test fetches it")
    page, _, _ = visit(place, color_scheme=scheme, bypass_csp=True)
    page.add_script_tag(content=axe.read_text(encoding="utf-8"))
    result = page.evaluate("rules => axe.run({runOnly: rules})", RULES)
    assert [(rule["id"], [node["html"] for node in rule["nodes"]]) for rule in result["violations"]] == []
    checked = " ".join(node["html"] for rule in result["passes"] for node in rule["nodes"])
    assert "<img src" in checked
    assert {"color-contrast", "image-alt", "html-has-lang"} <= {rule["id"] for rule in result["passes"]}
    if isinstance(place, str):
        assert {"label", "select-name", "button-name"} <= {rule["id"] for rule in result["passes"]}
        assert '<input name="query"' in checked
    elif place.name == "report.html":
        assert all(part in checked for part in ('<th scope="col"', 'alt="curves of', 'class="map"'))


def test_colours_follow_the_scheme_of_the_reader(folder, visit):
    colours = []
    for scheme in ("light", "dark"):
        page, _, _ = visit(folder / "found.html", color_scheme=scheme)
        colours.append(
            page.evaluate("[document.body, document.body].map((e, i) => getComputedStyle(e)[['color', 'backgroundColor'][i]])")
        )
    assert colours == [["rgb(26, 26, 26)", "rgb(255, 255, 255)"], ["rgb(238, 238, 238)", "rgb(22, 24, 27)"]]
