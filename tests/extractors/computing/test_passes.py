import threading

import pytest
import torch

from extractors.computing.passes import FORWARD_IMAGES, in_chunks, in_halves, run_single_threaded
from schemas.errors import ImagepivotError


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("images", [1, 2, 3, 7, 16])
def test_chunks_have_one_size_and_results_keep_the_order(threads, images):
    sizes = []

    def double(chunk):
        sizes.append(len(chunk))
        return chunk * 2

    batch = torch.arange(images * 3).view(images, 3)
    assert torch.equal(in_chunks(double, batch), batch * 2)
    assert sizes == [FORWARD_IMAGES] * -(-images // FORWARD_IMAGES)


def test_torch_has_one_thread_inside_and_keeps_its_threads_outside(threads):
    seen = run_single_threaded(lambda _: torch.tensor(torch.get_num_threads()), [torch.zeros(1)] * 20)
    assert {int(number) for number in seen} == {1}
    assert torch.get_num_threads() == threads
    fresh: list[int] = []
    thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert fresh == [threads]


def test_all_threads_work_at_once(threads):
    barrier = threading.Barrier(threads, timeout=20)

    def wait(item):
        barrier.wait()
        return item

    assert len(run_single_threaded(wait, [torch.zeros(1)] * threads * 3)) == threads * 3


def test_gradients_are_off_and_errors_come_through(threads):
    weight = torch.ones(1, requires_grad=True)
    assert not any(out.requires_grad for out in run_single_threaded(lambda item: item * weight, [torch.zeros(1)] * 4))

    def fail(item):
        raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        run_single_threaded(fail, [torch.zeros(1)] * 4)


class SmallDevice:
    """Doubles batches of at most ``limit`` images, and has no memory for more."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.sizes: list[int] = []

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(batch))
        if len(batch) > self.limit:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return batch * 2


@pytest.mark.parametrize(("limit", "sizes"), [(99, [13]), (7, [13, 7, 6]), (4, [13, 7, 4, 3, 6, 3, 3])])
def test_halves_go_on_after_running_out_of_memory(limit, sizes, caplog):
    batch, device = torch.arange(13), SmallDevice(limit)
    assert torch.equal(in_halves(device, batch), batch * 2)
    assert device.sizes == sizes
    assert ("out of device memory with 13 images at once; going on with 7" in caplog.text) == (limit < 13)


def test_one_image_too_many_is_an_error():
    with pytest.raises(ImagepivotError, match="does not hold the model and one image"):
        in_halves(SmallDevice(0), torch.arange(3))
