"""The command ``view``."""

from __future__ import annotations

from rich.markup import escape

from pipelines.commands.binding import command
from pipelines.commands.results import console
from pipelines.jobs import ViewJob


@command("view regions photos --image 1000092795 -o 1000092795.png")
def view(job: ViewJob) -> None:
    """Draw over a picture what its features were made of.

    Regions are drawn as boxes with the names, or the ids, of their class and attribute and the score; for other extractors the
    crops that the model saw: ten for VGG19, else the centre.
    """
    from pipelines.datasets.viewing import draw_view

    description = draw_view(job)
    console.print(f"{escape(job.output)}: {escape(description)}", highlight=False, soft_wrap=True)
