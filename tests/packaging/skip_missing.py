"""Plugin of pytest: tests that need a package which is not installed are skipped.

An extra is tested in an environment with its own packages alone, by tests of folders that need others here and there.
"""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest


def missing_module(error: BaseException | None) -> str:
    """Return the module whose absence is the reason of an error; empty if there is none."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            top = error.name.partition(".")[0]
            return top if top == "google" or find_spec(top) is None else ""
        error = error.__cause__ or error.__context__
    return ""


def _skip(report, call) -> None:
    if report.failed and call.excinfo is not None and (name := missing_module(call.excinfo.value)):
        report.outcome, report.longrepr = "skipped", ("", 0, f"Skipped: needs {name}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call) -> Iterator[None]:
    report = yield
    _skip(report, call)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector) -> Iterator[None]:
    report = yield
    _skip(report, report.call) if hasattr(report, "call") else None
    return report
