"""Two made-up runs of a few steps, for the tests of what is made from journals."""

from __future__ import annotations

from holdfast.demo.failures import DemoFailureKind, Failure
from holdfast.demo.journal import Finished, Preempted, Record, Restored, Saved, Started, Step
from holdfast.demo.runner import RunLog, Start, Strike

STEPS = 30


def step(number: int, time: float) -> Step:
    loss = 5.0 - number / 10
    return Step(time=time, step=number, loss=loss.hex(), batch=f"batch {number}", secs=0.5)


def finished(time: float, **changed: str) -> Finished:
    digests = {"params": "p", "opt_state": "o", "rng": "r", "batches": "b", **changed}
    return Finished(time=time, tokens_seen=99, **digests)


def started(spawned: float, first_step: int, sources: dict[str, int] | None = None) -> Started:
    restored = sources and Restored(
        step=first_step - 1, attempt=1, sources=sources, skipped=[], secs=0.25
    )
    return Started(time=spawned + 3, pid=7, first_step=first_step, restored=restored or None)


def life(spawned: float, begin: Started, end: int, last: Record | None = None) -> Start:
    """Steps from where `begin` says up to `end`, one a second from four seconds after the spawn."""
    records: list[Record] = [begin]
    for index, number in enumerate(range(begin.first_step, end)):
        records.append(step(number, spawned + 4 + index))
        records.append(Saved(step=number, taken=number % 5 == 0, secs=0.01))
    return Start(spawned=spawned, by_host=(tuple(records) + ((last,) if last else ()),))


def strike(failure: Failure, time: float, start: int) -> Strike:
    host = f"host-{failure.host}"
    return Strike(failure=failure, host=host, time=time, pid=7, start=start)


def interrupted_run() -> RunLog:
    """Killed after step 11, taken up at 8; preempted after step 20; the agent killed after 24."""
    starts = (
        life(1000.0, started(1000.0, 0), 12),
        life(1020.0, started(1020.0, 8, {"ram": 1_000_000}), 21, Preempted(time=1037.0, step=20)),
        life(
            1040.0,
            started(1040.0, 21, {"ram": 1_000_000, "durable": 2_000_000}),
            STEPS,
            finished(1060.0),
        ),
    )
    dealt = (
        (DemoFailureKind.KILL, 11, 1015.5, 0),
        (DemoFailureKind.TERMINATE, 20, 1036.5, 1),
        (DemoFailureKind.KILL_AGENT, 24, 1047.25, 2),
    )
    strikes = tuple(
        strike(Failure(kind=kind, step=at, phase=0.5), time, start)
        for kind, at, time, start in dealt
    )
    return RunLog(starts=starts, strikes=strikes)


def uninterrupted_run() -> RunLog:
    return RunLog(starts=(life(2000.0, started(2000.0, 0), STEPS, finished(2040.0)),), strikes=())


def run_that_loses_a_host() -> RunLog:
    """Of two hosts the second one is lost after step 11, which it did not finish; resumed at 9."""
    one, other = life(1000.0, started(1000.0, 0), 12), life(1000.25, started(1000.0, 0), 11)
    ram, peer = {"ram": 2_000_000, "peer": 1_000_000}, {"peer": 3_000_000}
    ends = [
        life(1020.0 + later, started(1020.0, 9, sources), STEPS, finished(1050.0))
        for later, sources in ((0.0, ram), (0.25, peer))
    ]
    starts = (
        Start(spawned=1000.0, by_host=one.by_host + other.by_host),
        Start(spawned=1020.0, by_host=ends[0].by_host + ends[1].by_host),
    )
    lost = Failure(kind=DemoFailureKind.LOSE_HOST, step=11, phase=0.5, host=1)
    return RunLog(starts=starts, strikes=(strike(lost, 1015.5, 0),))


def uninterrupted_run_of_two_hosts() -> RunLog:
    (start,) = uninterrupted_run().starts
    return RunLog(starts=(Start(spawned=start.spawned, by_host=start.by_host * 2),), strikes=())
