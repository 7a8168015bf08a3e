import re
from urllib.parse import parse_qs, quote, urlsplit

import pytest
from starlette.testclient import TestClient

from pipelines.inputs.images.opening import open_images
from pipelines.looking.exhibits import Photos
from pipelines.looking.report import dataset_chapters
from pipelines.looking.serving import LiveReport, build_app
from schemas.dataset import open_dataset
from schemas.duplicates import Duplicate
from schemas.errors import UsageError
from schemas.features import FeatureSpec
from tests.builders import write_rows
from tests.pages import write_photos

IMAGES = [f"img-{number:02}" for number in range(30)] + [
    "../../etc/passwd",
    "<script>alert(1)</script>\u202e",
    "data:\u202e" + "x" * 1000,
]


def find(query, language, top):
    if query == "nothing":
        raise UsageError("the model knows no word of it")
    if query == "truecased":
        raise UsageError("recipe 'moses' truecases: give --truecaser with the folder of the captions of this run")
    return query, language, [(image_id, 0.5) for image_id in IMAGES[3:5]], None


def find_like(image_id, top):
    return [(other, 0.25) for other in IMAGES[:4] if other != image_id]


@pytest.fixture
def report(tmp_path):
    key = {"portion": "comparable", "index": 0, "tokens": ["a"]}
    rows = [
        key | {"image_id": image_id, "language": language, "split": split, "text": f"{language} of {image_id} & <b>"}
        for number, image_id in enumerate(IMAGES)
        for split in ("test" if number % 2 else "train",)
        for language in (("en", "de") if number < 10 else ("en",))
    ]
    write_rows(tmp_path / "captions", "captions", rows, parameters={})
    failures = [{"key": "img-99", "uri": "img-99.jpg", "stage": "decode", "reason": "truncated", "message": "cut"}]
    spec = FeatureSpec("toy", (2,))
    write_rows(tmp_path / "features", "features", [{"image_id": IMAGES[0], "feature": [1.0, 2.0]}], spec, failures=failures)
    datasets = [open_dataset(tmp_path / "captions"), open_dataset(tmp_path / "features")]
    photos = Photos(open_images(write_photos(tmp_path / "photos", IMAGES[:30])))
    groups = [Duplicate(7, "cosine", 1.0, image_id, "test") for image_id in IMAGES[5:7]]
    return LiveReport(
        "a report", [*dataset_chapters(datasets, photos)], datasets, groups, photos, find, find_like, ("de", "en")
    )


@pytest.fixture
def client(report):
    return TestClient(build_app(report), base_url="http://127.0.0.1:8000")


def ids_of(client, **values) -> list[str]:
    answer = client.get("/browse.json", params=values)
    assert answer.status_code == 200
    return [image["image_id"] for chapter in answer.json() for strip in chapter["strips"] for image in strip["images"]]


def test_browsing_filters_by_all_that_is_known(client):
    assert ids_of(client, language="de", split="test") == [f"img-{n:02}" for n in (1, 3, 5, 7, 9)]
    assert ids_of(client, image_id="-07") == ["img-07"]
    assert ids_of(client, failure="truncated") == ["img-99"]
    assert ids_of(client, group="7") == ["img-05", "img-06"]
    assert ids_of(client, language="fr") == []
    assert ids_of(client) == sorted([*IMAGES, "img-99"])[:24]
    assert ids_of(client, start="24") == sorted([*IMAGES, "img-99"])[24:]
    [chapter] = client.get("/browse.json").json()
    assert chapter["strips"][0]["following"] == {"start": "24"}
    assert chapter["strips"][0]["text"] == f"{len(IMAGES) + 1} images"


def test_search_answers_in_both_forms(client):
    [chapter] = client.get("/search.json", params={"query": "a dog", "language": "de"}).json()
    [strip] = chapter["strips"]
    assert (strip["text"], strip["language"]) == ("a dog", "de")
    assert [image["image_id"] for image in strip["images"]] == IMAGES[3:5]
    assert strip["images"][0]["captions"] == [{"text": "de of img-03 & <b>", "language": "de"}]
    page = client.get("/search", params={"like": IMAGES[0]})
    assert "/search?like=img-01" in page.text
    assert page.text.count("data:image/jpeg") == 3
    for values, remark in (
        ({"query": "nothing", "language": "de"}, "the model knows no word of it"),
        ({"query": "truecased", "language": "de"}, "the model cannot read sentences here"),
        ({"query": "a dog"}, "the model knows no language &#39;&#39;: choose de or en"),
        ({"query": "a dog", "language": "xx"}, "the model knows no language &#39;xx&#39;: choose de or en"),
    ):
        answer = client.get("/search", params=values)
        assert answer.status_code == 400
        assert remark in answer.text
        assert not re.search(r"(?<!var\()--\w", re.sub("<style>.*</style>", "", answer.text, flags=re.DOTALL))


def test_hostile_requests_and_ids_do_nothing(client):
    for path in ("/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/image/..%2f..%2fetc%2fpasswd", "/static/page.css"):
        assert client.get(path).status_code == 404
    for host in ("evil.example", "127.0.0.1.evil.example", ""):
        assert client.get("/", headers={"host": host}).status_code == 400
    for method in ("POST", "PUT", "DELETE"):
        assert client.request(method, "/search", headers={"origin": "http://evil.example"}).status_code == 405
    page = client.get("/browse", params={"image_id": "<script>"})
    assert "<script" not in page.text
    assert "\u202e" not in page.text
    assert r"&lt;script&gt;alert(1)&lt;/script&gt;\u202e" in page.text
    page = client.get("/browse", params={"image_id": "data:"})
    assert "\u202e" not in page.text
    assert r"data:\u202ex" in page.text
    assert page.text.count("x" * 600) == page.text.count(f'href="/search?like={quote(IMAGES[-1])}"') == 1
    long = {"image_id": "", "other": "\"'<" + "y" * 1000}
    more = re.findall('href="(/browse[^"]*)">more', client.get("/browse", params=long).text)
    assert parse_qs(urlsplit(more[0]).query) == {"other": [long["other"]], "start": ["24"]}
    assert page.headers["content-security-policy"].startswith("default-src 'none'; img-src data:; style-src 'sha256-")
    assert client.get("/browse", params={"image_id": "x" * 50_000, "start": "9" * 5000}).status_code < 500


def test_token_is_asked_for(report):
    client = TestClient(build_app(report, token="secret-ä", hosts=["reports.example"]), base_url="http://reports.example")
    assert client.get("/").status_code == 403
    assert client.get("/search.json?query=a&language=de&token=other").status_code == 403
    assert client.get("/", params={"token": "secret-ä"}).status_code == 200


def test_without_a_token_those_of_other_programs_are_no_matter(client):
    """A browser sends a cookie to all ports of a host."""
    assert client.get("/", headers={"cookie": "token=of-another-program"}).status_code == 200
