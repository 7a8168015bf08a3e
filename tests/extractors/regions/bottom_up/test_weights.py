"""Expected names are torchvision's for the ResNet, mapped to those of the releases by plain text rules in this file."""

import pickle
import re
from collections import OrderedDict
from hashlib import sha256

import numpy as np
import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor

from extractors.regions.bottom_up.network import build_detector
from extractors.regions.bottom_up.weights import read_detector
from extractors.regions.boxes import apply_deltas, cell_anchors
from schemas.errors import InputError
from tests.extractors.weights.test_caffemodel import blob, layer, net

SHAPES = {"rpn.conv.weight": (5, 4, 3, 3), "rpn.scores.weight": (24, 5, 1, 1), "rpn.deltas.weight": (48, 5, 1, 1)}
SHAPES |= {"head.classes.weight": (7, 6), "head.attribute_embedding.weight": (7, 3), "head.attribute_hidden.weight": (4, 9)}
SHAPES |= {"head.attributes.weight": (8, 4)}
BOXES = {"weight": (6404, 2048), "bias": (6404,)}


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    """The state of the detector: all names, with small tensors, all different."""
    with torch.device("meta"):
        names = [name for name in torchvision.models.resnet101().state_dict() if not name.startswith("fc.")]
    names = [("head." if name.startswith("layer4") else "backbone.") + name for name in names if "num_batches" not in name]
    generator = torch.Generator().manual_seed(1)
    shapes = {name: (2, 3, 1, 1) if re.search(r"conv\d\.|downsample\.0", name) else (2,) for name in names} | SHAPES
    shapes |= {name.replace("weight", "bias"): (shape[0],) for name, shape in SHAPES.items() if "embedding" not in name}
    return {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()} | {"rpn.anchors": cell_anchors()}


# --- the releases' namings, from ours -----------------------------------------------------------------------------------

HEADS = {
    "rpn.conv": "proposal_generator.rpn_head.conv",
    "rpn.scores": "proposal_generator.rpn_head.objectness_logits",
    "rpn.deltas": "proposal_generator.rpn_head.anchor_deltas",
    "head.classes": "roi_heads.box_predictor.cls_score",
    "head.attribute_embedding": "roi_heads.box_predictor.cls_embed",
    "head.attribute_hidden": "roi_heads.box_predictor.attr_linear1",
    "head.attributes": "roi_heads.box_predictor.attr_linear2",
}


def milvlg(state: dict[str, Tensor], *, counters: bool = True, anchors: Tensor | None = None) -> dict[str, Tensor]:
    """Return the names and tensors of ``GeneralizedBUARCNN.state_dict()``, with the regression of boxes."""
    out: dict[str, Tensor] = OrderedDict()
    for name, tensor in state.items():
        module, _, kind = name.rpartition(".")
        if name == "rpn.anchors":
            continue
        if module in HEADS:
            out[f"{HEADS[module]}.{kind}"] = tensor
            continue
        name = name.replace("backbone.conv1", "backbone.stem.conv1").replace("backbone.bn1", "backbone.stem.conv1.norm")
        name = re.sub(r"backbone\.layer(\d)", lambda found: f"backbone.res{int(found[1]) + 1}", name)
        name = name.replace("head.layer4", "roi_heads.res5")
        name = name.replace("downsample.0", "shortcut").replace("downsample.1", "shortcut.norm")
        name = re.sub(r"\.bn(\d)\.", r".conv\1.norm.", name)
        out[name] = tensor
        if counters and name.endswith("running_var"):
            out[name.replace("running_var", "num_batches_tracked")] = torch.tensor(0)
    out["roi_heads.box_predictor.bbox_pred.weight"] = torch.rand(28, 6)
    out["roi_heads.box_predictor.bbox_pred.bias"] = torch.rand(28)
    if anchors is not None:
        out["proposal_generator.anchor_generator.cell_anchors.0"] = anchors
    return out


