import pytest
import torch

from extractors.computing.oom import BatchLimits, run_with_oom_retry
from schemas.errors import ImagepivotError


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
def test_run_with_oom_retry_halves_the_batch(limit, sizes, caplog):
    batch, device = torch.arange(13), SmallDevice(limit)
    assert torch.equal(run_with_oom_retry(device, batch), batch * 2)
    assert device.sizes == sizes
    told = [] if limit >= 13 else [f"out of GPU memory with a batch of 13 images: continuing with {limit}"]
    assert [record.getMessage() for record in caplog.records] == told


def test_run_with_oom_retry_remembers_size_and_warns_once(caplog):
    device, fitted = SmallDevice(5), BatchLimits()
    for start in range(3):
        batch = torch.arange(start, start + 13)
        assert torch.equal(run_with_oom_retry(device, batch, fitted), batch * 2)
    assert device.sizes == [13, 7, *([4, 4, 4, 1] * 3)]
    assert torch.equal(run_with_oom_retry(device, torch.arange(3), fitted), torch.arange(3) * 2)
    assert device.sizes[-1] == 3
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
def test_run_with_oom_retry_recognizes_errors_of_libraries(message):
    device = SmallDevice(4, RuntimeError(message))
    assert torch.equal(run_with_oom_retry(device, torch.arange(7)), torch.arange(7) * 2)
    assert device.sizes == [7, 4, 3]


def test_run_with_oom_retry_raises_other_errors():
    device = SmallDevice(4, RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run_with_oom_retry(device, torch.arange(7))
    assert device.sizes == [7]


def test_run_with_oom_retry_empty_batch():
    assert run_with_oom_retry(SmallDevice(4), torch.zeros(0, 3)).shape == (0, 3)


def test_run_with_oom_retry_single_image_raises():
    with pytest.raises(ImagepivotError, match="too small for the model and one image"):
        run_with_oom_retry(SmallDevice(0), torch.arange(3))
