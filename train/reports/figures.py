"""Figures of a run: retrieved images, a map of embeddings, and attention."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from schemas.dataset import open_dataset
from schemas.errors import UsageError
from schemas.escapes import to_json
from schemas.options import takes_fields
from schemas.parameters import untrained_remark
from schemas.storage.folder import Folder
from schemas.writing.made_from import MadeFrom, sizes_of, write_made_from
from train.data.captions import labels_of
from train.data.splits import TEST_SPLITS, SplitData, default_test_splits
from train.devices import choose_device
from train.evaluation.compatibility import check_languages, check_vectors
from train.evaluation.evaluation import Count, embed_images, no_progress
from train.evaluation.pairs import open_members
from train.evaluation.scores import open_split, portions_in
from train.jobs import FIGURES, FiguresJob
from train.reports.attention import AttendedImage, attend, plot_attention
from train.reports.embedding_maps import EmbeddingMap, map_embeddings, plot_map
from train.reports.figure_examples import Example, ReadPictures, SizedPixels, check_sizes, choose_examples, read_texts
from train.reports.rankings import RankedCaptions, Ranking, plot_rankings, rank_captions, rank_examples
from train.runs.run import Run

_DATA = "figures.json"


@dataclass(frozen=True)
class Figures:
    """Figures of a run; empty or None if not requested, or refused.

    Attributes:
        refused: reasons for figures that cannot be drawn, by name.
        rule: selection of the examples, in words.
    """

    names: tuple[str, ...]
    refused: Mapping[str, str]
    rule: str
    rankings: tuple[Ranking, ...]
    map: EmbeddingMap | None
    attention: tuple[AttendedImage, ...]
    untrained: tuple[str, ...] = ()


@takes_fields(FiguresJob)
def draw_figures(
    job: FiguresJob,
    read_pictures: ReadPictures | None = None,
    on_progress: Count = no_progress,
    *,
    made_from: MadeFrom | None = None,
) -> Figures:
    """Draw the figures of a run, or of a pair of vectors, into a folder.

    Files are ``retrieval``, ``map`` and ``attention-N`` in each format, ``figures.json`` and ``_made_from.json``. Equal runs, data
    and options give equal bytes on the same machine and number of threads.

    ``read_pictures`` reads the pictures of ``job.images``, e.g. ``imagepivot.read_pictures``. ``made_from``
    is the result of ``job.made_from()``, which reads every input, if it is known.

    Raises:
        UsageError: the run does not know a language, no captions match, or a figure of ``job.only`` cannot be drawn.
        InputError: a picture is missing, damaged, or has another size than its regions.
        DatasetError: the folder holds no run, the data has another vocabulary or extractor, or the output is not writable.
    """
    Folder(job.output).check_writable()
    now = job.made_from() if made_from is None else made_from
    run, data, examples, rule = open_examples(job)
    features = open_dataset(job.features)

    images = cache(lambda: embed_images(run.model, data.features, on_progress=on_progress))

    def embedding_map() -> EmbeddingMap:
        check_vectors(run)
        return map_embeddings(
            run.model, data.captions, images(), examples, max_images=job.points, seed=job.seed, on_progress=on_progress
        )

    compute: dict[str, Callable[[], Any]] = {
        "retrieval": lambda: rank_examples(run.model, data.captions, images(), examples, top=job.top, on_progress=on_progress),
        "map": embedding_map,
        "attention": lambda: tuple(attend(run, data, features, example) for example in examples),
    }
    results: dict[str, Any] = {}
    refused = {}
    for name in job.only or FIGURES:
        try:
            results[name] = compute[name]()
        except UsageError as error:
            if job.only:
                raise
            refused[name] = str(error)
    figures = Figures(
        (), refused, rule, results.get("retrieval", ()), results.get("map"), results.get("attention", ()), data.untrained
    )
    shown = {hit.image_id for ranking in figures.rankings for hit in (*ranking.hits, ranking.right) if hit}
    attended = {image.image_id for image in figures.attention}
    pictures: Mapping[str, SizedPixels] = {}
    if job.images:
        if read_pictures is None:
            raise UsageError(
                f"--images is {job.images!r}, and reading images needs pip install 'imagepivot[pipelines]': "
                "install that, or leave --images out for figures with ids in place of pictures"
            )
        pictures = read_pictures(job.images, sorted(shown | attended))
    check_sizes(features, pictures, attended)
    return _write_figures(figures, run, job, data, pictures, now)


def open_examples(job: FiguresJob) -> tuple[Run, SplitData, tuple[Example, ...], str]:
    """Return model, data, examples, and the choice of examples in words."""
    [run] = open_members((job.run,) if job.run else (), job.captions, job.features, choose_device(job.device))
    data, words = _open_captions(run, job), run.vocabulary.tokens if job.run else ()
    options: dict[str, Any] = {"count": job.examples, "seed": job.seed, "caption_ids": job.caption_ids}
    examples, rule = choose_examples(data.captions, words, read_texts(job.texts), **options)
    return run, data, examples, rule


def retrieve_examples(job: FiguresJob) -> tuple[tuple[Ranking, ...], list[RankedCaptions], str]:
    """Return ranked images, ranked captions, and the choice of examples in words."""
    run, data, examples, rule = open_examples(job)
    given = (run.model, data.captions, embed_images(run.model, data.features), examples)
    images = rank_examples(*given, top=job.top)
    return images, [*rank_captions(*given, top=job.top, on_progress=no_progress)], rule


def _write_figures(
    figures: Figures, run: Run, job: FiguresJob, data: SplitData, pictures: Mapping[str, SizedPixels], made_from: MadeFrom
) -> Figures:
    """Draw the figures, and write them as JSON."""
    folder = Folder(job.output)
    attention = {f"attention-{image.number}": image for image in figures.attention}
    for name in folder.names():  # Figures of an earlier command with more examples.
        if re.fullmatch(r"attention-\d+\.(png|pdf|svg)", name) and attention and name.partition(".")[0] not in attention:
            folder.delete(name)
    names = []

    def draw(plot: Callable[..., None], stem: str, *given: Any, **options: Any) -> None:
        for name in (f"{stem}.{kind}" for kind in job.formats):
            plot(*given, folder, name, **options)
            names.append(name)

    if figures.rankings:
        note = f"Queries: {figures.rule}. A thick frame marks the right image."
        note += "" if pictures else " No pictures were given: ids of images stand for them."
        note += f" {remark}." if (remark := untrained_remark(figures.untrained)) else ""
        draw(plot_rankings, "retrieval", figures.rankings, pictures, note=note)
    if figures.map is not None:
        draw(plot_map, "map", figures.map)
    for stem, image in attention.items():
        draw(plot_attention, stem, image, pictures.get(image.image_id))
    content = {
        "step": run.step if job.run else None,
        "split": data.captions.split,
        "languages": list(data.captions.language_names),
        "portions": list(data.captions.portion_names),
        "fingerprints": dict(data.fingerprints),
        "untrained": list(figures.untrained),
        "examples": figures.rule,
        "seed": job.seed,
        "retrieval": [ranking.to_dict() for ranking in figures.rankings],
        "map": figures.map.to_dict() if figures.map else None,
        "attention": [image.to_dict() for image in figures.attention],
        # Independent of the folder of the run.
        "refused": {name: reason.replace(repr(run.folder.location), "the run") for name, reason in figures.refused.items()},
    }
    folder.put(_DATA, (to_json(content, indent=1) + "\n").encode())
    names.append(_DATA)
    write_made_from(folder, made_from, sizes_of(folder, names))
    return replace(figures, names=tuple(names))


def _open_captions(run: Run, job: FiguresJob) -> SplitData:
    """Open the captions of a split, in one portion if all languages share one."""
    known = run.model.languages
    check_languages(job.languages, known)
    labels = labels_of(open_dataset(job.captions))
    splits = sorted({split for split, language, _ in labels if language in known})
    wanted = job.split or next(iter(default_test_splits(splits)), "")
    portions = portions_in(labels, wanted, job.languages or sorted(known), (job.portion,) if job.portion else ())
    missing = [language for language in job.languages if language not in portions]
    if not portions or missing:
        selection = f"of split {wanted!r}" if wanted else f"of a split test, {' or '.join(TEST_SPLITS)}"
        selection += f", portion {job.portion!r}" if job.portion else ""
        raise UsageError(
            f"{job.captions!r} has no captions {selection} in {', '.join(missing or known)}: choose with "
            f"--split of {', '.join(splits)}, and with --languages and --portion"
        )
    common = set.intersection(*map(set, portions.values()))
    if common and not job.caption_ids:
        portions = dict.fromkeys(portions, (min(common),))  # Alphabetically, comparable precedes translation.
    return open_split([run], job, wanted, portions, l2=run.config.data.l2_features)
