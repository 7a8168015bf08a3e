"""Fixtures of small corpora and runs, which those of `train` define."""

from tests.train.conftest import (  # noqa: F401
    finished_run,
    gappy,
    kinds,
    multi30k,
    toy,
    toy_2016,
    train_toy,
    with_equal_features,
    without_features,
    write_run,
)
