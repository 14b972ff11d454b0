"""Waits of the training: nested ones, exceptions, and a manager that was closed inside."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

import pytest

from holdfast.trainer.process.training_wait import TrainingWait


@dataclass
class Place:
    calls: list[tuple] = field(default_factory=list)

    def begin_wait(self, reason: int, now_secs: float) -> None:
        self.calls.append(("begin", reason, now_secs))

    def end_wait(self, reason: int, secs: float) -> None:
        self.calls.append(("end", reason, secs))


@dataclass
class Session:
    place: Place = field(default_factory=Place)
    is_closed: bool = False


@dataclass
class Ticks:
    seconds: count = field(default_factory=lambda: count(10))

    def monotonic(self) -> float:
        return next(self.seconds)


def test_of_nested_waits_the_outermost_counts() -> None:
    session = Session()
    wait = TrainingWait(session, Ticks())
    with wait.of("data"), wait.of("other"):
        with wait.of("evaluation"):
            pass
        assert session.place.calls == [("begin", 0, 10)]
    with wait.of("evaluation"):
        pass
    assert session.place.calls[1:] == [("end", 0, 1), ("begin", 1, 12), ("end", 1, 1)]


def test_a_wait_that_raises_ends_too() -> None:
    session = Session()
    wait = TrainingWait(session, Ticks())
    for _ in range(2):
        with pytest.raises(StopIteration), wait.of("data"):
            next(iter(()))
    assert [call[0] for call in session.place.calls] == ["begin", "end"] * 2


def test_a_manager_may_be_closed_within_a_wait() -> None:
    session = Session()
    with TrainingWait(session, Ticks()).of("data"):
        session.is_closed = True
    assert [call[0] for call in session.place.calls] == ["begin"]
