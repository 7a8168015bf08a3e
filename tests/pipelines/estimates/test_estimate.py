"""The arithmetic of an estimate, against numbers worked out by hand, and the rate and prices that it takes."""

import json

import pytest

from pipelines.commands.estimating import lines_of, size
from pipelines.estimates.estimate import Cluster, Estimate, Requests, Work, writes_of_upload
from pipelines.estimates.prices import Prices
from pipelines.estimates.rates import Rate, read_rate
from schemas.errors import UsageError
from schemas.sharding import VECTOR_SHARD_BYTES, choose_shards
from tests.simulation import largest_shard

MIB = 1 << 20
# Of a million in 16 shards: L = ln 16,000 = 9.680; L / 3 = 3.23;
# sqrt(L * L / 9 + 2 * 62,500 * L) = sqrt(10.4 + 1,210,042) = 1,100.02.
MOST = 62_500 + 1104
OF_TWO = 125_000 + 1502  # Of 8 slots: L = ln 8,000 = 8.987; L / 3 = 3.00; sqrt(L * L / 9 + 2 * 125,000 * L) = 1,498.9.


def work(count: int | None = 1_000_000, shards: int = 16, **values) -> Work:
    return Work(
        *("features", "images", count, shards),
        **{"source": "gs://b/photos", "output": "gs://b/f", "item_bytes": 100_000.0, "row_bytes": 8192, **values},
    )


def test_a_million_images_on_eight_machines():
    prices = Prices({"g2-standard-4": 2.0}, writes_per_1000=5.0, reads_per_1000=0.5, gb_month=0.1, currency="X")
    estimate = Estimate(work(), Cluster(8, 1, Rate(400.0, "given"), "g2-standard-4", "nvidia-l4"), prices)
    assert estimate.shard_rows == 62_500
    assert estimate.most_rows == MOST
    assert estimate.stored_bytes == 8_192_000_000
    assert estimate.shard_bytes == 512_000_000
    assert estimate.read_bytes == 100_000_000_000
    assert (estimate.slots, estimate.rounds) == (8, 2)
    assert estimate.slot_rows == OF_TWO
    assert estimate.seconds == pytest.approx(OF_TWO / 400)
    assert estimate.machine_hours == pytest.approx(8 * OF_TWO / 400 / 3600)
    assert [cost.what for cost in estimate.costs] == ["machines", "requests that write", "requests that read"]
    assert estimate.requests is not None
    assert [cost.amount for cost in estimate.costs] == pytest.approx(
        [estimate.machine_hours * 2, estimate.requests.writes * 0.005, estimate.requests.reads * 0.0005]
    )
    assert estimate.cost == pytest.approx(sum(cost.amount for cost in estimate.costs))
    assert estimate.month is not None
    assert estimate.month.amount == pytest.approx(0.8192)
    assert json.loads(json.dumps(estimate.to_json()))["cost"] == estimate.cost


@pytest.mark.parametrize(
    ("machines", "slots", "at_a_time", "rounds"),
    [(1, 1, 1, 16), (8, 1, 8, 2), (16, 1, 16, 1), (40, 1, 16, 1), (4, 2, 8, 2), (5, 1, 5, 4)],
)
def test_a_shard_is_made_in_one_piece(machines, slots, at_a_time, rounds):
    estimate = Estimate(work(), Cluster(machines, slots, Rate(400.0, "given")))
    assert (estimate.slots, estimate.rounds) == (at_a_time, rounds)
    rows = rounds * 62_500
    assert estimate.seconds is not None
    assert rows / (400 / slots) <= estimate.seconds <= 1.02 * rows / (400 / slots)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [16, 256])
def test_the_fullest_shard_is_no_fuller(shards):
    for count in (31_783, 200_000):
        most = Estimate(work(count, shards)).most_rows
        assert most is not None
        assert count / shards < largest_shard(count, shards) <= most


def test_what_is_unknown_stays_unknown():
    estimate = Estimate(work(None, item_bytes=None, row_bytes=None))
    assert estimate.requests is estimate.seconds is estimate.stored_bytes is estimate.read_bytes is estimate.cost is None
    lines = list(lines_of(estimate, None, ""))
    assert [line.split(maxsplit=1)[0] for line in lines if "?" in line] == [
        "graph",
        "dataset",
        "time",
        "requests",
        "bytes",
        "cost",
    ]
    assert "imagepivot doctor --extractor NAME --measure --json" in "\n".join(lines)


def test_machines_that_would_have_nothing_to_do_are_named():
    lines = "\n".join(lines_of(Estimate(work(), Cluster(20)), None, "DataflowRunner"))
    assert "20 machines; 16 shards / 16 at a time = 1 one after the other; no more than 16 can be at work" in lines


def test_no_store_takes_no_requests():
    assert Estimate(work(source="/photos", output="/f")).requests == Requests(0, 0)


def test_an_image_in_a_store_takes_one_request_and_a_listing_one_for_a_thousand():
    assert Estimate(work(31_783, source="s3://b/photos", output="/f")).requests == Requests(32, 31_783)
    assert Estimate(work(are_objects=False)).requests is None


@pytest.mark.parametrize(
    ("store", "size", "writes"),
    [
        *(("gs", 1, 1), ("gs", 8 * MIB, 1), ("gs", 9 * MIB, 2), ("gs", 16 * MIB, 2), ("gs", 40 * MIB, 2 + 2 + 1 + 1)),
        *(("gs", 512 * MIB, 64 + 1), ("gs", 513 * MIB, 64 + 1 + 2 + 1), ("s3", 16 * MIB, 1), ("s3", 40 * MIB, 5)),
    ],
)
def test_an_upload_goes_in_parts(store, size, writes):
    assert writes_of_upload(store, size) == writes


