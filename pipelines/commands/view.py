"""The command ``view``: it turns arguments into a job, and has no logic of its own."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from pipelines.commands.binding import bound
from pipelines.commands.options import console
from pipelines.jobs import ImageOptions
from schemas.options import Opt

__all__ = ["app"]

app = typer.Typer()


@app.command(epilog="Example: imagepivot view regions photos --image 1000092795 -o 1000092795.png")
@bound
def view(
    dataset: Annotated[str, Opt("Folder of regions or features.")],
    images: Annotated[str, Opt("Location of the images, as for features.")],
    image: Annotated[str, Opt("Image id of the picture.", is_option=True)],
    output: Annotated[
        str, Opt("File for the drawing: .png, .jpg or .webp; local, gs:// or s3://.", is_option=True, short="-o")
    ],
    most: Annotated[int, Opt("Draw at most this many regions, the best by score; 0: all.", least=0)] = 0,
    reading: ImageOptions = ImageOptions(),
    overwrite: Annotated[bool, Opt("Replace an existing file.")] = False,
) -> None:
    """Draw over a picture what its features were made of.

    Regions are drawn as boxes with the names, or the ids, of their class and attribute and the score; for other extractors the
    crops that the model saw: ten for VGG19, else the centre.
    """
    from pipelines.datasets.viewing import ViewJob, draw_view

    job = ViewJob(
        dataset=dataset,
        images=reading.open(images),
        image_id=image,
        output=output,
        most=most or None,
        overwrite=overwrite,
    )
    description = draw_view(job)
    console.print(f"{escape(output)}: {escape(description)}", highlight=False, soft_wrap=True)
