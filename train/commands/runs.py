"""The commands ``evaluate``, ``embed`` and ``search``: what people do with a run. Arguments become calls; no logic of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from schemas.errors import UsageError
from schemas.parameters import TextRecipe

__all__ = ["Tokenize", "register"]

Tokenize = Callable[[str, str, TextRecipe | None, str], list[str]]
"""Text, language, recipe of the captions, folder of truecasers: to tokens."""

RunFolder = Annotated[str, typer.Argument(metavar="RUN", help="Folder of a run.", show_default=False)]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:N, or auto: a GPU where there is one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer, *, console: Console, notes: Console, tokenize: Tokenize) -> None:
    """Adds the commands to the application.

    Args:
        app: the application.
        console: for results.
        notes: for progress and remarks.
        tokenize: makes a query's tokens as those of the captions were made.
    """

    @app.command(epilog="Example: imagepivot evaluate runs/c2c --captions encoded --features features")
    def evaluate(
        run: RunFolder,
        captions: Annotated[str, typer.Option("--captions", help="Folder of encoded captions.", show_default=False)],
        features: Annotated[str, typer.Option("--features", help="Folder of image features.", show_default=False)],
        split: Annotated[
            str, typer.Option("--split", help="Splits, e.g. [i]val[/i]; the test images of 2016 when not given.")
        ] = "",
        languages: Annotated[str, typer.Option("--languages", help="Only these; all that the run knows when not given.")] = "",
        portion: Annotated[
            str, typer.Option("--portion", help="[i]comparable[/i] or [i]translation[/i]; each by itself when not given.")
        ] = "",
        device: Device = "auto",
        memory_map: Annotated[
            str, typer.Option("--memory-map", help="Folder for a copy of features that do not fit into memory.")
        ] = "",
        as_json: AsJson = False,
    ) -> None:
        """Measure what a run retrieves: R@1, R@5, R@10 and median rank, from image to text and from text to image.

        Of an image with several captions the best-ranked one counts. Equal scores count against the model.
        """
        from train.devices import resolve_device
        from train.evaluation.scoring import score_run
        from train.reports.score_tables import score_table
        from train.runs.run import open_run

        scores = score_run(
            open_run(run, device=resolve_device(device)),
            captions=captions,
            features=features,
            splits=_several(split),
            languages=_several(languages),
            portion=portion,
            memory_map=memory_map or None,
        )
        if as_json:
            typer.echo(json.dumps([score.to_dict() for score in scores], indent=2))
        else:
            console.print(score_table(scores, title=escape(run)))

    @app.command(epilog="Example: imagepivot embed runs/c2c embeddings --features features --captions encoded")
    def embed(
        run: RunFolder,
        output: Annotated[str, typer.Argument(help="Folder; its folders images and captions are written.", show_default=False)],
        features: Annotated[str, typer.Option("--features", help="Folder of image features; none: no images.")] = "",
        captions: Annotated[str, typer.Option("--captions", help="Folder of encoded captions; none: no captions.")] = "",
        device: Device = "auto",
        overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace another dataset that lies in OUTPUT.")] = False,
    ) -> None:
        """Write the embeddings of images and captions into shards.

        OUTPUT/images is a dataset of kind features, OUTPUT/captions one of kind embeddings, keyed as the captions are. A run that
        was stopped goes on where it was when the same command is given again.
        """
        from train.devices import resolve_device
        from train.evaluation.embedding import EmbedJob
        from train.evaluation.embedding import embed as write_embeddings
        from train.runs.run import open_run

        if not features and not captions:
            raise UsageError("nothing to embed: give --features, --captions, or both")
        opened = open_run(run, device=resolve_device(device))
        job = EmbedJob(output=output, name=_name(run), features=features, captions=captions, overwrite=overwrite)
        with notes.status("embedding"):
            manifests = write_embeddings(opened, job)
        for manifest in manifests:
            folder = "images" if manifest.kind == "features" else "captions"
            console.print(
                f"[bold]{manifest.kind}[/bold]: {manifest.rows:,} rows in {len(manifest.shards)} shards in "
                f"{escape(f'{output}/{folder}')} (fingerprint {manifest.fingerprint[:12]})",
                highlight=False,
                soft_wrap=True,
            )

    @app.command(epilog='Example: imagepivot search runs/c2c "ein Hund im Schnee" --language de --features features')
    def search(
        run: RunFolder,
        text: Annotated[str, typer.Argument(help="What to look for.", show_default=False)],
        language: Annotated[
            str, typer.Option("--language", help="Language of the text; not needed where the run knows one only.")
        ] = "",
        features: Annotated[str, typer.Option("--features", help="Folder of the features of the images.")] = "",
        embeddings: Annotated[str, typer.Option("--embeddings", help="Instead: folder that imagepivot embed wrote.")] = "",
        top: Annotated[int, typer.Option("--top", help="Images that are listed.")] = 10,
        truecaser: Annotated[
            str, typer.Option("--truecaser", help="Folder of the captions, where their recipe truecases.")
        ] = "",
        tokenized: Annotated[bool, typer.Option("--tokenized", help="The text is tokens, with spaces between them.")] = False,
        device: Device = "auto",
        as_json: AsJson = False,
    ) -> None:
        """List the best images for a sentence in any language of a run.

        The text goes through the recipe of the captions that the run was trained on.
        """
        from train.devices import resolve_device
        from train.evaluation.searching import embedded_gallery, gallery_of
        from train.evaluation.searching import search as find
        from train.runs.run import open_run

        if bool(features) == bool(embeddings):
            raise UsageError("say where the images are: give either --features or --embeddings")
        opened = open_run(run, device=resolve_device(device))
        known = opened.model.config.languages
        chosen = language or (known[0] if len(known) == 1 else "")
        if chosen not in known:
            raise UsageError(f"--language is {language!r}, this run knows {', '.join(known)}")
        tokens = text.split() if tokenized else tokenize(text, chosen, opened.text, truecaser)
        gallery = gallery_of(opened, features) if features else embedded_gallery(opened, embeddings)
        hits = find(opened, tokens, chosen, gallery, top=top)
        unknown = [token for token in tokens if token not in opened.vocabulary.ids]
        if unknown:
            notes.print(f"[yellow]not in the vocabulary: {escape(' '.join(unknown))}[/yellow]", soft_wrap=True)
        if as_json:
            typer.echo(
                json.dumps([{"image_id": hit.image_id, "score": hit.score} for hit in hits], ensure_ascii=False, indent=2)
            )
            return
        table = Table("", "image", "score", box=None)
        for number, hit in enumerate(hits, start=1):
            table.add_row(str(number), escape(hit.image_id), f"{hit.score:.3f}")
        console.print(table)


def _several(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _name(run: str) -> str:
    """The last component of a run's folder."""
    return run.rstrip("/").rpartition("/")[2] or "run"
