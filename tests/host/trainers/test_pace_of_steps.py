"""The duration of a step, by which the next checkpoint is timed."""

from __future__ import annotations

from holdfast.host.trainers.save_scheduler import Pace


def test_the_first_step_after_a_resume_is_no_measure_of_the_others() -> None:
    pace = Pace(at_secs=100.0)
    for step, now_secs in [(-1, 100.0), (10, 101.0), (10, 130.0), (11, 131.0)]:
        pace.note_step(step, now_secs)
        assert pace.step_secs is None
    pace.note_step(13, 132.0)
    assert pace.step_secs == 0.5


def test_a_lower_step_is_no_duration() -> None:
    pace = Pace(at_secs=0.0)
    for step in range(5):
        pace.note_step(step, step * 0.25)
    pace.note_step(2, 60.0)
    assert pace.step_secs == 0.25
