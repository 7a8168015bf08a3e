from pathlib import Path

import numpy as np
import pytest

from schemas.dataset import open_dataset


def write_arrays(folder: Path) -> np.ndarray:
    values = np.random.default_rng(0).standard_normal((4, 6)).astype("float32")
    for name, part, ids in (("train", values[:3], "a.jpg\nb.jpg\nc.jpg\n"), ("val", values[3:], "d.jpg\n")):
        np.save(folder / f"{name}.npy", part)
        (folder / f"{name}.lst").write_text(ids)
    return values


@pytest.mark.slow
def test_import_export_and_diff_go_round(tmp_path, call):
    values = write_arrays(tmp_path)
    files = [str(tmp_path / f"{name}.npy") for name in ("train", "val")]
    lists = [part for name in ("train", "val") for part in ("--ids", str(tmp_path / f"{name}.lst"))]
    out = str(tmp_path / "features")
    code, shown, _ = call("import", *files, out, "--name", "surrogate", "--source", "made up", "--shards", "2", *lists)
    assert (code, f"features: 4 rows in 2 shards in {out} (0 failed, " in shown) == (0, True)
    assert open_dataset(out).spec.source == "made up"
    np.testing.assert_array_equal(open_dataset(out).get("d")["feature"], values[3])

    code, shown, _ = call("export", out, str(tmp_path / "arrays"), "--format", "npy")
    assert (code, "npy: 2 files, " in shown) == (0, True)
    back = str(tmp_path / "back")
    assert call("import", str(tmp_path / "arrays" / "features.npy"), back, "--name", "surrogate")[0] == 0
    code, shown, _ = call("diff", out, back)
    assert (code, f"{out} and {back} hold the same rows" in shown) == (0, True)

    np.save(tmp_path / "arrays" / "features.npy", np.load(tmp_path / "arrays" / "features.npy") + np.float32(0.5))
    other = str(tmp_path / "other")
    assert call("import", str(tmp_path / "arrays" / "features.npy"), other, "--name", "surrogate")[0] == 0
    assert call("diff", out, other)[0] == 1
    assert call("diff", out, other, "--tolerance", "0.6")[0] == 0
