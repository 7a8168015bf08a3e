import json
import re
import socket
from pathlib import Path

import numpy as np
import pytest
import uvicorn
from PIL import Image
from starlette.testclient import TestClient

from schemas.dataset import open_dataset
from schemas.errors import DatasetError, UsageError
from tests.builders import write_rows
from tests.pages import Page, colour_of, pixels_of, write_photos
from train.evaluation.search import embed_gallery, search_gallery
from train.runs.run import open_run


@pytest.fixture
def photos(toy, tmp_path):
    """Write a picture of one colour for each image."""
    return write_photos(tmp_path / "photos of all", open_dataset(toy.features).image_ids())


HOSTILE = "<script>alert(1)</script> \u202eevil\x1b[31m &amp; " + "word " * 20_000


def write_captions(folder, image_ids):
    """Write raw captions, a hostile English one and a German one of each image."""
    rows = [
        {"image_id": image_id, "language": language, "portion": "comparable", "index": 0, "split": "test"}
        | {"text": text, "tokens": ["a"]}
        for image_id in image_ids
        for language, text in (("de", f"Straße {image_id}"), ("en", HOSTILE))
    ]
    write_rows(folder, "captions", rows, parameters={})
    return folder


@pytest.fixture
def captions(toy, tmp_path):
    return write_captions(tmp_path / "captions", open_dataset(toy.features).image_ids())


@pytest.mark.slow
def test_search_lists_images(command, tokenizer, write_run, toy, tmp_path):
    folder = write_run()
    run = open_run(folder)
    gallery = embed_gallery(run, toy.features)
    hits = search_gallery(run, ["en1", "en2", "enraw"], "en", gallery, top=4)
    query = {"query": "1 2", "language": "en"}
    expected = [{"image_id": hit.image_id, "score": pytest.approx(hit.score), **query} for hit in hits]
    arguments = ("search", folder, "1 2", "--language", "en", "--top", "4")
    out, notes = command(*arguments, "--features", toy.features, "--json")
    assert json.loads(out) == expected
    assert "not in the vocabulary: enraw" in notes  # The tokenizer got the recipe of the run's captions.
    command("embed", folder, tmp_path / "e", "--features", toy.features)
    assert json.loads(command(*arguments, "--embeddings", tmp_path / "e", "--json")[0]) == expected
    tokenized = command("search", folder, "en1 en2", "--language", "en", "--tokenized", "--features", toy.features)
    assert search_gallery(run, ["en1", "en2"], "en", gallery)[0].image_id in tokenized[0].splitlines()[1]
    assert tokenized[1] == ""


@pytest.mark.slow
def test_json_of_several_queries_names_each(command, tokenizer, write_run, toy):
    query = ("search", write_run(), "1", "2", "--language", "en", "--features", toy.features, "--top", 2, "--json")
    rows = json.loads(command(*query)[0])
    assert [(row["query"], row["language"]) for row in rows] == [("1", "en")] * 2 + [("2", "en")] * 2


def test_search_needs_no_language_for_a_run_with_one(command, tokenizer, write_run, toy):
    folder = write_run(languages=("de",))
    out, _ = command("search", folder, "1", "--features", toy.features, "--truecaser", "2", "--json")
    run = open_run(folder)
    expected = search_gallery(run, ["de1", "deraw", "de2"], "de", embed_gallery(run, toy.features))
    assert [hit["image_id"] for hit in json.loads(out)] == [hit.image_id for hit in expected]


