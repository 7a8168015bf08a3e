"""The command in this process, as the integration tests call it, and lines for the log."""

from collections.abc import Callable

import pytest

from tests.integration.conftest import empty, imagepivot  # noqa: F401 -- fixtures


@pytest.fixture(scope="session")
def tell(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Write a line to the log of the tests, also where they pass: what ran, what was killed, which bytes came of it."""
    reporter, capture = (pytestconfig.pluginmanager.get_plugin(name) for name in ("terminalreporter", "capturemanager"))

    def line(text: str) -> None:
        with capture.global_and_fixture_disabled():
            reporter.write_line(f"  {text}", flush=True)

    return line
