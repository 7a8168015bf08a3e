"""``--metrics-file``: what a run says to Prometheus while it works and when it has ended."""

from tests.prometheus import Series, read_metrics

BAD = "image_id\ttext\na\tone\nb\t \nc\t\n"


def by(series: Series, label: str) -> dict[str, float]:
    """Values by one label."""
    return {dict(labels)[label]: value for labels, value in series.items()}


def value(series: Series) -> float:
    [number] = series.values()
    return number


def test_failures_are_counted_by_reason(imagepivot, tmp_path):
    (tmp_path / "bad.tsv").write_text(BAD)
    words = ("captions", "bad.tsv", "out", "--format", "table", "--shards", "2", "--workers", "1")
    imagepivot(*words, "--metrics-file", "night.prom", code=3, cwd=tmp_path)
    metrics = read_metrics((tmp_path / "night.prom").read_text())
    [labels] = metrics["imagepivot_done_total"]
    assert dict(labels) == {"run": "night", "task": "captions", "unit": "captions"}
    failed = by(metrics["imagepivot_failed_total"], "reason")
    assert (value(metrics["imagepivot_done_total"]), failed["empty_caption"], sum(failed.values())) == (3, 2, 2)
    assert (failed["truncated"], value(metrics["imagepivot_shards_total"])) == (0, 2)
    assert (value(metrics["imagepivot_running"]), value(metrics["imagepivot_left_seconds"])) == (0, 0)
    assert "imagepivot_current_shard" not in metrics
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.tsv", "night.prom", "out"]