@pytest.mark.slow
def test_sheet_shows_queries_in_their_languages(command, tokenizer, write_run, toy, photos, captions, tmp_path):
    folder = write_run()
    run, target = open_run(folder), tmp_path / "found.html"
    sheet = ("--images", photos, "--captions", captions, "--output", target)
    printed, _ = command("search", folder, "1 2", "3", "--language", "en,de", "--features", toy.features, "--top", 3, *sheet)
    gallery = embed_gallery(run, toy.features)
    english = search_gallery(run, ["en1", "en2", "enraw"], "en", gallery, top=3)
    german = search_gallery(run, ["de3", "deraw"], "de", gallery, top=3)
    hits = [*english, *german]
    assert re.findall(r"^\d +(\S+)", printed, flags=re.MULTILINE) == [hit.image_id for hit in hits]
    page = Page(target)
    for image, hit in zip(page.all("img"), hits, strict=True):
        np.testing.assert_allclose(pixels_of(image["src"])[15, 20], colour_of(hit.image_id), atol=6)
        assert image["alt"].startswith(f"{hit.image_id}: ")
    assert [text["lang"] for text in page.all("bdi") if "lang" in text] == ["en"] * 4 + ["de"] * 4
    assert all(f"rank {rank}, score {hit.score:.3f}" in page.text for rank, hit in enumerate(english, start=1))
    assert all(f"Straße {hit.image_id}" in page.text for hit in german)


@pytest.mark.slow
def test_sheet_disarms_hostile_captions(command, tokenizer, write_run, toy, captions, tmp_path):
    target = tmp_path / "found.html"
    query = ("search", write_run(), "1 <b>&amp;</b>", "--language", "en", "--features", toy.features)
    command(*query, "--captions", captions, "--output", target)
    html, page = target.read_text(encoding="utf-8"), Page(target)
    assert not page.all("script")
    assert "\u202e" not in html
    assert "\x1b" not in html
    assert page.text.count(r"<script>alert(1)</script> \u202eevil\x1b[31m &amp; word") == 10
    assert "1 <b>&amp;</b>" in page.text
    assert len(html) < 30_000
    [policy] = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'sha256-")
    assert page.text.count("no picture") == 10


@pytest.mark.slow
def test_sheet_is_drawn_as_a_picture(command, tokenizer, write_run, toy, photos, tmp_path):
    folder = write_run()
    query = ("search", folder, "1", "2", "--language", "en", "--features", toy.features, "--top", 2)
    command(*query, "--images", photos, "--output", tmp_path / "found.png")
    run = open_run(folder)
    gallery = embed_gallery(run, toy.features)
    ids = [hit.image_id for word in "12" for hit in search_gallery(run, [f"en{word}", "enraw"], "en", gallery, top=2)]
    colours = np.asarray(Image.open(tmp_path / "found.png").convert("RGB")).reshape(-1, 3)
    assert all((np.abs(colours - np.array(colour_of(image_id))).max(1) <= 2).sum() > 5_000 for image_id in ids)


def test_search_refuses_before_the_work(command, write_run, toy, photos, tmp_path):
    query = ("search", write_run(), "1", "--language", "en", "--features", toy.features)
    with pytest.raises(UsageError, match=r"--output is 'found.txt', expected a file that ends in .html, .png, .pdf"):
        command(*query, "--output", "found.txt")
    with pytest.raises(UsageError, match="--captions shows captions in a page: give --output"):
        command(*query, "--captions", "captions")
    with pytest.raises(UsageError, match="--language names 2 languages for 1 sentences"):
        command(*query[:-4], "--language", "en,de", "--features", toy.features)
    with pytest.raises(UsageError, match="give either --features or --embeddings"):
        command(*query, "--embeddings", "e")


# --- report ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_report_has_a_chapter_of_each_dataset_and_run(command, finished_run, toy, photos, captions, tmp_path):
    target = tmp_path / "report.html"
    datasets = (captions, toy.captions, toy.vocabulary, toy.features)
    command("report", *datasets, finished_run[0], "--images", photos, "--output", target)
    page = Page(target)
    assert [section["id"] for section in page.all("section")] == [f"chapter-{number}" for number in range(1, 7)]
    for title in (
        f"captions: {captions}",
        f"encoded: {toy.captions}",
        f"vocabulary: {toy.vocabulary}",
        "runs",
        f"retrieval: {finished_run[0]}",
    ):
        assert page.text.count(title) >= 2
    [curves] = [image["alt"] for image in page.all("img") if image["alt"].startswith("curves of run")]
    best = finished_run[1].progress
    assert f"{best.step:,} steps, the best evaluation at step {best.best_step:,}" in curves
    assert len(page.all("image")) > 0


