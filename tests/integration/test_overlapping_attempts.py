"""Two attempts of one shard in S3, in every order in which their requests can follow each other.

Google's store is left out: its emulator, and its client in pyarrow, know no writes under a condition.
"""

from __future__ import annotations

from collections import Counter

import pytest

from schemas.storage import Folder
from schemas.survey import Survey
from schemas.validation import validate
from schemas.writing import commit
from tests.stages import attempt, every_order, output_in, staged
from tests.stores import PACKAGES, emulator, is_installed, use

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(600)]

NAME = "part-00000-of-00001.parquet"


@pytest.fixture(scope="module")
def s3():
    if not is_installed("s3"):
        pytest.skip(f"no emulator: pip install '{PACKAGES['s3']}'")
    with emulator("s3") as store:
        yield store


@pytest.fixture
def store(s3, monkeypatch):
    use(s3.environment, monkeypatch)
    return s3


def bytes_of(location: str) -> dict[str, bytes]:
    folder = Folder(location)
    return {name: folder.read(name) for name in folder.names()}


@pytest.fixture
def alone(store) -> dict[str, dict[str, bytes]]:
    """The dataset that each attempt makes alone."""
    made = {}
    for name in "ABC":
        output = output_in(store.address(f"alone/{name}"))
        if Survey(output).complete() is None:
            attempt(output, name)
            commit(output)
        made[name] = bytes_of(output.folder.location)
    return made


@pytest.mark.parametrize(("names", "commits"), [("AB", "after the first"), ("AC", "after both")])
def test_two_attempts_at_once_publish_one_of_them(monkeypatch, store, alone, names, commits):
    outcomes: Counter[str] = Counter()

    def play(first: list[str]) -> list[tuple[str, list[str]]]:
        output = output_in(store.address(f"{names}/{sum(outcomes.values())}"))
        committed, chosen = None, []
        with staged(monkeypatch, names) as stage:
            for name in names:
                stage.start(name, output)
            while choices := stage.can_go():
                choice = first[len(chosen)] if len(chosen) < len(first) else choices[0]
                chosen.append((choice, choices))
                stage.go(choice)
                if commits == "after the first" and stage.ended() and committed is None and is_published(output):
                    commit(output)
                    committed = bytes_of(output.folder.location)
        assert stage.unforeseen == []
        if committed is None:
            commit(output)
        result = bytes_of(output.folder.location)
        assert committed in (None, result)
        assert validate(output.folder.location) == []
        [winner] = [name for name in names if alone[name] == result]
        assert all(f"is committed: {NAME} was not written" in str(error) for error in stage.errors.values())
        outcomes[winner] += 1
        return chosen

    assert every_order(play) > 40
    assert set(outcomes) == set(names)


def is_published(output) -> bool:
    """Whether the shard has its record: the attempt that has ended may have been overtaken."""
    found = Survey(output)
    return found.usable() == {0}
