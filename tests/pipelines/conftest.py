"""What tests of the pipelines share."""

import sys
from collections import Counter
from collections.abc import Callable

import pytest

from pipelines.commands import app, results
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


@pytest.fixture
def call(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """Runs the entry point in this process, on wide consoles; gives exit code, standard output and standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["imagepivot", *map(str, arguments)])
        for console in (results.console, results.notes):
            monkeypatch.setattr(console, "_width", 200)
        with pytest.raises(SystemExit) as caught:
            app.main()
        return caught.value.code or 0, *capsys.readouterr()

    return run
