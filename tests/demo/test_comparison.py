"""The comparison of two runs of a few steps: any difference of any host makes the demo fail."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.demo.journal import Finished, Preempted, Record, Started, Step, compare, verdict

STEPS = 12


def step(number: int) -> Step:
    return Step(step=number, loss=(5.0 - number / 10).hex(), batch=f"batch {number}", secs=0.5)


def life(first: int, end: int, last: Record | None = None) -> list[Record]:
    """The records of one start: its steps from `first` up to `end`."""
    begun = Started(pid=7, first_step=first, restored_step=None, sources={})
    return [begun, *map(step, range(first, end)), *([last] if last else [])]


END = Finished(params="p", opt_state="o", rng="r", batches="b", tokens_seen=99)
WHOLE = life(0, STEPS, END)
# Killed after step 5, resumed at 3, preempted after step 8.
INTERRUPTED = life(0, 6) + life(3, 9, Preempted(step=8)) + life(9, STEPS, END)
FIRST_OF_STEP_4, SECOND_OF_STEP_4 = (
    index
    for index, record in enumerate(INTERRUPTED)
    if isinstance(record, Step) and record.step == 4
)
LAST = len(INTERRUPTED) - 1


def test_equal_runs_are_identical() -> None:
    assert verdict(compare([INTERRUPTED] * 2, [WHOLE] * 2)) == (
        "bit-identical: parameters yes, optimizer state yes, RNG yes, order of batches yes, "
        "losses yes"
    )


@pytest.mark.parametrize(("hosts", "host"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize(
    ("index", "field", "difference"),
    [
        (LAST, "params", "parameters"),
        (LAST, "opt_state", "optimizer state"),
        (LAST, "rng", "RNG"),
        (LAST, "batches", "order of batches"),
        (FIRST_OF_STEP_4, "batch", "order of batches"),
        (SECOND_OF_STEP_4, "batch", "order of batches"),
        (FIRST_OF_STEP_4, "loss", "losses"),
        (SECOND_OF_STEP_4, "loss", "losses"),
    ],
)
def test_any_difference_on_any_host_is_found_and_named(
    index: int, field: str, difference: str, hosts: int, host: int
) -> None:
    run = [list(INTERRUPTED) for _ in range(hosts)]
    run[host][index] = msgspec.structs.replace(run[host][index], **{field: "0x0.0p+0"})
    identity = compare(run, [WHOLE] * hosts)
    assert [name for name, is_equal in identity.items() if not is_equal] == [difference]
    assert f"{difference} NO" in verdict(identity)


def test_a_missing_step_is_a_difference() -> None:
    without = [record for record in WHOLE if not (isinstance(record, Step) and record.step == 9)]
    for identity in (compare([without], [WHOLE]), compare([WHOLE], [without])):
        assert not identity["losses"]


def test_hosts_that_differ_alike_in_both_runs_are_a_difference() -> None:
    other = [*WHOLE[:-1], msgspec.structs.replace(END, params="x", rng="x")]
    other[1] = msgspec.structs.replace(step(0), loss="0x1.0p+0")
    run = [WHOLE, other]
    # Each host has an RNG of its own.
    unequal = [name for name, is_equal in compare(run, run).items() if not is_equal]
    assert unequal == ["parameters", "losses"]
