"""The supply of batches against a sampler and a material that are used by hand."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from tests.train.region_models import REGION_CONFIG
from tests.train.trainings import CONFIG
from train.config.sections import from_toml
from train.distributed import Processes
from train.material import Material, open_material
from train.supply import Supply

CPU = torch.device("cpu")


@pytest.fixture(params=["regions", "vectors"])
def data(request, toy, regions):
    """A configuration, its material, and whether it is read ahead."""
    text, corpus = (REGION_CONFIG, regions) if request.param == "regions" else (CONFIG, toy)
    config = from_toml(text, "test")
    return config, open_material(config, corpus, seed=0), request.param == "regions"


@pytest.mark.parametrize("processes", [Processes(), Processes(1, 3)])
def test_batches_states_and_epochs_are_those_of_the_sampler(data, processes):
    config, material, _ = data
    supply, sampler = Supply(material, material.sampler(config, 3), processes, CPU), material.sampler(config, 3)
    assert (supply.state(), supply.epoch, supply.epoch_steps) == (sampler.state(), 0, sampler.epoch_steps)
    with supply.reading():
        for _ in range(2 * sampler.epoch_steps + 5):
            batch, inputs = supply.next()
            expected = sampler.next()
            assert (batch.task, batch.images.tolist()) == (expected.task, expected.images.tolist())
            assert (supply.state(), supply.epoch) == (sampler.state(), sampler.epoch)
            rows = processes.rows(len(expected.images))
            wanted = material.inputs(expected, CPU, rows)
            assert inputs.numbers.tolist() == expected.images.tolist()
            assert [c.rows.tolist() for c in inputs.captions] == [c.rows.tolist() for c in wanted.captions]
            assert (inputs.images is None) == (wanted.images is None)
            if wanted.images is not None:
                assert torch.equal(inputs.images.features, wanted.images.features)
                assert (inputs.images.mask is None) == (wanted.images.mask is None)
                assert wanted.images.mask is None or torch.equal(inputs.images.mask, wanted.images.mask)
    assert supply.epoch == 2


def test_it_goes_on_where_it_stood(data):
    config, material, _ = data

    def images(supply: Supply, steps: int) -> list[list[int]]:
        with supply.reading():
            return [supply.next()[0].images.tolist() for _ in range(steps)]

    whole = images(Supply(material, material.sampler(config, 0), Processes(), CPU), 30)
    first = Supply(material, material.sampler(config, 0), Processes(), CPU)
    begun = images(first, 11)
    second = Supply(material, material.sampler(config, 0), Processes(), CPU)
    second.restore(first.state())
    assert begun + images(second, 19) == whole


def test_only_several_features_an_image_are_read_by_a_thread(data, monkeypatch):
    config, material, ahead = data
    seen, inputs = set(), Material.inputs

    def look(self, *arguments):
        seen.add(threading.current_thread() is threading.main_thread())
        return inputs(self, *arguments)

    monkeypatch.setattr(Material, "inputs", look)
    supply = Supply(material, material.sampler(config, 0), Processes(), CPU)
    with supply.reading():
        for _ in range(10):
            supply.next()
    assert seen == {not ahead}


def test_a_gpu_takes_what_a_thread_has_pinned(regions, monkeypatch):
    config = from_toml(REGION_CONFIG.replace("0.5", "0"), "test")
    material = open_material(config, regions, seed=0)
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
    supply = Supply(material, material.sampler(config, 0), Processes(), torch.device("cuda", 1))
    with supply.reading():
        supply.next()
    kinds = {torch.int64, torch.float32, torch.bool}
    assert set(pinned) == {(dtype, False) for dtype in kinds}
    assert {dtype for dtype, _ in moved} == kinds
    assert all(how == {"non_blocking": True} for _, how in moved)


def test_an_error_of_the_thread_keeps_its_message(regions):
    config = from_toml(REGION_CONFIG, "test")
    material = open_material(config, regions, seed=0)
    features = material.training.features
    broken = replace(material, training=replace(material.training, features=replace(features, rows=features.rows[:3])))
    supply = Supply(broken, broken.sampler(config, 0), Processes(), CPU)

    def work() -> None:
        with supply.reading():
            while True:
                supply.next()

    with pytest.raises(IndexError, match="is out of bounds for axis 0 with size 3"):
        work()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetching")]
