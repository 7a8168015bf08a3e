from copy import deepcopy
from threading import Event, Thread

import pytest
import torch
from torch import nn

import extractors
from extractors.computing.devices import cache_casts, cast_layers, precision_context
from schemas.errors import UsageError
from schemas.process.devices import check_precision, resolve_device
from tests.fake_gpu import fake_gpu

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


def pretend_gpus(monkeypatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("device", "gpus", "expected"),
    [
        ("cpu", 0, "cpu"),
        ("cpu", 2, "cpu"),
        ("auto", 0, "cpu"),
        ("auto", 2, "cuda:0"),
        ("cuda", 1, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
    ],
)
def test_resolve_device_returns_requested_device(monkeypatch, device, gpus, expected):
    pretend_gpus(monkeypatch, gpus)
    assert resolve_device(device) == torch.device(expected)


@pytest.mark.parametrize(("device", "gpus"), [("cuda", 0), ("cuda:0", 0), ("cuda:2", 2)])
def test_resolve_device_missing_gpu_names_host_state(monkeypatch, device, gpus):
    pretend_gpus(monkeypatch, gpus)
    with pytest.raises(
        UsageError, match=rf"'{device}' is not on this host: .*is_available\(\) is {gpus > 0}, .*is {gpus}, torch"
    ):
        resolve_device(device)


@pytest.mark.parametrize("device", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda0", "cuda:²"])
def test_resolve_device_invalid_name_raises(device):
    with pytest.raises(UsageError, match="expected 'cpu', 'cuda', 'cuda:N' or 'auto'"):
        resolve_device(device)


def test_check_precision_on_cpu():
    for precision in ("tf32", "fp16"):
        check_precision(precision, GPU)
    check_precision("fp32", CPU)
    with pytest.raises(UsageError, match="precision 'fp16' needs a GPU, but the device is 'cpu'"):
        check_precision("fp16", CPU)


@pytest.fixture
def gpu():
    with fake_gpu() as gpu:
        yield gpu


def switches() -> dict[str, object]:
    """Return all switches of torch, old and new; torch raises an error if one contradicts the other."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    return {
        "benchmark": cudnn.benchmark,
        "deterministic": cudnn.deterministic,
        "conv": cudnn.conv.fp32_precision,
        "rnn": cudnn.rnn.fp32_precision,
        "matmul": matmul.fp32_precision,
        "matmul on a CPU": torch.backends.mkldnn.matmul.fp32_precision,
        "old conv and rnn": cudnn.allow_tf32,
        "old matmul": matmul.allow_tf32,
        "old matmul, of three": torch.get_float32_matmul_precision(),
    }


@pytest.mark.parametrize(("precision", "tf32"), [("fp32", False), ("tf32", True), ("bf16", False), ("fp16", False)])
def test_precision_context_switches_tf32_inside_only(gpu, precision, tf32):
    before = switches()
    with precision_context(precision, GPU):
        value = "tf32" if tf32 else "ieee"
        assert switches() == {
            "benchmark": False,
            "deterministic": True,
            **dict.fromkeys(("conv", "rnn", "matmul"), value),
            "matmul on a CPU": "ieee",
            **dict.fromkeys(("old conv and rnn", "old matmul"), tf32),
            "old matmul, of three": "high" if tf32 else "highest",
        }
    assert switches() == before


@pytest.mark.parametrize("name", ["conv", "rnn", "matmul"])
def test_precision_context_restores_contradicting_switches(gpu, name):
    """A program may have set one of the new switches, after which torch refuses to tell the old ones."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    owner = {"conv": cudnn.conv, "rnn": cudnn.rnn, "matmul": matmul}[name]
    before = owner.fp32_precision
    value = owner.fp32_precision = "tf32" if name == "matmul" else "ieee"
    try:
        with precision_context("fp32", GPU):
            assert {cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision, matmul.fp32_precision} == {"ieee"}
        assert owner.fp32_precision == value
    finally:
        owner.fp32_precision = before


def test_precision_context_sets_gpu_of_thread_and_restores_after_error(gpu):
    """Page-locked memory names no device: it would open a context on the first GPU, in every worker."""
    before = switches()
    with precision_context("tf32", torch.device("cuda", 3)):
        assert gpu.device == 3
    with pytest.raises(ZeroDivisionError, match="by zero"), precision_context("tf32", GPU):
        1 / 0  # noqa: B018
    assert (switches(), gpu.device) == (before, None)
    with precision_context("fp32", CPU):
        assert (switches(), gpu.device) == (before, None)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "waits"), [("tf32", True), ("bf16", False)])
