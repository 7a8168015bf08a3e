"""The command in this process, as the integration tests call it, and lines for the log."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.integration.conftest import empty, imagepivot

__all__ = ["empty", "imagepivot"]


@pytest.fixture(scope="session")
def tell(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Write a line to the log of the tests, also where they pass: what ran, what was killed, which bytes came of it."""
    reporter = pytestconfig.pluginmanager.get_plugin("terminalreporter")

    def line(text: str) -> None:
        reporter.ensure_newline()
        reporter.write_line(f"  {text}")

    return line
