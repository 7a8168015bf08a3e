"""Tables of addresses: web servers, ``file://`` and ``~``. Folders and patterns are tested in `test_opening`."""

from __future__ import annotations

import csv
import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.features.inference import Tally
from pipelines.features.shard_worker import decoding_threads
from pipelines.inputs.images.opening import open_images
from pipelines.inputs.web import PARALLEL_READS, WebAccess
from pipelines.jobs import FeaturesJob
from schemas.errors import InputError, UsageError
from tests.fake_extractors import extract_images, picture

pytestmark = pytest.mark.usefixtures("no_proxies")


def table(path: Path, rows: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("image_id", "uri"), *rows.items()])
    return path


def extracted(source, threads: int) -> tuple[dict[str, list[float]], dict[str, tuple[str, str]]]:
    """Features by id, and reason and message of failures by id."""
    tally = Tally()
    rows = extract_images(source.refs(), read=source.read, threads=threads, tally=tally, reads=source.parallel_reads)
    features = {row["image_id"]: row["feature"] for part in rows for row in part.to_pylist()}
    return features, {row["key"]: (row["reason"], row["message"]) for row in tally.failures}


# --- web servers -----------------------------------------------------------------------------------------------------


def test_extraction_of_web_images_records_failed_downloads(site, tmp_path):
    site.pages |= {"/red.png": picture(255, 0, 0), "/large.png": bytes(5000), "/text.png": b"<html>"}
    site.pages["/moved.png"] = lambda handler: handler.answer(301, Location="/red.png")
    (tmp_path / "local.png").write_bytes(picture(0, 0, 9))
    paths = ("red.png", "missing.png", "large.png", "text.png", "moved.png")
    rows = {path.partition(".")[0]: site.address(f"/{path}") for path in paths}
    path = table(tmp_path / "t.csv", rows | {"local": "local.png", "bad": "http://[bad"})
    access = WebAccess(allow_private_addresses=True, max_bytes=1000)
    features, failures = extracted(replace(open_images(path), access=access), PARALLEL_READS)
    assert features == {"red": [255, 0, 0], "moved": [255, 0, 0], "local": [0, 0, 9]}
    assert failures.pop("text")[0] == "not_an_image"
    assert failures == {
        "missing": ("unreadable", "HTTP 404"),
        "large": ("unreadable", "larger than 1,000 bytes"),
        "bad": ("unreadable", "not a valid address"),
    }


@pytest.mark.parametrize(
    ("uri", "fault"),
    [
        *((uri, "use the location .* NUL character") for uri in ("a\0b.png", "/a\0/b.png", "~a\0", "s3://b\0/a.png")),
        *((uri, "use the location .* not UTF-8") for uri in ("\udcff.png", "file:///a%FFb.png")),
        ("s3:///a.png", "use the location .* names no bucket"),
        ("file://other/a.png", "understand the location 'file://other/a.png'"),
        ("ftp://h/a.png", "uri is 'ftp://h/a.png', expected a path, file://, or one of http://"),
    ],
)
def test_impossible_addresses_are_named_with_their_row(tmp_path, uri, fault):
    (tmp_path / "t.jsonl").write_text(json.dumps({"image_id": "a", "uri": uri}) + "\n")
    with pytest.raises(InputError, match=rf"t.jsonl', line 1: .*{fault}"):
        list(open_images(tmp_path / "t.jsonl").refs())


def test_private_addresses_fail_unless_they_are_allowed(site, tmp_path):
    site.pages["/red.png"] = picture(255, 0, 0)
    path = table(tmp_path / "t.csv", {"red": site.address("/red.png")})
    refused = ("unreadable", "its host has an address that is not public")
    assert extracted(open_images(path), 4) == ({}, {"red": refused})
    assert site.connections == 0
    assert extracted(open_images(path, allow_private_addresses=True), 4) == ({"red": [255, 0, 0]}, {})


def test_extraction_reads_with_parallel_reads_of_the_source(site, tmp_path):
    # Each answer waits for all others: fewer requests at once would never be answered.
    together = threading.Barrier(PARALLEL_READS)

    def page(handler):
        together.wait(20)
        handler.answer(200, picture(1, 2, 3))

    rows = {f"image{number:02d}": site.address(f"/{number}") for number in range(PARALLEL_READS)}
    site.pages = {f"/{number}": page for number in range(PARALLEL_READS)}
    source = open_images(table(tmp_path / "t.csv", rows), allow_private_addresses=True)
    features, failures = extracted(source, threads=1)
    assert (len(features), failures) == (PARALLEL_READS, {})


@pytest.mark.parametrize(
    ("uris", "threads"),
    [(["a.png", "b.png"], 1), (["a.png", "HTTP://h/b.png"], PARALLEL_READS), (["s3://b/http://a"], PARALLEL_READS)],
)
def test_parallel_reads_of_remote_addresses(tmp_path, uris, threads):
    source = open_images(table(tmp_path / "t.csv", {str(number): uri for number, uri in enumerate(uris)}))
    assert source.parallel_reads == threads
    # Threads that wait for other machines do not decode: the model needs the cores.
    job = FeaturesJob(images=source, output="f", device="cpu")
    assert [decoding_threads(job, cores) for cores in (1, 2, 7, 8, 64)] == [1, 1, 1, 2, 16]


def test_proxy_is_refused_before_anything_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    path = table(tmp_path / "t.csv", {"a": "a.png", "b": "http://h.test/b.png"})
    with pytest.raises(UsageError, match=r"cannot fetch 'http://h.test/b.png': the environment names a proxy"):
        list(open_images(path).refs())
    assert len(list(open_images(path, allow_private_addresses=True).refs())) == 2


# --- local paths -----------------------------------------------------------------------------------------------------


def test_file_addresses_and_home_folders_in_a_table(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "a b%ü.png").write_bytes(b"1")
    (tmp_path / "home" / "c.png").write_bytes(b"2")
    (tmp_path / "~nobody-here.png").write_bytes(b"3")
    rows = {
        "address": f"file://{tmp_path}/a%20b%25%C3%BC.png",
        "host": f"file://localhost{tmp_path}/a%20b%25%c3%bc.png",
        "upper": f"FILE://{tmp_path}/home/c.png",
        "home": "~/c.png",
        "tilde": "~nobody-here.png",
        "path": f"{tmp_path}/a b%ü.png",
    }
    source = open_images(table(tmp_path / "t.csv", rows))
    found = {ref.image_id: (ref.uri, source.read(ref)) for ref in source.refs()}
    expected = {"address": b"1", "host": b"1", "upper": b"2", "home": b"2", "tilde": b"3", "path": b"1"}
    assert found == {name: (rows[name], data) for name, data in expected.items()}
