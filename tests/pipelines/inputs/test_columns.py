import pytest

from pipelines.inputs.columns import check_columns
from schemas.errors import UsageError


def test_unknown_columns_are_refused():
    check_columns({"image_id": "img"}, ("image_id", "uri"))
    with pytest.raises(UsageError, match="unknown column 'text': ours are image_id, uri; write OURS=THEIRS"):
        check_columns({"image_id": "img", "text": "caption"}, ("image_id", "uri"))
