"""The images, each built once, when the first test asks for it."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.containers.images import ROOT, Images, missing
from tests.containers.page import line_of
from tests.integration.conftest import empty, imagepivot  # noqa: F401 -- fixtures
from tests.integration.workload import MODEL


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
def image(images: Images) -> Callable[[str], str]:
    """Return the name of an image as the page has it; it is built if it is not there, with weights where it takes some."""
    built: set[str] = set()

    def get(target: str) -> str:
        words = line_of(f"docker/build.sh {target} ")
        if target not in built:
            options = () if target == "train" else ("--build-context", f"weights={weights(images.folder)}")
            images.build(*words, *options)
            built.add(target)
        return words[-1]

    return get


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that containers of any user may write to, under the same path inside."""
    folder = tmp_path_factory.mktemp("shared")
    folder.chmod(0o777)
    return folder


def weights(folder: Path) -> Path:
    """Return the folder of the weights that are baked in: of a small model, which are made once, for the sake of the cache."""
    import timm
    import torch

    made = folder / "weights"
    if not made.exists():
        made.mkdir()
        torch.save(timm.create_model(MODEL.removeprefix("timm:"), num_classes=0).state_dict(), made / "w.pth")
    return made
