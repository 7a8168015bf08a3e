"""Joint models of open_clip by name or folder: network, tokenizer, weights.

A model is

- ``NAME`` or ``NAME.TAG``: one of ``open_clip.list_models()``, and one of its tags in ``open_clip.list_pretrained()``. The tag
  determines weights and preprocessing; by default it is the first one;
- a folder with ``open_clip_config.json`` and weights, open_clip's ``local-dir``.

The weights of both encoders have one digest.
"""

import difflib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.convert import convert_state_dict
from open_clip.factory import _find_checkpoint_in_dir
from open_clip.model import convert_to_custom_text_state_dict
from open_clip.pretrained import download_pretrained, get_pretrained_cfg, list_pretrained_tags_by_model
from torch import Tensor

from extractors.weights.checkpoints import Choice, read_state_dict
from extractors.weights.resolve import Architecture, Weights, resolve_weights
from schemas.errors import InputError, UsageError, first_line
from schemas.fingerprints import sha256_of_json
from schemas.storage.locations import local_path

PREFIX = "open_clip:"

_CONFIG = "open_clip_config.json"
_LOCATIONS = ("hf_model_name", "hf_tokenizer_name")
_IGNORED_CONFIG = ("_name_or_path", "architectures", "dtype", "transformers_version")
_POSITION_IDS = "text.transformer.embeddings.position_ids"  # Stored by transformers before 4.31.
_FAULTS = (
    OSError,
    HTTPException,
    RuntimeError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    ImportError,
)


def full_name(model: str) -> str:
    """Return a model's name with its tag; a folder remains unchanged.

    Raises:
        UsageError: the model is unknown, or the tag is unknown or for another activation (GELU, QuickGELU).
    """
    if _is_folder(model):
        return model
    name, _, tag = model.partition(".")
    if name not in open_clip.list_models():
        close = difflib.get_close_matches(name, open_clip.list_models(), n=5, cutoff=0.5)
        hint = f"did you mean {', '.join(close)}?" if close else "open_clip.list_models() lists them"
        raise UsageError(f"open_clip {open_clip.__version__} has no model {name!r}, nor is it a folder with {_CONFIG}: {hint}")
    gelu = _has_quick_gelu(open_clip.get_model_config(name))
    tags = [known for known in list_pretrained_tags_by_model(name) if _has_quick_gelu(get_pretrained_cfg(name, known)) == gelu]
    if tag and tag not in tags:
        raise UsageError(
            f"open_clip's model {name!r} has no weights {tag!r} for its activation, expected one of "
            f"{', '.join(tags) or 'none'}: models with QuickGELU have names that end in -quickgelu"
        )
    return ".".join([name, *([tag] if tag else tags[:1])])


def short_name(model: str) -> str:
    """Return the name of a model in datasets: that of the folder, without its path."""
    return PREFIX + (local_path(model).absolute().name if _is_folder(model) else model)


def build_joint_model(model: str) -> Any:
    """Build a model with random weights and ``config``, on torch's default device."""
    name, _, tag = model.partition(".")
    preprocessing = {} if _is_folder(model) else get_pretrained_cfg(name, tag)
    with _explained(f"cannot build the model {model!r}"):
        network = open_clip.create_model(
            _open_clip_name(model),
            load_weights=False,
            pretrained_text=False,
            device=torch.get_default_device(),
            force_preprocess_cfg=preprocessing,
        )
        network.config = open_clip.get_model_config(_open_clip_name(model))
    return network.eval().requires_grad_(False)


@lru_cache(maxsize=8)
def model_on_meta(model: str) -> Any:
    """Return a model without values."""
    with torch.device("meta"):
        return build_joint_model(model)


def load_network(model: str, weights: Weights) -> Any:
    """Build a model with the given weights of both encoders."""
    # Not on the meta device: some models have values outside their state dict.
    with torch.random.fork_rng(devices=[]):
        network = build_joint_model(model)
    network.load_state_dict(weights.state)
    return network


def load_tokenizer(model: str) -> Any:
    """Load the tokenizer of a model: that of the package, or one of transformers."""
    with _explained(f"cannot load the tokenizer of {model!r}"):
        return open_clip.get_tokenizer(_open_clip_name(model))


def find_weights(model: str, request: str) -> Weights:
    """Resolve the weights of both encoders; ``default`` are those of folder or tag."""
    if request == "default":
        with _explained(f"cannot find or download the weights of {model!r}"):
            tag = get_pretrained_cfg(*model.partition(".")[::2])
            request = _find_checkpoint_in_dir(local_path(model)) if _is_folder(model) else download_pretrained(tag)
            if not request:
                raise FileNotFoundError("no .safetensors, .bin or .pth file")
    read = partial(_read_joint_state, model=model)
    return resolve_weights(request, Architecture(build=partial(build_joint_model, model), read=read))


def config_sha256(model: str) -> str:
    """Return the SHA-256 of a model's configuration, without locations."""
    network = model_on_meta(model)
    text = {name: value for name, value in network.config["text_cfg"].items() if name not in _LOCATIONS}
    if hasattr(getattr(network, "text", None), "config"):  # A text tower of transformers.
        text["config"] = {k: v for k, v in network.text.config.to_dict().items() if k not in _IGNORED_CONFIG}
    return sha256_of_json({**network.config, "text_cfg": text})


def _is_folder(model: str) -> bool:
    return os.path.isfile(local_path(model) / _CONFIG)  # noqa: PTH113 -- False for invalid paths, too.


def _open_clip_name(model: str) -> str:
    return f"local-dir:{local_path(model)}" if _is_folder(model) else model.partition(".")[0]


def _has_quick_gelu(config: Any) -> bool:
    return bool(config.get("quick_gelu"))


@contextmanager
def _explained(problem: str) -> Iterator[None]:
    """Silence open_clip's advice inside the block, and explain its errors."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    except _FAULTS as error:
        raise InputError(
            f"open_clip {problem} ({type(error).__name__}: {first_line(error)[:200]}): a file is missing or "
            "corrupt, or must be downloaded and there is no network. Use a folder that holds all files, or "
            "give weights by --weights PATH; --weights random:0 runs the untrained model"
        ) from error
    finally:
        logging.disable(level)


def _read_joint_state(path: Path, choice: Choice | None = None, *, model: str) -> dict[str, Tensor]:
    """Read a state dict with open_clip's tensor names, as ``load_checkpoint``."""
    network, state = model_on_meta(model), read_state_dict(path, choice)
    expected = network.state_dict()
    with _explained(f"cannot translate the tensor names in {str(path)!r}"):
        state = convert_state_dict(network, state)
        if "positional_embedding" in state and "positional_embedding" not in expected:
            state = convert_to_custom_text_state_dict(state)
    if _POSITION_IDS not in expected:
        state.pop(_POSITION_IDS, None)
    for name in {"logit_scale", "logit_bias"} & expected.keys():
        state[name] = state.get(name, torch.zeros(())).reshape(expected[name].shape)
    return state
