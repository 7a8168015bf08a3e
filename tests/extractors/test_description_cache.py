from __future__ import annotations

import os
from pathlib import Path

import pytest
import timm
import torch

import extractors
from extractors import ExtractorRequest, description_cache
from extractors.base import Description
from extractors.weights import resolve
from schemas.features import FeatureSpec


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("IMAGEPIVOT_CACHE", str(folder))
    return folder


@pytest.fixture
def weights(tmp_path) -> Path:
    return save(tmp_path / "weights.pth", seed=1)


@pytest.fixture
def hashed(monkeypatch) -> list[int]:
    """One entry for each time that weights were hashed."""
    calls: list[int] = []
    original = resolve.state_sha256

    def counting(state):
        calls.append(1)
        return original(state)

    monkeypatch.setattr(resolve, "state_sha256", counting)
    return calls


def save(path: Path, *, seed: int) -> Path:
    torch.manual_seed(seed)
    torch.save(timm.create_model("test_resnet.r160_in1k", num_classes=0).state_dict(), path)
    return path


def request(weights: Path | str, **options) -> ExtractorRequest:
    """A request for a small model."""
    return ExtractorRequest("timm:test_resnet.r160_in1k", weights=str(weights), **options)


@pytest.mark.slow
@pytest.mark.parametrize("random", ["", "random:3"])
def test_describe_hashes_weights_once(cache, weights, hashed, random):
    first, second = request(random or weights).describe(), request(random or weights).describe()
    assert (len(hashed), first) == (1, second)
    assert first.fingerprint == second.fingerprint == request(random or weights).load().fingerprint


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"precision": "bf16"}, {"dtype": "float16"}, {"regions": extractors.RegionOptions(10, 100)}, {"name": "vgg19-grid"}],
)
def test_describe_other_request_computes_again(cache, options):
    plain = {"name": "faster-rcnn-36" if "regions" in options else "resnet50-pool", "weights": "random:0"}
    one, other = ExtractorRequest(**plain), ExtractorRequest(**{**plain, **options})
    kept = one.describe()
    assert other.describe() == ExtractorRequest(**{**plain, **options})._describe()[0] != kept


@pytest.mark.slow
def test_describe_changed_file_with_old_mtime_hashes_again(cache, weights, hashed, tmp_path):
    before, status = request(weights).describe(), weights.stat()
    (tmp_path / "other").mkdir()
    other = save(tmp_path / "other" / "weights.pth", seed=2).read_bytes()  # The name is in the file.
    assert len(other) == status.st_size
    with weights.open("r+b") as file:
        file.write(other)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (weights.stat().st_ino, weights.stat().st_mtime_ns) == (status.st_ino, status.st_mtime_ns)
    after = request(weights).describe()
    assert len(hashed) == 2
    assert after.parameters["weights"] != before.parameters["weights"]


@pytest.mark.slow
def test_describe_relative_path_is_resolved_in_working_directory(cache, tmp_path, monkeypatch, hashed):
    found = []
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        save(folder / "weights.pth", seed=seed)
        monkeypatch.chdir(folder)
        found.append(request("weights.pth").describe())
    assert len(hashed) == 2
    assert found[0] != found[1]


def test_describe_failed_request_is_not_cached(cache, tmp_path):
    (tmp_path / "broken.pth").write_bytes(b"no weights")
    for _ in range(2):
        with pytest.raises(resolve.InputError):
            request(tmp_path / "broken.pth").describe()
    assert not cache.exists()


def test_cache_folder_follows_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("IMAGEPIVOT_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert description_cache.cache_folder("descriptions") == tmp_path / ".cache" / "imagepivot" / "descriptions"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert description_cache.cache_folder("descriptions") == tmp_path / "xdg" / "imagepivot" / "descriptions"


def test_user_without_home_folder_has_no_cache(tmp_path, monkeypatch):
    def without_entry(uid):
        raise KeyError(uid)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pwd.getpwuid", without_entry)
    for name in ("HOME", "XDG_CACHE_HOME", "IMAGEPIVOT_CACHE", "TORCH_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(resolve.InputError, match="no home folder for the weights: set TORCH_HOME"):
        ExtractorRequest("resnet50-pool").describe()
    assert ExtractorRequest("resnet50-pool", weights="random:0").describe().parameters["untrained"]
    assert list(tmp_path.iterdir()) == []


# --- models that are a folder ------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    for name in ("config.json", "model.safetensors"):
        (made / name).write_text(name, encoding="utf-8")
    return made


class Describing:
    """Describes the files of a folder by their contents, and counts how often."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def __call__(self) -> Description:
        self.count += 1
        contents = {path.name: path.read_text(encoding="utf-8") for path in sorted(self.folder.iterdir())}
        return Description(FeatureSpec("bert", (4,), "float16"), {"contents": contents}, kind="token-features", batch_size=8)

    def cached_description(self, **options) -> Description:
        return description_cache.cached_folder_description({"precision": "fp32"} | options, self.folder, self)


def test_cached_folder_description_computes_once(cache, folder):
    describing = Describing(folder)
    first, second = describing.cached_description(), describing.cached_description()
    assert (describing.count, second) == (1, first)
    assert second == describing()
    assert second.fingerprint == first.fingerprint
    describing.cached_description(precision="bf16")
    assert describing.count == 3


def test_cached_folder_description_changed_files_describe_again(cache, folder, tmp_path):
    describing = Describing(folder)
    before = describing.cached_description()
    times = (folder / "config.json").stat()
    (folder / "config.json").write_text("CONFIG.json", encoding="utf-8")
    os.utime(folder / "config.json", ns=(times.st_atime_ns, times.st_mtime_ns))
    written = describing.cached_description()
    (folder / "vocab.txt").write_text("a", encoding="utf-8")
    added = describing.cached_description()
    (folder / "vocab.txt").unlink()
    removed = describing.cached_description()
    assert describing.count == 3
    assert before.fingerprint != written.fingerprint != added.fingerprint
    assert removed == written
    # As in Hugging Face's cache, where a name leads to another blob after an update.
    for name in ("old", "new"):
        (tmp_path / name).write_text(name, encoding="utf-8")
        (folder / "weights").unlink(missing_ok=True)
        (folder / "weights").symlink_to(tmp_path / name)
        assert describing.cached_description() == describing()


def test_cached_folder_description_other_library_or_code_computes_again(cache, folder, monkeypatch):
    describing = Describing(folder)

    def cached_description() -> Description:
        return description_cache.cached_folder_description({}, folder, describing, libraries=("pytest",))

    cached_description()
    versions = {}
    original = description_cache.metadata.version
    monkeypatch.setattr(description_cache.metadata, "version", lambda name: versions.get(name) or original(name))
    for count, name in enumerate(("pytest", "torch"), 2):
        versions[name] = "0"
        cached_description()
        assert describing.count == count
    monkeypatch.setattr(description_cache, "_sources", lambda: iter(["other code"]))
    cached_description()
    assert describing.count == 4


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", "{}", '{"spec": 1}', '{"path": null}', '{"path": null, "description": {"spec": {}}}']
)
def test_cached_folder_description_unreadable_entry_is_replaced(cache, folder, content):
    describing = Describing(folder)
    expected = describing.cached_description()
    (file,) = (cache / "descriptions").iterdir()
    file.write_text(content, encoding="utf-8")
    for _ in range(2):
        assert describing.cached_description() == expected
        assert describing.count == 2
