"""Commands over text write the same files in one process, in several, and with Beam."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.jobs import CaptionsJob, EncodeJob, VocabularyJob
from pipelines.running.execution import Execution
from pipelines.text.captions import prepare_captions
from pipelines.text.encoding import encode_captions
from pipelines.text.vocabulary import build_vocabulary
from tests.beam import IN_BEAM
from tests.builders import tree
from tests.pipelines.text.captions import caption, random_captions, write_table

IN_PROCESS, TWO = Execution(workers=1), Execution(workers=2)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    captions = [*random_captions(3), caption(text=" ")]  # The last is a failure.
    return write_table(tmp_path_factory.mktemp("text") / "captions.tsv", captions)


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize("other", [TWO, IN_BEAM], ids=["two workers", "Beam"])
def test_every_file_is_the_same_in_one_process_in_two_and_with_beam(table, tmp_path, other):
    (tmp_path / "in_process").mkdir()
    (tmp_path / "other").mkdir()

    def write(execution: Execution, output: Path) -> dict[str, dict[str, bytes]]:
        lower, true, words, ids = (str(output / name) for name in ("lower", "true", "words", "ids"))
        prepare_captions(CaptionsJob(str(table), lower, "table", shards=3), execution)
        truecased = CaptionsJob(str(table), true, "table", recipe="moses-truecase", train_splits=("train", "val"), shards=3)
        prepare_captions(truecased, execution)
        build_vocabulary(VocabularyJob(lower, words, min_count=2), execution)
        encode_captions(EncodeJob(lower, words, ids), execution)
        return {folder.name: tree(folder) for folder in output.iterdir()}

    alone, shared = write(IN_PROCESS, tmp_path / "in_process"), write(other, tmp_path / "other")
    assert [len(alone[name]) for name in ("lower", "true", "words", "ids")] == [8, 10, 4, 7]
    assert shared == alone
