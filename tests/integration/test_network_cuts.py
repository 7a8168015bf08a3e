"""A network that is gone for some seconds while inputs are read from a store and a dataset is written to it."""

import io

import pytest
from PIL import Image

from schemas.storage.folder import Folder
from schemas.writing.validation import validate
from tests.builders import stored
from tests.fake_extractors import use_colours
from tests.stores import use

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SECONDS = 4
CUTS = ("drop", "busy", "stall", "torn")


@pytest.fixture
def far(stores, monkeypatch):
    use(stores[1].environment, monkeypatch)
    use_colours(monkeypatch)
    return stores[1]


def bytes_of(location: str) -> dict[str, bytes]:
    return {name: data for name, data in stored(location).items() if name.startswith(("_", "part-"))}


def photos(location: str) -> str:
    folder = Folder(location)
    for number in range(12):
        data = io.BytesIO()
        Image.new("RGB", (8, 8), (number, 20, 30)).save(data, "png")
        folder.write(f"{number:02d}.png", data.getvalue())
    return location


def features(images: str, output: str) -> tuple[object, ...]:
    return "features", images, output, "--weights", "random:0", "--device", "cpu", "--shards", "3", "--workers", "1"


def captions(raw: str, output: str) -> tuple[object, ...]:
    return "captions", f"{raw}/c.csv", output, "--format", "table", "--shards", "3", "--workers", "1"


def run_through(imagepivot, far, command, how: str, after: int) -> None:
    """Run a command through a cut, which it rides out."""
    far.asked()
    far.cut(how, SECONDS, after=after)
    imagepivot(*command)
    assert len(far.asked()) > after  # The cut came while it ran.


@pytest.mark.parametrize("how", CUTS)
@pytest.mark.parametrize("after", [4, 25])
def test_features_ride_out_a_cut(far, imagepivot, how, after):
    images = photos(far.address("photos"))
    expected = far.address(f"whole/{how}{after}")
    imagepivot(*features(images, expected))
    output = far.address(f"features/{how}{after}")
    run_through(imagepivot, far, features(images, output), how, after)
    assert bytes_of(output) == bytes_of(expected)
    assert validate(output) == []


@pytest.mark.parametrize("how", CUTS)
@pytest.mark.parametrize("after", [6, 15])  # While the table is read, and while shards are written.
def test_captions_ride_out_a_cut(far, imagepivot, how, after):
    raw, expected = far.address("raw"), far.address("captions/whole")
    lines = "".join(f"image{number},en,A dog.,train\n" for number in range(20))
    Folder(raw).write("c.csv", ("image_id,language,text,split\n" + lines).encode())
    imagepivot(*captions(raw, expected))
    output = far.address(f"captions/{how}{after}")
    run_through(imagepivot, far, captions(raw, output), how, after)
    assert bytes_of(output) == bytes_of(expected)
    assert validate(output) == []


def test_lasting_network_cut_is_an_error_and_the_command_resumes(far, imagepivot):
    images, output = photos(far.address("photos")), far.address("lasting")
    far.cut("drop", 600, after=30)
    error = imagepivot(*features(images, output), code=1).stderr
    assert f"cannot use '{output}" in error
    assert "it cannot be reached: check the network" in error
    assert "Traceback" not in error
    far.cut("", 0, after=0)
    imagepivot(*features(images, output))
    imagepivot(*features(images, f"{output} again"))
    assert bytes_of(output) == bytes_of(f"{output} again")
    assert validate(output) == []
