import pytest

from schemas import interruption
from schemas.interruption import Left, leaving, say


@pytest.fixture(autouse=True)
def nothing_left():
    interruption._left = None  # A test that interrupts a training in this process leaves it behind.
    yield
    interruption._left = None


def test_what_would_be_left_is_known_while_the_block_runs():
    assert interruption.left() is None
    with leaving(Left("it goes on", lambda: "cancelled")) as _:
        say("it goes on and on")
        assert interruption.left().words == "it goes on and on"
    assert interruption.left() is None
    say("nobody listens")
    assert interruption.left() is None


def test_an_interrupt_leaves_it_and_an_error_does_not():
    with pytest.raises(ValueError, match="broken"), leaving(Left("it goes on", str)):
        raise ValueError("broken")
    assert interruption.left() is None
    with pytest.raises(KeyboardInterrupt), leaving(Left("it goes on", str)):
        raise KeyboardInterrupt
    assert interruption.left().words == "it goes on"