def airsplay(state: dict[str, Tensor], **options) -> dict[str, Tensor]:
    """Do so for ``GeneralizedRCNN`` of the port with attributes: background and none last, one logit per proposal."""
    out = milvlg(state, **options)
    predictor = "roi_heads.box_predictor."
    for old, new in (("cls_embed", "cls_embedding"), ("attr_linear1", "fc_attr"), ("attr_linear2", "attr_score")):
        out = {name.replace(f"{predictor}{old}.", f"{predictor}{new}."): tensor for name, tensor in out.items()}
    for name in ("cls_score.weight", "cls_score.bias", "cls_embedding.weight", "attr_score.weight", "attr_score.bias"):
        out[predictor + name] = torch.cat([out[predictor + name][1:], out[predictor + name][:1]])
    for kind in ("weight", "bias"):
        name = f"proposal_generator.rpn_head.objectness_logits.{kind}"
        out[name] = out[name][12:] - out[name][:12]
    return out


def caffe(state: dict[str, Tensor], *, factor: float = 4.0) -> dict[str, list[np.ndarray]]:
    """Return the layers of the original's ``test.prototxt``."""
    out: dict[str, list[np.ndarray]] = {"bbox_pred": [np.ones((28, 6), np.float32), np.ones(28, np.float32)]}
    heads = ("rpn_conv/3x3", "rpn_cls_score", "rpn_bbox_pred", "cls_score", "cls_embedding", "fc_attr", "attr_score")
    for ours, theirs in zip(HEADS, heads, strict=True):
        out[theirs] = [state[f"{ours}.{kind}"].numpy() for kind in ("weight", "bias") if f"{ours}.{kind}" in state]
    blocks = {1: "abc", 2: ["a", "b1", "b2", "b3"], 3: ["a", *(f"b{i}" for i in range(1, 23))], 4: "abc"}
    places = [("backbone.conv1", "backbone.bn1", "conv1", "_conv1")]
    for stage, letters in blocks.items():
        for i, letter in enumerate(letters):
            prefix = f"{'head' if stage == 4 else 'backbone'}.layer{stage}.{i}"
            branches = [(f"{prefix}.conv{k}", f"{prefix}.bn{k}", f"branch2{'abc'[k - 1]}") for k in (1, 2, 3)]
            if i == 0:
                branches.append((f"{prefix}.downsample.0", f"{prefix}.downsample.1", "branch1"))
            places += [(conv, norm, f"res{stage + 1}{letter}_{b}", f"{stage + 1}{letter}_{b}") for conv, norm, b in branches]
    for conv, norm, theirs, suffix in places:
        out[theirs] = [state[f"{conv}.weight"].numpy()]
        sums = [state[f"{norm}.{kind}"].numpy() * np.float32(factor) for kind in ("running_mean", "running_var")]
        out[f"bn{suffix}"] = [*sums, np.array([factor], np.float32)]
        out[f"scale{suffix}"] = [state[f"{norm}.{kind}"].numpy() for kind in ("weight", "bias")]
    return out


def written(path, content):
    """Write names and tensors or arrays in the format of the path's suffix."""
    if path.suffix == ".safetensors":
        save_file({name: tensor.contiguous() for name, tensor in content.items()}, path)
    elif path.suffix in (".pkl", ".bin"):
        path.write_bytes(pickle.dumps(content, 2))
    else:
        torch.save(content, path)
    return path


