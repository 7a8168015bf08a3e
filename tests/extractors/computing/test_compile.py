from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from extractors.computing.compile import set_compile_cache

ROOT = Path(__file__).parents[3]

# Extracts five images in batches and threads of a number, and prints the digest, and the operations by which torch convolves.
SCRIPT = """
import hashlib, json, sys
import numpy as np, torch, extractors
from torch._dynamo.utils import counters
from torch.profiler import profile
name, size, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(threads)
extractor = extractors.load_extractor(name, weights="random:0", compile=True)
images = torch.randint(0, 256, (5, *extractor._input_shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
with profile() as done:
    found = np.concatenate([extractor.extract(part) for part in images.split(size)])
plain = extractors.load_extractor(name, weights="random:0").extract(images)
print(json.dumps({
    "digest": hashlib.sha256(found.tobytes()).hexdigest(),
    "difference": float(abs(found - plain).max() / abs(plain).max()),
    "graphs": counters["stats"]["unique_graphs"],
    "convolutions": sorted({event.key for event in done.key_averages() if "conv" in event.key}),
}))
"""


def extracted(cache: Path, size: int, threads: int) -> dict:
    environment = os.environ | {"IMAGEPIVOT_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    command = [sys.executable, "-c", SCRIPT, "timm:test_resnet.r160_in1k", str(size), str(threads)]
    done = subprocess.run(command, env=environment, cwd=cache, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.cluster
def test_compiled_model_is_cached_and_independent_of_threads_and_batches(tmp_path):
    pytest.importorskip("timm", reason="needs timm: pip install 'imagepivot[timm]'")
    first = extracted(tmp_path, 2, 1)
    libraries = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "compiled").rglob("*.so")}
    second = extracted(tmp_path, 5, 2)
    assert libraries
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "compiled").rglob("*.so")} == libraries
    assert first["graphs"] == second["graphs"] == 1
    assert first["digest"] == second["digest"]
    assert max(first["difference"], second["difference"]) < 5e-6
    # Those of frozen weights, which are laid out once; others would be `aten::convolution`.
    assert first["convolutions"] == ["mkldnn::_convolution_pointwise", "mkldnn::_convolution_pointwise_"]


@pytest.mark.parametrize("named", [None, default_cache_dir()])
def test_set_compile_cache_respects_environment(named, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", named or "")
    if named is None:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    set_compile_cache(tmp_path / "ours")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "ours")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "theirs"))
    set_compile_cache(tmp_path / "ours")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "theirs")
