"""Draw the README's picture: a query in each of four languages and the scenes that the demo's model ranks first.

The queries are chosen: sentences whose own scene comes first among the scenes held out of training.

Run after ``imagepivot demo build/demo``, from the root of the checkout:

    python docs/make_picture.py build/demo docs/images/search.png
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont

import imagepivot

QUERIES = {
    "English": ("en", "scene-00199"),
    "German": ("de", "scene-00159"),
    "French": ("fr", "scene-00099"),
    "Czech": ("cs", "scene-00279"),
}
TOP = 5
WIDTH, ROW, THUMBNAIL, TEXT, GAP = 1124, 150, 130, 408, 12  # Pixels.
INK, GREY, MARK = "#1b1f24", "#6a737d", "#2da44e"


def main(demo: Path, output: Path) -> None:
    """Draw a row per query: the sentence, and the scenes that match it best."""
    captions = imagepivot.open_dataset(demo / "captions")
    held_out = {row["image_id"] for row in captions.table(["image_id", "split"]).to_pylist() if row["split"] == "test"}
    run = imagepivot.open_run(demo / "run")
    gallery = imagepivot.embed_gallery(run, str(demo / "features"))

    picture = Image.new("RGB", (WIDTH, ROW * len(QUERIES) + GAP), "white")
    draw = ImageDraw.Draw(picture)
    for row, (name, (language, scene_id)) in enumerate(QUERIES.items()):
        top = GAP + row * ROW
        [query] = (
            caption["text"]
            for caption in captions.rows(scene_id).to_pylist()
            if caption["language"] == language and caption["portion"] == "translation"
        )
        draw.text((GAP, top + 4), name, GREY, _font(16))
        draw.text((GAP, top + 32), "\n".join(textwrap.wrap(query, 38)), INK, _font(18), spacing=6)
        tokens = imagepivot.tokenize_query(query, language, run.text)
        hits = imagepivot.search_gallery(run, tokens, language, gallery, top=len(gallery.image_ids))
        ranking = [hit.image_id for hit in hits if hit.image_id in held_out]
        for column, image_id in enumerate(ranking[:TOP]):
            left = TEXT + column * (THUMBNAIL + GAP)
            picture.paste(_square(demo / "scenes" / "images" / f"{image_id}.jpg"), (left, top))
            if image_id == scene_id:  # The scene that the sentence describes.
                draw.rectangle((left - 5, top - 5, left + THUMBNAIL + 4, top + THUMBNAIL + 4), outline=MARK, width=5)
    # Few colours make a small file; the refinement keeps those of small shapes.
    picture.quantize(192, method=Image.Quantize.MAXCOVERAGE, kmeans=5, dither=Image.Dither.NONE).save(output, optimize=True)


def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(font_manager.findfont("DejaVu Sans"), size)  # Comes with matplotlib; has Czech letters.


def _square(path: Path) -> Image.Image:
    """Fit a scene into a square of ``THUMBNAIL`` pixels, centred on grey."""
    with Image.open(path) as scene:
        scene.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
        square = Image.new("RGB", (THUMBNAIL, THUMBNAIL), "#eaecef")
        square.paste(scene, ((THUMBNAIL - scene.width) // 2, (THUMBNAIL - scene.height) // 2))
    return square


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
