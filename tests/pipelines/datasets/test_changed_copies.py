"""Changed copies of photographs: the numbers that the how-to states by kind of change, and pairs of different photographs."""

import io
import re
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from imagehash import phash
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageFont, ImageOps

from pipelines.datasets.duplicates import PictureDigest, digest_picture, hash_bits, near_pictures

HOW_TO = Path(__file__).parents[3] / "docs" / "how-to" / "duplicates.md"
LONGEST_SIDE = 500  # Pixels, as in Flickr30K.

Change = Callable[[Image.Image], Image.Image]


def as_picture(values: np.ndarray) -> Image.Image:
    return Image.fromarray(values.clip(0, 255).round().astype(np.uint8))


def scale(factor_width: float, factor_height: float) -> Change:
    return lambda photo: photo.resize((round(photo.width * factor_width), round(photo.height * factor_height)))


def crop(share: float) -> Change:
    """Cut half of the share from each side."""

    def cut(photo: Image.Image) -> Image.Image:
        x, y = round(photo.width * share / 2), round(photo.height * share / 2)
        return photo.crop((x, y, photo.width - x, photo.height - y))

    return cut


def multiply(red: float, green: float, blue: float) -> Change:
    return lambda photo: as_picture(np.asarray(photo) * np.array([red, green, blue]))


def enhance(kind: type, factor: float) -> Change:
    return lambda photo: kind(photo).enhance(factor)


def raise_to(gamma: float) -> Change:
    return lambda photo: photo.point([round(255 * (level / 255) ** gamma) for level in range(256)] * 3)


def add_noise(deviation: float) -> Change:
    return lambda photo: as_picture(photo + np.random.default_rng(0).normal(0, deviation, (photo.height, photo.width, 3)))


def add_border(share: float) -> Change:
    return lambda photo: ImageOps.expand(photo, round(photo.width * share), "white")


def write_text(photo: Image.Image) -> Image.Image:
    """Write white letters with black outlines, a twelfth of the height, into the lower left corner."""
    copy = photo.copy()
    font = ImageFont.load_default(photo.height / 12)
    place = (photo.width * 0.05, photo.height * 0.82)
    ImageDraw.Draw(copy).text(place, "Lorem ipsum dolor", "white", font, stroke_width=2, stroke_fill="black")
    return copy


CHANGES: dict[str, Change] = {
    "JPEG of quality 75": lambda photo: photo,
    "JPEG of quality 30": lambda photo: photo,
    "half the size": scale(0.5, 0.5),
    "quarter of the size": scale(0.25, 0.25),
    "height 0.8": scale(1, 0.8),
    "grey": ImageOps.grayscale,
    "saturation 0.6": enhance(ImageEnhance.Color, 0.6),
    "saturation 0.3": enhance(ImageEnhance.Color, 0.3),
    "saturation 1.5": enhance(ImageEnhance.Color, 1.5),
    "red 1.1, blue 0.9": multiply(1.1, 1, 0.9),
    "red 1.2, blue 0.8": multiply(1.2, 1, 0.8),
    "red 0.9, blue 1.1": multiply(0.9, 1, 1.1),
    "sepia": lambda photo: multiply(1.07, 0.95, 0.74)(photo.convert("L").convert("RGB")),
    "brightness 1.3": enhance(ImageEnhance.Brightness, 1.3),
    "brightness 1.5": enhance(ImageEnhance.Brightness, 1.5),
    "brightness 0.7": enhance(ImageEnhance.Brightness, 0.7),
    "contrast 1.3": enhance(ImageEnhance.Contrast, 1.3),
    "contrast 0.7": enhance(ImageEnhance.Contrast, 0.7),
    "gamma 0.7": raise_to(0.7),
    "gamma 1.4": raise_to(1.4),
    "automatic contrast": lambda photo: ImageOps.autocontrast(photo, 1),
    "blur of 2 pixels": lambda photo: photo.filter(ImageFilter.GaussianBlur(2)),
    "blur of 4 pixels": lambda photo: photo.filter(ImageFilter.GaussianBlur(4)),
    "noise of 10 levels": add_noise(10),
    "noise of 20 levels": add_noise(20),
    "mirrored": ImageOps.mirror,
    "rotated by 90°": lambda photo: photo.rotate(90, expand=True),
    "rotated by 2°": lambda photo: photo.rotate(2, Image.Resampling.BICUBIC),
    "rotated by 5°": lambda photo: photo.rotate(5, Image.Resampling.BICUBIC),
    "white border of 2%": add_border(0.02),
    "white border of 5%": add_border(0.05),
    "text": write_text,
    "cropped by 2%": crop(0.02),
    "cropped by 5%": crop(0.05),
    "cropped by 10%": crop(0.1),
    "cropped by 20%": crop(0.2),
}


def encode(picture: Image.Image, kind: str = "") -> bytes:
    data = io.BytesIO()
    quality = re.fullmatch(r"JPEG of quality (\d+)", kind)
    picture.save(data, "JPEG", quality=int(quality[1]) if quality else 90)
    return data.getvalue()


def near_pairs_of(digests: Sequence[PictureDigest]) -> set[tuple[int, int]]:
    parts = [zip(first.tolist(), second.tolist(), strict=True) for first, second, _ in near_pictures(digests)]
    return {pair for part in parts for pair in part}


