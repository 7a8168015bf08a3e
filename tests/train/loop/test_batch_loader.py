"""Batches and prefetching, against a sampler and training inputs used by hand."""

import threading
from contextlib import nullcontext

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


def test_loader_copies_pinned_memory_to_a_gpu(region_inputs, monkeypatch):
    config, training_inputs = region_inputs
    pinned, moved, moving = [], [], torch.Tensor.to

    def pin(self):
        pinned.append((self.dtype, threading.current_thread() is threading.main_thread()))
        return self

    def to(self, device, **how):
        if device == torch.device("cuda", 1):
            moved.append((self.dtype, how))
            return self
        return moving(self, device, **how)

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    loader = BatchLoader(training_inputs, training_inputs.sampler(config, 0), DistributedContext(), torch.device("cuda", 1))
    with loader.prefetching():
        loader.next()
    kinds = {torch.int64, torch.float32, torch.bool}
    assert set(pinned) == {(dtype, False) for dtype in kinds}
    assert {dtype for dtype, _ in moved} == kinds
    assert all(how == {"non_blocking": True} for _, how in moved)


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


def test_prefetching_interrupted_waits_for_the_current_batch(region_inputs, monkeypatch):
    config, training_inputs = region_inputs
    read, started, go_on, inputs = [], threading.Event(), threading.Event(), TrainingInputs.inputs

    def slowly(self, *arguments):
        if len(read) == 1:
            started.set()
            go_on.wait(60)
        read.append(threading.current_thread())
        return inputs(self, *arguments)

    monkeypatch.setattr(TrainingInputs, "inputs", slowly)
    loader = BatchLoader(training_inputs, training_inputs.sampler(config, 0), DistributedContext(), CPU)

    def work() -> None:
        with loader.prefetching():
            loader.next()
            assert started.wait(60)
            threading.Timer(0.05, go_on.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert len(read) == 2
    assert threads() == []
