import errno
import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import pytest
import torch

from schemas.console.tables import Cell
from schemas.dataset import open_dataset
from schemas.errors import DatasetError, ImagepivotError, UsageError, errno_of
from schemas.vocabulary import SPECIALS
from tests.train.trainings import SMALL, reproduce_job, rewrite, settings_of, with_other_features
from train.config.sections import load_config
from train.data.captions import one_caption_per_image, read_captions
from train.evaluation.scores import evaluate
from train.jobs import DivergedError, ReproduceJob
from train.reports.reproduce import failure_of, reproduce
from train.reports.reproduce_report import read_report
from train.reports.row_results import FAILURE_KINDS, read_result, write_result
from train.runs.run import open_run


def job_of(toy, output, **more) -> ReproduceJob:
    fields = {"rows": ("pivot-*", "vse-en"), "seeds": 2, "overrides": SMALL, "workers": 1, "device": "cpu", **more}
    return reproduce_job("gella2017", str(output), toy, **fields)


def run(job: ReproduceJob) -> list[tuple[str, int]]:
    """Run a job, and return its runs in the order in which they ended."""
    ended = []
    reproduce(job, lambda done: ended.append((done.task.preset, done.task.seed)))
    return ended


@pytest.fixture(scope="module")
def finished(toy_2016, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("tables") / "out"
    presets = [f"gella2017/{name}" for name in ("vse-en", "pivot-sym", "pivot-asym")]
    assert run(job_of(toy_2016, output)) == [(preset, seed) for seed in (0, 1) for preset in presets]
    return output


@pytest.mark.cluster
def test_result_equals_an_evaluation_of_the_run(finished, toy_2016):
    for seed in (0, 1):
        name = f"gella2017/pivot-asym/seed-{seed}"
        result = json.loads((finished / "results" / f"{name}.json").read_text())
        opened = open_run(finished / "runs" / name)
        scores = evaluate(opened, captions=toy_2016.captions, features=toy_2016.features)
        assert result["scores"] == [score.to_dict() for score in scores]
        assert {score["split"] for score in result["scores"]} == {"test_2016"}
        assert (opened.seed, opened.model.similarity, opened.config.schedule.max_steps) == (seed, "order", 4)
        assert result["step"] in (2, 4)
        assert not (finished / "runs" / name / "last.pt").exists()


@pytest.mark.cluster
def test_existing_results_are_kept_and_the_rest_is_done(finished, toy_2016):
    def stamps() -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in finished.rglob("*.json")}

    before = stamps()
    gone = finished / "results" / "gella2017" / "vse-en" / "seed-1.json"
    text = gone.read_text()
    gone.unlink()
    (failed,) = reproduce(job_of(toy_2016, finished))
    assert (failed.name, failed.failure.kind) == ("gella2017/vse-en, seed 1", "refused")
    assert "seed-1' holds a run, but has no last.pt to resume from" in failed.failure.reason
    assert gone.with_name("failed-seed-1.json").exists()
    shutil.rmtree(finished / "runs" / "gella2017" / "vse-en" / "seed-1")
    ended = run(job_of(toy_2016, finished))
    assert len(ended) == 6
    assert ended[-1] == ("gella2017/vse-en", 1)
    assert gone.read_text() == text
    after = stamps()
    assert set(after) == set(before)  # Nothing is left of the failure.
    assert {path for path in before if before[path] != after[path]} == {str(gone)}


