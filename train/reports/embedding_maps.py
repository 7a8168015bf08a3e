"""t-SNE map of images and their captions, as in figure 3 of Huang et al. 2019.

A thin line joins an image and its captions.

Letters: ``I`` images, ``L`` languages, ``E`` width of a vector.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from schemas.drawing.charts import ONE_COLUMN, SMALL, TINY, place_labels, plain, save, settle, style_of
from schemas.drawing.style import Figure, LineCollection, own_style
from schemas.errors import UsageError
from schemas.storage.folder import Folder
from train.data.captions import Captions
from train.evaluation.evaluation import Count, embed_captions, no_progress
from train.models.retrieval_model import Encoded, RetrievalModel
from train.reports.figure_examples import Example, first_captions, images_in_all_languages

_PERPLEXITY = 30.0  # Scikit-learn's default; a tenth of the points where they are few, so that more than one group can show.


@dataclass(frozen=True)
class EmbeddingMap:
    """Images and a caption of each in each language, in a plane.

    Attributes:
        points: float32 ``[1 + L, I, 2]``: the images, then their captions in each language.
        numbers: numbers of the examples, by index in ``image_ids``.
        seed: seed of the sample of images and of t-SNE.
    """

    image_ids: tuple[str, ...]
    languages: tuple[str, ...]
    points: np.ndarray
    numbers: dict[int, int]
    perplexity: float
    seed: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        names = ("image", *self.languages)
        points = {name: points.round(4).tolist() for name, points in zip(names, self.points.astype(float), strict=True)}
        return {"image_ids": list(self.image_ids), "points": points, "perplexity": self.perplexity, "seed": self.seed}


def map_embeddings(
    model: RetrievalModel,
    captions: Captions,
    images: Encoded,
    examples: Sequence[Example],
    *,
    max_images: int,
    seed: int,
    on_progress: Count = no_progress,
) -> EmbeddingMap:
    """Map images and the first caption of each in each language.

    Images are those of the examples and a sample of others, at most ``max_images`` in all. Examples without a
    caption in some language are left out.

    Raises:
        UsageError: fewer than two images have captions in all languages, or all vectors are equal, or some are not finite.
    """
    candidates = images_in_all_languages(captions)
    if len(candidates) < 2:
        raise UsageError(f"a map needs at least two images with captions in all languages, split {captions.split!r} has one")
    shown = [example.image for example in examples if example.image in candidates]
    others = np.random.default_rng(seed).permutation(np.setdiff1d(candidates, shown))
    chosen = np.sort(np.concatenate([np.array(shown, np.int64), others[: max(0, max_images - len(shown))]])).astype(np.int64)
    rows = np.array([first_captions(captions, image) for image in chosen.tolist()])  # [I, L]
    vectors = [images.values.cpu().numpy()[chosen]]
    for language, language_rows in zip(captions.language_names, rows.T, strict=True):
        batch = captions.batch(language_rows)
        vectors.append(embed_captions(model, batch, language, on_progress=on_progress).values.cpu().numpy())
    stacked = np.stack(vectors)  # [1 + L, I, E]
    perplexity = min(_PERPLEXITY, max(2.0, stacked.shape[0] * stacked.shape[1] / 10))
    points = plane_of(stacked.reshape(-1, stacked.shape[2]), perplexity=perplexity, seed=seed)
    indices = {image: index for index, image in enumerate(chosen.tolist())}
    return EmbeddingMap(
        image_ids=tuple(captions.image_ids[image] for image in chosen.tolist()),
        languages=captions.language_names,
        points=points.reshape(*stacked.shape[:2], 2),
        numbers={indices[example.image]: example.number for example in examples if example.image in indices},
        perplexity=perplexity,
        seed=seed,
    )


def plane_of(vectors: np.ndarray, *, perplexity: float, seed: int) -> np.ndarray:
    """Compute t-SNE by Euclidean distance (van der Maaten and Hinton 2008).

    Maps vectors ``[N, E]`` to float32 ``[N, 2]``, initialized by PCA. Single-threaded, since sums depend on
    the number of threads: equal vectors and seeds give equal bits on the same machine.

    Raises:
        UsageError: all vectors are equal, or some are not finite.
    """
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    if not np.isfinite(vectors).all() or bool((vectors == vectors[0]).all()):
        raise UsageError("the vectors are all equal, or not finite: there is nothing to map. Has the training collapsed?")
    method = TSNE(2, perplexity=perplexity, init="pca", learning_rate="auto", random_state=seed)
    with threadpool_limits(limits=1):
        points: np.ndarray = method.fit_transform(vectors.astype(np.float64))
    return points.astype(np.float32)


_AREA = 14.0  # Of a dot, in square points.


@own_style()
def plot_map(embedding_map: EmbeddingMap, folder: Folder, name: str) -> None:
    """Draw a map as wide as a column, with numbers beside examples that have room.

    Raises:
        DatasetError: the picture cannot be written.
    """
    figure = Figure(figsize=(ONE_COLUMN, ONE_COLUMN + 0.3), layout="constrained")
    panel = figure.subplots()
    images, *captions = embedding_map.points
    for points in captions:
        pairs = [(image, caption) for image, caption in zip(images, points, strict=True)]
        panel.add_collection(LineCollection(pairs, colors="0.65", linewidths=0.5, zorder=1))
    dots: dict[str, Any] = {"s": _AREA, "edgecolors": "white", "linewidths": 0.4}
    panel.scatter(images[:, 0], images[:, 1], c="black", marker="s", label="image", zorder=3, **dots)
    for index, (language, points) in enumerate(zip(embedding_map.languages, captions, strict=True)):
        style = style_of(index)
        marker = style.marker if style.marker != "s" else "P"  # Squares are images.
        panel.scatter(points[:, 0], points[:, 1], c=style.color, marker=marker, label=plain(language), zorder=2, **dots)
    panel.set(xticks=[], yticks=[])
    panel.set_aspect("equal", adjustable="datalim")
    size = f"{len(embedding_map.image_ids):,} images and a caption in each language"
    note = f"t-SNE of {size},\nperplexity {embedding_map.perplexity:.3g}, seed {embedding_map.seed}"
    panel.set_xlabel(note, fontsize=TINY, color="0.35")
    figure.legend(loc="outside upper center", ncols=min(5, 1 + len(captions)), fontsize=SMALL, frameon=False, handletextpad=0.1)
    font: dict[str, Any] = {"fontsize": SMALL, "fontweight": "bold", "ha": "center", "va": "center", "in_layout": False}
    line = {"arrowstyle": "-", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 0}
    numbers = [
        (panel.annotate(str(number), images[index], images[index], arrowprops=line, zorder=4, **font), images[[index]])
        for index, number in embedding_map.numbers.items()
    ]
    settle(figure)
    radius = (_AREA**0.5 / 2 + 0.5) * figure.dpi / 72  # Pixels.
    centres = panel.transData.transform(embedding_map.points.reshape(-1, 2))
    taken = [(x - radius, y - radius, x + radius, y + radius) for x, y in centres.tolist()]
    place_labels(panel, numbers, taken, pad=radius, reach=20)
    save(figure, folder, name)
