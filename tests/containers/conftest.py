"""The images, each built once, when the first test asks for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.containers.images import ROOT, Images, missing
from tests.integration.conftest import empty, imagepivot

__all__ = ["empty", "imagepivot"]

_SIZES = pytest.StashKey[dict[str, int]]()


@pytest.fixture(scope="session")
def images() -> Iterator[Images]:
    """Builds and runs images; the stand-ins for what is pulled elsewhere are there."""
    if reason := missing():
        pytest.skip(reason)
    folder = Path(os.environ.get("IMAGEPIVOT_CONTAINERS", ROOT / "build" / "containers")).resolve()
    images = Images(folder)
    for make in (images.base, images.beam_sdk, images.template_launcher):
        make()
    yield images
    if not os.environ.get("IMAGEPIVOT_KEEP_IMAGES"):
        images.remove()


@pytest.fixture(scope="session")
def image(images: Images, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return the name of an image, which is built if it is not there."""
    built = request.config.stash.setdefault(_SIZES, {})

    def get(target: str) -> str:
        if target not in built:
            options: tuple[str, ...] = ()
            if target == "worker":
                weights = tmp_path_factory.mktemp("weights")
                (weights / "model.pth").write_bytes(b"weights")
                options = ("--build-context", f"weights={weights}")
            images.build(target, *options)
            built[target] = images.size(f"localhost/{target}")
        return f"localhost/{target}"

    return get


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the sizes of the images."""
    for target, size in config.stash.get(_SIZES, {}).items():
        terminalreporter.write_line(f"image {target}: {size / 1e9:.2f} GB")
