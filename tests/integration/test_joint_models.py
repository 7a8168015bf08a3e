"""Both sides of joint models, against open_clip itself and against meaning, without a network.

The trained pair is that of `tests.trained_pair`. Other models have random weights, which map all images close together: differences
are compared with the standard deviation over images or captions.
"""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipelines.features.planning import list_images, plan_features
from pipelines.jobs import FeaturesJob
from schemas.dataset import Dataset, open_dataset
from schemas.parameters import FeaturesParameters
from tests.trained_pair import build_trained_pair, mean_vectors, unpack_minilm
from train.sts.correlation import cosines
from train.sts.pairs import read_sts

pytestmark = pytest.mark.slow
open_clip = pytest.importorskip("open_clip", reason="needs pip install 'imagepivot[clip]'")

import torch  # noqa: E402
from PIL import Image  # noqa: E402

from extractors import ExtractorRequest, decode_image, load_extractor  # noqa: E402
from extractors.tokens.request import TextRequest  # noqa: E402

LANGUAGES = ("cs", "de", "en", "fr")


def deviation(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference in standard deviations over the rows, each dimension by its own.

    Three dimensions of MiniLM are zero for all texts, and so for all classes; rounding is all that they hold.
    """
    assert found.shape == expected.shape
    spread = expected.std(axis=0)
    is_dead = spread < 1e-6 * np.median(spread)
    assert is_dead.sum() <= 3
    assert np.abs(found[:, is_dead]).max(initial=0) < 1e-6 * np.median(spread)
    return float((np.abs(found - expected)[:, ~is_dead] / spread[~is_dead]).max())


def normalized(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def vectors_of_open_clip(source: str, photos: Path, texts: list[str], **options) -> tuple[np.ndarray, np.ndarray]:
    """What open_clip makes of images, opened by Pillow, and of texts."""
    model, _, transform = open_clip.create_model_and_transforms(source, **options)
    model, tokenizer = model.eval(), open_clip.get_tokenizer(source)
    with torch.inference_mode():
        pixels = [transform(Image.open(file).convert("RGB"))[None] for file in sorted((photos / "images").iterdir())]
        images = torch.cat([model.encode_image(one) for one in pixels])
        vectors = torch.cat([model.encode_text(tokenizer([text])) for text in texts])
    return images.numpy(), vectors.numpy()


@pytest.fixture(scope="module")
def minilm(tmp_path_factory) -> Path:
    return unpack_minilm(tmp_path_factory.mktemp("minilm") / "all-MiniLM-L6-v2")


@pytest.fixture(scope="module")
def pair(minilm, tmp_path_factory) -> Path:
    return build_trained_pair(tmp_path_factory.mktemp("models") / "pair", minilm)


@pytest.fixture(scope="module")
def captions(photos, imagepivot, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("raw") / "captions"
    imagepivot("captions", photos / "captions.tsv", folder, "--workers", "1", "--shards", "2")
    return folder


@pytest.fixture(scope="module")
def sides(pair, photos, captions, imagepivot, tmp_path_factory) -> tuple[Dataset, Dataset]:
    """Both datasets of the pair, made by one command each."""
    folder, model = tmp_path_factory.mktemp("pair"), f"open_clip:{pair}"
    here = ("--device", "cpu", "--workers", "1")
    done = imagepivot("features", photos / "images", folder / "images", "--extractor", model, "--shards", "2", *here)
    assert "untrained" not in done.stdout + done.stderr
    done = imagepivot("text-features", captions, folder / "texts", "--model", model, *here)
    assert re.search(r"longest, sub-words.*captions cut.*de +│ +18 │ +30 │ +0 │", done.stdout, re.DOTALL)
    return open_dataset(folder / "images", kind="features"), open_dataset(folder / "texts", kind="embeddings")


def test_both_sides_name_one_checkpoint_and_no_path(sides, pair):
    images, texts = (FeaturesParameters.from_json(dataset.manifest.parameters) for dataset in sides)
    assert images.checkpoint == texts.checkpoint
    assert images.checkpoint is not None
    assert (images.extractor["similarity"], texts.model.similarity) == ("cosine", "cosine")
    assert (images.feature.name, texts.feature.name, images.feature.shape) == ("open_clip:pair", "open_clip:pair", (384,))
    assert images.extractor["config"] == texts.model.encoder["config"]
    assert str(pair.parent) not in json.dumps([dict(dataset.manifest.parameters) for dataset in sides])


def test_pair_equals_open_clip_and_finds_the_photographs(sides, pair, photos, captions):
    images, texts = sides
    rows = {(row["image_id"], row["language"]): row["text"] for row in open_dataset(captions)}
    keys, found = zip(*(((row["image_id"], row["language"]), row["embedding"]) for row in texts), strict=True)
    image_ids = sorted(images.image_ids())
    order = [images.image_ids().index(image_id) for image_id in image_ids]
    ours = images.numpy()[order], np.stack(found)
    theirs = vectors_of_open_clip(f"local-dir:{pair}", photos, [rows[key] for key in keys])
    assert deviation(ours[0], theirs[0]) < 1e-4
    assert deviation(ours[1], theirs[1]) < 1e-4
    our_scores, their_scores = (normalized(text) @ normalized(image).T for image, text in (ours, theirs))
    np.testing.assert_array_equal(np.argsort(-our_scores), np.argsort(-their_scores))
    recalls = {}
    for language in LANGUAGES:
        lines = [row for row, key in enumerate(keys) if key[1] == language]
        right = [image_ids.index(keys[row][0]) for row in lines]
        ranks = (our_scores[lines] > our_scores[lines, right][:, None]).sum(axis=1)
        recalls[language] = [float((ranks < k).mean()) for k in (1, 5)]
    assert recalls["en"][0] >= 0.5
    assert recalls["en"][1] >= 0.85
    assert all(recalls["en"][0] > recalls[other][0] for other in ("cs", "de", "fr"))  # MiniLM reads English.
    query = TextRequest(f"open_clip:{pair}").load().encode(["a cup of coffee"])
    assert image_ids[int((normalized(query) @ normalized(ours[0]).T).argmax())] == "coffee"


def test_bytes_do_not_depend_on_batches(pair, photos, captions):
    extractor = load_extractor(f"open_clip:{pair}")
    files = sorted((photos / "images").iterdir())
    pixels = extractor.collate([extractor.preprocess(decode_image(file.read_bytes())) for file in files])
    expected = extractor.extract(pixels)
    for size in (1, 7, 64):
        assert np.concatenate([extractor.extract(part) for part in pixels.split(size)]).tobytes() == expected.tobytes(), size
    encoder = TextRequest(f"open_clip:{pair}").load()
    ids, _ = encoder.read([row["text"] for row in open_dataset(captions) if row["language"] == "en"])
    first = encoder.encode_ids(ids, 64)
    for size in (1, 7):
        assert encoder.encode_ids(ids, size).tobytes() == first.tobytes(), size


# --- other models of open_clip ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def siglip(multi30k, tmp_path_factory) -> Path:
    """A small model with the parts of SigLIP: tower of timm, squashed images, bias of the logits, tokenizer in the folder."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("models") / "tiny-siglip"
    folder.mkdir()
    files = sorted(str(file) for file in multi30k.rglob("train.??") if file.suffix in (".en", ".de"))
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    tokenizer.train(files, trainers.UnigramTrainer(vocab_size=2000, special_tokens=special, unk_token="<unk>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    config = {
        "embed_dim": 48,
        "init_logit_bias": -10,
        "custom_text": True,
        "vision_cfg": {"image_size": 160, "timm_model_name": "test_vit", "timm_model_pretrained": False, "timm_pool": "token"},
        "text_cfg": {
            "context_length": 16,
            "vocab_size": 2000,
            "hf_tokenizer_name": "tiny-siglip",
            "tokenizer_kwargs": {"clean": "canonicalize"},
            "width": 48,
            "heads": 2,
            "layers": 2,
            "no_causal_mask": True,
            "proj_bias": True,
            "pool_type": "last",
        },
    }
    mean = (0.5, 0.5, 0.5)
    preprocessing = {"mean": mean, "std": mean, "interpolation": "bicubic", "resize_mode": "squash"}
    content = {"model_cfg": config, "preprocess_cfg": preprocessing}
    (folder / "open_clip_config.json").write_text(json.dumps(content), encoding="utf-8")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = open_clip.create_model(f"local-dir:{folder}")
    save_file(model.state_dict(), folder / "open_clip_model.safetensors")
    return folder


def test_siglip_shaped_folder_equals_open_clip(siglip, photos):
    texts = [line.split("\t")[5] for line in (photos / "captions.tsv").read_text(encoding="utf-8").splitlines()[1:]]
    images, vectors = vectors_of_open_clip(f"local-dir:{siglip}", photos, texts)
    extractor, encoder = load_extractor(f"open_clip:{siglip}"), TextRequest(f"open_clip:{siglip}").load()
    files = sorted((photos / "images").iterdir())
    pixels = extractor.collate([extractor.preprocess(decode_image(file.read_bytes())) for file in files])
    assert deviation(extractor.extract(pixels), images) < 1e-4
    assert deviation(encoder.encode(texts), vectors) < 1e-4
    _, lengths = encoder.read([*texts, "a dog " * 20])
    assert lengths[-1] > encoder.max_length == 16
    assert extractor.parameters["checkpoint"] == encoder.description.parameters["weights"]["sha256"]
    assert extractor.parameters["transform"]["resize_hw"] == [160, 160]


def test_space_and_precision_are_in_the_fingerprint(siglip, photos, tmp_path):
    model = f"open_clip:{siglip}"
    job = FeaturesJob(str(photos / "images"), str(tmp_path / "features"), ExtractorRequest(model), device="cpu", shards=1)
    changes = ({}, {"space": "clip"}, {"extractor": ExtractorRequest(model, precision="bf16")})
    plans = [plan_features(changed, list_images(changed)) for changed in (replace(job, **change) for change in changes)]
    assert len({plan.fingerprint for plan in plans}) == 3
    parameters = [FeaturesParameters.from_json(plan.parameters) for plan in plans]
    assert ([one.space for one in parameters], len({one.checkpoint for one in parameters})) == ([None, "clip", None], 1)


@pytest.mark.cluster  # Hundreds of megabytes of weights are drawn four times for each.
@pytest.mark.parametrize("name", ["ViT-S-32", "convnext_tiny", "MobileCLIP2-S0.dfndr2b", "PE-Core-T-16-384.meta"])
def test_model_by_name_equals_open_clip(name, photos, tmp_path):
    from open_clip.pretrained import get_pretrained_cfg
    from open_clip.transform import PreprocessCfg, image_transform_v2, merge_preprocess_dict

    short, _, tag = name.partition(".")
    texts = [line.split("\t")[5] for line in (photos / "captions.tsv").read_text(encoding="utf-8").splitlines()[1:]]
    torch.manual_seed(3)
    model, weights = open_clip.create_model(short).eval(), "random:3"
    if name.startswith("MobileCLIP2"):  # Its first layer scales, 1e-5, would leave nothing but rounding of the differences.
        for layer, values in model.named_parameters():
            if "layer_scale" in layer or layer.endswith("gamma"):
                torch.nn.init.ones_(values)
        weights = str(tmp_path / "weights.pt")
        torch.save({"state_dict": {f"module.{layer}": values for layer, values in model.state_dict().items()}}, weights)
    config = merge_preprocess_dict(model.visual.preprocess_cfg, get_pretrained_cfg(short, tag))
    transform, tokenizer = image_transform_v2(PreprocessCfg(**config), is_train=False), open_clip.get_tokenizer(short)
    files = sorted((photos / "images").iterdir())
    with torch.inference_mode():
        pixels = torch.stack([transform(Image.open(file).convert("RGB")) for file in files])
        images, vectors = model.encode_image(pixels).numpy(), model.encode_text(tokenizer(texts)).numpy()
    extractor = load_extractor(f"open_clip:{name}", weights=weights)
    ours = extractor.extract(extractor.collate([extractor.preprocess(decode_image(file.read_bytes())) for file in files]))
    assert deviation(ours, images) < 5e-4  # On some processors open_clip's own is 1.2e-4 from double precision, ours 0.5e-4.
    encoder = TextRequest(f"open_clip:{name}", weights=weights).load()
    assert deviation(encoder.encode(texts), vectors) < 1e-4
    assert extractor.parameters["checkpoint"] == encoder.description.parameters["weights"]["sha256"]


# --- queries ---------------------------------------------------------------------------------------------------------


def test_search_takes_the_model_of_the_images_only(sides, pair, minilm, imagepivot):
    images = sides[0].folder.location
    done = imagepivot("search", f"open_clip:{pair}", "a cup of coffee", "--features", images, "--top", "1", "--json")
    (hit,) = json.loads(done.stdout)
    assert hit["image_id"] == "coffee"
    done = imagepivot("search", f"sentence:{minilm}", "a cup of coffee", "--features", images, code=1)
    assert f"'sentence:all-MiniLM-L6-v2' and '{images}' do not share a space" in done.stderr


@pytest.mark.cluster  # Three times 2,527 sentences.
def test_sts_of_minilm_equals_transformers_in_both_layouts(minilm, sts_pairs, imagepivot, tmp_path):
    new = tmp_path / "new layout"  # As sentence-transformers 6.2 saves the model.
    shutil.copytree(minilm, new)
    kinds = (
        "base.modules.transformer.Transformer",
        "sentence_transformer.modules.pooling.Pooling",
        "base.modules.normalize.Normalize",
    )
    modules = json.loads((new / "modules.json").read_text(encoding="utf-8"))
    for module, kind in zip(modules, kinds, strict=True):
        module["type"] = f"sentence_transformers.{kind}"
    (new / "modules.json").write_text(json.dumps(modules))
    pooling = {"embedding_dimension": 384, "pooling_mode": "mean", "include_prompt": True}
    (new / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (new / "sentence_bert_config.json").write_text(json.dumps({"transformer_task": "feature-extraction"}))
    done = imagepivot("sts", sts_pairs, f"sentence:{minilm}", f"sentence:{new}", "--json", "--device", "cpu")
    _, *systems = json.loads(done.stdout)["systems"]
    ours = [{name: score["pearson"] for name, score in system["scores"].items()} for system in systems]
    data = read_sts(sts_pairs)
    sentences = list(dict.fromkeys(sentence for pairs in data for sentence in pairs.sentences))
    means = dict(zip(sentences, mean_vectors(minilm, sentences), strict=True))
    vectors = {pairs.name: [[means[sentence] for sentence in side] for side in (pairs.first, pairs.second)] for pairs in data}
    theirs = {pairs.name: pairs.correlation(cosines(*vectors[pairs.name])).pearson for pairs in data}
    assert [sorted(scores) for scores in ours] == [["images-2014", "images-2015"]] * 2
    assert [{name: round(value, 2) for name, value in scores.items()} for scores in ours] == [
        {name: round(value, 2) for name, value in theirs.items()}
    ] * 2
    assert theirs["images-2014"] == pytest.approx(90.3, abs=0.2)


@pytest.mark.cluster
def test_plan_measures_photographs_and_a_table_in_one_line(pair, photos, captions, sides, imagepivot, tmp_path):
    folders = ("--captions", sides[1].folder.location, "--features", sides[0].folder.location)
    evaluated = imagepivot("evaluate", *folders, "--splits", "train", "--json")
    model = f"open_clip:{pair}"
    settings = {
        "paths.photos": photos / "images",
        "paths.table": photos / "captions.tsv",
        "steps.images.extractor": model,
        "steps.texts.model": model,
        "steps.found.run": model,
        "steps.found.query": '["a cup of coffee"]',
        "steps.evaluation.splits": '["train"]',
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    imagepivot("build", "zero-shot", *words, cwd=tmp_path)
    folder = tmp_path / "build/zero-shot"
    content = json.loads((folder / "evaluation/evaluation.json").read_text(encoding="utf-8"))
    assert content["scores"] == json.loads(evaluated.stdout)["scores"]
    assert (folder / "comparison/comparison.png").stat().st_size > 10_000
    page = (folder / "found.html").read_text(encoding="utf-8")
    assert page.index("a cup of coffee") < page.index("coffee", page.index("<img"))
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.parquet")}
    imagepivot("build", "zero-shot", *words, cwd=tmp_path)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.parquet")} == before
