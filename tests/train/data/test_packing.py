from itertools import product

import numpy as np
import pytest
import torch

from train.data.batches import CaptionBatch
from train.data.packing import PackedCaptions, pack


def flat(captions: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids one after the other, and offsets."""
    token_ids = np.array([token for caption in captions for token in caption], dtype=np.int32)
    return token_ids, np.cumsum([0, *map(len, captions)], dtype=np.int64)


def unpacked(packed: PackedCaptions) -> list[list[int]]:
    """Rebuild the captions, walking each from its end to the root."""
    captions = []
    for number in packed.ends.tolist():
        caption = []
        while number:
            caption.append(int(packed.tokens[packed.last_tokens[number - 1]]))
            number = int(packed.parents[number - 1])
        captions.append(caption[::-1])
    return captions


def check(captions: list[list[int]], rows: list[int]) -> PackedCaptions:
    """Pack captions and compare with a plain set of prefixes."""
    packed = pack(CaptionBatch(*flat(captions), np.array(rows, dtype=np.int64)))
    chosen = [captions[row] for row in rows]
    prefixes = {tuple(caption[: end + 1]) for caption in chosen for end in range(len(caption))}
    longest = max(map(len, chosen), default=0)
    assert unpacked(packed) == chosen
    assert len(packed) == len(rows)
    assert packed.step_sizes == tuple(sum(len(prefix) == step + 1 for prefix in prefixes) for step in range(longest))
    assert packed.tokens.tolist() == sorted({token for caption in chosen for token in caption})
    assert len(packed.parents) == len(packed.last_tokens) == len(prefixes)
    return packed


def test_a_worked_example():
    packed = check([[1, 5, 2], [1, 5, 6, 2], [1, 2]], [1, 0, 2, 0])
    assert packed.step_sizes == (1, 2, 2, 1)
    assert packed.tokens.tolist() == [1, 2, 5, 6]
    assert packed.last_tokens.tolist() == [0, 1, 2, 1, 3, 1]
    assert packed.parents.tolist() == [0, 1, 1, 3, 3, 5]
    assert packed.ends.tolist() == [6, 4, 2, 4]


@pytest.mark.parametrize("seed", range(20))
def test_captions_come_back_in_the_order_of_the_request(seed):
    generator = np.random.default_rng(seed)
    captions = [generator.integers(0, 4, size=generator.integers(1, 9)).tolist() for _ in range(40)]
    check(captions, generator.integers(0, 40, size=generator.integers(1, 60)).tolist())


def test_all_captions_of_few_tokens():
    captions = [list(tokens) for length in (1, 2, 3) for tokens in product(range(3), repeat=length)]
    packed = check(captions, list(range(len(captions)))[::-1])
    assert packed.step_sizes == (3, 9, 27)


def test_a_caption_that_is_a_prefix_of_another_has_its_own_end():
    packed = check([[3], [3, 3], [3, 3, 3]], [2, 0, 1])
    assert packed.ends.tolist() == [3, 1, 2]


def test_parents_belong_to_the_previous_step():
    packed = check([[1, 4, 2], [1, 5, 2], [1, 4, 4, 2]], [0, 1, 2])
    first = np.cumsum([0, *packed.step_sizes])
    for step, parents in enumerate(packed.steps(packed.parents)):
        expected = range(first[step - 1] + 1, first[step] + 1) if step else [0]
        assert set(parents.tolist()) <= set(expected)


def test_types():
    packed = check([[1, 2]], [0])
    assert {t.dtype for t in (packed.tokens, packed.last_tokens, packed.parents, packed.ends)} == {torch.int64}
    assert packed.to("cpu").step_sizes == packed.step_sizes
    assert packed.to("meta").ends.device.type == "meta"


def test_no_captions():
    packed = check([[1, 2]], [])
    assert (len(packed), packed.step_sizes, packed.tokens.numel()) == (0, (), 0)


def test_a_caption_without_tokens_is_an_error_that_names_it():
    token_ids, offsets = flat([[1, 2], [], [1, 2]])
    with pytest.raises(ValueError, match="caption 1 has no tokens"):
        CaptionBatch(token_ids, offsets, np.array([0, 1, 2]))
    assert len(pack(CaptionBatch(token_ids, offsets, np.array([0, 2])))) == 2
