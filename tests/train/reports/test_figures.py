"""The figures of a run: what is handed to the drawing, what is written, and what is refused."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

import tests.train.region_models  # noqa: F401 -- Registers a kind that shows no attention.
from schemas.dataset import open_dataset
from schemas.errors import DatasetError, InputError, UsageError
from schemas.features import FeatureSpec
from schemas.keys import CaptionKey
from schemas.storage.folder import Folder
from tests.pages import width_of
from tests.train.conftest import write_dataset
from tests.train.region_models import REGION_CONFIG
from tests.train.trainings import DAN, MHA_D
from train.config.sections import from_toml
from train.data.batches import CaptionBatch
from train.data.splits import open_data
from train.evaluation.evaluation import eval_mode
from train.jobs import Corpus, FiguresJob, TrainJob
from train.loop.training import train
from train.models.retrieval_model import ImageBatch
from train.reports import attention, rankings
from train.reports.attention import AttendedCaption, AttendedImage, grid_of, plot_attention
from train.reports.figure_examples import ShownCaption
from train.reports.figures import draw_figures
from train.reports.rankings import FRAME
from train.runs.run import open_run

SCAN = MHA_D.split("[model]")[0] + '[model]\nkind = "scan"\nembed_dim = 6\nword_dim = 4\n[schedule]\nbatch_size = 9\n'


@pytest.fixture(scope="session")
def boxed(regions: Corpus, tmp_path_factory) -> Corpus:
    """The toy with regions that have boxes, each of them another one."""
    rng, rows = np.random.default_rng(0), []
    for row in open_dataset(regions.features):
        corners = rng.uniform(0, 300, (4, 2)).astype(np.float32)
        boxes = np.concatenate([corners, corners + rng.uniform(20, 150, (4, 2)).astype(np.float32)], axis=1)
        rows.append({**row, "boxes": boxes})
    folder = tmp_path_factory.mktemp("boxed") / "regions"
    spec = FeatureSpec("regions", (4, 8), "float16")
    write_dataset(folder, "regions", rows, parameters={"extractor_fingerprint": "toy"}, spec=spec)
    return Corpus(regions.captions, str(folder), regions.vocabulary)


@pytest.fixture(scope="session")
def attending(boxed: Corpus, tmp_path_factory) -> dict[str, str]:
    """Runs of models that attend, by kind, hardly trained."""
    runs = {}
    t2i, i2t = (SCAN.replace("word_dim = 4", f'word_dim = 4\nattention = "{name}"') for name in ("t2i", "i2t"))
    for name, text in {"mha-d": MHA_D, "dan": DAN, "t2i": t2i, "i2t": i2t, "other": REGION_CONFIG}.items():
        config = from_toml(text, name)
        config = replace(config, schedule=replace(config.schedule, max_steps=3, eval_every_steps=3, patience=0))
        runs[name] = str(tmp_path_factory.mktemp("attending") / name)
        train(TrainJob(config, boxed, runs[name], device="cpu", curves=False, tensorboard=False))
    return runs


@pytest.fixture
def job(toy, write_run, tmp_path) -> FiguresJob:
    return FiguresJob(write_run(), str(tmp_path / "figures"), toy.captions, toy.features, split="test", device="cpu")


def job_of(attending, boxed, tmp_path, name, **fields) -> FiguresJob:
    fields = {"split": "test", "device": "cpu", "examples": 2} | fields
    return FiguresJob(attending[name], str(tmp_path / "figures"), boxed.captions, boxed.features, **fields)


@pytest.fixture
def drawn(monkeypatch):
    """Figures by file name, as they were when they were saved."""
    figures = {}
    for module in (rankings, attention):
        save = module.save

        def keep(figure, folder, name, save=save):
            figures[name] = figure
            save(figure, folder, name)

        monkeypatch.setattr(module, "save", keep)
    return figures


def pictures(location, image_ids):
    """A picture of one colour for each image, 640 x 480, reduced."""
    assert location == "photos"
    return {name: (np.full((48, 64, 3), int(name[-3:]), np.uint8), (640, 480)) for name in image_ids}


def framed(panel) -> bool:
    spines = panel.spines.values()
    return all(spine.get_visible() for spine in spines) and next(iter(spines)).get_edgecolor()[:3] == pytest.approx(
        tuple(int(FRAME[n : n + 2], 16) / 255 for n in (1, 3, 5))
    )


@pytest.mark.slow
def test_sheet_shows_the_best_images_and_frames_the_right_one(job, drawn):
    found = draw_figures(replace(job, images="photos", top=3, only=("retrieval",)), pictures)
    assert found.names == ("retrieval.png", "figures.json")
    panels = list(drawn["retrieval.png"].axes)
    texts = [text.get_text() for text in drawn["retrieval.png"].texts]
    for ranking in found.rankings:
        shown, panels = panels[:3], panels[3:]
        # The colour of a picture tells its image.
        ids = [
            f"test-{next(c for c in panel.get_children() if isinstance(c, AxesImage)).get_array()[0, 0, 0]:03d}"
            for panel in shown
        ]
        assert ids == [hit.image_id for hit in ranking.hits]
        assert [panel.get_title() for panel in shown] == ["1", "2", "3"]
        assert [framed(panel) for panel in shown] == [name == ranking.right.image_id for name in ids]
        if ranking.rank > 3:
            right, *panels = panels
            assert (right.get_title(), framed(right)) == (f"right: {ranking.rank}", True)
        assert f"right image: rank {ranking.rank} of 9" in texts
        assert ranking.caption.text.split()[0] in " ".join(texts)
    assert panels == []
    assert {ranking.rank > 3 for ranking in found.rankings} == {True, False}


@pytest.mark.slow
def test_numbers_are_written(job, tmp_path):
    found = draw_figures(job)
    content = json.loads((tmp_path / "figures" / "figures.json").read_text())
    assert [row["rank"] for row in content["retrieval"]] == [ranking.rank for ranking in found.rankings]
    assert content["retrieval"][0]["hits"][0] == {
        "image_id": found.rankings[0].hits[0].image_id,
        "score": found.rankings[0].hits[0].score,
    }
    assert content["portions"] == ["comparable"]
    assert content["map"]["image_ids"] == list(found.map.image_ids)
    np.testing.assert_allclose(content["map"]["points"]["de"], found.map.points[1 + found.map.languages.index("de")], atol=1e-3)
    assert "attends to neither regions nor words" in content["refused"]["attention"]
    assert content["examples"].startswith("4 of the 9 images of split test with captions in de, en, drawn with seed 0")


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["mha-d", "dan", "t2i", "i2t"])
def test_attention_is_the_models(attending, boxed, tmp_path, name):
    found = draw_figures(job_of(attending, boxed, tmp_path, name, only=("attention",)))
    assert found.names == ("attention-1.png", "attention-2.png", "figures.json")
    run = open_run(attending[name])
    data = open_data(boxed.captions, boxed.features, split="test", portions=dict.fromkeys(("de", "en"), ("comparable",)))
    rows = {row["image_id"]: row for row in open_dataset(boxed.features)}
    content = json.loads((tmp_path / "figures" / "figures.json").read_text())["attention"]
    for image, plain in zip(found.attention, content, strict=True):
        count = rows[image.image_id]["num_regions"]
        assert np.array_equal(image.boxes, rows[image.image_id]["boxes"][:count])
        assert (image.size_wh, plain["image_id"]) == ((640, 480), image.image_id)
        place = data.captions.image_ids.index(image.image_id)
        assert [shown.caption.key.language for shown in image.captions] == list(data.captions.language_names)
        for shown, plain_caption in zip(image.captions, plain["captions"], strict=True):
            batch = CaptionBatch(data.captions.token_ids, data.captions.offsets, np.array([shown.caption.row]))
            with eval_mode(run.model) as device:
                images = ImageBatch.of(data.features, np.array([place]), device)
                weights = run.model.attention_weights(images, batch, shown.caption.key.language)
            if name in ("mha-d", "dan"):
                assert image.regions.shape == (2, count)
                assert shown.words.shape == (2, len(shown.caption.tokens))
                assert np.array_equal(image.regions, weights.regions.numpy())
                assert np.array_equal(shown.words, weights.words.numpy())
                np.testing.assert_allclose(plain_caption["words"], shown.words, atol=1e-6)
            else:
                assert image.regions is None
                assert shown.pairs.shape == (len(shown.caption.tokens), count)
                assert np.array_equal(shown.pairs, weights.pairs.numpy())
                assert plain_caption["words_attend"] is shown.words_attend is (name == "t2i")
                np.testing.assert_allclose(shown.pairs.sum(1 if name == "t2i" else 0), 1, atol=1e-5)
                np.testing.assert_allclose(plain_caption["pairs"], shown.pairs, atol=1e-6)


def boxes_of(panel) -> list[tuple[tuple[float, ...], float]]:
    """Boxes of a panel, in the order in which they are drawn, with their line widths."""
    found = [patch for patch in panel.patches if not patch.get_fill()]
    return [((*patch.get_xy(), patch.get_width(), patch.get_height()), patch.get_linewidth()) for patch in found]


@pytest.mark.slow
def test_heads_over_regions_and_words(attending, boxed, tmp_path, drawn):
    found = draw_figures(job_of(attending, boxed, tmp_path, "mha-d", images="photos", only=("attention",)), pictures)
    for image in found.attention:
        *heads, german, english = drawn[f"attention-{image.number}.png"].axes
        assert len(heads) == 2
        for panel, weights in zip(heads, image.regions, strict=True):
            (picture,) = panel.images
            assert picture.get_array()[0, 0, 0] == int(image.image_id[-3:])
            assert tuple(picture.get_extent()) == (0, 640, 480, 0)
            order = sorted(range(len(weights)), key=lambda n: weights[n])  # The strongest on top.
            expected = [(x1, y1, x2 - x1, y2 - y1) for x1, y1, x2, y2 in image.boxes[order]]
            boxes = boxes_of(panel)
            np.testing.assert_allclose([box for box, _ in boxes], expected, rtol=1e-5)
            widths = [width for _, width in boxes]
            assert widths == sorted(widths)
            assert widths[-1] == pytest.approx(0.4 + 2.4 * weights.max() / max(weights.max(), min(1, 3 / len(weights))))
            greatest = f"{weights.max():.0%}" if weights.max() >= 0.1 else f"{weights.max():.1%}"
            assert f"up to {greatest}, even " in panel.get_title()
        for panel, shown in zip((german, english), image.captions, strict=True):
            assert np.array_equal(panel.images[0].get_array(), shown.words)
            even = 1 / shown.words.shape[1]
            assert panel.images[0].get_clim() == pytest.approx((0, max(shown.words.max(), min(1, 3 * even))))
            assert [label.get_text() for label in panel.get_xticklabels()] == list(shown.caption.words)
            assert panel.get_title(loc="left").startswith(f"{shown.caption.key.language}: ")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "title"), [("t2i", "words attend to regions"), ("i2t", "regions attend to words")])
def test_words_over_regions(attending, boxed, tmp_path, drawn, name, title):
    found = draw_figures(job_of(attending, boxed, tmp_path, name, only=("attention",)))
    for image in found.attention:
        panels = drawn[f"attention-{image.number}.png"].axes
        assert len(panels) == 4
        for field, picture, shown in zip(panels[::2], panels[1::2], image.captions, strict=True):
            assert np.array_equal(field.images[0].get_array(), shown.pairs)
            assert [label.get_text() for label in field.get_yticklabels()] == list(shown.caption.words)
            assert f"{shown.caption.key.language}: {title}, " in field.get_title(loc="left")
            assert (len(picture.images), picture.get_xlim(), picture.get_ylim()) == (0, (0, 640), (480, 0))
            inside = shown.pairs[1:-1] if len(shown.pairs) > 2 else shown.pairs
            words = shown.caption.words[1:-1] if len(shown.pairs) > 2 else shown.caption.words
            allowed = {f"{n + 1}: {words[inside[:, n].argmax()]}" for n in range(inside.shape[1])}
            assert {text.get_text() for text in picture.texts} - {""} <= allowed
            assert len(boxes_of(picture)) == inside.shape[1]


def test_cells_of_a_grid_are_maps_and_others_a_field(tmp_path, drawn):
    weights = np.random.default_rng(0).dirichlet(np.ones(12), 3)
    caption = ShownCaption(0, CaptionKey("a", "en", "comparable", 0), ("<start>", "one", "<end>"))
    words = np.full((3, 3), 1 / 3)
    image = AttendedImage(1, "a", None, None, weights, (AttendedCaption(caption, words, None),), grid_hw=(3, 4))
    plot_attention(image, None, Folder(str(tmp_path)), "a.png")
    *panels, field = drawn["a.png"].axes
    assert np.array_equal(field.images[0].get_array(), words)
    for panel, of_head in zip(panels, weights, strict=True):
        cells = panel.images[0].get_array()
        assert cells.shape == (3, 4)
        assert all(cells[y, x] == of_head[4 * y + x] for y in range(3) for x in range(4))
    plot_attention(replace(image, grid_hw=None), None, Folder(str(tmp_path)), "b.png")
    assert np.array_equal(drawn["b.png"].axes[0].images[0].get_array(), weights)


def test_grid_of_reads_the_extractor_parameters(toy_regions, tmp_path):
    rows = [{"image_id": "a", "feature": np.ones(24, np.float32)}]
    for name, extractor, expected in (
        ("grid", {"grid": [1, 3]}, (1, 3)),
        ("crops", {"separate": True}, None),
        ("other", {"grid": [2, 2]}, None),
    ):
        spec = FeatureSpec("several", (3, 8))
        write_dataset(tmp_path / name, "features", rows, parameters={"extractor": extractor}, spec=spec)
        assert grid_of(open_dataset(tmp_path / name)) == expected
    assert grid_of(open_dataset(toy_regions.features)) is None


@pytest.mark.slow
def test_unsupported_figure_is_refused_alone(attending, boxed, tmp_path, job):
    found = draw_figures(job_of(attending, boxed, tmp_path, "t2i"))
    assert found.names == ("retrieval.png", "attention-1.png", "attention-2.png", "figures.json")
    assert list(found.refused) == ["map"]
    assert "has no vector of either" in found.refused["map"]
    found = draw_figures(job_of(attending, boxed, tmp_path, "other"))
    assert list(found.refused) == ["attention"]
    for refused, name, message in (
        (job_of(attending, boxed, tmp_path / "a", "t2i"), "map", "compares an image with a caption part by part"),
        (replace(job, output=str(tmp_path / "b" / "figures")), "attention", "kind 'vse', which attends to neither"),
    ):
        with pytest.raises(UsageError, match=message):
            draw_figures(replace(refused, only=("retrieval", name)))
        assert not list(Path(refused.output).glob("*"))


@pytest.mark.slow
def test_attention_pictures_of_former_examples_are_deleted(attending, boxed, tmp_path):
    job = job_of(attending, boxed, tmp_path, "mha-d", only=("attention",), examples=3)
    draw_figures(job)
    Folder(job.output).put("attention-mine.png", b"mine")
    draw_figures(replace(job, examples=1))
    assert sorted(Folder(job.output).names()) == ["_made_from.json", "attention-1.png", "attention-mine.png", "figures.json"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"languages": ("en", "it")}, "--languages names it, but this run knows only en, de"),
        ({"split": "tests"}, "has no captions of split 'tests' in en, de: choose with --split of test, train, val"),
    ],
)
def test_missing_captions_are_refused(job, fields, message):
    with pytest.raises(UsageError, match=message):
        draw_figures(replace(job, **fields))


@pytest.mark.slow
def test_figure_appears_whole(job, tmp_path, monkeypatch):
    draw_figures(replace(job, only=("retrieval",)))
    before = {path.name: path.read_bytes() for path in (tmp_path / "figures").iterdir()}

    def fail(figure, file, **options):
        file.write(b"half of a picture")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises((OSError, DatasetError), match=r"No space left on device|the disk is full"):
        draw_figures(replace(job, only=("retrieval",), seed=1))
    assert {path.name: path.read_bytes() for path in (tmp_path / "figures").iterdir()} == before


@pytest.mark.slow
def test_regions_of_a_picture_of_another_size(attending, boxed, tmp_path):
    def smaller(location, image_ids):
        return {name: (pixels, (320, 240)) for name, (pixels, _) in pictures(location, image_ids).items()}

    job = job_of(attending, boxed, tmp_path, "mha-d", images="photos", only=("attention",))
    with pytest.raises(InputError, match=r"is 320×240 pixels, its regions in .* are those of a picture of 640×480"):
        draw_figures(job, smaller)
    assert not list(Path(job.output).glob("*"))


@pytest.mark.slow
def test_figures_have_all_formats_and_the_width_of_columns(job, tmp_path):
    names = {"retrieval": 7.2, "map": 3.5}  # Inches.
    found = draw_figures(replace(job, formats=("png", "pdf", "svg")))
    assert {*found.names} == {"figures.json"} | {f"{name}.{kind}" for name in names for kind in ("png", "pdf", "svg")}
    for name, width in names.items():
        path = Path(job.output) / name
        assert [width_of(path.with_suffix(f".{kind}")) for kind in ("png", "pdf", "svg")] == pytest.approx([width] * 3)
