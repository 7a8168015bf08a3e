"""Fixtures of a small corpus and a run, which those of `train` define."""

from tests.train.conftest import finished_run, toy  # noqa: F401
