"""The page of estimates is true: its counts are those of the code, and its estimates follow from them."""

import pytest

from tests.benchmarks.gpu.counting import Counts, Operation, count
from tests.benchmarks.gpu.data_sheets import DATA_SHEETS, DataSheet, Estimate
from tests.benchmarks.gpu.estimates import PAGE, all_tables, rates_of_sheets, read_tables, replaced, without_measurements
from tests.benchmarks.gpu.training import PRESETS

SHEET = DataSheet("made up", {"fp32": 1, "tf32": 4, "bf16": 8}, bandwidth=100, source="")


def page():
    return PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.cluster
def test_the_page_holds_what_is_counted():
    found, expected = read_tables(page()), all_tables()
    assert [without_measurements(table) for table in found] == [without_measurements(table) for table in expected]


def test_the_page_has_the_published_rates_and_room_for_measurements():
    rates, counts, estimates, step_counts, step_estimates = read_tables(page())
    assert without_measurements(rates) == without_measurements(rates_of_sheets())
    assert len(rates) == 1 + len(DATA_SHEETS)
    for table in (counts, step_counts):
        assert len(without_measurements(table)[0]) == len(table[0])  # They are counted, not measured.
    for table in (estimates, step_estimates):
        assert [name for name in table[0] if name == "measured"] == ["measured"] * len(DATA_SHEETS)
    assert [row[0] for row in step_counts[1:]] == [f"`{preset}`" for preset in PRESETS]  # As `make gpu` measures them.
    assert {len(row) for table in (rates, counts, estimates) for row in table if row} == {9, 11}


def test_other_measurements_leave_the_page_true():
    tables = read_tables(page())
    filled = [[head, *([cell or "12" for cell in row] for row in rows)] for head, *rows in tables[2:]]
    changed = replaced(page(), [*tables[:2], *filled])
    assert changed != page()
    assert [without_measurements(table)[0] for table in read_tables(changed)] == [
        without_measurements(table)[0] for table in tables
    ]


def test_the_example_on_the_page_is_arithmetic():
    [row] = [row for row in read_tables(page())[1] if row[0] == "`resnet50-pool`"]
    gmac, megabytes, launches = float(row[1]), float(row[4]), int(row[8])
    assert f"16 × {gmac} GMAC × 2 = {16 * 2 * gmac:.0f} GFLOP at 67 TFLOP/s take {16 * 2 * gmac / 67:.1f} ms" in page()
    assert (
        f"16 × {megabytes:.0f} MB = {16 * megabytes / 1000:.1f} GB at 3,350 GB/s take {16 * megabytes / 3350:.1f} ms" in page()
    )
    assert f"{launches} launches take {launches / 100:.1f} ms" in page()


def operations(*them):
    return Counts([Operation("convolution", *one) for one in them], launches=len(them))


@pytest.mark.parametrize(
    ("counts", "precision", "seconds", "bound"),
    [
        (operations((10**12, 0, 32)), "fp32", 2.0, "products"),
        (operations((10**12, 0, 32)), "tf32", 0.5, "products"),
        (operations((10**12, 0, 16)), "bf16", 0.25, "products"),
        (operations((0, 10**11, 32)), "fp32", 1.0, "memory"),
        (operations((10**12, 10**11, 32), (0, 10**11, 32)), "fp32", 3.0, "products"),
        (operations((10**12, 10**11, 32), (0, 3 * 10**11, 32)), "fp32", 5.0, "memory"),
        (Counts([], launches=1000), "fp32", 0.01, "launches"),
    ],
)
def test_an_estimate_is_the_longer_time_of_each_operation(counts, precision, seconds, bound):
    estimate = Estimate.of(counts, SHEET, precision)
    assert (estimate.seconds, estimate.bound) == (pytest.approx(seconds), bound)


def test_a_gpu_without_tf32_has_no_estimate_of_it():
    t4 = next(sheet for sheet in DATA_SHEETS if sheet.name == "T4")
    assert Estimate.of(Counts(launches=1), t4, "tf32") is None


@pytest.mark.slow
def test_counts_are_those_of_the_published_network():
    """ResNet18 by hand: He et al. 2015, table 1, have 1.8e9 multiply-adds, 11.7 million weights with the last layer of 513,000."""
    weights, counts = count("timm:resnet18", "fp32", (224, 224), (1, 3))
    # [outputs of a side, outputs, inputs, taps of a side]
    layers = [(112, 64, 3, 7), *[(56, 64, 64, 3)] * 4]
    for side, width in ((28, 128), (14, 256), (7, 512)):
        layers += [(side, width, width // 2, 3), (side, width, width // 2, 1), *[(side, width, width, 3)] * 3]
    macs = sum(side**2 * outputs * inputs * taps**2 for side, outputs, inputs, taps in layers)
    assert (counts[1].macs, counts[3].macs) == (macs, 3 * macs)
    convolutions = sum(outputs * inputs * taps**2 for _, outputs, inputs, taps in layers)
    assert weights == 4 * (convolutions + 4800)  # Norms are folded: of each channel one number, the bias, is left of them.
    pixels, features = 3 * 224 * 224, 4 * 512
    assert {images: found.moved for images, found in counts.items()} == {1: pixels + features, 3: 3 * (pixels + features)}
    assert counts[1].waits == counts[3].waits == 1
    # Each convolution reads its input and weights, and writes its output; the rest is sums and activations.
    assert sum(operation.macs > 0 for operation in counts[1].operations) == len(layers)
    assert counts[1].bytes > weights


def test_the_example_of_a_step_on_the_page_is_arithmetic():
    """The GRU of VSE++: 1024 units read words of 300 numbers, 128 captions of 15 tokens on average, forward and twice backward."""
    [row] = [row for row in read_tables(page())[3] if row[0] == "`vsepp`"]
    gmac, megabytes, launches = float(row[2]), float(row[3].replace(",", "")), int(row[4])
    assert gmac == pytest.approx(3 * 128 * 15 * 3 * 1024 * (300 + 1024) / 1e9, rel=0.05)
    assert f"{gmac} GMAC × 2 = {2 * gmac:.0f} GFLOP at 67 TFLOP/s take {2 * gmac / 67:.1f} ms" in page()
    assert f"{launches} launches take {launches / 100:.1f} ms" in page()
    assert f"{megabytes:,.0f} MB at 3,350 GB/s take {megabytes / 3350:.1f} ms" in page()
