"""The command ``view``: it turns arguments into a job, and has no logic of its own."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from pipelines.commands.configuration import Config
from pipelines.commands.options import AllowPrivateAddresses, Columns, Delimiter, Ids, Quoting, console

__all__ = ["app"]

app = typer.Typer()


@app.command(epilog="Example: imagepivot view regions photos --image 1000092795 -o 1000092795.png")
def view(
    dataset: Annotated[str, typer.Argument(help="Folder of regions or features.", show_default=False)],
    images: Annotated[str, typer.Argument(help="Location of the images, as for features.", show_default=False)],
    image: Annotated[str, typer.Option("--image", help="Image id of the picture.", show_default=False)],
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", help="File for the drawing: .png, .jpg or .webp; local, gs:// or s3://.", show_default=False
        ),
    ],
    most: Annotated[int, typer.Option("--most", min=0, help="Draw at most this many regions, the best by score; 0: all.")] = 0,
    ids: Ids = "name",
    allow_private_addresses: AllowPrivateAddresses = False,
    columns: Columns = "",
    delimiter: Delimiter = "",
    quoting: Quoting = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    config: Config = "",
) -> None:
    """Draw over a picture what its features were made of.

    Regions are drawn as boxes with the names, or the ids, of their class and attribute and the score; for other extractors the
    crops that the model saw: ten for VGG19, else the centre.
    """
    from pipelines.datasets.viewing import ViewJob, draw_view
    from pipelines.inputs.columns import parse_columns
    from pipelines.inputs.images import open_images

    job = ViewJob(
        dataset=dataset,
        images=open_images(
            images,
            ids=ids,
            columns=parse_columns(columns) if columns else None,
            delimiter=delimiter,
            quoting=quoting,
            allow_private_addresses=allow_private_addresses,
        ),
        image_id=image,
        output=output,
        most=most or None,
        overwrite=overwrite,
    )
    description = draw_view(job)
    console.print(f"{escape(output)}: {escape(description)}", highlight=False, soft_wrap=True)
