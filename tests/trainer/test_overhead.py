"""The cost of a checkpoint is measured by the durations of steps."""

from __future__ import annotations

import math
from collections.abc import Collection
from itertools import chain

import pytest

from holdfast.clock import SystemClock
from holdfast.host.wire.protocol import PartTier, Sealed
from holdfast.policy.preservation_policy import LatestN
from holdfast.policy.save_decision_policy import ContinuousCheckpointingPolicy
from holdfast.policy.step_cost import QUIET_COUNT_MIN
from holdfast.trainer.options import Options, RamTier
from holdfast.trainer.save.overhead import OverheadMeter, meter_for
from holdfast.trainer.save.progress import Progress, Reach, SavesInFlight
from tests.attempts import checkpoint_id
from tests.trust.in_process import StepClock


def flight(accepted_count: int, *, is_going_on: bool, ended: float = math.inf) -> SavesInFlight:
    """Saves, of which the last one ended as late as it may have."""
    return SavesInFlight(accepted_count, is_going_on, ended)


def told(
    durations: list[tuple[float, bool]],
    begun_at: Collection[int] = (),
    ended_after_secs: float = math.inf,
) -> list[float]:
    """What the meter says of steps of these durations, each with whether one is being saved.

    At the beginnings of the steps `begun_at` one was accepted, which may be over at their end.
    What is over at the end of a step has ended so many seconds after its beginning.
    """
    meter, now, found = OverheadMeter(Reach.FINISHED), 100.0, []
    meter.stepped(now, flight(0, is_going_on=False))
    for number, (secs, is_saving) in enumerate(durations):
        ended_secs, now = now + ended_after_secs, now + secs
        accepted_count = sum(at <= number for at in begun_at)
        saving = flight(accepted_count, is_going_on=is_saving, ended=ended_secs)
        cost = meter.stepped(now, saving)
        if cost is not None:
            found.append(cost)
    return found


QUIET = [(0.1, False)] * QUIET_COUNT_MIN


def test_a_save_costs_what_its_steps_took_beyond_the_quiet_ones() -> None:
    # The last step of a save is the one in which it ends.
    assert told([*QUIET, (0.1, True), (0.3, True), (0.2, False)]) == [pytest.approx(0.3)]


def test_the_cost_is_told_once_enough_quiet_steps_are_known() -> None:
    saving = [(0.3, True), (0.2, False)]
    assert told([*saving, *QUIET[:-1]]) == []
    assert told([*saving, *QUIET]) == [pytest.approx(0.3)]


def test_a_save_that_is_over_within_its_step_is_one() -> None:
    steps = [*QUIET, (0.3, False), (0.1, False), (0.1, False)]
    begun_at = [QUIET_COUNT_MIN]
    assert told(steps, begun_at) == [pytest.approx(0.2)]
    # Of the first step nothing else is known yet.
    assert told([(0.3, False), *QUIET], [0]) == [pytest.approx(0.2)]


def test_saves_before_there_are_enough_quiet_steps_count_each_by_itself() -> None:
    save = [(0.1, True), (0.2, False)]
    assert told([*save, *save, *QUIET[:-1], *save, *QUIET]) == [pytest.approx(0.1)]


def test_saves_in_each_step_that_take_less_than_a_hundredth_of_it_have_a_cost() -> None:
    count = QUIET_COUNT_MIN + 3
    steps = [(4.0, False)] * (count - 1) + [(4.1, False)]
    assert len(told(steps, range(count), ended_after_secs=0.005)) == 4


def test_a_save_of_which_no_step_counts_has_no_cost() -> None:
    meter = OverheadMeter(Reach.FINISHED)
    for number in range(QUIET_COUNT_MIN + 1):
        meter.stepped(number * 0.1, flight(0, is_going_on=False))
    meter.paused()
    assert meter.stepped(100.0, flight(1, is_going_on=False)) is None


def test_a_slow_step_costs_no_more_than_the_save_within_it_took() -> None:
    # A program is compiled again, or the input stalls, in the step whose save took 20 ms.
    stall = [*QUIET, (6.1, False), (0.1, False)]
    assert told(stall, [QUIET_COUNT_MIN], ended_after_secs=0.02) == [pytest.approx(0.02)]
    long = [*QUIET, (0.1, True), (6.1, False)]
    assert told(long, ended_after_secs=0.05) == [pytest.approx(0.05)]


