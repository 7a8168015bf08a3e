import io
from itertools import count

import pytest
from PIL import Image

from pipelines.doctor import rates
from pipelines.doctor.rates import check_rates, draw_photo, read_sample, verdict
from pipelines.inputs.images import open_images
from schemas.errors import InputError
from tests.fake_extractors import ColourExtractor


def ticking(seconds: float):
    """A clock that goes on by so many seconds whenever it is looked at."""
    ticks = count()
    return lambda: next(ticks) * seconds


def test_a_drawn_photo_is_one_to_decode():
    data = draw_photo(3)
    assert Image.open(io.BytesIO(data)).size == (500, 375)
    assert 90_000 < len(data) < 180_000  # Those of Flickr30k have 138,000 on average.
    assert (draw_photo(3), draw_photo(4) == data) == (data, False)


@pytest.fixture
def folder(tmp_path):
    for number in range(3):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number}.png")
    return tmp_path


def test_images_are_read(folder):
    size = sum(path.stat().st_size for path in folder.iterdir())
    sample, found = read_sample(open_images(folder), ticking(0.5))
    assert sorted(sample) == sorted(path.read_bytes() for path in folder.iterdir())
    assert (found.status, found.values["images"], found.values["failed"]) == ("ok", 3, 0)
    assert found.values["images_per_second"] == 6.0
    assert found.values["bytes_per_second"] == 2 * size


def test_images_that_cannot_be_read(folder):
    (folder / "2.png").unlink()
    (folder / "2.png").symlink_to("nowhere")
    sample, found = read_sample(open_images(folder))
    assert len(sample) == 2
    assert (found.status, found.values["failed"]) == ("note", 1)
    assert "'2.png'" in found.advice
    for number in range(2):
        (folder / f"{number}.png").unlink()
    with pytest.raises(InputError, match=r"none of the first 1 images of .* can be read: '2\.png'"):
        read_sample(open_images(folder))


def test_rates_of_one_thread_of_all_and_of_the_model(monkeypatch):
    monkeypatch.setattr(rates, "usable_cores", lambda: 4)
    sample = [draw_photo(0), b"no image", draw_photo(1)]
    # Each rate is of one round: the clock goes on by 2.5 seconds between its two looks.
    decoding, model, bound = check_rates(ColourExtractor(), sample, on_gpu=False, batch_size=5, clock=ticking(2.5))
    assert (decoding.status, decoding.found) == (
        "note",
        "1.2 s each in one thread, 1.2 s each in 4; 1 of 3 cannot be decoded",
    )
    assert decoding.values == {"per_second_of_one": 0.8, "per_second_of_all": 0.8, "threads": 4, "failed": 1}
    assert model.values == {"per_second": 2.0, "batch_size": 5, "extractor": "fake"}
    assert bound.values == {"bottleneck": "decoding", "per_second": 0.8}


@pytest.mark.parametrize(("on_gpu", "size"), [(False, 8), (True, 16)])
def test_batches_are_smaller_on_a_cpu(monkeypatch, on_gpu, size):
    monkeypatch.setattr(rates, "usable_cores", lambda: 1)
    decoding, model, _ = check_rates(ColourExtractor(), [draw_photo()], on_gpu=on_gpu, clock=ticking(3))
    assert model.values["batch_size"] == size
    assert decoding.values["threads"] == 1


def test_images_of_which_none_can_be_decoded():
    with pytest.raises(InputError, match="none of 2 images can be decoded: "):
        list(check_rates(ColourExtractor(), [b"x", b"y"], on_gpu=False))


@pytest.mark.parametrize(
    ("given", "bottleneck", "status", "advice"),
    [
        ({"model": 3, "decoding": 90, "reading": None, "on_gpu": False}, "model", "ok", "a GPU is many times faster"),
        ({"model": 900, "decoding": 4000, "reading": 5000, "on_gpu": True}, "model", "ok", ""),
        ({"model": 900, "decoding": 300, "reading": 5000, "on_gpu": True}, "decoding", "note", "give each GPU more cores"),
        ({"model": 900, "decoding": 300, "reading": 50.5, "on_gpu": True}, "reading", "note", "a bucket of its region"),
    ],
)
def test_what_a_run_waits_for(given, bottleneck, status, advice):
    found = verdict(**given)
    assert (found.status, found.values["bottleneck"]) == (status, bottleneck)
    assert found.values["per_second"] == given[bottleneck]
    assert advice in found.advice
    assert bool(found.advice) == bool(advice)
