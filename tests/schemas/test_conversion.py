"""Settings and unknown names of what users write."""

import pytest

from schemas.conversion import did_you_mean, key_value_pairs
from schemas.errors import UsageError


def test_settings():
    assert key_value_pairs(["a.b = 1", "c=d=e", "f="], "x=1") == {"a.b": "1", "c": "d=e", "f": ""}
    for setting in ("a", "=1"):
        with pytest.raises(UsageError, match=f"^--set '{setting}' is not KEY=VALUE, e.g. --set x=1$"):
            key_value_pairs([setting], "x=1")


def test_unknown_names():
    assert did_you_mean("colour", ["color", "size"]) == ": did you mean 'color'?"
    assert did_you_mean("zzz", ["color", "size"]) == ": there are 'color', 'size'"
