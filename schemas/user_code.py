"""Digests of modules of users, e.g. of ``--import``, which determine results."""

from collections.abc import Mapping

_digests: dict[str, str] = {}


def set_user_code(digests: Mapping[str, str]) -> None:
    """Replace the digests of the user's modules, SHA-256 by dotted name."""
    _digests.clear()
    _digests.update(digests)


def user_code() -> dict[str, str]:
    """Return the digests of the user's modules by dotted name; empty without any."""
    return dict(sorted(_digests.items()))
