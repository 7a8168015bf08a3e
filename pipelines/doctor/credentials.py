"""Where credentials of object stores come from. What they are is never read out: only their sources have names here."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from pipelines.doctor.findings import Finding
from schemas.filesystems import filesystem_of
from schemas.locations import is_remote

__all__ = ["check_credentials", "is_store", "source_of", "sources"]

_GROUP = "credentials"
_AMAZON = {
    "env": "environment variables",
    "shared-credentials-file": "the credentials file",
    "custom-process": "a program that the configuration file names",
    "config-file": "the configuration file",
    "iam-role": "the machine's role (its metadata service)",
    "container-role": "the container's role",
    "assume-role": "a role that the configuration file names",
    "assume-role-with-web-identity": "a role, by a web identity token",
    "sso": "single sign-on",
    "login": "a login of AWS's command line",
}
"""What botocore calls a source, and what it is."""

_KEY_FILE = "GOOGLE_APPLICATION_CREDENTIALS"


def sources(environment: Mapping[str, str], home: Path) -> Iterator[tuple[str, str, bool]]:
    """Yield the sources of credentials that can be seen without a network: the store, the source, whether it is usable.

    Args:
        environment: variables of the environment.
        home: the user's home folder.
    """
    keys = [name for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY") if environment.get(name)]
    if keys:
        yield "AWS", " and ".join(keys), len(keys) == 2
    for store, variable, default in (
        ("AWS", "AWS_SHARED_CREDENTIALS_FILE", home / ".aws" / "credentials"),
        ("AWS", "AWS_CONFIG_FILE", home / ".aws" / "config"),
        ("AWS", "AWS_WEB_IDENTITY_TOKEN_FILE", None),
        ("Google", _KEY_FILE, None),
    ):
        if named := environment.get(variable):
            yield store, f"{variable}, which names {named!r}", os.access(named, os.R_OK)
        elif default is not None and default.is_file():
            yield store, repr(str(default)), os.access(default, os.R_OK)
    for variable in ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"):
        if environment.get(variable):
            yield "AWS", variable, True
    cloud = Path(environment.get("CLOUDSDK_CONFIG") or home / ".config" / "gcloud") / "application_default_credentials.json"
    if cloud.is_file():
        yield "Google", repr(str(cloud)), os.access(cloud, os.R_OK)
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if environment.get(variable):
            yield "Hugging Face", variable, True


def check_credentials(environment: Mapping[str, str] | None = None, home: Path | None = None) -> Iterator[Finding]:
    """Find the sources of credentials that can be seen without a network.

    Args:
        environment: variables of the environment; both arguments are by default as they are here.
        home: the user's home folder.
    """
    seen = list(sources(os.environ if environment is None else environment, home or Path.home()))
    for store, source, usable in seen:
        if usable:
            yield Finding(_GROUP, store, "ok", source, values={"source": source})
        else:
            advice = "give both variables, or none" if source.startswith("AWS_") and "names" not in source else "check the path"
            found = f"{source} is incomplete, or cannot be read"
            yield Finding(_GROUP, store, "note", found, advice, {"source": source})
    if not seen:
        found = "none in environment variables and files; a cloud's own machines have some without"
        yield Finding(_GROUP, "stores", "ok", found)


def source_of(location: str) -> str:
    """Return where the credentials for a bucket come from, in words; may ask the metadata service of a cloud's machine.

    Raises:
        ImagepivotError: the location cannot be used.
    """
    filesystem, _ = filesystem_of(location)
    settings = filesystem.__reduce__()[1][0]  # What pickling would keep: pyarrow tells its settings in no other way.
    if settings.get("anonymous"):
        return "none, requests are anonymous"
    return _amazon_source(settings) if location.startswith("s3://") else _google_source()


def _amazon_source(settings: Mapping[str, object]) -> str:
    if settings.get("access_key"):
        return "the address"
    if find_spec("botocore") is None:
        return "unknown, since botocore is not installed"
    from botocore.session import get_session

    found = get_session().get_credentials()
    return "none were found" if found is None else _AMAZON.get(found.method, found.method)


def _google_source() -> str:
    if find_spec("google") is None or find_spec("google.auth") is None:
        return "unknown, since google-auth is not installed"
    import google.auth
    from google.auth.exceptions import DefaultCredentialsError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # About projects, which objects do not need.
            found, _ = google.auth.default(scopes=["https://www.googleapis.com/auth/devstorage.read_write"])
    except DefaultCredentialsError:
        return "none were found"
    if os.environ.get(_KEY_FILE):
        return f"the file that {_KEY_FILE} names"
    if type(found).__module__.startswith("google.auth.compute_engine"):
        return "the machine's service account (its metadata service)"
    return "the login of gcloud (application default credentials)"


def is_store(location: str) -> bool:
    """Return whether a location is in an object store."""
    return is_remote(location) and location.startswith(("s3://", "gs://", "gcs://"))
