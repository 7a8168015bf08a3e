"""The recipe for Embedding Atlas, as printed on its page, to a page that answers."""

import json
import shutil
import subprocess
import urllib.request
from pathlib import Path
from urllib.parse import quote

import pytest

from schemas.dataset import open_dataset
from tests.integration.processes import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

PAGE = Path(__file__).parents[2] / "docs/how-to/read.md"


def read(path: str) -> bytes:
    with urllib.request.urlopen(f"http://localhost:5055/{path}", timeout=60) as answer:
        return answer.read()


def answers(process: subprocess.Popen) -> bool:
    assert process.poll() is None
    try:
        return b"<script" in read("")
    except OSError:
        return False


def test_embedding_atlas_shows_features(demo):
    if shutil.which("embedding-atlas") is None:
        pytest.skip("needs pip install embedding-atlas, of 6 GB")
    (line,) = (line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("embedding-atlas "))
    with subprocess.Popen(f"exec {line}", shell=True, cwd=demo.folder) as process:
        try:
            wait_for(lambda: answers(process), seconds=600)
            query = {"sql": "SELECT image_id, projection_x FROM dataset", "type": "json"}
            rows = json.loads(read(f"data/query?query={quote(json.dumps(query))}"))
        finally:
            process.terminate()
    features = open_dataset(demo.folder / "build/demo/features")
    assert sorted(row["image_id"] for row in rows) == sorted(features.image_ids())
    assert len({row["projection_x"] for row in rows}) == len(rows)
