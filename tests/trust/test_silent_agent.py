"""What hangs on an agent that does not answer ends in time."""

from __future__ import annotations

import contextlib
import subprocess
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.clock import SystemClock
from holdfast.host.wire import protocol
from holdfast.local_agent.client import PULSE_SECS
from holdfast.local_agent.launch import START_SECS
from holdfast.store.disk import DiskStore
from tests.hosts import Host, host, wait_until
from tests.trust.in_process import in_process_host
from tests.trust.killing import end_well, sealed, stopped, trainer

SILENT_SECS = 2 * PULSE_SECS
"""After this an agent that does not answer is taken for gone."""

EASE_SECS = 15.0
"""What a loaded machine may add to a bound."""


@pytest.fixture
def one_host() -> Iterator[Host]:
    """A host of the test's own."""
    with host() as made:
        yield made


def _joining(rank: int) -> protocol.Attach:
    tier = protocol.TierPolicies(save=None, preserve=None)
    return protocol.Attach(
        group="group",
        rank=rank,
        count=2,
        attempt=None,
        takeover=False,
        durable=tier,
        ram=tier,
        ram_limit_bytes=None,
        linger_secs=60.0,
    )


@pytest.mark.parametrize(
    ("leaves", "told"),
    [
        ("killed", "has ended"),
        ("killed while no agent lives", "has ended"),
        ("in good order", "has closed its manager"),
    ],
)
def test_trainers_hear_at_once_of_another_rank_that_is_gone(
    tmp_path: Path, leaves: str, told: str
) -> None:
    """They may be waiting for its vote on a restore."""
    with in_process_host(tmp_path) as one, contextlib.ExitStack() as ends:
        one.start_agent()
        service = one.service
        assert service is not None
        processes = [subprocess.Popen(["sleep", "1000"]) for _ in range(2)]
        for process in processes:
            ends.callback(process.wait)
            ends.callback(process.kill)
        one.call_and_wait(*(service.attach(_joining(r), p.pid) for r, p in enumerate(processes)))

        if leaves == "killed":
            processes[1].kill()
        elif leaves == "killed while no agent lives":
            one.crash_agent()
            processes[1].kill()
            processes[1].wait()
            one.start_agent()
            service = one.service
            assert service is not None
        else:
            detach = protocol.Detach(group="group", rank=1)
            one.call(service.detach(detach, processes[1].pid))

        def notices() -> list[protocol.Notice]:
            one.settle()
            watch = protocol.Watch(group="group", rank=0, cursor=0)
            if not one.board.posted:
                # The agent would wait for one.
                return []
            return list(one.call(service.watch(watch, processes[0].pid)).notices)

        wait_until(notices, EASE_SECS)
        (notice,) = notices()
        assert (notice.kind, notice.data) == ("gone", "group")
        rank = f"rank 1 (process {processes[1].pid} on host {one.agent.run.config.host})"
        assert f"{rank} {told}" in notice.reason


def test_a_store_forgets_the_folders_that_another_one_removed() -> None:
    """A trainer writes each checkpoint into a folder of its own, and its agent removes it."""
    with host() as made:
        clock = SystemClock()
        writer, remover = DiskStore(made.folder, clock), DiskStore(made.folder, clock)

        def write_and_remove(first: int, count: int) -> None:
            for number in range(first, first + count):
                key = f"checkpoints/{number:09d}.1-00000001/part-00000-of-00001.json"
                writer.put(key, b"x")
                remover.delete(key)

        def held_bytes_after(first: int) -> int:
            tracemalloc.start()
            try:
                write_and_remove(first, 500)
                return tracemalloc.get_traced_memory()[0]
            finally:
                tracemalloc.stop()

        write_and_remove(0, 300)
        # Python's table of strings, where pathlib keeps names, doubles now and then, at once. It
        # does not do so twice in a row; what is leaked is there each time.
        assert min(held_bytes_after(300), held_bytes_after(800)) < 25_000


@pytest.mark.soak
def test_a_manager_closes_with_an_error_where_the_agent_stands_still(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with trainer(one_host, run, every=1, sleep=0.05, steps=100) as closing:
        wait_until(lambda: sealed(run) > 0)
        with stopped(one_host.agent().pid):
            started = time.monotonic()
            code = closing.process.wait(2 * SILENT_SECS + EASE_SECS)
            print(f"closed after {time.monotonic() - started:.0f} s")
        assert code == 1
        closing.kill()
        assert "SaveFailedError" in closing.told()
    end_well(one_host, run)


@pytest.mark.soak
def test_saves_that_failed_for_a_silent_agent_are_told_and_later_ones_succeed(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with trainer(one_host, run, every=3, sleep=0.05) as living:
        wait_until(lambda: sealed(run) > 0)
        with stopped(one_host.agent().pid):
            bound_secs = SILENT_SECS + PULSE_SECS + EASE_SECS
            failed = living.await_line("failed", secs=bound_secs)
            assert "not confirmed" in failed["reason"]
        newest = living.said("step")[-1]["step"]
        wait_until(lambda: sealed(run) > newest, secs=START_SECS + EASE_SECS)
    end_well(one_host, run)
