"""What the stand-in for Dataflow must not get wrong itself."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from tests.dataflow_service import _tell


def test_of_two_ends_at_once_the_first_is_told_whole(tmp_path):
    """A worker that dies is noticed by the thread that waits for it, and by the one that awaits its data."""
    both = Barrier(2)

    def end(folder, name):
        both.wait()
        _tell(folder, {name: "x" * 10_000})
        return json.loads((folder / "outcome").read_text())

    with ThreadPoolExecutor(2) as pool:
        for turn in range(50):
            (folder := tmp_path / str(turn)).mkdir()
            one, other = pool.map(end, (folder, folder), ("died", "error"))
            assert one == other
            assert [path.name for path in folder.iterdir()] == ["outcome"]
