"""The command ``view``: it turns arguments into a call, and has no logic of its own."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from pipelines.commands.options import Ids

__all__ = ["register"]


def register(app: typer.Typer, *, console: Console) -> None:
    """Adds the command to the application.

    Args:
        app: the application.
        console: for results.
    """

    @app.command(epilog="Example: imagepivot view build/regions photos --image cat -o cat-regions.png")
    def view(
        dataset: Annotated[str, typer.Argument(help="Folder of regions or features.", show_default=False)],
        images: Annotated[str, typer.Argument(help="Where the images are, as for features.", show_default=False)],
        image: Annotated[str, typer.Option("--image", help="Image id of the picture.", show_default=False)],
        output: Annotated[
            str, typer.Option("--output", "-o", help="File of the drawing: .png, .jpg or .webp.", show_default=False)
        ],
        most: Annotated[int, typer.Option("--most", min=0, help="Draw only so many regions, the best by score; 0: all.")] = 0,
        ids: Ids = "name",
        overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file where it is there.")] = False,
    ) -> None:
        """Draw over a picture what its features were made of.

        Regions are drawn as boxes with the name, or the id, of their class and attribute and its score; of the other extractors the
        crops that the model saw: ten for VGG19, else the centre.
        """
        from pipelines.datasets.viewing import draw_view
        from pipelines.inputs.images import open_images
        from schemas.dataset import open_dataset

        drawn = draw_view(
            open_dataset(dataset),
            open_images(images, ids=ids),
            image,
            output,
            most=most or None,
            overwrite=overwrite,
        )
        console.print(f"{escape(output)}: {escape(drawn)}", highlight=False, soft_wrap=True)
