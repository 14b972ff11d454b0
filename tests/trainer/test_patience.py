"""How long saves are put off for the sake of a slot: never without a bound."""

from __future__ import annotations

from holdfast.trainer.save.save_schedule import FREE_SECS, PREPARE_SECS, SlotPatience
from tests.trust.in_process import StepClock


def test_a_slot_that_is_prepared_is_waited_for_and_not_for_ever() -> None:
    clock = StepClock()
    patience = SlotPatience(clock)
    assert not patience.for_preparing()
    with patience.preparing():
        assert patience.for_preparing()
        clock.sleep(PREPARE_SECS)
        assert not patience.for_preparing()
    with patience.preparing():
        assert patience.for_preparing()
    assert not patience.for_preparing()


def test_earlier_saves_are_waited_for_from_the_first_step_that_is_put_off() -> None:
    clock = StepClock()
    patience = SlotPatience(clock)
    clock.sleep(10 * FREE_SECS)
    assert patience.for_earlier_saves()
    clock.sleep(FREE_SECS / 2)
    assert patience.for_earlier_saves()
    clock.sleep(FREE_SECS)
    assert not patience.for_earlier_saves()
    patience.note_taken()
    # With steps that are longer than all that, one of them is waited for.
    assert patience.for_earlier_saves()
    clock.sleep(100 * FREE_SECS)
    assert not patience.for_earlier_saves()