def test_ten_times_the_images_take_ten_times_the_requests_and_hours():
    each = []
    for count in (1_000_000, 10_000_000, 100_000_000):
        shards = choose_shards(count * 8192, VECTOR_SHARD_BYTES)
        estimate = Estimate(work(count, shards), Cluster(16, 1, Rate(400.0, "given")))
        assert estimate.requests is not None
        assert estimate.machine_hours is not None
        each.append((sum(estimate.requests) / count, estimate.machine_hours / count))
    assert all(one == pytest.approx(each[0], rel=0.02) for one in each)


@pytest.mark.parametrize(
    ("number", "text"), [(512, "512 bytes"), (8192, "8.19 kB"), (512_000_000, "512.00 MB"), (819_200_000_000, "819.20 GB")]
)
def test_sizes_in_words(number, text):
    assert size(number) == text


# --- rates -----------------------------------------------------------------------------------------------------------


def test_a_rate_that_is_given():
    assert read_rate("12.5") == (12.5, "given")


def test_the_rate_that_doctor_measured(tmp_path):
    values = {"bottleneck": "decoding", "per_second": 81.2}
    findings = [
        {"group": "rates", "subject": "model", "values": {}},
        {"group": "rates", "subject": "bottleneck", "values": values},
    ]
    (tmp_path / "doctor.json").write_text(json.dumps({"works": True, "findings": findings}))
    assert read_rate(str(tmp_path / "doctor.json")) == (81.2, "measured by doctor, bound by decoding")


def test_the_rate_of_a_run(tmp_path):
    events = [{"event": "progress", "what": "resnet50-pool", "per_second": rate} for rate in (0.0, 70.0, 90.5)]
    lines = [*map(json.dumps, events), "not JSON", json.dumps({"event": "end", "per_second": 1})]
    (tmp_path / "log").write_text("\n".join(lines))
    assert read_rate(str(tmp_path / "log")) == (90.5, "measured by a run of resnet50-pool")


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf"])
def test_a_rate_is_more_than_nothing(text):
    with pytest.raises(UsageError, match="expected more than 0 images or captions a second"):
        read_rate(text)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"findings": []}', '{"event": "progress", "per_second": null}'])
def test_a_file_without_a_rate(tmp_path, content):
    (tmp_path / "log").write_text(content)
    with pytest.raises(UsageError, match="holds no rate"):
        read_rate(str(tmp_path / "log"))


@pytest.mark.parametrize("text", ["fast", "nowhere/doctor.json", "a\0b"])
def test_no_number_and_no_file(text):
    with pytest.raises(UsageError, match="neither a number nor a file"):
        read_rate(text)


# --- prices ----------------------------------------------------------------------------------------------------------

PRICES = """
currency = "EUR"
source = "our contract"
date = 2026-11-01
writes-per-1000 = 1
gb-month = 0.5

[machine-hour]
"n1-standard-4" = 0.25
"g2-standard-4" = 1

[gpu-hour]
nvidia-tesla-t4 = 0.5
"""


def prices(tmp_path, text: str) -> Prices:
    (tmp_path / "prices.toml").write_text(text)
    return Prices.read(str(tmp_path / "prices.toml"))


def test_prices_are_read(tmp_path):
    read = prices(tmp_path, PRICES)
    assert read == Prices(
        {"n1-standard-4": 0.25, "g2-standard-4": 1}, {"nvidia-tesla-t4": 0.5}, 1, None, 0.5, *read_words(read)
    )
    estimate = Estimate(work(), Cluster(8, 2, Rate(400.0, "given"), "n1-standard-4", "nvidia-tesla-t4"), read)
    hours = estimate.machine_hours
    assert hours is not None
    assert [cost.amount for cost in estimate.costs[:2]] == pytest.approx([hours * 0.25, hours * 2 * 0.5])
    lines = "\n".join(lines_of(estimate, None, "DataflowRunner"))
    assert f"{estimate.cost:,.2f} EUR, by our contract, 2026-11-01" in lines
    assert "keeping it for a month: 8.19 GB x 0.5 = 4.10 EUR" in lines


def read_words(read: Prices) -> tuple[str, str, str]:
    assert (read.currency, read.source, read.date) == ("EUR", "our contract", "2026-11-01")
    return read.currency, read.source, read.date


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("machine-hours = 1", r"key 'machine-hours', which is no price: did you mean 'machine-hour'\?"),
        ("machine-hour = 1", "expected a section with a number for each type"),
        ("[gpu-hour]\nt4 = true", "expected a section with a number for each type"),
        ('gb-month = "0.02"', "expected a number"),
        ("gb-month = -1", "a price is -1, expected 0 or more"),
        ("gb-month = nan", "a price is nan, expected 0 or more"),
        ("currency = 1", "expected text in quotes"),
        ("gb-month", "is not TOML"),
    ],
)
def test_prices_are_read_strictly(tmp_path, text, message):
    with pytest.raises(UsageError, match=message):
        prices(tmp_path, text)


@pytest.mark.parametrize("location", ["nowhere.toml", "a\0b", ""])
def test_prices_that_are_not_there(tmp_path, monkeypatch, location):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"--prices .*(cannot be read|is not TOML)"):
        Prices.read(location)


def test_the_machine_must_have_a_price(tmp_path):
    read = prices(tmp_path, PRICES)
    with pytest.raises(UsageError, match=r"has no price of 'g2-standard-8': did you mean 'g2-standard-4'\?"):
        read.of_machine("g2-standard-8")
    with pytest.raises(UsageError, match=r"has prices of 'n1-standard-4', 'g2-standard-4': say which the workers are"):
        read.of_machine("")
    assert Prices({"any": 3.0}).of_machine("") == 3.0
    assert Prices().of_machine("n1") is None
