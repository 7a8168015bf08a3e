"""A tiny BERT with drawn weights, saved as transformers saves models."""

from pathlib import Path

import torch

SUB_WORDS = (
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    *("a", "ein", "dog", "hund", "run", "##s", "##ning", "man", "snow", "##board", "'", "s", ".", "&", "grun", "##er"),
)
"""The vocabulary; in lower case and without accents."""


def make_tiny_bert(folder: Path, *, seed: int = 0, width: int = 16, positions: int = 24, head: bool = False) -> Path:
    """Write a BERT of two layers with a tokenizer of `SUB_WORDS`; with the head of a masked language model if asked for."""
    from transformers import BertConfig, BertForMaskedLM, BertModel, BertTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    config = BertConfig(
        vocab_size=len(SUB_WORDS),
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=2 * width,
        max_position_embeddings=positions,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = BertForMaskedLM(config) if head else BertModel(config)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in SUB_WORDS), encoding="utf-8")
    BertTokenizerFast(vocab=str(folder / "vocab.txt"), do_lower_case=True, model_max_length=positions).save_pretrained(folder)
    return folder
