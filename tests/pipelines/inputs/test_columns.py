import pytest

from pipelines.inputs.columns import check_columns, parse_columns
from schemas.errors import UsageError


def test_parse_columns():
    assert parse_columns("image_id=img,text=caption") == {"image_id": "img", "text": "caption"}
    assert parse_columns("image_id=img, text= a=b ") == {"image_id": "img", "text": " a=b "}


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("", r"cannot understand '' in the columns '': write OURS=THEIRS"),
        ("text", r"cannot understand 'text'"),
        ("text=", r"cannot understand 'text='"),
        ("=text", r"cannot understand '=text'"),
        ("text=a,,image_id=b", r"cannot understand ''"),
        ("text=a,text=b", r"name 'text' twice"),
    ],
)
def test_parse_columns_refuses(argument, message):
    with pytest.raises(UsageError, match=message):
        parse_columns(argument)


def test_unknown_columns_are_refused():
    check_columns({"image_id": "img"}, ("image_id", "uri"))
    with pytest.raises(UsageError, match="unknown column 'text': ours are image_id, uri; write OURS=THEIRS"):
        check_columns({"image_id": "img", "text": "caption"}, ("image_id", "uri"))