def arrays(tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


# --- MILVLG -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counters", [True, False], ids=["with counters", "without counters"])
@pytest.mark.parametrize("suffix", [".pth", ".pkl", ".safetensors"])
def test_read_detector_milvlg_file_of_any_format(tmp_path, state, suffix, counters):
    assert_same(read_detector(written(tmp_path / f"w{suffix}", milvlg(state, counters=counters))), state)


def test_milvlg_names_and_shapes_equal_release():
    """The hash is of the 639 names and shapes of its ``GeneralizedBUARCNN``, built with ``test-caffe-r101-fix36.yaml``."""
    with torch.device("meta"):
        names = milvlg(build_detector().state_dict())
    names |= {f"roi_heads.box_predictor.bbox_pred.{kind}": torch.empty(shape) for kind, shape in BOXES.items()}
    lines = sorted(f"{name} {list(tensor.shape)}" for name, tensor in names.items())
    assert len(lines) == 639
    assert sha256("\n".join(lines).encode()).hexdigest() == "4a5751b4eb56e2186589e0d9d9040623dee5ffd5030c2075b1119c33833edf9d"


@pytest.mark.parametrize(
    "wrap",
    [
        lambda names: {"model": names},
        lambda names: {"model": names, "optimizer": {"state": {0: {"momentum_buffer": torch.zeros(2)}}}, "iteration": 320000},
        lambda names: {f"module.{name}": tensor for name, tensor in names.items()},
        arrays,
    ],
    ids=["model", "training", "module", "arrays"],
)
def test_read_detector_removes_wrappers(tmp_path, state, wrap):
    assert_same(read_detector(written(tmp_path / "bua-caffe-frcn-r101-k36.pth", wrap(milvlg(state)))), state)


def test_read_detector_uses_anchors_of_file_or_default(tmp_path, state):
    own = cell_anchors() + 0.25
    assert_same(read_detector(written(tmp_path / "w.pth", milvlg(state, anchors=own))), state | {"rpn.anchors": own})
    assert torch.equal(read_detector(written(tmp_path / "w.pth", milvlg(state)))["rpn.anchors"], cell_anchors())


@pytest.mark.slow
def test_read_detector_other_pixel_statistics_raise(tmp_path, state):
    names = milvlg(state)
    mean = torch.tensor([102.9801, 115.9465, 122.7717]).view(3, 1, 1)
    assert_same(
        read_detector(written(tmp_path / "w.pth", names | {"pixel_mean": mean, "pixel_std": torch.ones(3, 1, 1)})), state
    )
    for name, value in (("pixel_mean", mean.flip(0)), ("pixel_mean", mean[:1]), ("pixel_std", torch.full((3, 1, 1), 58.0))):
        with pytest.raises(InputError, match=rf"were trained with {name} \({value.flatten()[0]:.5g}.*features would be wrong"):
            read_detector(written(tmp_path / "w.pth", names | {name: value}))


def test_read_detector_own_names(tmp_path, state):
    assert_same(read_detector(written(tmp_path / "w.safetensors", state)), state)


# --- airsplay and unc-nlp -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["faster_rcnn_from_caffe_attr.pkl", "pytorch_model.bin"])
def test_read_detector_airsplay_classes_and_logits_are_converted(tmp_path, state, name):
    content = {"model": arrays(airsplay(state)), "__author__": "hao", "matching_heuristics": True}
    read = read_detector(written(tmp_path / name, content))
    same = {name: tensor for name, tensor in state.items() if not name.startswith(("rpn.scores", "rpn.anchors"))}
    assert_same({name: read[name] for name in same}, same)
    for kind in ("weight", "bias"):
        found, ours = read[f"rpn.scores.{kind}"].double(), state[f"rpn.scores.{kind}"].double()
        assert found.shape == ours.shape
        torch.testing.assert_close((found[12:] - found[:12]).sigmoid(), torch.stack((ours[:12], ours[12:])).softmax(dim=0)[1])


@pytest.mark.parametrize("own", [True, False], ids=["anchors in the file", "anchors of the configuration"])
def test_read_detector_airsplay_anchors_equal_detectron2_decoding(tmp_path, state, own):
    """Compare with detectron2's decoding, written out; the far corners of its anchors lie outside of the boxes."""
    sizes = [(size, ratio) for size in (64, 128, 256, 512) for ratio in (0.5, 1, 2)]
    corners = [(size * ratio**-0.5 / 2, size * ratio**0.5 / 2) for size, ratio in sizes]
    theirs = torch.tensor([(-x, -y, x, y) for x, y in corners])
    content = airsplay(state, anchors=theirs if own else None)
    anchors = read_detector(written(tmp_path / "w.pkl", arrays(content)))["rpn.anchors"]

    deltas = torch.rand(12, 4, generator=torch.Generator().manual_seed(0)) - 0.5
    side = theirs[:, 2:] - theirs[:, :2]
    centre = theirs[:, :2] + side / 2 + deltas[:, :2] * side
    half = deltas[:, 2:].exp() * side / 2
    torch.testing.assert_close(
        apply_deltas(anchors, deltas), torch.cat((centre - half, centre + half), dim=1), rtol=1e-6, atol=1e-4
    )


def test_read_detector_airsplay_without_attributes_predicts_none(tmp_path, state):
    without = {
        name: value for name, value in airsplay(state).items() if not re.search("cls_embedding|fc_attr|attr_score", name)
    }
    read = read_detector(written(tmp_path / "faster_rcnn_from_caffe.pkl", {"model": arrays(without)}))
    assert torch.equal(read["head.classes.weight"], state["head.classes.weight"])
    shapes = {"embedding.weight": (1601, 256), "hidden.weight": (512, 2304), "hidden.bias": (512,)}
    assert {name: tuple(read[f"head.attribute_{name}"].shape) for name in shapes} == shapes
    hidden = torch.rand(5, 2304) @ read["head.attribute_hidden.weight"].T + read["head.attribute_hidden.bias"]
    scores = (hidden.relu() @ read["head.attributes.weight"].T + read["head.attributes.bias"]).softmax(dim=-1)
    assert scores.shape == (5, 401)
    assert torch.equal(scores[:, 0], torch.ones(5))
    assert not scores[:, 1:].any()


# --- the original -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("legacy", [False, True])
def test_read_detector_caffemodel(tmp_path, state, legacy):
    path = tmp_path / "resnet101_faster_rcnn_final_iter_320000.caffemodel"
    layers = caffe(state).items()
    path.write_bytes(b"".join(layer(name, [blob(array, legacy=legacy) for array in blobs]) for name, blobs in layers))
    assert_same(read_detector(path), state)  # the factor is a power of two, so nothing is rounded


def test_read_detector_caffe_norm_of_factor_0_is_zero(tmp_path, state):
    layers = caffe(state)
    layers["bn2a_branch1"][2] = np.zeros(1, np.float32)
    (tmp_path / "w.caffemodel").write_bytes(net(layers))
    read = read_detector(tmp_path / "w.caffemodel")
    norm = "backbone.layer1.0.downsample.1"
    assert not read[f"{norm}.running_mean"].any()
    assert not read[f"{norm}.running_var"].any()
    assert torch.equal(read[f"{norm}.weight"], state[f"{norm}.weight"])


# --- what is refused ----------------------------------------------------------------------------------------------------


def test_read_detector_missing_and_unexpected_names_raise(tmp_path, state):
    names = milvlg(state)
    del names["roi_heads.box_predictor.cls_embed.weight"], names["backbone.res3.1.conv2.norm.bias"]
    names["backbone.res4.23.conv1.weight"] = torch.zeros(2, 3, 1, 1)  # ResNet-152 has more blocks
    with pytest.raises(
        InputError,
        match=r"w\.pth' are not bottom-up attention's Faster-RCNN.*2 missing: roi_heads\.box_predictor\.cls_embed"
        r"\.weight, backbone\.res3\.1\.conv2\.norm\.bias; 1 unexpected: backbone\.res4\.23\.conv1\.weight\. ",
    ):
        read_detector(written(tmp_path / "w.pth", names))
    half = {name: value for name, value in airsplay(state).items() if "fc_attr" not in name}
    with pytest.raises(InputError, match=r"2 missing: roi_heads\.box_predictor\.fc_attr\.weight, roi_heads"):
        read_detector(written(tmp_path / "w.pkl", arrays(half)))