@pytest.mark.cluster
def test_other_settings_or_data_are_refused(finished, toy_2016, tmp_path):
    job = job_of(toy_2016, finished)
    with pytest.raises(DatasetError, match="measured with other config: nothing was trained"):
        run(replace(job, settings=settings_of({**SMALL, "schedule.max_steps": "5"})))
    with pytest.raises(DatasetError, match="measured with other precision"):
        run(replace(job, precision="bf16"))
    path = finished / "results/gella2017/vse-en/seed-0.json"
    before = path.read_bytes()
    with pytest.raises(DatasetError, match="measured with other contents"):
        run(replace(job, features=(with_other_features(toy_2016, tmp_path / "changed").features,)))
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"paper": "kadar2018", "rows": ("multi-translation",)}, "needs captions of cs translation, de translation, which"),
        ({"split": "train"}, "--split is 'train', which gella2017/vse-en is trained on: name another split"),
        ({"split": "mine"}, "gella2017/vse-en needs captions of en comparable, which .* does not have in split mine"),
        ({"table": 3, "rows": (), "split": "val"}, "ranks captions of the test images of 2016: leave --split out"),
        ({"seeds": 0}, "--seeds is 0"),
    ],
    ids=["language", "split of training", "unknown split", "ranks of captions", "no seeds"],
)
def test_rows_without_test_captions_are_refused_before_training(toy_2016, tmp_path, change, message):
    with pytest.raises((UsageError, DatasetError), match=message):
        run(replace(job_of(toy_2016, tmp_path / "o", rows=("vse-en",)), **change))
    assert not (tmp_path / "o").exists()


@pytest.mark.cluster
def test_rows_are_evaluated_on_the_split(toy_2016, tmp_path):
    job = job_of(toy_2016, tmp_path / "o", rows=("vse-en",), seeds=1, split="val")
    assert run(job) == [("gella2017/vse-en", 0)]
    result = read_result(tmp_path / "o/results/gella2017/vse-en/seed-0.json")
    opened = open_run(tmp_path / "o/runs/gella2017/vse-en/seed-0")
    scores = evaluate(opened, captions=toy_2016.captions, features=toy_2016.features, splits=["val"])
    assert result["scores"] == [score.to_dict() for score in scores]
    with pytest.raises(DatasetError, match="was measured with other split: nothing was trained"):
        run(replace(job, split=""))


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_missing_features_are_refused_before_training(multi30k, tmp_path, split):
    few = rewrite(multi30k.features, tmp_path / "few", lambda rows: [row for row in rows if row["image_id"] != f"{split}-003"])
    job = job_of(replace(multi30k, features=few), tmp_path / "o")
    name = "test_2016" if split == "test" else split
    with pytest.raises(DatasetError, match=rf"lacks the features of 1 of \d+ images of split '{name}'.*: {split}-003"):
        run(job)
    assert not (tmp_path / "o").exists()


@pytest.mark.cluster
def test_report_has_means_deviations_and_published_numbers(finished):
    report = read_report(str(finished), "gella2017")
    assert [section.title for section in report.sections] == ["Table 1 (comparable captions)", "Table 2 (comparable captions)"]
    results = [json.loads((finished / f"results/gella2017/pivot-sym/seed-{seed}.json").read_text()) for seed in (0, 1)]
    for section, language in zip(report.sections, ("en", "de"), strict=True):
        lines = {line.row.name: line for line in section.lines}
        values = [
            score["text_to_image"]["recall_at_5"]
            for result in results
            for score in result["scores"]
            if (score["language"], score["portion"]) == (language, "comparable")
        ]
        cell = lines["PIVOT-SYM"].cells["text_to_image", "recall_at_5"]
        assert (cell.mean, cell.deviation) == pytest.approx((mean(values), stdev(values)))
        assert cell.published == {"en": 53.4, "de": 46.4}[language]
        assert lines["PARALLEL-SYM"].runs == 0
        median = lines["PARALLEL-SYM"].cells["image_to_text", "median_rank"]
        assert median.to_cell() == Cell("–", {"en": 3, "de": 4}[language])
    assert "| PIVOT-SYM | de | 2 |" in report.to_markdown()


def counted(corpus, data) -> tuple[int, dict[str, int]]:
    """Count the words that occur four times in a row's training captions, of all languages together, and the captions."""
    captions = read_captions(open_dataset(corpus.captions), split="train", portions=data.portions)
    if data.captions_per_image == "one":
        captions = one_caption_per_image(captions, seed=0)
    words = Counter(captions.token_ids.tolist())
    languages = Counter(captions.language_names[number] for number in captions.languages.tolist())
    frequent = sum(count >= 4 for token, count in words.items() if token >= len(SPECIALS))
    return frequent, {language: languages[language] for language in data.portions}


