"""The detector of hangs, with times that the tests give."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest

from holdfast.host.wire.protocol import TrainerStatus
from holdfast.supervise.hangs import Hang, HangDetector, ranks_behind

POLL_SECS = 0.25


def trainer(step: int | None, busy: str = "", rank: int = 0) -> TrainerStatus:
    return TrainerStatus(rank=rank, pid=100 + rank, step=step, busy=busy)


def found_at(
    detector: HangDetector,
    seen: Callable[[float], Iterable[TrainerStatus]],
    until_secs: float,
) -> tuple[float, Hang] | None:
    """Looks at the trainers four times a second; when a hang is found, and which."""
    looks = int(until_secs / POLL_SECS)
    for now_secs in (look * POLL_SECS for look in range(looks)):
        hang = detector.note(now_secs, [*seen(now_secs)])
        if hang is not None:
            return now_secs, hang
    return None


def test_seeded_hangs_are_found_within_two_seconds_after_the_limit() -> None:
    rng = random.Random(32)
    for _ in range(100):
        step_secs, hung_step = rng.uniform(0.01, 5.0), rng.randrange(3, 200)
        limit_secs = rng.uniform(6.0, 60.0)
        # Waiting for data is a part of a step.
        hung_secs = hung_step * step_secs

        def seen(now: float, secs: float = step_secs, last: int = hung_step):
            step = min(last, int(now / secs))
            return [trainer(step, "" if step > 1 else "starting")]

        result = found_at(HangDetector(limit_secs), seen, hung_secs + limit_secs + 10)
        assert result is not None
        now_secs, hang = result
        assert limit_secs <= now_secs - hung_secs + 1e-9 < limit_secs + 2
        assert (hang.step, hang.limit_secs) == (hung_step, limit_secs)


def test_slow_steps_below_the_limit_are_no_hang() -> None:
    rng = random.Random(33)
    for _ in range(200):
        limit_secs = rng.uniform(5.0, 60.0)
        ends, total = [], 0.0
        while len(ends) < 20:
            total += rng.uniform(0.0, limit_secs - 2 * POLL_SECS)
            ends.append(total)

        def seen(now: float, ends: list[float] = ends):
            return [trainer(sum(end <= now for end in ends))]

        assert found_at(HangDetector(limit_secs), seen, total) is None


def test_auto_is_five_times_the_longest_gap_and_at_least_half_a_minute() -> None:
    assert found_at(HangDetector(None), lambda now: [trainer(4)], 60)[0] == 30.0
    assert found_at(HangDetector(None, 20.0), lambda now: [trainer(4)], 200)[0] == 100.0
    # Two steps that took 10 s each are seen here.
    slow = found_at(HangDetector(None), lambda now: [trainer(min(2, int(now / 10)))], 200)
    assert slow is not None
    assert slow[0] == pytest.approx(20 + 50, abs=1)


@pytest.mark.parametrize(
    ("busy", "auto_secs", "fixed_secs"),
    [
        ("starting", 1800.0, 1800.0),
        ("evaluation", 1800.0, 12.0),
        ("other", 1800.0, 12.0),
        ("call", None, None),
        ("held", None, None),
    ],
)
def test_sections_have_limits_of_their_own(
    busy: str, auto_secs: float | None, fixed_secs: float | None
) -> None:
    for limit, expected in ((None, auto_secs), (12.0, fixed_secs)):
        result = found_at(HangDetector(limit), lambda now: [trainer(4, busy)], 4000)
        assert (result[0] if result else None) == expected
        if result is not None:
            assert result[1].busy == {0: busy}


def test_a_gap_begins_anew_after_a_section() -> None:
    def seen(now: float):
        return [trainer(4, "evaluation" if now < 100 else "")]

    result = found_at(HangDetector(None), seen, 200)
    assert result is not None
    assert result[0] == 130.0


def test_ranks_that_wait_for_a_busy_one_do_not_hang_until_that_one_does() -> None:
    def seen(now: float):
        return [trainer(4), trainer(4, "evaluation", rank=1)]

    assert found_at(HangDetector(None), seen, 1000) is None
    result = found_at(HangDetector(20.0), seen, 1000)
    assert result is not None
    assert result[0] == 20.0


def test_a_held_process_is_named_and_nothing_hangs_until_it_is_released() -> None:
    detector = HangDetector(10.0)

    def seen(now: float):
        return [trainer(4), trainer(4, "held" if 2 <= now < 100 else "", rank=1)]

    named = []
    for look in range(600):
        now_secs = look * POLL_SECS
        hang = detector.note(now_secs, seen(now_secs))
        if detector.held_ranks(now_secs):
            named.append(now_secs)
        if hang is not None:
            break
    assert named[0] == 12.0
    # Rank 0 waits for the held one, and has its whole time again when that is released.
    assert now_secs == pytest.approx(110, abs=POLL_SECS)


def test_a_start_without_a_step_is_named_after_the_limit_of_a_step_and_is_no_hang() -> None:
    detector = HangDetector(10.0)
    assert detector.note(0.0, [trainer(None, "starting")]) is None
    assert detector.slow_starts(9.9) == {}
    assert detector.note(10.0, [trainer(None, "starting")]) is None
    assert detector.slow_starts(10.0) == {0: 10.0}


def test_a_longer_limit_begins_after_a_postponement_and_new_processes_begin_anew() -> None:
    detector = HangDetector(10.0)
    detector.note(0.0, [trainer(4)])
    detector.postpone(9.0)
    assert detector.note(15.0, [trainer(4)]) is None
    assert detector.note(15.5, []) is None
    assert detector.note(20.0, [trainer(4)]) is None
    assert detector.note(30.0, [trainer(4)]) is not None


def test_other_hosts_are_asked_after_half_of_the_limit() -> None:
    detector = HangDetector(10.0)
    asked = []
    for now_secs in range(9):
        detector.note(float(now_secs), [trainer(4)])
        asked.append(detector.is_waiting(float(now_secs)))
    assert asked == [False] * 6 + [True] * 3


def test_the_rank_that_is_behind_is_named() -> None:
    assert ranks_behind([(0, 7), (1, 6), (2, 7)], []) == [1]
    assert ranks_behind([(0, 7), (1, 7)], [0]) == [1]
    assert ranks_behind([(0, 7), (1, None)], []) == [1]
    # All wait in a collective, or nothing is known.
    assert ranks_behind([(0, 7), (1, 7)], [0, 1]) == []
    assert ranks_behind([(0, 7), (1, 7)], []) == []
    assert ranks_behind([(0, 7)], []) == []
