import hashlib
import io
import itertools
import random
import struct
import threading

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from extractors import Description, Extractor
from pipelines.features.inference import Tally, merge_rows
from schemas.errors import DatasetError, UsageError
from schemas.features import FeatureSpec
from schemas.kinds import schema_of
from schemas.storage.storage_errors import StoreError
from tests.fake_extractors import extract_images

SPEC = FeatureSpec("fake", (2, 3))
SCHEMA = schema_of("features", SPEC)


class FakeExtractor(Extractor):
    """The feature of a grey image of one colour is ``colour + [0, 1, 2, 3, 4, 5]``."""

    def __init__(self, spec=SPEC, **parameters):
        super().__init__(Description(spec, {"name": "fake", **parameters}))
        self.batches: list[int] = []

    def preprocess(self, image):
        return torch.tensor(image.getpixel((0, 0))[0])

    def extract(self, batch):
        self.batches.append(len(batch))
        return (batch.numpy()[:, None] + np.arange(6)).astype(np.float32).reshape(-1, 2, 3)


def grey(colour: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (2, 2), colour).save(file, "PNG")
    return file.getvalue()


def expected_rows(colours: dict[str, int]) -> list[dict]:
    return [{"image_id": key, "feature": [float(colour + k) for k in range(6)]} for key, colour in colours.items()]


def run(files: dict[str, bytes], *, extractor=None, **options):
    extractor, tally = extractor or FakeExtractor(), Tally()
    tables = list(extract_images(files, extractor, **{"batch_size": 3, "threads": 2, "tally": tally, **options}))
    assert all(table.schema.equals(SCHEMA, check_metadata=True) for table in tables)
    return pa.concat_tables([SCHEMA.empty_table(), *tables]).to_pylist(), tally, extractor.batches


@pytest.mark.parametrize("threads", [1, 2])
def test_decoding_threads_use_one_torch_thread(threads):
    class Noting(FakeExtractor):
        def preprocess(self, image):
            decoding.add((threading.current_thread().name.partition("_")[0], torch.get_num_threads()))
            return super().preprocess(image)

    decoding: set[tuple[str, int]] = set()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        run({f"image{n:02d}": grey(n) for n in range(20)}, extractor=Noting(), threads=threads)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert decoding == {("decode", 1)}


def test_failures_name_stage_and_reason():
    def read(ref):
        raise {
            "absent": FileNotFoundError(2, "No such file or directory", "/secret/place"),
            "nameless": OSError("odd"),
            "refused": _dataset_error(PermissionError(13, "Permission denied", "/secret/place")),
            "stored": _dataset_error(StoreError("503 from /secret/place")),
        }[ref.image_id]

    def _dataset_error(cause):
        try:
            raise DatasetError("cannot use '/secret/place': permission denied") from cause
        except DatasetError as error:
            return error

    tally = Tally()
    assert list(extract_images(("absent", "nameless", "refused", "stored"), read=read, tally=tally)) == []
    assert tally.failures == [
        {"key": "absent", "uri": "uri/absent", "stage": "read", "reason": "unreadable", "message": "No such file or directory"},
        {"key": "nameless", "uri": "uri/nameless", "stage": "read", "reason": "unreadable", "message": "OSError"},
        {"key": "refused", "uri": "uri/refused", "stage": "read", "reason": "unreadable", "message": "Permission denied"},
        {"key": "stored", "uri": "uri/stored", "stage": "read", "reason": "unreadable", "message": "OSError"},
    ]


def extract_many(read: list[str], **options):
    """Extract 200 images in batches of four; ``read`` gets the id of each image when it is read (appending is atomic)."""

    def read_and_tell(ref):
        read.append(ref.image_id)
        return grey(1)

    return extract_images((f"image{n:03d}" for n in range(200)), FakeExtractor(), read=read_and_tell, **options)


@pytest.mark.parametrize("reads", [2, 16])
def test_reading_runs_ahead_of_the_model_by_two_batches(reads):
    read: list[str] = []
    tables = extract_many(read, threads=2, reads=reads)
    assert next(tables).num_rows == 4
    assert len(read) <= 4 + 2 * 4 + reads
    assert 4 + sum(table.num_rows for table in tables) == 200


@pytest.mark.parametrize("batch_size", [1, 40])
def test_more_images_are_read_at_once_than_decoding_threads_exist(batch_size):
    """All of sixteen reads wait for each other: fewer at once would never end."""
    together = threading.Barrier(16)

    def read(_):
        together.wait(20)
        return grey(1)

    tables = extract_images((f"{n}" for n in range(64)), FakeExtractor(), read=read, batch_size=batch_size, reads=16)
    assert sum(table.num_rows for table in tables) == 64


