"""What tests of the pipelines share."""

from collections import Counter

import pytest

from pipelines.inputs.images import archives


@pytest.fixture
def read(monkeypatch) -> Counter:
    """How often each row group was read."""
    counter, read_column = Counter(), archives.read_column

    def counted(folder, name, version, group):
        counter[name, group] += 1
        return read_column(folder, name, version, group)

    monkeypatch.setattr(archives, "read_column", counted)
    return counter