def test_slow_steps_during_a_few_saves_are_outvoted() -> None:
    save, stall = [(0.1, True), (0.2, False)], [(0.1, True), (60.0, False)]
    for saves in ([stall, save], [stall, stall, save], [*[save] * 3, stall], [stall, save, stall]):
        assert told([*QUIET, *chain(*saves)])[-1] == pytest.approx(0.1)
    # The first one, which creates files and pages, counts only until there are enough.
    assert told([*QUIET, *stall, *stall, *save, *save])[-1] == pytest.approx(0.1)


def test_what_most_saves_cost_counts() -> None:
    save, free = [(0.1, True), (0.2, False)], [(0.1, True), (0.1, False)]
    assert told([*QUIET, *free, *save, *save, *save])[-1] == pytest.approx(0.1)


def test_a_save_that_costs_nothing_costs_nothing_less() -> None:
    assert told([*QUIET, (0.05, True), (0.05, False)]) == [0.0]


def test_a_pause_is_no_step() -> None:
    meter = OverheadMeter(Reach.FINISHED)
    for number in range(QUIET_COUNT_MIN + 1):
        meter.stepped(number * 0.1, flight(0, is_going_on=False))
    meter.stepped(QUIET_COUNT_MIN * 0.1 + 0.5, flight(1, is_going_on=True))
    meter.paused()
    assert meter.stepped(100.0, flight(1, is_going_on=True)) is None
    assert meter.stepped(100.1, flight(1, is_going_on=False)) == pytest.approx(0.4)


BUDGET, NONE = ContinuousCheckpointingPolicy(max_overhead=0.03), ContinuousCheckpointingPolicy()


@pytest.mark.parametrize(
    ("durable", "ram", "reach"),
    [
        (BUDGET, RamTier(), Reach.DURABLE),
        (BUDGET, None, Reach.DURABLE),
        (BUDGET, RamTier(save_decision_policy=NONE), Reach.DURABLE),
        (NONE, RamTier(save_decision_policy=BUDGET), Reach.SEALED),
        (BUDGET, RamTier(save_decision_policy=BUDGET), Reach.FINISHED),
    ],
)
def test_the_saves_of_the_tier_with_the_budget_count(
    durable: ContinuousCheckpointingPolicy, ram: RamTier | None, reach: Reach
) -> None:
    meter = meter_for(options(durable, ram))
    assert meter is not None
    assert meter.reach is reach


def test_without_a_budget_nothing_is_measured() -> None:
    assert meter_for(options(NONE, RamTier(save_decision_policy=NONE))) is None


def options(durable: ContinuousCheckpointingPolicy, ram: RamTier | None) -> Options:
    return Options(save=durable, preservation=LatestN(1), ram=ram, takeover=False)


REACHES = (Reach.SEALED, Reach.DURABLE, Reach.FINISHED)
SEALED = Sealed(rank=0, id=checkpoint_id(1, 0), part_count=1, tier=PartTier.RAM, durable=True)


def test_each_reach_sees_its_saves() -> None:
    progress, durable, in_ram = Progress(SystemClock()), checkpoint_id(1, 0), checkpoint_id(2, 0)

    def look() -> list[tuple[int, bool]]:
        return [progress.saving(reach)[:2] for reach in REACHES]

    progress.accept(durable, durable=True, by_step=True)
    assert look() == [(1, True), (1, True), (1, True)]
    progress.seal(durable, SEALED)
    assert look() == [(1, False), (1, True), (1, True)]
    progress.finish(durable)
    progress.accept(in_ram, durable=False, by_step=True)
    assert look() == [(2, True), (1, False), (2, True)]
    progress.seal(in_ram, SEALED)
    assert look() == [(2, False), (1, False), (2, False)]


def test_each_reach_knows_when_its_last_save_ended() -> None:
    clock = StepClock()
    progress, durable, in_ram = Progress(clock), checkpoint_id(1, 0), checkpoint_id(2, 0)
    began_secs = clock.monotonic()

    def look() -> list[float]:
        return [progress.saving(reach).ended_secs - began_secs for reach in REACHES]

    assert look() == [-math.inf] * 3
    progress.accept(durable, durable=True, by_step=True)
    clock.sleep(1)
    progress.seal(durable, SEALED)
    assert look() == [1, -math.inf, -math.inf]
    clock.sleep(1)
    progress.finish(durable)
    clock.sleep(1)
    progress.finish(durable)
    assert look() == [1, 2, 2]
    progress.accept(in_ram, durable=False, by_step=True)
    clock.sleep(1)
    progress.seal(in_ram, SEALED)
    assert look() == [4, 2, 4]
    clock.sleep(1)
    progress.finish(in_ram)
    progress.accept(durable, durable=True, by_step=True)
    clock.sleep(1)
    progress.fail_save(durable, "no room")
    assert look() == [6, 6, 6]