@pytest.mark.parametrize("error", [UsageError("LOAD_TRUNCATED_IMAGES is set"), RuntimeError("a fault of ours")])
def test_other_errors_are_not_failures_of_an_image(error):
    def read(_):
        raise error

    with pytest.raises(type(error), match=str(error)):
        list(extract_images(("a",), read=read))


def in_parts(ids: list[str], generator: random.Random) -> list[pa.Table]:
    """Rows with these ids, cut at random places into tables that are not empty."""
    table = pa.table({"image_id": ids, "n": list(range(len(ids)))})
    cuts = sorted({0, len(ids), *(generator.randrange(len(ids) + 1) for _ in range(generator.randrange(6)))})
    return [table.slice(start, end - start) for start, end in itertools.pairwise(cuts)]


@pytest.mark.parametrize("seed", range(200))
def test_two_sorted_sources_become_one(seed):
    generator = random.Random(seed)
    ids = sorted({f"{generator.randrange(1000):03d}" for _ in range(generator.randrange(60))})
    is_new = {key: generator.random() < generator.choice((0.1, 0.5, 0.9)) for key in ids}
    old, new = ([key for key in ids if is_new[key] == side] for side in (False, True))
    batches = [batch for table in in_parts(old, generator) for batch in table.to_batches()]
    merged = list(merge_rows(iter(batches), iter(in_parts(new, generator))))
    assert [key for table in merged for key in table["image_id"].to_pylist()] == ids
    rank = {key: number for side in (old, new) for number, key in enumerate(side)}
    assert [n for table in merged for n in table["n"].to_pylist()] == [rank[key] for key in ids]


# --- a model that a GPU computes -------------------------------------------------------------------------------------


class Elsewhere(FakeExtractor):
    """Features of a model on a GPU; logs the batches that it starts and that are taken, by index."""

    def __init__(self):
        super().__init__()
        self.device = torch.device("cuda", 0)
        self.log: list[tuple[str, int]] = []
        self.started = [threading.Event() for _ in range(100)]
        self.count = 0

    def extract_async(self, batch):
        number, self.count = self.count, self.count + 1
        features = self.extract(batch)
        self.on_start(number)
        self.log.append(("started", number))
        self.started[number].set()

        def result():
            self.on_result(number)
            self.log.append(("taken", number))
            return {"feature": features}

        return result

    def on_start(self, number):
        pass

    def on_result(self, number):
        pass


@pytest.mark.parametrize("extractor", [FakeExtractor, Elsewhere])
@pytest.mark.parametrize(("batch_size", "threads"), [(1, 1), (2, 1), (3, 4), (7, 2), (20, 1), (100, 4)])
@pytest.mark.parametrize("bad", [(), (1, 7, 13, 19), tuple(range(19)), tuple(range(1, 20)), tuple(range(20))])
def test_rows_and_failures_equal_a_plain_loop(bad, batch_size, threads, extractor):
    generator = random.Random(7)
    colours = {f"image{n:02d}": generator.randrange(256) for n in range(20)}
    files = {key: b"" if n in bad else grey(colour) for n, (key, colour) in enumerate(colours.items())}
    told: list[tuple[int, int]] = []
    options = {"batch_size": batch_size, "threads": threads}
    rows, tally, batches = run(
        files, extractor=extractor(), **options, on_batch=lambda batch: told.append((batch.images, len(batch.failures)))
    )
    good = {key: colour for n, (key, colour) in enumerate(colours.items()) if n not in bad}
    assert rows == expected_rows(good)
    full, rest = divmod(len(good), batch_size)
    assert batches == [batch_size] * full + [rest] * (rest > 0), "batches are filled across failures"
    assert (tally.images, [failure["key"] for failure in tally.failures]) == (len(good), [f"image{n:02d}" for n in bad])
    assert tally.digests == {key: hashlib.sha256(data).hexdigest() for key, data in files.items()}
    assert [sum(counts) for counts in zip(*told, strict=True)] == [len(good), len(bad)]


def test_next_batch_is_started_while_rows_are_written_and_images_are_decoded_meanwhile():
    written, decoded = threading.Event(), threading.Event()

    class Waiting(Elsewhere):
        def preprocess(self, image):
            colour = super().preprocess(image)
            if colour == 8:
                decoded.set()
            return colour

        def on_start(self, number):
            if number == 1:
                assert written.wait(20)
                assert decoded.wait(20)

    tables = extract_images({f"{n:02d}": grey(n) for n in range(9)}, Waiting(), batch_size=3, threads=2)
    assert next(tables).num_rows == 3
    written.set()
    assert sum(table.num_rows for table in tables) == 6


