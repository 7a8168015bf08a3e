"""Compare a training step (batch 128, words 300, GRU and joint space 1024) with the usual one, and with its matrix products.

Yardsticks: a model with ``torch.nn.GRU``, ``pack_padded_sequence`` and default Adam, as in VSE++ and its successors; and the lower
bound for a step that shares no prefixes, which is three times the multiply-adds of the unpadded tokens at the rate of a large
matrix product in the same run. Sharing may go below it. The captions are those of Multi30K, if its text is available, and synthetic
ones that share no prefix but ``<start>``, which is the worst case. Takes the number of threads as an argument.
"""

import gzip
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch
from measuring import ratio, test_data
from processor import machine
from targets import floor
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from schemas.vocabulary import END, START, UNK
from train.config.models import VseConfig
from train.data.batches import CaptionBatch
from train.losses import ranking_loss
from train.models.retrieval_model import Dimensions, ImageBatch
from train.models.vse import JointEmbedding

BATCH, WIDTH, WORDS, FEATURES, MARGIN, CLIP, RATE = 128, 1024, 300, 2048, 0.2, 2.0, 2e-4
VOCABULARY = 8344  # English words that occur four times in Multi30K's comparable captions.
STEPS = 2  # Per measurement. The batches differ from step to step and are the same for both models.


