"""Draw images and captions in a plane, see `train.reports.embedding_maps`: a thin line from each image to each of its captions."""

from __future__ import annotations

from typing import Any

from matplotlib import patheffects
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from schemas.storage.folder import Folder
from train.reports.embedding_maps import EmbeddingMap
from train.runs.plotting import SMALL, TINY, plain, save, style_of

_SIDE = 5.0  # Inches.


def plot_map(found: EmbeddingMap, folder: Folder, name: str) -> None:
    """Draw a map; the examples have their numbers in it.

    Raises:
        DatasetError: the picture cannot be written.
    """
    figure = Figure(figsize=(_SIDE, _SIDE), layout="constrained")
    panel = figure.subplots()
    images, *captions = found.points
    for of_language in captions:
        pairs = [(image, caption) for image, caption in zip(images, of_language, strict=True)]
        panel.add_collection(LineCollection(pairs, colors="0.65", linewidths=0.5, zorder=1))
    dots: dict[str, Any] = {"edgecolors": "white", "linewidths": 0.4}
    panel.scatter(images[:, 0], images[:, 1], s=26, c="black", marker="s", label="image", zorder=3, **dots)
    for number, (language, of_language) in enumerate(zip(found.languages, captions, strict=True)):
        style = style_of(number)
        marker = style.marker if style.marker != "s" else "P"  # Squares are images.
        panel.scatter(
            of_language[:, 0], of_language[:, 1], s=22, c=style.color, marker=marker, label=plain(language), zorder=2, **dots
        )
    for place, number in found.numbers.items():
        label = panel.annotate(
            str(number),
            images[place],
            xytext=(5, 5),
            textcoords="offset points",
            fontsize=SMALL + 1,
            fontweight="bold",
            zorder=4,
        )
        label.set_path_effects([patheffects.withStroke(linewidth=2.5, foreground="white")])
    panel.set_xticks([])
    panel.set_yticks([])
    panel.set_aspect("equal", adjustable="datalim")
    size = f"{len(found.image_ids):,} images and a caption in each language"
    note = f"t-SNE of {size}, perplexity {found.perplexity:.3g}, seed {found.seed}"
    panel.set_xlabel(note, fontsize=TINY, color="0.35")
    figure.legend(loc="outside upper center", ncols=1 + len(captions), fontsize=SMALL, frameon=False)
    save(figure, folder, name)
