import threading

import pytest
import torch

from extractors.computing.passes import (
    FORWARD_IMAGES,
    Fitted,
    in_chunks,
    in_halves,
    passes_share_threads,
    run_single_threaded,
    single_threaded_pool,
)
from schemas.errors import ImagepivotError
from tests.threads import threads_of_torch


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    with threads_of_torch(request.param):
        yield request.param


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


def test_several_pools_at_once_limit_their_own_threads_alone(threads):
    """Begun by threads that have not used torch before, as those of a worker."""
    seen: list[tuple[set[int], int]] = []

    def work() -> None:
        with single_threaded_pool(3, "some") as pool:
            inside = set(pool.map(lambda _: torch.get_num_threads(), range(30)))
            seen.append((inside, torch.get_num_threads()))

    callers = [threading.Thread(target=work) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert seen == [({1}, threads)] * 8
    assert torch.get_num_threads() == threads


def test_all_threads_work_at_once(threads):
    barrier = threading.Barrier(threads, timeout=20)

    def wait(item):
        barrier.wait()
        return item

    assert len(run_single_threaded(wait, [torch.zeros(1)] * threads * 3)) == threads * 3


def test_several_callers_share_threads_if_there_are_several(threads):
    assert passes_share_threads() == (threads > 1)
    names: set[str] = set()

    def note(item):
        names.add(threading.current_thread().name)
        return item

    callers = [threading.Thread(target=run_single_threaded, args=(note, range(50)), name=f"caller{n}") for n in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(names) <= max(2, threads)
    assert {name.startswith("extractor") for name in names} == {threads > 1}


def test_gradients_are_off_and_errors_come_through(threads):
    weight = torch.ones(1, requires_grad=True)
    assert not any(out.requires_grad for out in run_single_threaded(lambda item: item * weight, [torch.zeros(1)] * 4))

    def fail(item):
        raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        run_single_threaded(fail, [torch.zeros(1)] * 4)


class SmallDevice:
    """Doubles batches of at most ``limit`` images, and has no memory for more."""

    def __init__(self, limit: int, error: RuntimeError | None = None) -> None:
        self.limit = limit
        self.error = error or torch.cuda.OutOfMemoryError("CUDA out of memory")
        self.sizes: list[int] = []

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(batch))
        if len(batch) > self.limit:
            raise self.error
        return batch * 2


@pytest.mark.parametrize(("limit", "sizes"), [(99, [13]), (7, [13, 7, 6]), (4, [13, 7, 4, 4, 4, 1])])
def test_halves_go_on_after_running_out_of_memory(limit, sizes, caplog):
    batch, device = torch.arange(13), SmallDevice(limit)
    assert torch.equal(in_halves(device, batch), batch * 2)
    assert device.sizes == sizes
    told = [] if limit >= 13 else [f"out of device memory with 13 images at once; going on with {limit}"]
    assert [record.getMessage() for record in caplog.records] == told


def test_what_fitted_is_remembered_and_told_once(caplog):
    device, fitted = SmallDevice(5), Fitted()
    for start in range(3):
        batch = torch.arange(start, start + 13)
        assert torch.equal(in_halves(device, batch, fitted), batch * 2)
    assert device.sizes == [13, 7, *([4, 4, 4, 1] * 3)]
    assert torch.equal(in_halves(device, torch.arange(3), fitted), torch.arange(3) * 2)
    assert device.sizes[-1] == 3
    assert len(caplog.records) == 1


def test_what_fitted_is_remembered_by_the_shape_of_an_item(caplog):
    """Long captions take more memory than short ones; the log has one line for all."""
    device, fitted = SmallDevice(8), Fitted()
    for length, count in ((3, 8), (9, 10), (3, 8), (9, 10), (5, 10)):
        in_halves(device, torch.zeros(count, length), fitted)
    assert device.sizes == [8, 10, 5, 5, 8, 5, 5, 10, 5, 5]
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "message",
    [
        "CUDA out of memory. Tried to allocate 20.00 MiB",
        "CUDA error: out of memory",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "GET was unable to find an engine to execute this computation",
        "FIND was unable to find an engine to execute this computation",
    ],
)
def test_the_errors_of_all_libraries_count_as_out_of_memory(message):
    device = SmallDevice(4, RuntimeError(message))
    assert torch.equal(in_halves(device, torch.arange(7)), torch.arange(7) * 2)
    assert device.sizes == [7, 4, 3]


def test_other_errors_come_through():
    device = SmallDevice(4, RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        in_halves(device, torch.arange(7))
    assert device.sizes == [7]


def test_nothing_is_handed_on():
    assert in_halves(SmallDevice(4), torch.zeros(0, 3)).shape == (0, 3)


def test_one_image_too_many_is_an_error():
    with pytest.raises(ImagepivotError, match="does not hold the model and one image"):
        in_halves(SmallDevice(0), torch.arange(3))
