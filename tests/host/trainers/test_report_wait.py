"""How long the agent waits for the report of a checkpoint that it has asked for."""

from __future__ import annotations

from holdfast.host.trainers.save_scheduler import AWAITED_SECS, POLL_SECS_MAX, ReportWait


def count_ticks(wait: ReportWait, now_secs: float, step_secs: float) -> int:
    """The ticks, every `step_secs` after `now_secs`, until the wait for step 5 is over."""
    count = 0
    while wait.is_on(4):
        count += 1
        wait.note_tick(5, now_secs + count * step_secs, is_set=False)
    return count


def test_a_report_is_awaited_from_the_time_when_the_cell_is_cleared() -> None:
    wait = ReportWait()
    wait.note_tick(5, 100.0, is_set=True)
    wait.note_tick(5, 100.0 + 10 * AWAITED_SECS, is_set=True)
    assert wait.is_on(4)
    assert not wait.is_on(5)
    assert count_ticks(wait, 100.0 + 10 * AWAITED_SECS, 0.125) == AWAITED_SECS / 0.125


def test_a_target_that_no_tick_saw_in_its_cell_is_awaited_too() -> None:
    wait = ReportWait()
    wait.note_tick(5, 100.0, is_set=False)
    assert count_ticks(wait, 100.0, 0.125) == AWAITED_SECS / 0.125


def test_time_in_which_the_agent_did_not_run_does_not_end_the_wait() -> None:
    # The report may be waiting at the socket, and one more request would put the training more
    # than one checkpoint ahead of what is written.
    wait = ReportWait()
    wait.note_tick(5, 100.0, is_set=True)
    wait.note_tick(5, 160.0, is_set=False)
    assert wait.is_on(4)
    assert count_ticks(wait, 160.0, 60.0) >= AWAITED_SECS / (2 * POLL_SECS_MAX) - 1
