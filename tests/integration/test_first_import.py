"""A worker that gets any one function of a pipeline imports our packages, in a folder where other modules have our names.

An engine may give a new worker any stage first, whose functions it unpickles in the order in which they were pickled.
"""

import base64
import subprocess
import sys

import apache_beam as beam
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.portability.common_urns import StandardPTransforms
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from tests.beam import BEAM_FLAGS
from tests.integration.clusters import foreign_modules
from tests.integration.workload import CODES, commands, make_inputs

pytest.importorskip("timm", reason="the extra dev installs it")

pytestmark = pytest.mark.slow

# Each in a process of its own, which has Beam and nothing of ours, as a worker has at its start.
UNPICKLE = """
import base64, multiprocessing, sys
from apache_beam.internal import pickler

def unpickle(name, text):
    try:
        pickler.loads(base64.b64decode(text))
    except Exception as error:
        print(name, error)
        raise

functions = [line.split("\\t") for line in sys.stdin.read().splitlines()]
assert not {"schemas", "extractors", "pipelines", "train"} & set(sys.modules)
processes = [multiprocessing.get_context("fork").Process(target=unpickle, args=each) for each in functions]
for process in processes:
    process.start()
    process.join()
print(len(functions), "functions,", sum(process.exitcode == 0 for process in processes), "of them unpickled")
"""


def functions_of(pipeline: beam.Pipeline) -> dict[str, bytes]:
    """Return the pickled functions of a pipeline, by the names of their transforms."""
    found = {}
    for transform in pipeline.to_runner_api().components.transforms.values():
        if transform.spec.urn == StandardPTransforms.Primitives.PAR_DO.urn:
            found[transform.unique_name] = beam_runner_api_pb2.ParDoPayload.FromString(transform.spec.payload).do_fn.payload
    return found


def test_any_function_of_a_pipeline_finds_our_packages(imagepivot, monkeypatch, tmp_path):
    run, functions = FnApiRunner.run_pipeline, []

    def run_pipeline(self, pipeline, options):
        functions.extend(functions_of(pipeline).items())
        return run(self, pipeline, options)

    monkeypatch.setattr(FnApiRunner, "run_pipeline", run_pipeline)
    here = make_inputs(tmp_path)
    photos = sorted((here / "photos").iterdir())
    rows = pa.table({"image_id": [photo.stem for photo in photos], "image": [photo.read_bytes() for photo in photos]})
    given = commands("--shared-disk")
    staged = ("features", "rows.parquet", "staged", *given[-1][3:], "--update")
    pq.write_table(rows[:4], here / "rows.parquet", row_group_size=2)
    for command, code in [*zip(given, CODES, strict=True), (staged, 3)]:
        imagepivot(*command, "--", *BEAM_FLAGS, cwd=here, code=code)
    pq.write_table(rows, here / "rows.parquet", row_group_size=2)
    imagepivot(*staged, "--", *BEAM_FLAGS, cwd=here, code=3)
    names = {name.rpartition("/")[2] for name, _ in functions}
    assert names >= {"WriteShard", "Commit", "ListImages", "CopyPortion", "WantedImages"}
    foreign_modules(here / "worker")
    lines = [f"{name}\t{base64.b64encode(text).decode()}" for name, text in functions]
    done = subprocess.run(
        [sys.executable, "-c", UNPICKLE],
        input="\n".join(lines),
        cwd=here / "worker",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"{len(lines)} functions, {len(lines)} of them unpickled\n", done.stderr