def documented(column: int) -> dict[str, int]:
    """Read a column of the table of changes."""
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in HOW_TO.read_text().splitlines()]
    return {row[0]: int(row[column]) for row in rows if row[0] in CHANGES}


@pytest.fixture(scope="module")
def copies(photos) -> dict[tuple[str, str], bytes]:
    """Files of the photographs and of their changed copies, by kind of change and photograph."""
    files = {}
    for path in sorted((photos / "images").iterdir()):
        with Image.open(path) as opened:
            photo = ImageOps.contain(opened.convert("RGB"), (LONGEST_SIDE, LONGEST_SIDE))
        files["", path.stem] = encode(photo)
        files |= {(kind, path.stem): encode(change(photo), kind) for kind, change in CHANGES.items()}
    return files


@pytest.mark.slow
def test_changed_copies_are_found_as_documented_and_no_other_pairs(copies):
    names = list(copies)
    with ThreadPoolExecutor(2) as pool:
        digests = list(pool.map(digest_picture, copies.values()))
    pairs = [(names[first], names[second]) for first, second in near_pairs_of(digests)]
    others = [pair for pair in pairs if len({photo.removesuffix("_gray") for _, photo in pair}) > 1]
    assert (len(names), others) == (666, [])
    found = Counter(
        "".join(kind for kind, _ in pair) for pair in pairs if ("", pair[0][1]) in pair and pair[0][1] == pair[1][1]
    )
    assert {kind: found[kind] for kind in CHANGES} == documented(1)
    recoloured = ("saturation 0.6", "red 1.1, blue 0.9", "red 0.9, blue 1.1", "brightness 1.3", "brightness 0.7")
    assert [found[kind] for kind in recoloured] == [18] * 5


@pytest.mark.slow
def test_hash_bits_of_photographs_equal_those_of_imagehash(copies):
    for (kind, name), data in copies.items():
        if kind in ("", "blur of 4 pixels"):
            picture = Image.open(io.BytesIO(data)).convert("RGB")
            assert np.array_equal(hash_bits(picture), phash(picture, hash_size=32).hash.ravel()), name


def blend(weights: np.ndarray) -> Image.Image:
    """Draw a picture of 300 x 400 pixels between two greys."""
    return as_picture(60 + 150 * np.broadcast_to(weights[..., np.newaxis], (300, 400, 3)))


def plain_pictures() -> dict[str, Image.Image]:
    y, x = np.linspace(0, 1, 300)[:, np.newaxis], np.linspace(0, 1, 400)
    distance = np.hypot(x - 0.5, y - 0.5)
    noise = np.random.default_rng(0).normal(0.5, 0.01, (300, 400))
    return {
        "one level": blend(np.zeros(1)),
        "noise of 1.5 levels": blend(noise),
        "gradient down": blend(y),
        "gradient to the right": blend(x),
        "steep gradient": blend(y**2),
        "oblique gradient": blend((x + y) / 2),
        "horizon": blend(y > 0.6),
        "vignette": blend(np.exp(-6 * distance**2)),
    }


def test_plain_pictures_have_hashes_without_information():
    digests = {kind: digest_picture(encode(picture)) for kind, picture in plain_pictures().items()}
    assert [kind for kind, digest in digests.items() if digest.bits is not None] == []
    assert near_pairs_of(list(digests.values())) == set()


def test_colours_match_up_to_one_factor_and_cast_and_more_where_clipped():
    rng = np.random.default_rng(0)
    bits = rng.random(1024) < 0.5
    base = np.concatenate([rng.integers(0, 256, (1, 256)), rng.integers(-60, 61, (2, 256)), np.zeros((1, 256))]).astype(float)

    def is_joined(factor: float = 1, cast: float = 0, area: float = 0, clipped: int = 0) -> bool:
        colours = base.copy()
        colours[1:3] = base[1:3] * factor + cast * base[0]
        colours[:, 7] += 0, 0, area, clipped
        digests = [PictureDigest("", None, bits, values.round().astype(np.int16)) for values in (base, colours)]
        assert near_pairs_of(digests) == near_pairs_of(digests[::-1])
        return near_pairs_of(digests) == {(0, 1)}

    assert [is_joined(factor) for factor in (0.02, 0.3, 0.55, 1.8, 3)] == [True, False, True, True, False]
    assert [is_joined(1, cast) for cast in (0.075, -0.075, 0.15, -0.15)] == [True, True, False, False]
    assert [is_joined(0.7, 0.07), is_joined(0.7, 0.07, 20), is_joined(-1)] == [True, False, False]
    assert [is_joined(1, 0, area) for area in (9, 12, -12)] == [True, False, False]
    assert [is_joined(1, 0, 20, clipped) for clipped in (5, 6, 255)] == [False, True, True]
    assert not is_joined(1, 0, 30, 255)


def test_hash_matches_have_the_share_of_equal_bits():
    bits = np.random.default_rng(0).random(1024) < 0.5
    flipped = [np.where(np.arange(1024) < number, ~bits, bits) for number in (0, 153, 154)]
    grey = np.zeros((4, 256), np.int16)
    ((first, second, similarities),) = near_pictures([PictureDigest("", None, values, grey) for values in flipped])
    assert list(zip(first.tolist(), second.tolist(), similarities.tolist(), strict=True)) == [
        (0, 1, pytest.approx(1 - 153 / 1024)),
        (1, 2, pytest.approx(1 - 1 / 1024)),
    ]
