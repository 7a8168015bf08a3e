from collections.abc import Callable

import pytest
import torch
import torchvision
from torch import Tensor, fx, nn
from torch.nn import functional as F  # noqa: N812

from extractors.computing import shapes
from extractors.computing.shapes import shapes_of


def traced(model: nn.Module) -> fx.GraphModule:
    return fx.symbolic_trace(model.eval())


def computed(model: nn.Module, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Shapes of what each node really makes."""
    found: dict[str, tuple[int, ...]] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Tensor:
            made = super().run_node(n)
            if isinstance(made, Tensor):
                found[n.name] = tuple(made.shape)
            return made

    Recorder(traced(model)).run(torch.zeros(shape))
    return {name: shape for name, shape in found.items() if name != "output"}


def without_output(found: dict[str, torch.Size]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for name, shape in found.items() if name != "output"}


def refuse(*_arguments: object) -> None:
    raise AssertionError("ran on the meta device")


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, kernel_size=(3, 5), stride=(2, 1), padding=(0, 2), dilation=(1, 2))
        self.norm, self.relu, self.pool = nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1, dilation=2)

    def forward(self, values: Tensor) -> Tensor:
        maps = self.norm(self.conv(values))
        maps = torch.add(F.relu(maps), self.relu(maps))
        maps += maps
        return self.pool(maps + maps)


class ByName(nn.Sequential):
    def forward(self, values: Tensor) -> Tensor:
        return self[0](input=values)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 3, 40, 33), (3, 3, 41, 38)])
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(Sums, id="sums"),
        pytest.param(lambda: torchvision.models.vgg11(weights=None).features, id="vgg11"),
        pytest.param(lambda: nn.Sequential(*list(torchvision.models.resnet18(weights=None).children())[:-2]), id="resnet18"),
    ],
)
def test_shapes_of_known_layers_are_calculated(model: Callable[[], nn.Module], shape, monkeypatch):
    network = model()
    monkeypatch.setattr(shapes._Interpreter, "shapes_of", refuse)
    assert without_output(shapes_of(traced(network), shape, torch.float32)) == computed(network, shape)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding="same"), nn.ReLU()), id="padding in words"),
        pytest.param(lambda: nn.Sequential(nn.MaxPool2d(2, ceil_mode=True)), id="rounded up"),
        pytest.param(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()), id="other layers"),
        pytest.param(lambda: ByName(nn.Conv2d(3, 4, 3)), id="an input by its name"),
    ],
)
def test_shapes_of_anything_else_are_found_too(model: Callable[[], nn.Module]):
    network, shape = model(), (2, 3, 9, 11)
    assert without_output(shapes_of(traced(network), shape, torch.float32)) == computed(network, shape)


def test_sums_of_maps_of_several_sizes_are_not_guessed():
    class Broadcast(nn.Module):
        def forward(self, values: Tensor) -> Tensor:
            return values + values[:, :1]

    found = shapes_of(traced(Broadcast()), (2, 3, 4, 5), torch.float32)
    assert found["add"] == (2, 3, 4, 5)
