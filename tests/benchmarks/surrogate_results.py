"""Train models of Huang et al. 2019 and of SCAN on SURROGATE regions with equal budgets, and say what came of it.

The regions are those of `surrogate_regions.py`: no photograph is behind them, so recall says nothing about images. Compared are:

1. MHA-D with and without the diversity of heads, and VSE++ with the same text encoder (an LSTM in both directions per language, its
   states averaged) on the mean of the same regions: sum of recalls of the test split, both languages; and the mean distance
   ``1 - cos`` between the heads of an image, and of a caption.
2. SCAN, text to image: of the test split's words that go with terms which the image's regions carry, how often the region with the
   greatest attention carries one of them, and how often a region drawn at random would (chance).

Usage: surrogate_results.py CAPTIONS VOCABULARY REGIONS MEANS ARRAYS OUTPUT [--steps 800] [--seeds 3] [--only NAME ...]

CAPTIONS, VOCABULARY: Multi30K's comparable captions, recipe multi30k-lc, encoded. REGIONS, MEANS: the arrays, imported. ARRAYS: the
folder of the arrays. Runs that are finished in OUTPUT are not trained again.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cosine_similarity

import imagepivot
from train.data.batches import CaptionBatch
from train.data.splits import TrainingData, open_data
from train.evaluation.evaluation import evaluating
from train.models.retrieval_model import Encoded, ImageBatch
from train.runs.run import Run

SPLIT, ARRAYS, LANGUAGES = "test_2016", "test_2016_flickr", ("en", "de")
SAME = {
    "model.embed_dim": "128",
    "model.word_dim": "128",
    "loss.hinges": "sum",  # In so few steps the hardest negatives of the presets make all of the models collapse.
    "optimizer.learning_rate": "1e-3",
    "schedule.batch_size": "128",
    "schedule.eval_every_steps": "200",
    "schedule.lr_step_epochs": "0",
}
HEADS = {**SAME, "model.attention_dim": "128", "model.context_dim": "128"}
VSE = {
    **SAME,
    "data.portions": "{ en = ['comparable'], de = ['comparable'] }",
    "data.l2_features": "false",
    "data.min_count": "1",
    "model.text_encoder": "bilstm",
    "model.shared_encoder": "false",
    "loss.caption_weight": "0.6",
    "schedule.batches": "images",
}
SETTINGS = {
    "vse++": ("vsepp", VSE),
    "mha": ("huang2019/mha", HEADS),
    "mha-d": ("huang2019/mha-d", HEADS),
    "mha-d, margin 1": ("huang2019/mha-d", {**HEADS, "loss.diversity_margin": "1.0"}),
    "scan": ("scan/t2i-avg", SAME),
}


def main() -> None:
    """Train what is missing, and print the results."""
    parser = argparse.ArgumentParser(description="Compare models on surrogate regions.")
    for name in ("captions", "vocabulary", "regions", "means", "arrays", "output"):
        parser.add_argument(name)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=SETTINGS, default=list(SETTINGS))
    args = parser.parse_args()
    for name in args.only:
        found = [results(args, name, seed) for seed in range(args.seeds)]
        print(f"{name}, {args.steps} steps, {args.seeds} seeds")
        for key in found[0]:
            values = [result[key] for result in found]
            print(f"  {key}: mean {statistics.mean(values):.4g} ({', '.join(f'{value:.4g}' for value in values)})", flush=True)


def results(args: argparse.Namespace, name: str, seed: int) -> dict[str, float]:
    """Train a setting with a seed, unless that is done, and measure it."""
    folder = Path(args.output) / f"{name.replace(', ', '-').replace(' ', '-')}-{args.steps}-{seed}"
    features = args.means if name == "vse++" else args.regions
    file = folder / "results.json"
    if not file.exists():
        preset, values = SETTINGS[name]
        values = {**values, "schedule.max_steps": str(args.steps)}
        job = imagepivot.TrainJob(
            config=imagepivot.resolve_config(preset, values),
            corpus=imagepivot.Corpus(args.captions, features, args.vocabulary),
            output=str(folder),
            seed=seed,
            resume=True,
            curves=False,
            memory_map=maps(args),
        )
        imagepivot.train(job)
        file.write_text(json.dumps(measured(args, str(folder), features), indent=1))
    found: dict[str, float] = json.loads(file.read_text())
    return found


def measured(args: argparse.Namespace, folder: str, features: str) -> dict[str, float]:
    """Measure a run on the test split."""
    run = imagepivot.open_run(folder)
    languages = [language for language in LANGUAGES if language in run.model.languages]
    job = imagepivot.EvaluateJob(
        folder,
        args.captions,
        features,
        splits=(SPLIT,),
        languages=tuple(languages),
        portion="comparable",
        memory_map=maps(args),
    )
    found = {f"sum of recalls, {score.language}": score.retrieval.sum_of_recalls for score in imagepivot.evaluate(job)}
    data = open_data(args.captions, features, split=SPLIT, languages=languages, portions=["comparable"], memory_map=maps(args))
    if run.model.heads > 1:
        found |= distances(run, data)
    if run.config.model.kind == "scan":
        found |= hits(run, data, Path(args.arrays))
    return found


def maps(args: argparse.Namespace) -> str:
    """Return the folder of what is mapped into memory."""
    return str(Path(args.output) / "maps")


def batches(run: Run, data: TrainingData) -> Iterator[tuple[str, Encoded]]:
    """Encode the images, and then the captions of each language, in batches."""
    size = 256
    for start in range(0, len(data.captions.image_ids), size):
        images = np.arange(start, min(start + size, len(data.captions.image_ids)))
        yield "images", run.model.encode_images(ImageBatch.of(data.features, images, torch.device("cpu")))
    for number, language in enumerate(data.captions.language_names):
        rows = np.flatnonzero(data.captions.languages == number)
        for start in range(0, len(rows), size):
            batch = CaptionBatch(data.captions.token_ids, data.captions.offsets, rows[start : start + size])
            yield f"captions, {language}", run.model.encode_captions(batch, language)


def distances(run: Run, data: TrainingData) -> dict[str, float]:
    """Return the mean distance ``1 - cos`` between the heads of an image, and of captions."""
    found: dict[str, list[np.ndarray]] = {}
    with evaluating(run.model):
        for name, batch in batches(run, data):
            heads = batch.values.unflatten(-1, (run.model.heads, -1)).unbind(1)
            pairs = [1 - cosine_similarity(a, b) for a, b in combinations(heads, 2)]
            found.setdefault(name, []).append(torch.stack(pairs).mean(0).numpy())
    return {f"distance between heads, {name}": float(np.concatenate(values).mean()) for name, values in found.items()}


def hits(run: Run, data: TrainingData, arrays: Path) -> dict[str, float]:
    """Return how often the region that an English word attends to most carries one of its terms, and how often chance would."""
    terms = json.loads((arrays / "words.json").read_text())["en"]
    carried = np.load(arrays / f"{ARRAYS}-carried.npy")
    names = (arrays / f"{ARRAYS}-regions.ids").read_text().split()
    positions = {Path(name).stem: row for row, name in enumerate(names)}  # As `import` makes ids of names.
    found, chance = [], []
    captions = data.captions
    with evaluating(run.model) as device:
        for row in np.flatnonzero(captions.indices == 0):
            tokens = [
                run.vocabulary.tokens[number]
                for number in captions.token_ids[captions.offsets[row] : captions.offsets[row + 1]]
            ]
            image = captions.images[row]
            there = carried[positions[captions.image_ids[image]]]
            right = {place: np.isin(there, terms[token]) for place, token in enumerate(tokens) if token in terms}
            right = {place: regions for place, regions in right.items() if regions.any()}
            if not right:
                continue
            images = ImageBatch.of(data.features, np.array([image]), device)
            weights = run.model.attention_weights(
                images, CaptionBatch(captions.token_ids, captions.offsets, np.array([row])), "en"
            )
            assert weights is not None
            assert weights.pairs is not None
            found += [regions[int(weights.pairs[place].argmax())] for place, regions in right.items()]
            chance += [regions.mean() for regions in right.values()]
    return {
        "words whose region is found": float(np.mean(found)),
        "chance": float(np.mean(chance)),
        "words": len(found),
    }


if __name__ == "__main__":
    main()
