"""The command in this process, as the integration tests call it."""

from tests.integration.conftest import empty, imagepivot

__all__ = ["empty", "imagepivot"]
