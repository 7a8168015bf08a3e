"""Passwords, keys and signatures of addresses appear nowhere but in the requests that need them."""

import os
import re
from pathlib import Path

import pytest

from pipelines.features import feature_shards
from pipelines.inputs.images import listing
from schemas import failures
from schemas.console import events
from schemas.dataset import open_dataset
from schemas.features import FeatureSpec
from schemas.writing.validation import validate
from tests.builders import write_rows
from tests.fake_extractors import picture
from tests.pipelines.inputs.conftest import no_proxies  # noqa: F401
from tests.web_server import serve

EXTRACT = ("--extractor", "timm:test_resnet.r160_in1k", "--weights", "random:0", "--shards", "2", "--workers", "1")
SECRET = re.compile(b"SECRET[A-Z]+")
PRIVATE = "--allow-private-addresses"


pytestmark = pytest.mark.usefixtures("no_proxies")


def secrets_in(folder: Path) -> dict[str, list[bytes]]:
    """Return the secrets in the files of a folder, hidden ones as well."""
    files = {str(path.relative_to(folder)): SECRET.findall(path.read_bytes()) for path in folder.rglob("*") if path.is_file()}
    assert len(files) > 3
    return {name: found for name, found in files.items() if found}


@pytest.mark.slow
def test_addresses_of_images_are_stored_and_shown_without_secrets(imagepivot, tmp_path, monkeypatch):
    table, out = tmp_path / "images.tsv", tmp_path / "out"
    image = picture(9, 0, 0, size_wh=(64, 64))

    def write(password: str, signature: str, missing: str = "missing") -> None:
        login = f"http://user:{password}@127.0.0.1:{site.port}"
        rows = [
            f"a\t{login}/a.png?X-Amz-Date={signature}&X-Amz-Signature={signature}",
            f"b\t{login}/{missing}.png?sig={signature}",
        ]
        table.write_text("\n".join(["image_id\turi", *rows, ""]))

    with serve() as site:
        tagged = lambda handler: handler.answer(200, image, ETag='"1"')  # noqa: E731
        site.pages = {"/a.png?X-Amz-Date=SECRETSIG&X-Amz-Signature=SECRETSIG": tagged}
        site.pages["/a.png?X-Amz-Date=SECRETNEW&X-Amz-Signature=SECRETNEW"] = tagged
        write("SECRETPW", "SECRETSIG")
        said = [imagepivot("features", table, out, *EXTRACT, PRIVATE, "--max-failures", "1", "--log-json")]
        manifest = open_dataset(out).manifest
        assert (manifest.rows, manifest.failed, validate(out)) == (1, 1, [])
        assert secrets_in(out) == {}
        (failure,) = open_dataset(out).failures().to_pylist()
        assert failure["uri"] == f"http://***@127.0.0.1:{site.port}/missing.png?sig=***"
        said += [imagepivot("inspect", out, *words) for words in ((), ("--json",), ("--failures",), ("--failures", "--json"))]

        # A new signature or password is no change, neither for the same command nor for an update; another path is one.
        write("SECRETOTHER", "SECRETNEW")
        site.requests.clear()
        said.append(imagepivot("features", table, out, *EXTRACT, PRIVATE, "--max-failures", "1"))
        assert (open_dataset(out).manifest, site.requests) == (manifest, [])
        said.append(imagepivot("features", table, out, *EXTRACT, PRIVATE, "--max-failures", "1", "--update"))
        assert "0 new, 0 changed, 0 removed" not in said[-1].stdout, "an unreadable image is read again"
        assert [path for method, path, _ in site.requests if method == "GET"] == ["/missing.png?sig=SECRETNEW"]
        assert open_dataset(out).manifest == manifest
        write("SECRETOTHER", "SECRETNEW", missing="moved")
        said.append(imagepivot("features", table, out, *EXTRACT, PRIVATE, "--max-failures", "1", code=1))
        said.append(imagepivot("features", table, out, *EXTRACT, PRIVATE, "--max-failures", "1", "--update"))
        assert secrets_in(out) == {}

        monkeypatch.setenv("http_proxy", "http://user:SECRETPROXY@127.0.0.1:9")
        said.append(imagepivot("features", table, tmp_path / "proxy", *EXTRACT, code=2))
        assert "http://***@127.0.0.1:" in said[-1].stderr
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    said.append(imagepivot("inspect", "s3://AKIA:SECRET/KEY@bucket/x", code=(1, 2)))
    assert "s3://***@bucket/x" in said[-1].stderr
    assert [SECRET.findall((done.stdout + done.stderr).encode()) for done in said] == [[]] * len(said)


@pytest.mark.slow
def test_update_removes_secrets_that_an_earlier_version_stored(imagepivot, tmp_path, monkeypatch):
    table, out = tmp_path / "images.tsv", tmp_path / "out"
    with serve() as site:
        image = picture(0, 0, 0, size_wh=(64, 64))
        site.pages = {"/a.png": lambda handler: handler.answer(200, image, ETag='"1"'), "/b.png": b"no image"}
        login = f"http://user:SECRETPW@127.0.0.1:{site.port}"
        table.write_text(f"image_id\turi\na\t{login}/a.png\nb\t{login}/b.png\n")
        with monkeypatch.context() as patch:
            for module in (feature_shards, listing, failures):
                patch.setattr(module, "redact_address", lambda address: address)
            imagepivot("features", table, out, *EXTRACT, PRIVATE, "--max-failures", "1")
        assert [name.split("/")[0] for name in sorted(secrets_in(out))] == [".records", "_failures"]
        site.requests.clear()
        imagepivot("features", table, out, *EXTRACT, PRIVATE, "--max-failures", "1", "--update")
        assert secrets_in(out) == {}
        assert [path for method, path, _ in site.requests if method == "GET"] == [], "nothing is read again"
        assert (open_dataset(out).manifest.rows, open_dataset(out).manifest.failed, validate(out)) == (1, 1, [])


@pytest.mark.parametrize(
    ("folder_mode", "file_mode"), [(0o700, 0o600), (0o750, 0o640), (0o2770, 0o664 & 0o770), (0o755, 0o644)]
)
def test_files_of_a_dataset_are_no_more_readable_than_its_folder(tmp_path, folder_mode, file_mode):
    folder = tmp_path / "dataset"
    folder.mkdir()
    folder.chmod(folder_mode)
    before = os.umask(0o022 if folder_mode != 0o2770 else 0o002)
    try:
        rows = [{"image_id": f"i{index}", "feature": [0.0, 1.0]} for index in range(4)]
        failed = [failures.failure_row("x", "read", "unreadable", "HTTP 404")]
        write_rows(folder, "features", rows, FeatureSpec("two", (2,)), failures=failed)
    finally:
        os.umask(before)
    modes = {path.relative_to(folder).parts[0]: path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()}
    assert {"_failures", ".records", "_manifest.json"} < modes.keys()
    assert set(modes.values()) == {file_mode}


def test_events_have_no_secrets():
    line = events.line(
        "end", message="", output="s3://AKIA:SECRET@b/x", counts={"failed": ["http://h/?sig=SECRET"]}, exit_code=1
    )
    assert "SECRET" not in line
    assert '"s3://***@b/x"' in line