@pytest.mark.cluster
def test_one_vocabulary_serves_all_rows(four_languages, tmp_path):
    rows = {
        row: load_config(f"kadar2018/{row}").data
        for row in ("monolingual-en", "monolingual-translation-cs", "multi-translation-c2c", "multi-comparable")
    }
    job = replace(job_of(four_languages, tmp_path, rows=tuple(rows), seeds=1), paper="kadar2018")
    assert set().union(*(data.portions for data in rows.values())) == {"en", "de", "fr", "cs"}
    assert reproduce(job) == ()
    kept = {}
    for row, data in rows.items():
        result = json.loads((tmp_path / f"results/kadar2018/{row}/seed-0.json").read_text())
        kept[row], captions = counted(four_languages, data)
        assert result["words"] == {"+".join(data.portions): kept[row]}
        assert result["captions"] == captions
        assert result["vocabulary"] == 120
        assert (result["feature"], result["untrained"], result["recipe"], result["steps"]) == ("toy", [], "raw", 4)
    assert kept["monolingual-en"] <= 30 < kept["multi-comparable"] < 120

    report = read_report(str(tmp_path), "kadar2018")
    measured = {  # Every portion that the captions hold is shown, each once.
        (line.row.preset.partition("/")[2], line.row.language, line.row.portion)
        for section in (*report.sections, *report.further)
        for line in section.lines
        if line.runs
    }
    tested = {(language, "translation") for language in ("en", "de", "fr", "cs")} | {("en", "comparable"), ("de", "comparable")}
    assert measured == {(row, *pair) for row, data in rows.items() for pair in tested if pair[0] in data.portions}


def test_further_portions_are_below_the_table_of_their_language(tmp_path):
    recalls = {"queries": 1000} | dict.fromkeys(("recall_at_1", "recall_at_5", "recall_at_10", "median_rank"), 1.0)
    scores = [
        {"language": language, "portion": portion, "split": "test_2016", "image_to_text": recalls, "text_to_image": recalls}
        for language in ("de", "en", "fr")
        for portion in ("comparable", "translation")
    ]
    for preset in ("gella2017/pivot-sym", "gella2017/vse-de"):
        result = {"scores": scores, "feature": "toy", "untrained": [], "step": 1, "steps": 1, "overrides": []}
        write_result(tmp_path / "results" / preset / "seed-0.json", result)
    further = {
        section.title: [(line.row.preset.partition("/")[2], line.row.language) for line in section.lines]
        for section in read_report(str(tmp_path), "gella2017").further
    }
    assert further == {  # No table has a French row, nor an English one of VSE in German.
        "Table 1 (translation captions), not in the paper": [("pivot-sym", "en"), ("pivot-sym", "fr")],
        "Table 1 (comparable captions), not in the paper": [("pivot-sym", "fr")],
        "Table 2 (comparable captions), not in the paper": [("vse-de", "en"), ("vse-de", "fr")],
        "Table 2 (translation captions), not in the paper": [
            *(("vse-de", "de"), ("vse-de", "en"), ("vse-de", "fr"), ("pivot-sym", "de")),
        ],
    }


def test_damaged_run_is_a_failure_of_its_row(toy_2016, tmp_path):
    damaged = tmp_path / "o" / "runs" / "gella2017" / "vse-en" / "seed-0"
    damaged.mkdir(parents=True)
    (damaged / "last.pt").write_bytes(b"nothing")
    (failed,) = reproduce(job_of(toy_2016, tmp_path / "o", seeds=1, rows=("vse-en",)))
    assert failed.failure.kind == "refused"
    assert "damaged, or not a checkpoint" in failed.failure.reason