class Captions:
    """Synthetic or real captions, flat as in `train.data.captions`."""

    def __init__(self, captions: list[list[int]]) -> None:
        self.token_ids = np.array([token for caption in captions for token in caption], dtype=np.int32)
        self.offsets = np.cumsum([0, *map(len, captions)])

    def padded(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return token ids ``[B, longest]`` and lengths ``[B]``."""
        captions = [torch.from_numpy(self.token_ids[self.offsets[r] : self.offsets[r + 1]].astype(np.int64)) for r in rows]
        return nn.utils.rnn.pad_sequence(captions, batch_first=True), torch.tensor([len(caption) for caption in captions])


def synthetic() -> Captions:
    """Draw captions with the lengths of Multi30K (mean 15.5 with <start> and <end>, deviation 5) and random tokens."""
    generator = np.random.default_rng(0)
    lengths = 2 + generator.gamma(7, 13.5 / 7, size=5000).astype(int)
    return Captions([[START, *generator.integers(UNK, VOCABULARY, size=length - 2).tolist(), END] for length in lengths])


def multi30k(language: str = "en") -> Captions | None:
    """Return the comparable captions of the training images in a language; None if the text is missing."""
    folder = test_data("multi30k")
    if folder is None:
        return None
    texts = []
    for number in range(1, 6):
        with gzip.open(folder / "data" / "task2" / "raw" / f"train.{number}.{language}.gz", "rt", encoding="utf-8") as lines:
            texts += [re.findall(r"\w+|[^\w\s]", line.lower()) for line in lines]
    counts = Counter(token for text in texts for token in text)
    ids = {token: UNK + 1 + rank for rank, (token, _) in enumerate(counts.most_common(VOCABULARY - UNK - 1))}
    return Captions([[START, *(ids.get(token, UNK) for token in text), END] for text in texts])


class Plain(nn.Module):
    """The usual model."""

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.Linear(FEATURES, WIDTH)
        self.words = nn.Embedding(VOCABULARY, WORDS)
        self.gru = nn.GRU(WORDS, WIDTH, batch_first=True)

    def forward(self, features: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        """Return scores ``[B, B]``."""
        outputs, _ = self.gru(pack_padded_sequence(self.words(ids), lengths, batch_first=True, enforce_sorted=False))
        padded, _ = pad_packed_sequence(outputs, batch_first=True)
        last = (lengths - 1).view(-1, 1, 1).expand(-1, 1, WIDTH)
        sentences = padded.gather(1, last).squeeze(1)
        images = self.images(features)
        return (images / images.norm(dim=1, keepdim=True)) @ (sentences / sentences.norm(dim=1, keepdim=True)).T


def plain_loss(scores: Tensor, hinges: str) -> Tensor:
    """Compute the hinges in the usual way."""
    true, diagonal = scores.diag().view(-1, 1), torch.eye(len(scores)) > 0.5
    of_rows = (MARGIN + scores - true).clamp(min=0).masked_fill(diagonal, 0)
    of_columns = (MARGIN + scores - true.T).clamp(min=0).masked_fill(diagonal, 0)
    if hinges == "max":
        of_rows, of_columns = of_rows.max(1)[0], of_columns.max(0)[0]
    return of_rows.sum() + of_columns.sum()


def timed(step: Callable[[np.ndarray], None], captions: Captions) -> Callable[[], float]:
    """Return a function that measures steps per second over the next `STEPS` batches; a first step warms up."""
    generator = np.random.default_rng(1)
    step(generator.choice(len(captions.offsets) - 1, BATCH, replace=False))

    def rate() -> float:
        batches = [generator.choice(len(captions.offsets) - 1, BATCH, replace=False) for _ in range(STEPS)]
        started = time.perf_counter()
        for rows in batches:
            step(rows)
        return STEPS / (time.perf_counter() - started)

    return rate


def plain_steps(captions: Captions, hinges: str) -> Callable[[], float]:
    """Return the rate of the usual model."""
    model = Plain()
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    features = torch.rand(BATCH, FEATURES)

    def step(rows: np.ndarray) -> None:
        optimizer.zero_grad()
        plain_loss(model(features, *captions.padded(rows)), hinges).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    return timed(step, captions)


def our_steps(captions: Captions, hinges: str) -> Callable[[], float]:
    """Return the rate of our model."""
    model = JointEmbedding(VseConfig(embed_dim=WIDTH, word_dim=WORDS), Dimensions(("en",), VOCABULARY, (FEATURES,)))
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, fused=True)
    features, images = torch.rand(BATCH, FEATURES), torch.arange(BATCH)

    def step(rows: np.ndarray) -> None:
        optimizer.zero_grad()
        batch = CaptionBatch(captions.token_ids, captions.offsets, rows)
        scores = model.scores(model.encode_images(ImageBatch(features)), model.encode_captions(batch, "en"))
        ranking_loss(scores, images, margin=MARGIN, hinges=hinges).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    return timed(step, captions)


def floor_steps(captions: Captions) -> Callable[[], float]:
    """Return the rate if a step consisted only of the products of its unpadded tokens, forward and backward."""
    tokens = BATCH * len(captions.token_ids) / (len(captions.offsets) - 1)
    operations = 3 * 2 * tokens * 3 * WIDTH * (WORDS + WIDTH)
    a, b = torch.rand(2048, WIDTH), torch.rand(WIDTH, 3 * WIDTH)

    def rate() -> float:
        seconds = []
        for _ in range(5):
            started = time.perf_counter()
            a @ b
            seconds.append(time.perf_counter() - started)
        return 2 * a.numel() * b.shape[1] / statistics.median(seconds) / operations

    return rate


def main() -> None:
    """Print the ratios."""
    if len(sys.argv) > 1:
        torch.set_num_threads(int(sys.argv[1]))
    torch.manual_seed(0)
    print(f"{machine()}, torch {torch.__version__} with {torch.get_num_threads()} threads")
    cases = {"Multi30K, sum of hinges": (multi30k(), "sum"), "Multi30K, max of hinges": (multi30k(), "max")}
    for case, (captions, hinges) in {**cases, "nothing shared, max of hinges": (synthetic(), "max")}.items():
        if captions is None:
            print(f"{case}: needs the Multi30K text: set IMAGEPIVOT_TEST_DATA")
            continue
        ours = our_steps(captions, hinges)
        ratio(
            f"training step, {case}, against torch.nn.GRU",
            ours,
            plain_steps(captions, hinges),
            unit="steps/s",
            at_least=floor("training step against torch.nn.GRU"),
        )
        ratio(
            f"training step, {case}, against its products",
            ours,
            floor_steps(captions),
            unit="steps/s",
            at_least=floor("training step against its products"),
        )


if __name__ == "__main__":
    main()
