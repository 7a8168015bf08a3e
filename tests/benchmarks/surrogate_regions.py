"""Make SURROGATE regions for Multi30K from its French and Czech captions, where the photographs cannot be had.

They are not image features: no image is opened, and no network that saw one is used. Each region of an image is a noisy, fixed
random projection of one word of its French and Czech captions, so that a model can be trained on regions, compared with another
one, and asked whether its attention finds the region that carries a word. A recall reached on them says nothing about images.

Letters in shapes: ``N`` images, ``R`` regions, ``D`` width.

Recipe; all draws come from ``--seed``:

1. The terms of an image are the French and Czech tokens of its captions in task 1, lower-cased and cut to six letters (a crude
   stemmer), marked with their language, those that occur in at least 3 and at most two fifths of the training images.
2. Each term has a latent vector of length 1, drawn once. A region carries ``z = term + 0.3 context + noise``: the context is the
   mean of the image's terms, as the features of a detector know their surroundings; the noise has the expected length ``--noise``.
3. Regions stand in random order. An image with fewer terms than regions has regions that carry none: context and noise.
4. ``v = max(0, W z + b)`` with ``W ~ N(0, 1)``, ``b = -0.5``, the same for every image, then ``v = max(0, v + 0.1 e)``,
   ``e ~ N(0, 1)``: a fixed random layer, non-negative as a pooled layer is.

Files, for each of train, val and test_2016_flickr: ``SPLIT-regions.npy`` float16 ``[N, R, D]``; its mean over regions
``SPLIT-mean.npy`` float32 ``[N, D]``; ``SPLIT-boxes.npy`` float32 ``[N, R, 4]``, the cells of a grid; ``SPLIT-sizes.npy`` int64
``[N, 2]``; ``SPLIT-carried.npy`` int32 ``[N, R]``, the term or -1; lists of ids. ``words.json`` has by language the terms that go
with a word, one that occurs in at least 20 training captions: the Dice coefficient of their images is at least a half.
``recipe.json`` has the arguments and the terms.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np

SPLITS = ("train", "val", "test_2016_flickr")
SOURCES, READERS = ("fr", "cs"), ("en", "de")
LETTERS, LEAST, MOST, CONTEXT, AMBIENT, COMMON, DICE = 6, 3, 0.4, 0.3, 0.1, 20, 0.5
BLOCK = 256


def main() -> None:
    """Write the arrays, and print how to import them."""
    parser = argparse.ArgumentParser(description="Make surrogate regions for Multi30K from its French and Czech captions.")
    parser.add_argument("data", type=Path, help="folder 'data' of multi30k/dataset")
    parser.add_argument("output", type=Path, help="folder to write to")
    parser.add_argument("--regions", type=int, default=36)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--latent", type=int, default=256)
    parser.add_argument("--noise", type=float, default=0.8, help="expected length of the noise; a term has length 1")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)

    train = [image_terms(captions) for captions in captions_of(args.data, "train", SOURCES)]
    counts = Counter(term for terms in train for term in terms)
    terms = sorted(term for term, count in counts.items() if LEAST <= count <= MOST * len(train))
    numbers = {term: number for number, term in enumerate(terms)}

    fixed, *others = (np.random.default_rng(seed) for seed in np.random.SeedSequence(args.seed).spawn(1 + len(SPLITS)))
    latent = unit(fixed.standard_normal((len(terms), args.latent), dtype=np.float32))
    layer = fixed.standard_normal((args.latent, args.width), dtype=np.float32)
    for split, generator in zip(SPLITS, others, strict=True):
        images = [
            [numbers[term] for term in image_terms(captions) if term in numbers]
            for captions in captions_of(args.data, split, SOURCES)
        ]
        carried = np.stack([placed(image, args.regions, generator) for image in images])
        np.save(args.output / f"{split}-carried.npy", carried)
        write_regions(args.output, split, carried, latent, layer, args.noise, generator)
        write_places(args.output, split, carried.shape, image_ids(args.data, split))
    words = {language: words_and_terms(args.data, language, train, numbers) for language in READERS}
    (args.output / "words.json").write_text(json.dumps(words, ensure_ascii=False, indent=1))
    recipe = {"what": "surrogate regions from French and Czech captions; no image features", "terms": terms}
    arguments = {name: value for name, value in vars(args).items() if not isinstance(value, Path)}
    (args.output / "recipe.json").write_text(json.dumps({**recipe, **arguments}, ensure_ascii=False, indent=1))
    print(f"{len(terms):,} terms; words with terms: {', '.join(f'{len(words[name]):,} {name}' for name in READERS)}")


def captions_of(data: Path, split: str, languages: tuple[str, ...]) -> list[list[tuple[str, str]]]:
    """Return language and text of the translations of each image."""
    texts = []
    for language in languages:
        with gzip.open(data / "task1" / "raw" / f"{split}.{language}.gz", "rt", encoding="utf-8", newline="\n") as file:
            texts.append([(language, line) for line in file])
    return [list(captions) for captions in zip(*texts, strict=True)]


def image_terms(captions: list[tuple[str, str]]) -> list[str]:
    """Return the terms of an image, each once."""
    return list(dict.fromkeys(f"{language}:{word[:LETTERS]}" for language, text in captions for word in words_of(text)))


def words_of(text: str) -> list[str]:
    """Return the runs of letters, lower-cased."""
    return re.findall(r"[^\W\d_]+", text.lower())


def image_ids(data: Path, split: str) -> list[str]:
    """Return the ids of a split's images."""
    lines = (data / "task1" / "image_splits" / f"{split}.txt").read_text().splitlines()
    return [line.split("#")[0].strip() for line in lines]


