"""The bytes of datasets and the parameters of extractors are those of tests/golden.json."""

import json
from pathlib import Path

import pytest

from tests import golden

EXPECTED = json.loads(golden.GOLDEN.read_text(encoding="utf-8"))


@pytest.mark.parametrize("group", ["imports", *(pytest.param(name, marks=pytest.mark.slow) for name in ("toys", "demo"))])
def test_datasets_have_the_bytes_on_record(group: str, tmp_path: Path) -> None:
    found = golden.datasets_of(group, tmp_path)
    assert list(found) == list(EXPECTED[group])
    for name, files in found.items():
        assert files == EXPECTED[group][name], name


@pytest.mark.slow
@pytest.mark.parametrize("name", golden.EXTRACTORS)
def test_extractors_have_the_parameters_on_record(name: str) -> None:
    import torch

    if name.startswith("timm"):
        pytest.importorskip("timm", reason="needs timm: pip install 'imagepivot[timm]'")
    found, expected = golden.describe(name), EXPECTED["extractors"][name]
    assert golden.without_weights(found) == golden.without_weights(expected)
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert found == expected


def test_every_extractor_and_every_kind_is_on_record() -> None:
    assert list(EXPECTED) == [*golden.GROUPS, "extractors"]
    assert list(EXPECTED["extractors"]) == list(golden.EXTRACTORS)
    kinds = {name.partition(" ")[0] for name in EXPECTED["toys"]}
    assert kinds == set(golden.toys.KEYS)
