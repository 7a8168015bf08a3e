"""The command in this process, as the integration tests call it."""

from tests.integration.conftest import empty, imagepivot  # noqa: F401 -- fixtures
