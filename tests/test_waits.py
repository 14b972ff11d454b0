"""Waits that signals end: which call a signal ends, also after a call whose end was cut off."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from holdfast import waits
from holdfast.errors import WaitInterruptedError


@contextlib.contextmanager
def patient(name: str) -> Iterator[None]:
    """Enter the call inside of another generator, as the manager does."""
    with waits.ended_by_signals(name, lambda: "unfinished", 0.0):
        yield


def cut_off() -> KeyboardInterrupt:
    """Make a call whose end an interruption cuts off, and return the interruption."""

    def interrupt(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_name == "__exit__":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught, patient("first"):
        sys.setprofile(interrupt)
    sys.setprofile(None)
    return caught.value


def test_a_signal_ends_the_outermost_call_that_is_under_way() -> None:
    with patient("outer"):
        with patient("inner"):
            assert not waits.has_signal()
            waits.arrived(signal.SIGTERM)
            with pytest.raises(WaitInterruptedError, match="outer: ended by SIGTERM: unfinished"):
                waits.check()
        assert waits.is_ended()
    waits.check()


def test_a_call_whose_end_was_cut_off_ends_no_later_one() -> None:
    interruption = cut_off()
    waits.arrived(signal.SIGTERM)
    waits.check()
    assert not waits.has_signal()
    with patient("next"):
        waits.check()
        waits.arrived(signal.SIGINT)
        with pytest.raises(WaitInterruptedError, match="next: ended by SIGINT"):
            waits.check()
    assert isinstance(interruption, KeyboardInterrupt)
