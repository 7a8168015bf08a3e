import hashlib
import math

import pytest
from PIL import Image, ImageChops

from pipelines.demo.run import write_scenes
from pipelines.demo.scene_captions import captions_of_scene
from pipelines.demo.scenes import (
    BACKGROUNDS,
    COLOURS,
    POSITIONS,
    SHAPES,
    SIZES,
    Scene,
    ShapeGroup,
    draw,
    layout,
    make_scenes,
    picture_size_wh,
)

TOLERANCE = 42  # Of each channel: shapes are shaded and pictures compressed.


def single(shape="circle", colour="red", size="large", count=1, position="left", background="white", variant=0):
    return Scene(background=background, groups=(ShapeGroup(shape, colour, size, count, position),), variant=variant)


def patches(picture, colour):
    """Find the connected patches of a colour, each a set of pixels; specks are omitted."""
    red, green, blue = ImageChops.difference(picture, Image.new("RGB", picture.size, COLOURS[colour])).split()
    distance = ImageChops.lighter(ImageChops.lighter(red, green), blue).tobytes()
    left = {divmod(i, picture.width)[::-1] for i, value in enumerate(distance) if value <= TOLERANCE}
    connected = []
    while left:
        queue = [left.pop()]
        patch = set(queue)
        while queue:
            x, y = queue.pop()
            for other in ((x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1)):
                if other in left:
                    left.remove(other)
                    patch.add(other)
                    queue.append(other)
        connected.append(patch)
    return [patch for patch in connected if len(patch) >= 40]


@pytest.mark.parametrize("variant", [0, 1, 2])
def test_draw_places_a_red_circle_by_its_layout(variant):
    scene = single(variant=variant)
    picture = draw(scene)
    (placed,) = layout(scene)
    (patch,) = patches(picture, "red")
    x, y = placed.centre_xy
    assert (round(x), round(y)) in patch
    assert all(math.dist((px + 0.5, py + 0.5), placed.centre_xy) <= placed.radius + 1 for px, py in patch)
    assert len(patch) == pytest.approx(math.pi * (0.9 * placed.radius) ** 2, rel=0.05)
    assert max(px for px, _ in patch) < picture.width / 2
    corner = picture.getpixel((picture.width - 3, 3))
    assert max(abs(a - b) for a, b in zip(corner, BACKGROUNDS["white"], strict=True)) < 30


@pytest.mark.slow
def test_patches_count_as_told():
    for _, scene in make_scenes(25, seed=7):
        picture = draw(scene)
        for group in scene.groups:
            shapes = patches(picture, group.colour)
            assert len(shapes) == group.count, scene
            box = POSITIONS[group.position]
            for patch in shapes:
                x = sum(x for x, _ in patch) / len(patch) / picture.width
                y = sum(y for _, y in patch) / len(patch) / picture.height
                assert box[0] <= x <= box[2], scene
                assert box[1] <= y <= box[3], scene


def test_shapes_stay_inside_and_apart():
    crowded = [
        single("star", "red", size, count, position, variant=variant)
        for size in SIZES
        for count in (1, 2, 3, 4)
        for position in POSITIONS
        for variant in range(12)
    ]
    for scene in crowded + [scene for _, scene in make_scenes(500, seed=3)]:
        width, height = picture_size_wh(scene)
        placed = layout(scene)
        assert len(placed) == sum(group.count for group in scene.groups)
        for number, shape in enumerate(placed):
            x, y = shape.centre_xy
            assert shape.radius <= x <= width - shape.radius
            assert shape.radius <= y <= height - shape.radius
            for other in placed[:number]:
                assert math.dist(shape.centre_xy, other.centre_xy) > shape.radius + other.radius


def test_scenes_are_distinct_and_numbered():
    made = list(make_scenes(2000))
    assert [image_id for image_id, _ in made[:2]] == ["scene-00000", "scene-00001"]
    assert len({(scene.background, scene.groups) for _, scene in made}) == 2000
    assert list(make_scenes(50)) == made[:50]
    assert list(make_scenes(50, seed=1)) != made[:50]
    assert {group.shape for _, scene in made for group in scene.groups} == set(SHAPES)
    assert {len(scene.groups) for _, scene in made} == {1, 2}


def test_captions_of_seed_0_never_change():
    text = "".join(f"{caption.text}\n" for _, scene in make_scenes(300) for caption in captions_of_scene(scene))
    assert hashlib.sha256(text.encode()).hexdigest() == "d04c42820673c2564d5b1230487bc9862d55264523e6692d552f84a7de1a829c"


def test_pictures_survive_jpeg(tmp_path):
    write_scenes(tmp_path, count=6)
    for image_id, scene in make_scenes(6):
        with Image.open(tmp_path / "images" / f"{image_id}.jpg") as picture:
            assert (picture.format, picture.mode, picture.size) == ("JPEG", "RGB", picture_size_wh(scene))
            for group in scene.groups:
                assert len(patches(picture, group.colour)) == group.count
