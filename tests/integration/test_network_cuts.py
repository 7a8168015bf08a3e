"""A network that is gone for some seconds while inputs are read from a store and a dataset is written to it."""

import pytest

from schemas.storage import s3
from schemas.storage.folder import Folder, open_bucket
from schemas.writing.validation import validate
from tests.builders import stored
from tests.fake_extractors import picture, use_colours
from tests.stores import use

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SECONDS = 4


@pytest.fixture
def far(stores, monkeypatch):
    """A store behind a proxy, with images and a table of captions."""
    far = stores[1]
    use(far.environment, monkeypatch)
    use_colours(monkeypatch)
    for number in range(12):
        Folder(far.address("photos")).put(f"{number:02d}.png", picture(number, 20, 30))
    lines = "".join(f"image{number},en,A dog.,train\n" for number in range(20))
    Folder(far.address("raw")).put("c.csv", ("image_id,language,text,split\n" + lines).encode())
    return far


def bytes_of(location: str) -> dict[str, bytes]:
    return {name: data for name, data in stored(location).items() if name.startswith(("_", "part-"))}


SOURCES = {
    "features": ("photos", "--weights", "random:0", "--device", "cpu"),
    "captions": ("raw/c.csv", "--format", "table"),
}


def run(imagepivot, far, name: str, output: str, code: int = 0):
    source, *options = SOURCES[name]
    return imagepivot(name, far.address(source), output, *options, "--shards", "3", "--workers", "1", code=code)


# While inputs are read, or while shards are written: each kind of cut at one for features, and at the other for captions.
@pytest.mark.parametrize(
    ("name", "after", "how"),
    [
        *(("features", 4, how) for how in ("drop", "stall")),
        *(("features", 25, how) for how in ("busy", "torn")),
        *(("captions", 6, how) for how in ("busy", "torn")),
        *(("captions", 15, how) for how in ("drop", "stall")),
    ],
)
def test_commands_ride_out_a_cut(far, imagepivot, how, name, after):
    expected, output = (far.address(f"{place}/{name}/{how}{after}") for place in ("whole", "cut"))
    run(imagepivot, far, name, expected)
    far.asked()
    far.cut(how, SECONDS, after=after)
    run(imagepivot, far, name, output)
    assert len(far.asked()) > after  # The cut came while it ran.
    assert bytes_of(output) == bytes_of(expected)
    assert validate(output) == []


def test_lasting_network_cut_is_an_error_and_the_command_resumes(far, imagepivot, monkeypatch):
    monkeypatch.setattr(s3, "ATTEMPTS", 4)  # The others only wait.
    open_bucket.cache_clear()
    output = far.address("lasting")
    far.cut("drop", 600, after=30)
    error = run(imagepivot, far, "features", output, code=1).stderr
    assert f"cannot use '{output}" in error
    assert "it cannot be reached: check the network" in error
    assert "Traceback" not in error
    far.cut("", 0, after=0)
    run(imagepivot, far, "features", output)
    run(imagepivot, far, "features", f"{output} again")
    assert bytes_of(output) == bytes_of(f"{output} again")
    assert validate(output) == []
