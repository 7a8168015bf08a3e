from pathlib import Path

import numpy as np
import pytest

from schemas.dataset import Dataset, open_dataset
from schemas.errors import UsageError
from schemas.features import FeatureSpec
from tests.train.trainings import SMALL, reproduce_job
from train.config.sections import load_config
from train.jobs import Corpus, ReproduceJob
from train.reports.row_datasets import corpora_of, features_for

SEVERAL = {
    "crops": {"extractor": {"name": "vgg19-10crop", "separate": True}},
    "grid": {"extractor": {"name": "resnet152-grid", "grid": [2, 2]}},
    "imported": {"imported": {"format": "npy"}},
}


@pytest.fixture
def given(new_dataset, regions, toy, tmp_path) -> dict[str, Dataset]:
    """A dataset of each sort, by its folder."""
    for name, parameters in SEVERAL.items():
        rows = [{"image_id": "a", "feature": np.ones(32, np.float32)}]
        new_dataset(tmp_path / name, "features", rows, parameters=parameters, spec=FeatureSpec(name, (4, 8)))
    folders = {"vector": toy.features, "regions": regions.features, **{name: str(tmp_path / name) for name in SEVERAL}}
    return {name: open_dataset(folder) for name, folder in folders.items()}


@pytest.mark.parametrize(
    ("preset", "fitting"),
    [
        ("gella2017/vse-en", ["vector"]),
        ("vsepp", ["vector"]),
        ("huang2019/mha-d", ["regions", "imported"]),
        ("scan/t2i-avg", ["regions", "imported"]),
        ("huang2019/mha-d-vgg19", ["crops", "imported"]),
    ],
)
def test_features_for_takes_the_first_fitting_dataset(given, preset, fitting):
    config = load_config(preset)
    found = [name for name, dataset in given.items() if features_for(preset, config, {name: dataset})[0]]
    assert found == fitting
    assert features_for(preset, config, given) == (fitting[0], "")
    location, lacking = features_for(preset, config, {name: one for name, one in given.items() if name not in fitting})
    assert location == ""
    assert lacking.endswith("(--features FOLDER, which may be repeated)")


def job_of(given: dict[str, Dataset], *names: str, rows: tuple[str, ...] = ("*",), paper="huang2019") -> ReproduceJob:
    first, *others = (given[name].folder.location for name in names)
    corpus = Corpus("captions", first, "vocabulary")
    return reproduce_job(paper, "o", corpus, *others, rows=rows, overrides=SMALL)


def test_table_is_divided_among_the_features(given):
    rows = ("vsepp", "mha-d", "mha-d-vgg19", "scan/t2i-avg+i2t-lse")
    job = job_of(given, "vector", "regions", "crops", rows=rows)
    corpora, remarks = corpora_of(job)
    assert {preset: Path(corpus.features).name for preset, corpus in corpora.items()} == {
        "vsepp": "features",
        "scan/t2i-avg": "regions",
        "scan/i2t-lse": "regions",
        "huang2019/mha-d-vgg19": "crops",
        "huang2019/mha-d": "regions",
        "scan/t2i-avg+i2t-lse": "regions",
    }
    assert remarks == []
    corpora, remarks = corpora_of(job_of(given, "vector", rows=rows))
    assert list(corpora) == ["vsepp"]
    assert sorted(remarks) == [
        "left out for lack of regions, such as 'faster-rcnn-36' (--features FOLDER, which may be repeated): huang2019/mha-d, "
        "scan/t2i-avg, scan/i2t-lse, scan/t2i-avg+i2t-lse",
        "left out for lack of separate crops, as those of 'vgg19-10crop' with imagepivot features --keep-crops (--features "
        "FOLDER, which may be repeated): huang2019/mha-d-vgg19",
    ]


def test_corpora_of_unused_features_is_refused(given):
    with pytest.raises(UsageError, match=r"--features '.*crops' is given, but no row that is chosen takes these features"):
        corpora_of(job_of(given, "vector", "crops", rows=("vsepp",)))
    with pytest.raises(UsageError, match="nothing to train: left out for lack of one vector per image"):
        corpora_of(job_of(given, "regions", paper="gella2017"))
