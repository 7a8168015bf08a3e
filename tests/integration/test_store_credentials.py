"""Credentials for buckets, from the environment, the machine and addresses, against the emulators of both stores.

A server on this machine plays the metadata service of Google. The emulators accept all credentials: the clients tell which they
found.
"""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from schemas.errors import DatasetError
from schemas.storage.folder import Folder, open_bucket
from schemas.storage.locations import split_address
from tests.stores import KEYS, LOCAL, use

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

TOKEN = {"access_token": "token", "expires_in": 3600, "token_type": "Bearer"}
ANSWERS = {
    "/token": json.dumps(TOKEN),
    "/": "",
    "/computeMetadata/v1/project/project-id": "project",
    "/computeMetadata/v1/instance/service-accounts/default/": json.dumps({"email": "me@project", "scopes": []}),
    "/computeMetadata/v1/instance/service-accounts/default/token": json.dumps(TOKEN),
    "/computeMetadata/v1/universe/universe-domain": "googleapis.com",
}


class Metadata(BaseHTTPRequestHandler):
    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        answer = ANSWERS.get(self.path.partition("?")[0])
        self.send_response(404 if answer is None else 200)
        self.send_header("Metadata-Flavor", "Google")
        is_json = answer is not None and answer.startswith("{")
        self.send_header("Content-Type", "application/json" if is_json else "application/text")
        self.end_headers()
        self.wfile.write((answer or "").encode())

    do_PUT = do_POST = do_GET  # noqa: N815 -- names of the base class

    def log_message(self, *rest):
        pass


@pytest.fixture(scope="module")
def metadata() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def blank(near, monkeypatch, tmp_path):
    """A store, and an environment without credentials and endpoints."""
    use(LOCAL, monkeypatch)
    for name in (*KEYS, "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    yield near
    open_bucket.cache_clear()


def read_and_write(location: str):
    """Use a folder of the bucket, and return its client."""
    folder = Folder(location)
    tag = folder.put("a", b"1")
    assert folder.put("a", b"2", if_match=tag)
    assert (folder.read("a"), folder.names(), folder.kind()) == (b"2", ["a"], "folder")
    return open_bucket(split_address(location)[0])._client


def at(store, folder: str, user: str = "") -> str:
    """Return an address with the endpoint of a store."""
    return f"{store.scheme}://{user}bucket/{folder}?endpoint_override=127.0.0.1:{store.port}&scheme=http"


@pytest.mark.parametrize("near", ["s3"], indirect=True)
@pytest.mark.parametrize(("user", "expected"), [("", ("testing", "testing")), ("key:se%2Fcret@", ("key", "se/cret"))])
def test_credentials_for_s3(blank, monkeypatch, user, expected):
    if not user:
        for name, value in KEYS.items():
            monkeypatch.setenv(name, value)
    found = read_and_write(at(blank, f"keys of {expected[0]}", user))._get_credentials()
    assert (found.access_key, found.secret_key) == expected


@pytest.mark.parametrize("near", ["s3"], indirect=True)
def test_profile_has_credentials_region_and_endpoint(blank, monkeypatch, tmp_path):
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text("[work]\naws_access_key_id = id\naws_secret_access_key = secret\n")
    (tmp_path / ".aws/config").write_text(f"[profile work]\nregion = eu-west-3\nendpoint_url = {blank.url}\n")
    monkeypatch.setenv("AWS_PROFILE", "work")
    client = read_and_write("s3://bucket/profile")
    assert (client._get_credentials().access_key, client.meta.region_name) == ("id", "eu-west-3")


@pytest.mark.parametrize("near", ["s3"], indirect=True)
def test_public_object_in_s3_is_read_without_credentials(blank, monkeypatch):
    owner = open_bucket(split_address(at(blank, "", "key:secret@"))[0])._client
    for name, rights in (("open", "public-read"), ("closed", "private")):
        owner.put_object(Bucket="bucket", Key=f"public/{name}", Body=b"1", ACL=rights)
    folder = Folder(at(blank, "public", "anonymous@"))
    assert folder.read("open") == b"1"
    with pytest.raises(DatasetError, match="access denied"):
        folder.read("closed")


@pytest.mark.parametrize("near", ["gs"], indirect=True)
@pytest.mark.parametrize("source", ["file", "instance", "anonymous"])
def test_credentials_for_google(blank, metadata, monkeypatch, tmp_path, source):
    kind = "AnonymousCredentials"
    if source == "file":
        kind = "Credentials"
        content = {"type": "service_account", "client_email": "me@project", "token_uri": f"http://{metadata}/token"}
        (tmp_path / "key.json").write_text(json.dumps({**content, "private_key": private_key(), "project_id": "p"}))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    elif source == "instance":
        kind = "Credentials"
        for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP"):
            monkeypatch.setenv(name, metadata)
        monkeypatch.setattr("google.auth.compute_engine._metadata._METADATA_HOST", metadata, raising=False)
    client = read_and_write(at(blank, source, "anonymous@" if source == "anonymous" else ""))
    assert type(client._credentials).__name__ == kind
    assert client._credentials.token == (None if source == "anonymous" else "token")


def private_key() -> str:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    forms = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return rsa.generate_private_key(65537, 2048).private_bytes(*forms).decode()


@pytest.mark.parametrize("content", [None, '{"type": "service_account"}', "{}"])
def test_key_file_of_google_without_a_key_denies_access(tmp_path, monkeypatch, content):
    if content is not None:
        (tmp_path / "key.json").write_text(content)
    use({"GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "key.json")}, monkeypatch)
    with pytest.raises(DatasetError, match="access denied: check the credentials of this machine"):
        Folder("gs://bucket/x").names()
