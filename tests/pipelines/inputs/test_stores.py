"""How stores are found. That they are read in one request is tested in tests/integration/test_bucket_requests.py."""

import pytest

import schemas.filesystems
from pipelines.inputs import stores
from pipelines.inputs.stores import read_object
from schemas.filesystems import StoreAccessError
from schemas.storage import Folder
from schemas.stores import bucket_of


@pytest.fixture(autouse=True)
def no_settings(monkeypatch, tmp_path):
    for name in (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_PROFILE",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    schemas.filesystems._connect.cache_clear()
    stores._s3_store.cache_clear()
    yield
    schemas.filesystems._connect.cache_clear()
    stores._s3_store.cache_clear()


def test_a_local_file_is_read_as_any_other(tmp_path):
    (tmp_path / "a").write_bytes(b"1")
    assert read_object(Folder(str(tmp_path)), "a") == b"1"
    with pytest.raises(FileNotFoundError, match="nothing"):
        read_object(Folder(str(tmp_path)), "nothing")


@pytest.mark.parametrize(
    ("location", "bucket"),
    [
        ("s3://b", "s3://b"),
        ("s3://b/a b/ü%20?", "s3://b"),
        ("s3://b/a/c?region=eu-west-1", "s3://b?region=eu-west-1"),
        ("s3://key:secret@b/a", "s3://key:secret@b"),
    ],
)
def test_all_of_a_bucket_is_read_through_one_store(location, bucket):
    assert bucket_of(location) == bucket


def test_endpoint_and_region_are_those_of_pyarrow(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    store = stores._s3_store("s3://b?region=eu-west-1")
    assert store.config["bucket"] == "b"
    assert (store.config["endpoint"], store.config["region"]) == ("http://127.0.0.1:1", "eu-west-1")
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    assert stores._s3_store("s3://b").config["region"] == "eu-north-1"
    assert stores._s3_store("s3://key:secret@b").config["access_key_id"] == "key"


def test_credentials_are_found_as_the_tools_of_the_cloud_find_them(monkeypatch, tmp_path):
    (tmp_path / "credentials").write_text(
        "[work]\naws_access_key_id = id\naws_secret_access_key = secret\naws_session_token = t\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "work")
    found = stores._credentials()()
    assert (found["access_key_id"], found["secret_access_key"], found["token"]) == ("id", "secret", "t")
    assert found["expires_at"].tzinfo is not None


def test_without_credentials_access_is_denied():
    with pytest.raises(StoreAccessError, match="Permission denied"):
        stores._credentials()