def placed(terms: list[int], regions: int, generator: np.random.Generator) -> np.ndarray:
    """Place terms, as many as there is room for, in random order among regions that carry none (-1)."""
    chosen = generator.permutation(terms)[:regions]
    return generator.permutation(np.r_[chosen, np.full(regions - len(chosen), -1)]).astype(np.int32)


def write_regions(
    output: Path,
    split: str,
    carried: np.ndarray,
    latent: np.ndarray,
    layer: np.ndarray,
    noise: float,
    generator: np.random.Generator,
) -> None:
    """Write the regions of a split, and their means."""
    shape = (*carried.shape, layer.shape[1])
    file = output / f"{split}-regions.npy"
    regions = np.lib.format.open_memmap(file, mode="w+", dtype=np.float16, shape=shape)
    means = np.empty((shape[0], shape[2]), np.float32)
    for start in range(0, len(carried), BLOCK):
        block = carried[start : start + BLOCK]
        there = (block >= 0)[..., None]
        terms = latent[block] * there
        context = terms.sum(1, keepdims=True) / np.maximum(there.sum(1, keepdims=True), 1)
        drawn = generator.standard_normal(terms.shape, dtype=np.float32) * np.float32(noise / np.sqrt(latent.shape[1]))
        values = np.maximum((terms + np.float32(CONTEXT) * context + drawn) @ layer - np.float32(0.5), 0)
        values += np.float32(AMBIENT) * generator.standard_normal(values.shape, dtype=np.float32)
        regions[start : start + BLOCK] = np.maximum(values, 0)
        means[start : start + BLOCK] = regions[start : start + BLOCK].astype(np.float32).mean(1)
    regions.flush()
    np.save(output / f"{split}-mean.npy", means)


def write_places(output: Path, split: str, shape: tuple[int, int], ids: list[str]) -> None:
    """Write boxes, the cells of a square grid in an image of 600 x 600 pixels, and the ids of the images."""
    images, regions = shape
    side = int(np.ceil(np.sqrt(regions)))
    rows, columns = np.divmod(np.arange(regions), side)
    boxes = np.stack([columns, rows, columns + 1, rows + 1], 1).astype(np.float32) * np.float32(600 / side)
    np.save(output / f"{split}-boxes.npy", np.broadcast_to(boxes, (images, regions, 4)))
    np.save(output / f"{split}-sizes.npy", np.full((images, 2), 600))
    for kind in ("regions", "mean"):
        (output / f"{split}-{kind}.ids").write_text("".join(f"{name}\n" for name in ids))


def words_and_terms(data: Path, language: str, images: list[list[str]], numbers: dict[str, int]) -> dict[str, list[int]]:
    """Return the terms that stand for the same images as a word does in the captions of one language."""
    captions = [set(words_of(text)) for ((_, text),) in captions_of(data, "train", (language,))]
    counts = Counter(word for words in captions for word in words)
    terms = Counter(numbers[term] for image in images for term in image if term in numbers)
    together = Counter(
        (word, numbers[term])
        for words, image in zip(captions, images, strict=True)
        for term in image
        if term in numbers
        for word in words
        if counts[word] >= COMMON
    )
    found: dict[str, list[int]] = {}
    for (word, term), count in together.items():
        if 2 * count >= DICE * (counts[word] + terms[term]):
            found.setdefault(word, []).append(term)
    return dict(sorted(found.items()))


def unit(vectors: np.ndarray) -> np.ndarray:
    """Return vectors of length 1."""
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


if __name__ == "__main__":
    main()
