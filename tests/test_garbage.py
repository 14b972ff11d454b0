"""The pause of the garbage collector."""

import gc

import pytest

from holdfast.garbage import nothing_collected


def test_nothing_is_collected_within_the_context_and_again_after_it() -> None:
    with nothing_collected():
        with nothing_collected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_within_the_context_enables_the_collector_again() -> None:
    with pytest.raises(KeyError), nothing_collected():
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_the_program_disabled_stays_disabled() -> None:
    gc.disable()
    try:
        with nothing_collected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
