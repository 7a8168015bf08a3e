import threading

import pytest
import torch

from extractors.computing.cpu_parallel import (
    FORWARD_IMAGES,
    run_in_chunks,
    run_single_threaded,
    single_threaded_pool,
)
from tests.threads import threads_of_torch


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    with threads_of_torch(request.param):
        yield request.param


@pytest.mark.parametrize("images", [1, 2, 3, 7, 16])
def test_run_in_chunks_has_fixed_size_and_keeps_order(threads, images):
    sizes = []

    def double(chunk):
        sizes.append(len(chunk))
        return chunk * 2

    batch = torch.arange(images * 3).view(images, 3)
    assert torch.equal(run_in_chunks(double, batch), batch * 2)
    assert sizes == [FORWARD_IMAGES] * -(-images // FORWARD_IMAGES)


def test_run_single_threaded_limits_torch_inside_only(threads):
    seen = run_single_threaded(lambda _: torch.tensor(torch.get_num_threads()), [torch.zeros(1)] * 20)
    assert {int(number) for number in seen} == {1}
    assert torch.get_num_threads() == threads
    fresh: list[int] = []
    thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert fresh == [threads]


def test_single_threaded_pool_limits_own_threads_only(threads):
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


def test_run_single_threaded_disables_gradients_and_raises_errors(threads):
    weight = torch.ones(1, requires_grad=True)
    assert not any(out.requires_grad for out in run_single_threaded(lambda item: item * weight, [torch.zeros(1)] * 4))

    def fail(item):
        raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        run_single_threaded(fail, [torch.zeros(1)] * 4)