def test_precision_context_waits_for_other_switches_only(gpu, precision, waits):
    before, entered, leave = switches(), Event(), Event()

    def other() -> None:
        with precision_context(precision, torch.device("cuda", 1)):
            entered.set()
            assert leave.wait(30)

    thread = Thread(target=other)
    with precision_context("fp32", GPU):
        inside = switches()
        thread.start()
        assert entered.wait(0.2 if waits else 30) != waits
    assert entered.wait(30)
    assert (switches() == inside) != waits
    leave.set()
    thread.join(30)
    assert switches() == before != inside


def test_cast_layers_skips_nested_norm():
    layer = nn.Conv2d(3, 8, 3)
    layer.norm = nn.BatchNorm2d(8)
    assert cast_layers(layer, "bf16") == torch.bfloat16
    assert {name: values.dtype for name, values in layer.state_dict().items()} == {
        "weight": torch.bfloat16,
        "bias": torch.bfloat16,
        **{f"norm.{name}": torch.float32 for name in ("weight", "bias", "running_mean", "running_var")},
        "norm.num_batches_tracked": torch.int64,
    }


def test_cast_layers_equals_autocast():
    torch_random = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8, 4)).eval()
    images = torch.rand(2, 3, 3, 3, generator=torch_random)
    with torch.inference_mode():
        with torch.autocast("cpu", torch.bfloat16):
            expected = model(images)
        dtype = cast_layers(model, "bf16")
        assert dtype == torch.bfloat16
        assert model[1].weight.dtype == torch.float32
        assert torch.equal(model(images.to(dtype)), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compile_on_gpu_is_close_to_plain():
    pixels = torch.randint(0, 256, (5, 3, 224, 224), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    plain, compiled = (
        extractors.load_extractor("resnet50-pool", weights="random:0", device="cuda", compile=compile).extract(pixels)
        for compile in (False, True)  # noqa: A001
    )
    assert abs(compiled - plain).max() <= 1e-4 * abs(plain).max()


class Mixed(nn.Module):
    """Layers of torch, one of a derived class, one whose weights are used beside its forward, and a block without autocast."""

    class Standardised(nn.Conv2d):
        def forward(self, values):
            weight = (self.weight - self.weight.mean((1, 2, 3), keepdim=True)) / self.weight.std((1, 2, 3), keepdim=True)
            return self._conv_forward(values, weight, self.bias)

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, stride=2, groups=1)
        self.second = self.Standardised(8, 8, 3, padding_mode="reflect", padding=1)
        self.third, self.fourth = nn.Linear(8, 5, bias=False), nn.Linear(5, 4)

    def forward(self, values):
        maps = self.second(self.first(values).relu()).mean((2, 3))
        found = self.third(maps) + torch.linspace(0, 1, 5, dtype=self.third.weight.dtype)
        with torch.autocast("cpu", enabled=False):
            return self.fourth(found.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cache_casts_preserves_results_and_weights(dtype):
    torch.manual_seed(0)
    model, values = Mixed().eval().requires_grad_(False), torch.randn(4, 3, 16, 16)
    state, plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}, deepcopy(model)
    with torch.autocast("cpu", dtype):
        expected = model(values)
        cache_casts(model, dtype)
        assert model(values).equal(expected)
    assert model.first.cast_weight.dtype == model.third.cast_weight.dtype == dtype
    assert type(model.second) is Mixed.Standardised
    assert model.state_dict().keys() == state.keys()
    assert all(tensor.equal(state[name]) and tensor.dtype == torch.float32 for name, tensor in model.state_dict().items())
    assert model(values).equal(plain(values))
