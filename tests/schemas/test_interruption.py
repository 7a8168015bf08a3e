import pytest

from schemas import interruption
from schemas.interruption import leaving, say


@pytest.fixture(autouse=True)
def nothing_left():
    interruption._left = None  # A test that interrupts a training in this process leaves it behind.
    yield
    interruption._left = None


def test_what_would_be_left_is_known_while_the_block_runs():
    assert interruption.left() is None
    with leaving("it goes on"):
        say("it goes on and on")
        assert interruption.left() == "it goes on and on"
    assert interruption.left() is None
    say("nobody listens")
    assert interruption.left() is None


def test_an_interrupt_leaves_it_and_an_error_does_not():
    with pytest.raises(ValueError, match="broken"), leaving("it goes on"):
        raise ValueError("broken")
    assert interruption.left() is None
    with pytest.raises(KeyboardInterrupt), leaving("it goes on"):
        raise KeyboardInterrupt
    assert interruption.left() == "it goes on"
