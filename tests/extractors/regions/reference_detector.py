"""A second, plain and slow implementation of the detector of bottom-up attention, for comparison: torch functions and loops.

Written from the description of the original computation; shares nothing with the project but the names of the weights.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812


def detect(state, pixels, *, least=36, most=36, threshold=0.2, proposals=300):
    """Return the regions of an image, uint8 [H, W, 3] RGB, chosen among its best proposals, as a dict of numpy arrays."""
    with torch.inference_mode():
        image, scale = resize(pixels)
        maps = backbone(state, torch.from_numpy(image.transpose(2, 0, 1).copy())[None])
        proposed = propose(state, maps, image.shape[1], image.shape[0], scale)
        proposals = proposed[:proposals]
        if not len(proposals):
            return {"proposals": proposed, "boxes": np.zeros((0, 4), np.float32), "features": np.zeros((0, 2048), np.float32)}
        pooled = torch.stack([roi_pool(maps[0], box) for box in proposals])
        features = torch.cat(
            [stage(state, "head.layer4", part, stride=1, dilation=2).mean(dim=(2, 3)) for part in pooled.split(30)]
        )
        classes, attributes = classify(state, features)
    boxes = (torch.from_numpy(proposals) / scale).numpy()
    kept = choose(boxes, classes, least, most, threshold)
    return {
        "proposals": proposed,
        "boxes": boxes[kept],
        "features": features.numpy()[kept],
        "class_ids": classes[kept, 1:].argmax(axis=1) + 1,
        "class_scores": classes[kept, 1:].max(axis=1),
        "attribute_ids": attributes[kept, 1:].argmax(axis=1) + 1,
        "attribute_scores": attributes[kept, 1:].max(axis=1),
    }


def resize(pixels):
    """Return float32 [H, W, 3] BGR less the mean, and the scale."""
    image = pixels[:, :, ::-1].astype(np.float32)
    image -= np.array([[[102.9801, 115.9465, 122.7717]]])
    short, long = min(image.shape[:2]), max(image.shape[:2])
    scale = 600 / short
    if np.round(scale * long) > 1000:
        scale = 1000 / long
    for axis in (1, 0):
        image = np.moveaxis(resize_axis(np.moveaxis(image, axis, 0), scale), 0, axis)
    return np.ascontiguousarray(image), scale


def resize_axis(image, scale):
    length = len(image)
    resized = np.empty((int(np.round(length * scale)), *image.shape[1:]), np.float32)
    for i in range(len(resized)):
        centre = min(max((i + 0.5) / scale - 0.5, 0), length - 1)
        first = math.floor(centre)
        share = np.float32(centre - first)
        resized[i] = image[first] * (1 - share) + image[min(first + 1, length - 1)] * share
    return resized


def norm(state, name, values):
    parts = (state[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
    return F.batch_norm(values, *parts, training=False, eps=1e-5)


def backbone(state, image):
    values = F.relu(norm(state, "backbone.bn1", F.conv2d(image, state["backbone.conv1.weight"], stride=2, padding=3)))
    values = F.max_pool2d(values, 3, stride=2, padding=0, ceil_mode=True)
    values = stage(state, "backbone.layer1", values, stride=1, dilation=1)
    values = stage(state, "backbone.layer2", values, stride=2, dilation=1)
    return stage(state, "backbone.layer3", values, stride=2, dilation=1)


def stage(state, name, values, *, stride, dilation):
    number = 0
    while f"{name}.{number}.conv1.weight" in state:
        block = f"{name}.{number}"
        step = stride if number == 0 else 1
        short = values
        if f"{block}.downsample.0.weight" in state:
            short = norm(state, f"{block}.downsample.1", F.conv2d(values, state[f"{block}.downsample.0.weight"], stride=step))
        branch = F.relu(norm(state, f"{block}.bn1", F.conv2d(values, state[f"{block}.conv1.weight"], stride=step)))
        branch = F.conv2d(branch, state[f"{block}.conv2.weight"], padding=dilation, dilation=dilation)
        branch = F.relu(norm(state, f"{block}.bn2", branch))
        branch = norm(state, f"{block}.bn3", F.conv2d(branch, state[f"{block}.conv3.weight"]))
        values = F.relu(branch + short)
        number += 1
    return values


def propose(state, maps, width, height, scale):
    hidden = F.relu(F.conv2d(maps, state["rpn.conv.weight"], state["rpn.conv.bias"], padding=1))
    scores = F.conv2d(hidden, state["rpn.scores.weight"], state["rpn.scores.bias"])[0]
    deltas = F.conv2d(hidden, state["rpn.deltas.weight"], state["rpn.deltas.bias"])[0].numpy()
    probabilities = torch.stack((scores[:12], scores[12:])).softmax(dim=0)[1].numpy()
    boxes, ranks = [], []
    one = np.float32(1)
    for y in range(maps.shape[2]):
        for x in range(maps.shape[3]):
            for a in range(12):
                left, top, right, bottom = (state["rpn.anchors"][a].numpy() + np.float32([x, y, x, y]) * 16).astype(np.float32)
                dx, dy, dw, dh = deltas[4 * a : 4 * a + 4, y, x]
                wide, tall = right - left + one, bottom - top + one
                middle_x, middle_y = dx * wide + (left + wide / 2), dy * tall + (top + tall / 2)
                half_wide = np.exp(min(dw, np.float32(math.log(1000 / 16)))) * wide / 2
                half_tall = np.exp(min(dh, np.float32(math.log(1000 / 16)))) * tall / 2
                box = [middle_x - half_wide, middle_y - half_tall, middle_x + half_wide, middle_y + half_tall]
                boxes.append([min(max(v, 0), end - 1) for v, end in zip(box, (width, height, width, height), strict=True)])
                ranks.append(probabilities[a, y, x])
    boxes, ranks = np.float32(boxes), np.float32(ranks)
    sides = boxes[:, 2:] - boxes[:, :2]
    large = (sides > 0).all(axis=1) & (sides + 1 > np.float32(16 * scale)).all(axis=1)
    boxes, ranks = boxes[large], ranks[large]
    order = np.argsort(-ranks, kind="stable")[:6000]
    return boxes[order][nms(boxes[order], ranks[order], 0.7)[:300]]


def nms(boxes, scores, threshold):
    """Return the positions of kept boxes, the best first, by looking at one box after the other."""
    order = np.argsort(-scores, kind="stable")
    areas = (boxes[:, 2] - boxes[:, 0] + 1) * (boxes[:, 3] - boxes[:, 1] + 1)
    gone = np.zeros(len(boxes), bool)
    kept = []
    for i in order:
        if gone[i]:
            continue
        kept.append(int(i))
        wide = np.maximum(0, np.minimum(boxes[i, 2], boxes[:, 2]) - np.maximum(boxes[i, 0], boxes[:, 0]) + 1)
        tall = np.maximum(0, np.minimum(boxes[i, 3], boxes[:, 3]) - np.maximum(boxes[i, 1], boxes[:, 1]) + 1)
        shared = wide * tall
        gone |= shared / (areas[i] + areas - shared) >= np.float32(threshold)
    return kept


def roi_pool(maps, box):
    """Pool a box, in pixels of the input, to [C, 14, 14]."""
    rows, columns = maps.shape[1:]
    # Halves are rounded away from zero, as C does.
    left, top, right, bottom = (math.floor(float(np.float32(v) * np.float32(1 / 16)) + 0.5) for v in box)
    tall, wide = np.float32(max(bottom - top + 1, 1) / 14), np.float32(max(right - left + 1, 1) / 14)
    pooled = torch.zeros(maps.shape[0], 14, 14)
    for i in range(14):
        for j in range(14):
            y = (top + math.floor(np.float32(i) * tall), top + math.ceil(np.float32(i + 1) * tall))
            x = (left + math.floor(np.float32(j) * wide), left + math.ceil(np.float32(j + 1) * wide))
            part = maps[:, max(y[0], 0) : min(y[1], rows), max(x[0], 0) : min(x[1], columns)]
            if part.numel():
                pooled[:, i, j] = part.amax(dim=(1, 2))
    return pooled


def classify(state, features):
    """Return probabilities of classes and attributes as numpy arrays."""
    scores = F.linear(features, state["head.classes.weight"], state["head.classes.bias"])
    embedded = state["head.attribute_embedding.weight"][scores.argmax(dim=1)]
    hidden = F.linear(
        torch.cat((features, embedded), dim=1), state["head.attribute_hidden.weight"], state["head.attribute_hidden.bias"]
    )
    attributes = F.linear(F.relu(hidden), state["head.attributes.weight"], state["head.attributes.bias"])
    return scores.softmax(dim=1).numpy(), attributes.softmax(dim=1).numpy()


def best_scores(boxes, classes):
    """Return the best probability of each box among the classes in which NMS at 0.3 keeps it; the first class is background."""
    best = np.zeros(len(boxes), np.float32)
    for number in range(1, classes.shape[1]):
        kept = nms(boxes, classes[:, number], 0.3)
        best[kept] = np.maximum(best[kept], classes[kept, number])
    return best


def choose(boxes, classes, least, most, threshold):
    best = best_scores(boxes, classes)
    chosen = np.flatnonzero(best >= np.float32(threshold))
    if len(chosen) < least:
        return np.argsort(-best, kind="stable")[:least]
    if len(chosen) > most:
        return np.argsort(-best, kind="stable")[:most]
    return chosen
