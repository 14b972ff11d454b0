"""Waits that a lost host or a signal ends: in time, with their step named, and nothing lost."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import waits
from holdfast.clock import SystemClock
from holdfast.conditions import Condition
from holdfast.coordination.settings import Settings
from holdfast.errors import WaitInterruptedError, WaitTimeoutError
from holdfast.format.names import CheckpointId
from holdfast.host.wire.protocol import QuietHosts
from holdfast.trainer.process.preemption import REPEAT_SECS, PreemptionSignals
from holdfast.trainer.save.patience import ERROR_CLOSE_SECS, HostWatch
from holdfast.trainer.save.progress import Progress
from tests.hosts import Host, await_events, wait_until
from tests.trainer.frameworks import TORCH
from tests.trainer.job import Job, durable_parts, is_committed, lose, parts_in_ram, some_hosts
from tests.trainer.job import start_job as start_any_job
from tests.trust.in_process import StepClock

TRAINER = Path(__file__).with_name("lockstep_trainer.py")
LAST = 8
"""The last step that some ranks have saved and others have not."""
PATIENCE = {"holdfast.trainer.save.patience.ERROR_CLOSE_SECS": 1.0}
"""A close after an error waits less long than the agents need to know of a lost host."""
END_SECS = 240.0
"""In which a process has to end, on a busy machine; its waits have deadlines of an hour."""


def blocked(secs: float = 20.0) -> None:
    """A wait for something that does not come about."""
    changed = Condition()
    with changed:
        waits.wait_for(changed, lambda: False, secs)


def signal_soon(act: Callable[[], None]) -> None:
    """Lets a signal arrive during the waits that follow."""

    def handler(number: int, frame: object) -> None:
        signal.signal(signal.SIGALRM, earlier)
        act()

    earlier = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)


def test_a_signal_ends_the_wait_that_is_under_way_and_names_it() -> None:
    signal_soon(lambda: waits.arrived(signal.SIGTERM))
    # A wait that lasts to its end raises nothing.
    with (
        pytest.raises(WaitInterruptedError, match="close: ended by SIGTERM: step 8 is not safe"),
        waits.ended_by_signals("close", lambda: "step 8 is not safe"),
        # Of nested calls the outer one counts.
        waits.ended_by_signals("wait", lambda: ""),
    ):
        blocked()


def test_a_signal_before_a_wait_or_without_one_ends_nothing() -> None:
    waits.arrived(signal.SIGTERM)
    with waits.ended_by_signals("close", lambda: ""):
        blocked(0.3)
        waits.sleep(SystemClock(), 0.3)
        waits.check()
    signal_soon(lambda: waits.arrived(signal.SIGTERM, at_once=True))
    blocked(0.3)


def test_what_ends_within_the_patience_is_not_cut_short() -> None:
    ended: list[float] = []
    signal_soon(lambda: waits.arrived(signal.SIGTERM))
    began = time.monotonic()
    with waits.ended_by_signals("close", lambda: "", 2.0):
        changed = Condition()
        with changed:
            assert waits.wait_for(changed, lambda: time.monotonic() - began > 0.6, 20.0)
        ended.append(time.monotonic())
    assert ended


def handled(act: Callable[[PreemptionSignals, StepClock], None]) -> bool:
    """Whether what `act` does with the signals ends a wait at once or soon."""
    clock, numbers = StepClock(), (signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.signal(number, lambda number, frame: None) for number in numbers]
    signals = PreemptionSignals(numbers, (), lambda: None, clock)
    signals.install()
    try:
        with waits.ended_by_signals("close", lambda: "", 0.0):
            act(signals, clock)
            return waits.is_ended()
    finally:
        signals.close()
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_the_signal_that_began_a_preemption_does_not_cut_its_save_short() -> None:
    def first(signals: PreemptionSignals, clock: StepClock) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)

    assert handled(first)

    # Another rank's signal has stopped the job, and this rank's own comes later.
    def announced(signals: PreemptionSignals, clock: StepClock) -> None:
        signals.is_announced = True
        first(signals, clock)

    assert not handled(announced)

    def second(signals: PreemptionSignals, clock: StepClock) -> None:
        announced(signals, clock)
        clock.sleep(REPEAT_SECS)
        first(signals, clock)

    assert handled(second)

    # Slurm's own signal follows the one that was asked for.
    def another(signals: PreemptionSignals, clock: StepClock) -> None:
        announced(signals, clock)
        os.kill(os.getpid(), signal.SIGUSR2)

    assert handled(another)


def test_the_repetition_of_a_signal_ends_no_wait_that_began_in_between() -> None:
    clock, before = StepClock(), signal.signal(signal.SIGUSR1, lambda number, frame: None)
    signals = PreemptionSignals([signal.SIGUSR1], (), lambda: None, clock)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        with waits.ended_by_signals("close", lambda: "", 0.0):
            clock.sleep(REPEAT_SECS / 2)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert not waits.is_ended()
            clock.sleep(REPEAT_SECS)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert waits.is_ended()
    finally:
        signals.close()
        signal.signal(signal.SIGUSR1, before)


def test_all_waits_for_saves_are_ended_by_a_signal() -> None:
    progress = Progress(SystemClock())
    progress.accept(CheckpointId(LAST, 1), durable=True, by_step=True)
    for wait in (
        lambda: progress.wait_until_finished(None),
        lambda: progress.wait(lambda sealed, finished: sealed, None),
    ):
        signal_soon(lambda: waits.arrived(signal.SIGTERM))
        with pytest.raises(WaitInterruptedError), waits.ended_by_signals("c", lambda: "", 0.2):
            wait()


@pytest.mark.parametrize(
    ("answer", "ends"),
    [
        (QuietHosts(hosts=(), is_writing=False), False),
        (QuietHosts(hosts=("host-b",), is_writing=True), False),
        (QuietHosts(hosts=("host-b",), is_writing=False), True),
        (None, False),
    ],
)
def test_a_close_after_an_error_waits_for_hosts_that_are_heard(
    answer: QuietHosts | None, ends: bool
) -> None:
    clock, asked = StepClock(), []

    def ask() -> QuietHosts | None:
        asked.append(clock.monotonic())
        return answer

    watch = HostWatch(ask, lambda: "step 8 may not be safe yet", clock)
    clock.sleep(ERROR_CLOSE_SECS - 0.1)
    watch.check()
    assert not asked
    clock.sleep(0.2)
    if ends:
        with pytest.raises(WaitTimeoutError, match=r"host host-b, .*: step 8 may not be safe"):
            watch.check()
    else:
        watch.check()
    assert asked


@pytest.fixture
def two_hosts() -> Iterator[list[Host]]:
    with some_hosts(2) as hosts:
        yield hosts


def start_job(hosts: list[Host], run: Path, **todo: Any) -> Job:
    return start_any_job(hosts, run, script=TRAINER, device_count=1, last=LAST, **todo)


def await_last_save(job: Job, run: Path, rank: int) -> None:
    """Waits until that rank has its part of the last step, and the step before is durable."""
    job.ranks[rank].await_line("at", lambda line: line["at"] == LAST)
    job.wait_until(lambda: rank in parts_in_ram(job.hosts[rank], LAST) and is_committed(run, 4))


# Without rank 0, JAX ends the other processes by itself.
@pytest.mark.parametrize(
    ("framework", "lost"),
    [
        ("jax", 1),
        pytest.param("torch", 1, marks=TORCH.marks[1:]),
        pytest.param("torch", 0, marks=TORCH.marks),
    ],
)
def test_after_the_error_of_a_lost_host_close_leaves_the_step_to_the_agent(
    two_hosts: list[Host], tmp_path: Path, lost: int, framework: str
) -> None:
    run, other = tmp_path / "run", 1 - lost
    # A collective of PyTorch fails in this moment; JAX would end the whole process.
    todo = {"collective": True} if framework == "torch" else {"raises": "Connection closed by peer"}
    todo |= {"limits": PATIENCE}
    job = start_job(two_hosts, run, framework=framework, stands=[lost, LAST], **todo)
    job.ranks[lost].await_line("at", lambda line: line["at"] == LAST)
    await_last_save(job, run, other)
    lose(two_hosts[lost])
    code = job.ranks[other].wait(END_SECS)
    said = "".join(job.ranks[other].errors).strip()
    assert code == 1, said
    # The user's error is the last one; its note has that of the close.
    error, note = said.splitlines()[-2:]
    assert "Connection closed by peer" in error
    assert error.startswith(("RuntimeError", "[rank"))
    assert note.startswith("holdfast: after this error the manager was closed, and: close: ")
    assert "closed after an error: close: not waiting for host" in said
    assert "step 8 may not be safe yet" in said
    (left,) = await_events(run, "left_unfinished", count=1)
    assert (left["rank"], left["steps"], left["newest_step"]) == (other, [LAST], 4)
    # The agent stays with its part, and makes it durable for the moment in which the other comes.
    if other == 0:
        wait_until(lambda: durable_parts(run, LAST) == {other})
    assert parts_in_ram(two_hosts[other], LAST) == {other}


@pytest.mark.parametrize(
    ("call", "limit", "expected"),
    [
        (
            "resume",
            "restore.restore_votes.VOTE_SECS",
            "ProcessLostError: meet before a restore: rank 1 (on host-b) of 2 did not join within "
            "1 s, since .* UTC; missing: rank 1 (host-b: before its first step); the others: "
            "rank 0 (host-a: before its first step); see their logs",
        ),
        (
            "finish",
            "finisher.FINISH_SECS",
            "ProcessLostError: finish the run: rank 1 (on host-b) of 2 did not join within 1 s, "
            "since .* UTC; missing: rank 1 (host-b: at step 8); the others: rank 0 (host-a: at "
            "step 8); see their logs",
        ),
        (
            LAST,
            "save.patience.CLOSE_SECS",
            "WaitTimeoutError: wait until finished: steps .*8] are not durable after 1.0 s; no "
            "host that answers has these parts of step 8 in RAM: rank 1 (host-b: at step 7); "
            "saving",
        ),
    ],
    ids=["resume", "finish", "close"],
)
def test_a_wait_beyond_its_deadline_names_the_rank_that_stands_still_and_its_step(
    two_hosts: list[Host], tmp_path: Path, call: str | int, limit: str, expected: str
) -> None:
    todo = {"finishes": True} if call == "finish" else {}
    # On a busy machine the agents take longer to answer than a user would wait for their texts.
    limits = {f"holdfast.trainer.{limit}": 1.0, "holdfast.trainer.parts.RANKS_ASK_SECS": 60.0}
    job = start_job(two_hosts, tmp_path / "run", stands=[1, call], limits=limits, **todo)
    job.ranks[1].await_line("at", lambda line: line["at"] == call)
    assert job.ranks[0].wait(END_SECS) == 1, job.told()
    line = "".join(job.ranks[0].errors).strip().splitlines()[-1]
    assert re.search(re.escape(expected).replace(r"\.\*", ".*"), line), line
    job.ranks[1].process.kill()


@pytest.mark.parametrize("framework", ["jax", TORCH])
@pytest.mark.parametrize("call", ["open", "resume", "finish", "close"])
def test_sigterm_ends_each_wait_for_another_host(
    two_hosts: list[Host], tmp_path: Path, call: str, framework: str
) -> None:
    run = tmp_path / "run"
    stands = LAST if call == "close" else call
    todo = {"finishes": True} if call == "finish" else {}
    job = start_job(two_hosts, run, framework=framework, stands=[1, stands], **todo)
    job.ranks[1].await_line("at", lambda line: line["at"] == stands)
    named = {"open": "open the run"}.get(call, call)
    # At any earlier moment the signal would announce a preemption.
    job.ranks[0].await_line("calls", lambda line: line["calls"] == named)
    if call == "close":
        await_last_save(job, run, 0)
    job.ranks[0].process.send_signal(signal.SIGTERM)
    code = job.ranks[0].wait(END_SECS)
    said = "".join(job.ranks[0].errors).strip()
    if (call, framework) == ("open", "torch"):
        # Before the first step nothing replaces the default action, which loses nothing.
        assert code == -signal.SIGTERM
        return
    assert code == 1, said
    # On a busy machine, a line about what is not durable yet may follow.
    assert f"WaitInterruptedError: {named}: ended by SIGTERM" in said
    if call == "close":
        assert "step 8 may not be safe yet" in said.splitlines()[-1]
        assert "continues from step 4" in said.splitlines()[-1]


def test_sigterm_ends_the_close_after_an_error_and_the_error_leaves(
    two_hosts: list[Host], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    # The other host lives, so without the signal the close would wait for its part.
    options = {"raises": "of the training", "limits": PATIENCE}
    job = start_job(two_hosts, run, stands=[1, LAST], **options)
    await_last_save(job, run, 0)
    job.ranks[0].await_line("at", lambda line: line["at"] == "error")
    # By now a host that is lost would be known.
    time.sleep(Settings().quiet_secs + 1.0)
    assert job.ranks[0].process.poll() is None
    job.ranks[0].process.send_signal(signal.SIGTERM)
    code = job.ranks[0].wait(END_SECS)
    said = "".join(job.ranks[0].errors).strip()
    assert code == 1
    error, note = said.splitlines()[-2:]
    assert error == "RuntimeError: of the training"
    assert "the manager was closed, and: close: ended by SIGTERM" in note
    assert "close: ended by SIGTERM: step 8 may not be safe yet" in said