@pytest.mark.slow
def test_captions_without_features_are_left_out(toy_2016, without_features, tmp_path):
    few = without_features(toy_2016, tmp_path)
    job = job_of(few, tmp_path / "o", rows=("vse-en",), seeds=1)
    with pytest.raises(DatasetError, match="--allow-missing-features"):
        run(job)
    allowed = replace(job, allow_missing_features=True)
    remarks = []
    reproduce(allowed, on_warning=remarks.append)
    assert [remark.partition(":")[0] for remark in remarks] == [
        f"left out of split '{split}'" for split in ("train", "val", "test_2016")
    ]
    result = json.loads((tmp_path / "o/results/gella2017/vse-en/seed-0.json").read_text())
    assert [missing["images"] for missing in result["missing_features"]] == [7, 2]
    assert [score["missing_features"]["first"] for score in result["scores"]] == [["test-004"]] * 2
    assert "were left out of 1 runs" in read_report(str(tmp_path / "o"), "gella2017").to_markdown()
    assert run(allowed) == [("gella2017/vse-en", 0)]
    with pytest.raises(DatasetError, match="measured with other fingerprints"):
        run(replace(allowed, features=(toy_2016.features,)))  # All images have features there.


@pytest.mark.parametrize(
    ("device", "workers", "expected"),
    [
        ("auto", 0, ["cuda:0", "cuda:1"]),
        ("cuda", 4, ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]),
        ("cuda:1", 3, ["cuda:1"] * 3),
    ],
)
def test_runs_take_the_gpus_in_turn(toy_2016, tmp_path, monkeypatch, device, workers, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    given = []

    def note(work, tasks, devices):
        given.append(devices)
        return iter(())

    monkeypatch.setattr("schemas.process.steps.run_side_by_side", note)
    reproduce(job_of(toy_2016, tmp_path / "o", workers=workers, device=device))
    assert given[0] == expected


def raised(do) -> Exception:
    with pytest.raises(Exception) as error:  # noqa: PT011 -- whatever it is
        do()
    return error.value


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (raised(lambda: torch.empty(1 << 60)), "memory", "DefaultCPUAllocator: can't allocate memory"),
        (MemoryError(), "memory", "memory ran out (MemoryError): give fewer --workers"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB"), "memory", "(OutOfMemoryError: CUDA out of"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling x"), "memory", "CUBLAS"),
        (RuntimeError("GET was unable to find an engine to execute this computation"), "memory", "find an engine"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "memory", "Cannot allocate memory"),
        (DatasetError("cannot use '/a/b.pt': the disk is full"), "disk", "cannot use '/a/b.pt': the disk is full"),
        (OSError(errno.EDQUOT, "quota"), "disk", "the disk is full: free some space"),
        (DivergedError("the loss is nan"), "diverged", "the loss is nan"),
        (UsageError("give\nanother"), "refused", "give another"),
        (RuntimeError("CUDA error: device-side assert triggered"), "fault", "RuntimeError: CUDA error"),
    ],
    ids=str,
)
def test_every_error_has_a_kind_and_a_line(error, kind, words):
    ours = isinstance(error, ImagepivotError)  # Others are events with a traceback, see `pipelines.commands.exit_codes`.
    name = type(error).__name__
    number = errno.ENOSPC if ours and kind == "disk" else errno_of(error)
    message = str(error) if ours or not str(error) else f"{name}: {error}"
    failure = failure_of(name, message or name, number, "" if ours else "Traceback ...")
    assert failure.kind == kind in FAILURE_KINDS
    assert words in failure.reason
    assert "\n" not in failure.reason
    assert bool(failure.traceback) is (kind == "fault")


@pytest.mark.parametrize(
    ("code", "lines", "kind", "reason"),
    [
        (137, [], "killed", "a training process was killed, probably because memory ran out: give fewer --workers"),
        (139, ["Fatal Python error: Segmentation fault"], "killed", "a training process was ended by SIGSEGV"),
        (1, ['{"event": "error", "kind": "DatasetError", "message": "last.pt is damaged"}'], "refused", "last.pt is damaged"),
    ],
    ids=["killed", "crashed", "with a message"],
)
def test_process_ending_without_a_message_counts_as_killed(toy_2016, tmp_path, monkeypatch, code, lines, kind, reason):
    def run(words, variables, read):
        for line in lines:
            read(line)
        return code

    monkeypatch.setattr("schemas.process.steps.run_command", run)
    (failed,) = reproduce(job_of(toy_2016, tmp_path / "o", rows=("vse-en",), seeds=1))
    assert failed.failure.kind == kind
    assert failed.failure.reason.startswith(reason)
    assert failed.failure.traceback == ("".join(lines) if kind == "killed" else "")
