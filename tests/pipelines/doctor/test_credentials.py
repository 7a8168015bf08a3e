import json
import os

import pytest

from pipelines.doctor.credentials import check_credentials, source_of, sources

SECRET = "wJalrXUtnFEMI"


@pytest.fixture
def clean(monkeypatch, tmp_path):
    """No credentials but those that a test makes, and no question to the metadata service of a cloud."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "CLOUDSDK_")) or name == "STORAGE_EMULATOR_HOST":
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_REGION", "eu-west-1")  # Else the store is asked for the region of the bucket.
    return tmp_path


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, []),
        (
            {"AWS_ACCESS_KEY_ID": SECRET, "AWS_SECRET_ACCESS_KEY": SECRET},
            [("AWS", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", True)],
        ),
        ({"AWS_ACCESS_KEY_ID": SECRET}, [("AWS", "AWS_ACCESS_KEY_ID", False)]),
        ({"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://x"}, [("AWS", "AWS_CONTAINER_CREDENTIALS_FULL_URI", True)]),
        (
            {"GOOGLE_APPLICATION_CREDENTIALS": "/none.json"},
            [("Google", "GOOGLE_APPLICATION_CREDENTIALS, which names '/none.json'", False)],
        ),
        ({"HF_TOKEN": SECRET}, [("Hugging Face", "HF_TOKEN", True)]),
    ],
)
def test_sources_in_the_environment(tmp_path, environment, expected):
    assert list(sources(environment, tmp_path)) == expected


def test_sources_in_files(tmp_path):
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(f"[default]\naws_secret_access_key = {SECRET}\n")
    (tmp_path / ".config" / "gcloud").mkdir(parents=True)
    login = tmp_path / ".config" / "gcloud" / "application_default_credentials.json"
    login.write_text(SECRET)
    assert list(sources({}, tmp_path)) == [
        ("AWS", repr(str(tmp_path / ".aws" / "credentials")), True),
        ("Google", repr(str(login)), True),
    ]


def test_no_secret_is_in_a_finding(tmp_path):
    environment = {"AWS_ACCESS_KEY_ID": SECRET, "HF_TOKEN": SECRET}
    found = list(check_credentials(environment, tmp_path))
    assert [(finding.subject, finding.status) for finding in found] == [("AWS", "note"), ("Hugging Face", "ok")]
    assert found[0].advice == "give both variables, or none"
    assert SECRET not in json.dumps([finding.to_json() for finding in found])


def test_no_credentials_are_no_problem(tmp_path):
    (found,) = check_credentials({}, tmp_path)
    assert found.status == "ok"


def test_credentials_in_an_address(clean):
    assert source_of(f"s3://AKIA:{SECRET}@bucket/x?region=eu-west-1") == "the address"


def test_a_bucket_for_everybody(clean):
    assert source_of("gs://anonymous@bucket/x") == "none, requests are anonymous"


def test_credentials_of_amazons_tools(clean, monkeypatch):
    assert source_of("s3://bucket/x?region=eu-west-1") == "none were found"
    (clean / ".aws").mkdir()
    (clean / ".aws" / "credentials").write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    assert source_of("s3://bucket/x?region=eu-west-1") == "the credentials file"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    assert source_of("s3://bucket/x?region=eu-west-1") == "environment variables"


@pytest.mark.slow
def test_credentials_of_googles_tools(clean, monkeypatch):
    login = {"type": "authorized_user", "client_id": "a", "client_secret": SECRET, "refresh_token": SECRET}
    place = clean / ".config" / "gcloud" / "application_default_credentials.json"
    place.parent.mkdir(parents=True)
    place.write_text(json.dumps(login))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(place.parent))
    assert source_of("gs://bucket/x") == "the login of gcloud (application default credentials)"
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(place))
    assert source_of("gs://bucket/x") == "the file that GOOGLE_APPLICATION_CREDENTIALS names"
