"""Image ids of lists and of imported files: control characters are errors that name their place, other text is kept.

`tests/pipelines/inputs/test_hostile_keys.py` has the same of every format of captions and images.
"""

import pytest

from pipelines.exchange.image_lists import make_image_id
from pipelines.exchange.importers.image_ids import ImageIds
from schemas.errors import InputError

ODD = [" a ", "cafe\u0301", "caf\u00e9", "a\u2028b", "\u202eb", "A.b", "x" * 200]
CONTROLS = ["\x00", "\t", "\x1b", "\x7f", "\x85", "\x9b"]


def read_list(folder, ids):
    (folder / "ids.txt").write_text("".join(f"{image_id}\n" for image_id in ids), encoding="utf-8", newline="")
    return ImageIds("exact").read_list(folder / "ids.txt")


def read_entries(folder, ids):
    return [make_image_id(image_id, "exact", place="'here'") for image_id in ids]


@pytest.mark.parametrize("read", [read_list, read_entries])
def test_odd_ids_are_read_unchanged(read, tmp_path):
    assert read(tmp_path, ODD) == ODD


@pytest.mark.parametrize(
    ("read", "control"),
    [*((read, control) for read in (read_list, read_entries) for control in CONTROLS), (read_entries, "\n")],
)
def test_control_characters_in_ids_are_refused(read, control, tmp_path):
    with pytest.raises(InputError, match=r"^(ids.txt, line 2|'here').*the image id .* has the control character"):
        read(tmp_path, ["fine", f"a{control}b"])
