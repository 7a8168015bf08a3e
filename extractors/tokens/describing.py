"""What a model of text makes, without loading it where this machine has described it before. Importing this loads no torch."""

from __future__ import annotations

from pathlib import Path

from extractors.base import Description
from extractors.description_cache import cached_folder_description
from extractors.tokens.finding import check_named, find_folder
from extractors.tokens.reading import Pooling

_ADAPTER = "adapter_config.json"  # Names another model, wherever that lies.
_LIBRARIES = ("transformers", "tokenizers", "safetensors")


def describe(model: str, pooling: Pooling, dtype: str, precision: str, *, device: str) -> Description:
    """Return the description of a `extractors.tokens.transformer.TokenExtractor`.

    Args:
        model: as `extractors.tokens.transformer.TokenRequest` takes it, and so the next three.
        pooling: likewise.
        dtype: likewise.
        precision: likewise.
        device: where it is loaded if it has to be; no part of the description.

    Raises:
        ImagepivotError: as the request and its ``load`` raise it.
    """
    check_named(model)
    folder = find_folder(model)

    def load() -> Description:
        from extractors.tokens.transformer import TokenRequest

        return TokenRequest(model, pooling, dtype, precision).load(device).description

    if Path(folder, _ADAPTER).exists():
        return load()
    request = {"sub_words": pooling, "dtype": dtype, "precision": precision}
    return cached_folder_description(request, folder, load, libraries=_LIBRARIES)
