import pytest
import torch

from schemas.errors import DatasetError
from train.runs.run import open_run


def test_open_run(write_run, toy):
    path = write_run(languages=("de", "en"), similarity="order", seed=3)
    state = torch.random.get_rng_state()
    run = open_run(path)
    assert run.step == 7
    assert (run.seed, run.precision, run.captions) == (3, "fp32", {"text": {"recipe": "raw"}})
    assert run.config.data.languages == run.model.languages == ("de", "en")
    assert run.model.similarity == "order"
    assert not run.model.training
    assert run.vocabulary.tokens[:4] == ("<pad>", "<start>", "<end>", "<unk>")
    assert run.vocabulary.encode([run.vocabulary.tokens[9]]) == [1, 9, 2]
    assert set(run.fingerprints) == {"captions", "features", "vocabulary", "extractor"}
    assert torch.equal(torch.random.get_rng_state(), state)
    again = open_run(path)
    assert all(torch.equal(a, b) for a, b in zip(run.model.parameters(), again.model.parameters(), strict=True))


def test_a_folder_that_is_not_a_run_is_refused(write_run, tmp_path):
    with pytest.raises(DatasetError, match=r"is not a run: it holds no best\.pt"):
        open_run(tmp_path / "nothing")
    with pytest.raises(DatasetError, match=r"is not a run: it holds no last\.pt"):
        open_run(write_run(), checkpoint="last")
