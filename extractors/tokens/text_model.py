"""Text models: loading those of transformers, and batches of equal lengths.

Nothing is downloaded, and no code of a model's folder is run. Batches contain texts of equal sub-word counts,
so on a CPU the bytes of a text do not depend on other texts and on the thread count.

Shapes: ``B`` texts, ``S`` sub-words.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from extractors.base import Description
from extractors.computing.cpu_parallel import run_in_chunks
from extractors.computing.devices import AUTOCAST_DTYPES, check_request, precision_context
from extractors.computing.oom import BatchLimits, run_with_oom_retry
from schemas.errors import InputError, first_line
from schemas.fingerprints import sha256_of_bytes, sha256_of_json
from schemas.process.devices import upload

FORWARD_CAPTIONS = 8
"""Captions per forward on a CPU."""

UNUSED_WEIGHTS = ("pooler.",)
# Config keys without effect on the computation.
_IGNORED_CONFIG = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")
_FAULTS = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError),
    UnpicklingError,
    SafetensorError,
)


class TextModel(ABC):
    """Loaded text model on a ``device``; subclasses set ``description``."""

    description: Description

    def __init__(self, precision: str, device: str) -> None:
        self.device = check_request(device, precision)
        self._precision, self._limits = precision, BatchLimits()

    @abstractmethod
    def compute(self, ids: Tensor) -> Tensor:
        """Run the model on sub-words ``[B, S]`` on its device: ``[B, ...]``."""

    def compute_by_length(self, ids: Sequence[Sequence[int]], batch_size: int = 64) -> list[np.ndarray]:
        """Run the model in batches of equal lengths: float32 results."""
        by_length: dict[int, list[int]] = {}
        for i, text_ids in enumerate(ids):
            by_length.setdefault(len(text_ids), []).append(i)
        results: list[np.ndarray] = [np.empty(0)] * len(ids)
        for _, indices in sorted(by_length.items()):
            for start in range(0, len(indices), batch_size):
                batch = indices[start : start + batch_size]
                for i, result in zip(batch, self._compute_batch(torch.tensor([ids[i] for i in batch])), strict=True):
                    results[i] = result
        return results

    def _compute_batch(self, ids: Tensor) -> np.ndarray:
        if self.device.type == "cpu":
            return run_in_chunks(self._forward, ids, FORWARD_CAPTIONS).numpy()
        with precision_context(self._precision, self.device), torch.inference_mode():
            return run_with_oom_retry(self._forward, ids, self._limits).numpy()

    def _forward(self, ids: Tensor) -> Tensor:
        dtype = AUTOCAST_DTYPES.get(self._precision)
        with torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            return self.compute(upload(ids, self.device)).float().cpu()


def load_model(folder: Path, name: str) -> tuple[Any, Any, Any]:
    """Load config, tokenizer and model of transformers, with weights in float32."""
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    if not (folder / "config.json").is_file():
        raise InputError(
            f"{name!r} has no config.json, expected a model as saved by transformers: config.json, "
            "tokenizer.json or vocab.txt, and model.safetensors or pytorch_model.bin"
        )
    local = {"local_files_only": True, "trust_remote_code": False}
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(folder, **local)
            tokenizer = AutoTokenizer.from_pretrained(folder, **local)
            model, report = AutoModel.from_pretrained(
                folder, config=config, dtype=torch.float32, output_loading_info=True, **local
            )
    except _FAULTS as error:
        raise InputError(
            f"transformers cannot read the model in {name!r} ({first_line(error)[:200]}): it is corrupt, "
            "incomplete or of another kind; download it again"
        ) from error
    missing = sorted(key for key in report["missing_keys"] if not key.startswith(UNUSED_WEIGHTS))
    misshapen = sorted(str(key) for key in report["mismatched_keys"])
    if missing or misshapen:
        raise InputError(
            f"the weights in {name!r} do not match its config.json: {len(missing)} tensors are missing, {len(misshapen)} have "
            f"another shape, e.g. {(missing or misshapen)[0]}; download the model again"
        )
    return config, tokenizer, model


def used_weights(model: Any) -> dict[str, Tensor]:
    """Return the state of a model without the weights that no vector depends on."""
    return {name: values for name, values in model.state_dict().items() if not name.startswith(UNUSED_WEIGHTS)}


def text_config_sha256(folder: Path) -> str:
    """Return the SHA-256 of a model's configuration, without keys that have no effect."""
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return sha256_of_json({name: value for name, value in stored.items() if name not in _IGNORED_CONFIG})


def tokenizer_sha256(tokenizer: Any) -> str:
    """Return the SHA-256 of a tokenizer; disable its truncation and padding."""
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    return sha256_of_bytes(json.dumps(content, sort_keys=True).encode())


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the progress and advice of transformers inside the block."""
    from transformers.utils import logging

    level, shows = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shows:
            logging.enable_progress_bar()
