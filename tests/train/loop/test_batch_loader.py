"""Batches and prefetching, against a sampler and training inputs used by hand."""

import threading

import pytest
import torch

from tests.train.region_models import REGION_CONFIG
from tests.train.trainings import CONFIG
from train.config.sections import from_toml
from train.loop.batch_loader import BatchLoader
from train.loop.distributed import DistributedContext
from train.loop.training_data import TrainingInputs, load_training_inputs

CPU = torch.device("cpu")


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetching")]


@pytest.fixture(params=["regions", "vectors"])
def data(request, toy, regions):
    """A configuration, its training inputs, and whether batches are prefetched."""
    text, corpus = (REGION_CONFIG, regions) if request.param == "regions" else (CONFIG, toy)
    config = from_toml(text, "test")
    return config, load_training_inputs(config, corpus, seed=0), request.param == "regions"


@pytest.fixture
def region_inputs(regions):
    """A configuration without pairs of captions, and its training inputs."""
    config = from_toml(REGION_CONFIG.replace("0.5", "0"), "test")
    return config, load_training_inputs(config, regions, seed=0)


@pytest.mark.parametrize("processes", [DistributedContext(), DistributedContext(1, 3)])
def test_loader_equals_the_sampler(data, processes):
    config, training_inputs, ahead = data
    sampler = training_inputs.sampler(config, 3)
    loader = BatchLoader(training_inputs, training_inputs.sampler(config, 3), processes, CPU)
    assert (loader.position, loader.epoch, loader.epoch_steps) == (sampler.position(), 0, sampler.epoch_steps)
    with loader.prefetching():
        for _ in range(2 * sampler.epoch_steps + 5):
            batch, inputs = loader.next()
            assert bool(threads()) == ahead  # Of several features only.
            expected = sampler.next()
            assert (batch.task, batch.images.tolist()) == (expected.task, expected.images.tolist())
            assert (loader.position, loader.epoch) == (sampler.position(), sampler.epoch)
            rows = processes.rows(len(expected.images))
            wanted = training_inputs.inputs(expected, CPU, rows)
            assert inputs.numbers.tolist() == expected.images.tolist()
            assert [c.rows.tolist() for c in inputs.captions] == [c.rows.tolist() for c in wanted.captions]
            assert (inputs.images is None) == (wanted.images is None)
            if wanted.images is not None:
                assert torch.equal(inputs.images.features, wanted.images.features)
                assert (inputs.images.mask is None) == (wanted.images.mask is None)
                assert wanted.images.mask is None or torch.equal(inputs.images.mask, wanted.images.mask)
    assert loader.epoch == 2


def test_loader_resumes_from_a_state_and_after_prefetching(data):
    config, training_inputs, _ = data
    whole, first, second = (
        BatchLoader(training_inputs, training_inputs.sampler(config, 0), DistributedContext(), CPU) for _ in range(3)
    )

    def images(loader: BatchLoader, steps: int) -> list[list[int]]:
        return [loader.next()[0].images.tolist() for _ in range(steps)]

    with whole.prefetching():
        expected = images(whole, 20)
    expected += images(whole, 10)
    with first.prefetching():
        begun = images(first, 11)
    second.restore(first.position)
    assert begun + images(second, 19) == begun + images(first, 19) == expected


def test_loader_prefetches_two_batches_and_raises_in_order(region_inputs, monkeypatch):
    config, training_inputs = region_inputs
    sampler, inputs = training_inputs.sampler(config, 0), TrainingInputs.inputs
    read, returned, go_on = [], [], threading.Event()

    def look(self, *arguments):
        read.append(threading.current_thread().name)
        if len(read) == 4:
            go_on.wait(60)
            raise OSError("the disk is gone")
        return inputs(self, *arguments)

    monkeypatch.setattr(TrainingInputs, "inputs", look)
    expected, drawn, draw = training_inputs.sampler(config, 0), [], sampler.next
    monkeypatch.setattr(sampler, "next", lambda: drawn.append(threading.current_thread()) or draw())
    loader = BatchLoader(training_inputs, sampler, DistributedContext(), CPU)

    def work() -> None:
        with loader.prefetching():
            for count in range(1, 5):
                returned.append(loader.next()[0].images.tolist())
                assert len(drawn) == count + 2
                if count == 3:
                    go_on.set()

    with pytest.raises(OSError, match="the disk is gone"):
        work()
    assert returned == [expected.next().images.tolist() for _ in range(3)]
    assert set(read) == {"prefetching_0"}
    assert set(drawn) == {threading.current_thread()}
    assert threads() == []