@pytest.mark.parametrize("moment", ["on_start", "on_result"])
def test_error_of_the_model_ends_the_shard_behind_the_rows_before_it(moment):
    def fail(extractor, number):
        if number == 2:
            raise RuntimeError("a fault of ours")

    extractor = type("Failing", (Elsewhere,), {moment: fail})()
    tables = extract_images({f"{n:02d}": grey(n) for n in range(30)}, extractor, batch_size=3)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        list(tables)
    assert extractor.count <= 4
    assert [number for what, number in extractor.log if what == "taken"] == [0, 1]


class Pairs(FakeExtractor):
    """Two batches are in the model at once: each waits there for another one."""

    feeder_threads = 2

    def __init__(self):
        super().__init__()
        self.meeting = threading.Barrier(2)

    def extract(self, batch):
        self.meeting.wait(20)
        return super().extract(batch)


@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_cpu_with_two_feeder_threads_keeps_order(batch_size):
    files = {f"image{n:02d}": grey(n) for n in range(24)}
    expected, of_one, sizes = run(files, batch_size=batch_size)
    found, of_pairs, sizes_of_pairs = run(files, batch_size=batch_size, extractor=Pairs())
    assert found == expected
    assert (sizes_of_pairs, of_pairs.images, of_pairs.digests) == (sizes, of_one.images, of_one.digests)


# --- values that cannot be stored ------------------------------------------------------------------------------------


def stored(colours: list[int], dtype: str, scale: float, *, precision: str = "fp32"):
    """Extract images of these colours, whose features are multiplied by a number; return rows by id, and the tally."""

    class Scaled(FakeExtractor):
        def extract(self, batch):
            return super().extract(batch) * np.float32(scale)

    extractor, tally = Scaled(FeatureSpec("fake", (2, 3), dtype), precision=precision), Tally()
    files = {f"image{n:02d}": grey(colour) for n, colour in enumerate(colours)}
    tables = list(extract_images(files, extractor, batch_size=3, tally=tally))
    schema = schema_of("features", extractor.spec)
    assert all(len(table) and table.schema.equals(schema, check_metadata=True) for table in tables)
    return {row["image_id"]: row["feature"] for table in tables for row in table.to_pylist()}, tally


@pytest.mark.filterwarnings("error")
def test_image_beyond_the_range_of_float16_is_a_failure_and_the_others_are_stored():
    # Multiplied by 256, colours from 251 on reach 65,536.
    rows, tally = stored([0, 255, 200, 251, 250, 249, 255, 255, 255], "float16", 256.0)
    assert rows == {f"image{n:02d}": [256.0 * (c + k) for k in range(6)] for n, c in ((0, 0), (2, 200), (4, 250), (5, 249))}
    assert (tally.images, type(tally.images)) == (4, int)  # counts of workers travel as JSON
    assert [(row["key"], row["stage"], row["reason"]) for row in tally.failures] == [
        (f"image{n:02d}", "extract", "not_finite") for n in (1, 3, 6, 7, 8)
    ]
    assert tally.failures[0]["message"] == (
        "5 values of the feature are infinite or no numbers in float16: its largest number is 65,504, float32 holds more"
    )
    assert tally.failures[1]["message"].startswith("1 values")
    assert set(tally.digests) == {f"image{n:02d}" for n in range(9)}


def test_inf_and_nan_are_failures_with_advice():
    assert len(stored([255, 251], "float32", 256.0)[0]) == 2
    advice = ": the model computes in fp16, whose largest number is 65,504; --precision bf16 has the range of fp32"
    for scale, precision, more in ((np.inf, "fp32", ""), (np.nan, "fp32", ""), (np.inf, "fp16", advice)):
        rows, tally = stored([1, 2], "float32", scale, precision=precision)
        assert (rows, tally.images) == ({}, 0)
        assert tally.failures[0]["message"] == f"6 values of the feature are infinite or no numbers in float32{more}"


def test_features_of_float32_are_rounded_for_a_dataset_of_float16():
    rows, _ = stored([17], "float16", 1 / 3)
    expected = [struct.unpack("<e", struct.pack("<e", np.float32((17 + k) * np.float32(1 / 3))))[0] for k in range(6)]
    assert rows == {"image00": expected}