@pytest.mark.slow
def test_report_shows_what_a_run_and_its_vectors_find(command, finished_run, toy, tmp_path):
    """The vectors that a run wrote find the same images and captions as the run."""
    run, _ = finished_run
    out, _ = command("embed", run, tmp_path / "e", "--features", toy.features, "--captions", toy.captions)
    assert f"features: {len(open_dataset(toy.features))} rows in 3 shards in {tmp_path}/e/images" in out.replace("\n", "")
    chapters = []
    for name, places in {
        "run.html": (toy.features, toy.captions, run),
        "pair.html": (tmp_path / "e" / "images", tmp_path / "e" / "captions"),
    }.items():
        command("report", *places, "--output", tmp_path / name)
        text = Page(tmp_path / name).text
        shown = text[text.rindex("retrieval: ") :]
        assert "examples: 4 of the 9 images of split test with captions in de, en" in shown
        chapters.append(
            re.findall(
                r"(rank \d+, score -?\d\.\d\d|right|image to text, ..|[✓✗] [\w-]+/../\w+/\d)", shown.rpartition("above it")[2]
            )
        )
    assert chapters[0] == chapters[1]
    assert chapters[0].count("right") >= 8
    assert "image to text, de" in chapters[0]
    assert sum(words.startswith("✓") for words in chapters[0]) >= 1


@pytest.mark.slow
def test_report_of_equal_inputs_has_equal_bytes(command, toy, tmp_path):
    for name in ("a.html", "b.html"):
        command("report", toy.vocabulary, toy.features, "--output", tmp_path / name)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_report_refuses_before_the_work(command, toy, tmp_path):
    with pytest.raises(UsageError, match=r"--output is 'report.pdf', expected a file that ends in .html"):
        command("report", toy.features, "--output", "report.pdf")
    half = tmp_path / "half"
    half.mkdir()
    (half / "part-00000-of-00001.parquet").touch()
    for place in (tmp_path / "none", half, half / "part-00000-of-00001.parquet"):
        with pytest.raises(DatasetError, match=f"{place.name}' is not a dataset"):
            command("report", place, "--output", tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


@pytest.fixture
def served(monkeypatch):
    """Collect applications and sockets instead of serving them."""
    found = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, sockets: found.append((server.config.app, sockets[0])))
    yield found
    for _, listener in found:
        listener.close()


@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "[::1]"])
def test_printed_link_opens_the_served_page(command, toy, served, host):
    """The link has the token, except on the loopback."""
    printed, _ = command("report", toy.vocabulary, "--serve", "--address", f"{host}:0")
    [link] = re.findall(r"serving: (http://\S+)", printed)
    [(app, listener)] = served
    assert listener.getsockname()[0] == host.strip("[]")
    assert link.startswith(f"http://{host}:{listener.getsockname()[1]}/")
    assert ("?token=" in link) == (host != "127.0.0.1")
    client = TestClient(app, base_url=link)
    assert f"<h1>Report of {Path(toy.vocabulary).name}</h1>" in client.get(link).text
    assert client.get(link, headers={"host": "evil.example"}).status_code == (200 if host == "0.0.0.0" else 400)


@pytest.mark.slow
def test_served_search_is_that_of_the_first_run(command, finished_run, toy, served, tmp_path):
    """Evaluations before it search nothing."""
    run, scores = finished_run[0], tmp_path / "scores"
    command("evaluate", run, "--captions", toy.captions, "--features", toy.features, "--output", scores)
    image_id = open_dataset(toy.features).image_ids()[0]
    for runs, status in (([scores, run], 200), ([scores], 400)):
        command("report", *runs, toy.features, "--serve", "--address", "127.0.0.1:0")
        client = TestClient(served[-1][0], base_url="http://127.0.0.1")
        assert client.get("/search.json", params={"like": image_id}).status_code == status


def test_serving_refuses_addresses_before_the_work(command, tmp_path):
    serve = ("report", tmp_path / "nothing", "--serve", "--address")
    for address in ("127.0.0.1:x", "127.0.0.1:65536"):
        with pytest.raises(UsageError, match=f"--address is '{address}', expected a host and a port"):
            command(*serve, address)
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(UsageError, match=rf"cannot serve at '{address}': .* in use.*Give --address a host of this machine"):
            command(*serve, address)
