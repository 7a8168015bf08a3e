"""Public names as type checkers see them: mypy reads this module in ``make check``, where an ignored error must be one."""

from typing import assert_type

import imagepivot


def read(folder: str) -> imagepivot.Run:
    assert_type(imagepivot.open_dataset(folder), imagepivot.Dataset)
    assert_type(imagepivot.validate_dataset(folder), list[str])
    assert_type(imagepivot.load_config("demo"), imagepivot.Config)
    assert_type(imagepivot.__version__, str)
    imagepivot.open_datasets  # type: ignore[attr-defined]
    imagepivot.validate  # type: ignore[attr-defined]
    return imagepivot.open_run(folder)


def run_jobs(corpus: imagepivot.Corpus) -> list[imagepivot.Hit]:
    here = imagepivot.Execution(workers=1)
    job = imagepivot.FeaturesJob("photos", "features")
    assert_type(imagepivot.extract_features(job, here), imagepivot.Manifest)
    assert_type(imagepivot.extract_features("photos", "features", extractor="vgg19-grid", execution=here), imagepivot.Manifest)
    result: imagepivot.TrainResult = imagepivot.train("demo", corpus, "run", max_steps=1)
    scores: list[imagepivot.Score] = imagepivot.evaluate("run", "encoded", "features")
    wrong: imagepivot.Score = imagepivot.train("demo", corpus, "run")  # type: ignore[assignment]
    imagepivot.FeaturesJob("photos", "features", extractors="vgg19-grid")  # type: ignore[call-arg]
    print(imagepivot.compare_runs([result.folder]).runs, scores, wrong)
    return imagepivot.search("run", "a dog", features="features")
