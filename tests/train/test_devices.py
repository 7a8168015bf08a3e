import pytest
import torch

from schemas.errors import UsageError
from schemas.process.devices import check_precision
from tests.fake_gpu import fake_gpu
from train.devices import choose_device, computing

CPU = torch.device("cpu")


def test_auto_prefers_a_gpu(monkeypatch):
    assert choose_device("cpu") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == CPU
    with pytest.raises(UsageError, match=r"device 'cuda:0' is not on this host: torch.cuda.is_available\(\) is False"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda", 3)
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(UsageError, match="device 'cuda:4' is not on this host"):
        choose_device("cuda:4")


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_matrix_products_have_the_precision(precision, dtype):
    check_precision(precision, CPU)
    with computing(precision, CPU):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    check_precision("tf32", torch.device("cuda", 0))
    with pytest.raises(UsageError, match="precision 'tf32' needs a GPU"):
        check_precision("tf32", CPU)


def switches() -> list[object]:
    """Return all switches of torch, old and new; torch raises an error if one contradicts the other."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    new = [owner.fp32_precision for owner in (cudnn.conv, cudnn.rnn, matmul)]
    return [*new, cudnn.allow_tf32, matmul.allow_tf32, torch.get_float32_matmul_precision()]


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("fp32", ["ieee", "ieee", "ieee", False, False, "highest"]),
        ("tf32", ["tf32", "tf32", "tf32", True, True, "high"]),
        ("bf16", ["ieee", "ieee", "ieee", False, False, "highest"]),
    ],
)
def test_switches_of_a_gpu_are_restored(precision, expected):
    before = switches()
    with fake_gpu() as gpu:
        with computing(precision, torch.device("cuda", 2)):
            assert switches() == expected
            assert gpu.device == 2
        assert switches() == before
        assert gpu.device is None
