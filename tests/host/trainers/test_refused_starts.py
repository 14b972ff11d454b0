"""A start that is refused leaves the agent, and what it knows, as they were."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.errors import (
    AgentUnavailableError,
    FencedError,
    InvalidArgumentError,
    RunBusyError,
    StorageError,
)
from holdfast.format.names import TOKEN_CHARS, AttemptId
from holdfast.host import service
from holdfast.host.leaving import REFUSED_SECS
from holdfast.host.wire import protocol
from holdfast.host.wire.control_block import INCARNATION, SEAT_COUNT, step_cell
from holdfast.policy import (
    preservation_evaluation,
    preservation_policy,
    save_decision_policy,
    save_evaluation,
)
from tests.manifests import manifest_path
from tests.trust.in_process import InProcessHost, in_process_host


def known(host: InProcessHost) -> dict[str, Any]:
    """What the agent works with, and the words that its trainers read."""
    agent, job = host.agent, host.agent.trainers.job
    return {
        "durable": job.durable,
        "ram": job.ram,
        "linger_secs": job.linger_secs,
        "has_ram": job.has_ram,
        "limit_bytes": agent.ram.pool.limit_bytes,
        "domain": agent.driver.domain,
        "settings": agent.driver.settings,
        "addresses": agent.network.peers.addresses(),
        # An agent that restarts its coordination counts that.
        "words": [
            v
            for i, v in enumerate(agent.trainers.control.cells[: step_cell(1)])
            if i != INCARNATION
        ],
    }


def stranger(group: str, **changes: Any) -> protocol.Attach:
    """A request that asks for something else in everything."""
    return msgspec.structs.replace(
        protocol.Attach(
            group=group,
            rank=0,
            count=1,
            attempt=None,
            takeover=False,
            durable=protocol.TierPolicies(
                save=save_evaluation.encode(save_decision_policy.FixedIntervalPolicy(77)).decode(),
                preserve=preservation_evaluation.encode(preservation_policy.LatestN(1)).decode(),
            ),
            ram=None,
            ram_limit_bytes=12345,
            linger_secs=1.0,
            addresses={"host-x": "127.0.0.1:9"},
            domain="elsewhere",
            copies=7,
            host_count=2,
        ),
        **changes,
    )


def refused(host: InProcessHost, request: protocol.Attach, pid: int) -> None:
    with pytest.raises(RunBusyError):
        host.call_and_wait(host.service.attach(request, pid))
    host.call(asyncio.sleep(0.01))


def test_a_refused_start_changes_nothing(tmp_path: Path) -> None:
    with in_process_host(tmp_path) as host:
        host.start_agent()
        trainer = host.attach()
        host.save(trainer, 5)
        host.settle()
        before = known(host)
        other = host.start_process()
        try:
            refused(host, stranger("another"), other.pid)
            assert known(host) == before
        finally:
            other.kill()
            other.wait()
        host.save(trainer, 6)
        host.settle()
        assert host.look().timeline[-1].step == 6


def test_processes_of_one_job_that_take_themselves_for_the_only_one_are_named_as_such(
    tmp_path: Path,
) -> None:
    with in_process_host(tmp_path) as host:
        host.start_agent()
        host.attach()
        # Like the first one, it runs the same command, of the same parent.
        other = host.start_process()
        try:
            with pytest.raises(RunBusyError) as raised:
                host.call_and_wait(host.service.attach(stranger("another"), other.pid))
        finally:
            other.kill()
            other.wait()
        asked = "jax.distributed.initialize() or torch.distributed.init_process_group() in all of"
        message = str(raised.value)
        # A second start of one program is more frequent than a job that was not initialised.
        assert (
            message.index("started twice") < message.index("takeover=True") < message.index(asked)
        )


def test_refused_starts_never_take_the_seat_of_a_live_trainer(
    tmp_path: Path,
) -> None:
    with in_process_host(tmp_path) as host:
        host.start_agent()
        trainer = host.attach()
        host.agent.trainers.control.cells[step_cell(trainer.place.seat)] = 41
        before = known(host)
        other = host.start_process()
        try:
            # As after many refused starts: the next seat is the live trainer's, once around.
            host.agent.sessions._seat = SEAT_COUNT + trainer.place.seat
            refused(host, stranger("another"), other.pid)
            assert known(host) == before
        finally:
            other.kill()
            other.wait()


def test_a_rank_that_cannot_be_leaves_no_start_behind(tmp_path: Path) -> None:
    with in_process_host(tmp_path) as host:
        host.start_agent()
        before = known(host)
        with pytest.raises(InvalidArgumentError, match="rank 3 of 1"):
            host.call(host.service.attach(stranger("another", rank=3), 1))
        assert known(host) == before


def test_what_a_start_asks_holds_once_its_attempt_has_begun(tmp_path: Path) -> None:
    with in_process_host(tmp_path) as host:
        host.start_agent()
        other = host.start_process()
        try:
            host.call_and_wait(host.service.attach(stranger("another"), other.pid))
            job = host.agent.trainers.job
            assert job.durable.save == save_decision_policy.FixedIntervalPolicy(77)
            assert (job.linger_secs, job.has_ram) == (1.0, False)
            assert host.agent.ram.pool.limit_bytes == 12345
            assert host.agent.driver.domain == "elsewhere"
        finally:
            other.kill()
            other.wait()


def test_a_start_that_fails_restores_the_layout(tmp_path: Path) -> None:
    with in_process_host(tmp_path) as host:
        host.start_agent()
        before = known(host)
        (host.run / "attempts").symlink_to(tmp_path)
        other = host.start_process()
        try:
            with pytest.raises(StorageError, match="symbolic link"):
                host.call_and_wait(host.service.attach(stranger("another"), other.pid))
            host.call(asyncio.sleep(0.01))
            assert known(host) == before
        finally:
            other.kill()
            other.wait()


def test_an_agent_that_has_refused_its_only_start_and_holds_nothing_leaves(tmp_path: Path) -> None:
    with in_process_host(tmp_path) as host:
        host.start_agent()
        with pytest.raises(RunBusyError):
            host.call(host.service.attach(stranger("another"), 0))
        assert host.agent.leaves_in_secs() <= REFUSED_SECS
        host.clock.sleep(REFUSED_SECS)
        assert host.agent.leaves_in_secs() == 0.0
        # One that is admitted in time keeps it.
        host.attach()
        assert host.agent.leaves_in_secs() is None


def test_a_process_of_another_pid_namespace_is_refused_by_that_reason(tmp_path: Path) -> None:
    with in_process_host(tmp_path) as host:
        host.start_agent()
        # The kernel reports a process that the agent's namespace does not have as 0.
        with pytest.raises(RunBusyError, match=r"another PID namespace.*HOLDFAST_RAM"):
            host.call(host.service.attach(stranger("another"), 0))


def test_a_takeover_reaches_an_attempt_whose_agent_has_another_ram_folder(tmp_path: Path) -> None:
    with (
        in_process_host(tmp_path, folder=tmp_path / "one") as first,
        in_process_host(tmp_path, folder=tmp_path / "other") as second,
    ):
        first.start_agent()
        fenced = first.attach()
        first.save(fenced, 1)
        first.settle()
        second.start_agent()
        trainer = second.attach(takeover=True)
        assert (trainer.attempt.number, trainer.place.origin.step) == (2, 1)
        first.save(fenced, 2)
        first.settle()
        assert first.agent.trainers.group is None
        notices = first.call(first.agent.trainers.notices.after(0)).notices
        assert "attempt 2 has taken the run over from attempt 1" in notices[-1].reason
        assert [step for step in (1, 2) if manifest_path(tmp_path / "run", step).exists()] == [1]


def at_another_place(place: Path, **changes: Any) -> protocol.Attach:
    """The request of a start at another directory of the run."""
    place.mkdir()
    state = place.stat()
    identity = f"{state.st_dev}:{state.st_ino}"
    return stranger("another", run=str(place), directory=identity, **changes)


def test_a_start_at_another_place_of_the_run_takes_it_over_by_request_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The agent does not leave in this test.
    monkeypatch.setattr(service, "LEAVE_SECS", 0.0)
    with in_process_host(tmp_path) as host:
        host.start_agent()
        trainer = host.attach()
        host.save(trainer, 5)
        with pytest.raises(RunBusyError, match="or open with takeover=True to fence it"):
            host.call(host.service.attach(at_another_place(tmp_path / "one"), 1))
        assert host.agent.trainers.group is not None
        request = at_another_place(tmp_path / "two", takeover=True)
        with pytest.raises(AgentUnavailableError, match="leaves by itself"):
            host.call(host.service.attach(request, 1))
        assert host.agent.trainers.group is None
        fenced = host.call(host.agent.trainers.notices.after(0)).notices[-1]
        assert (fenced.kind, fenced.data) == ("fenced", trainer.group)
        assert f"a start at {tmp_path / 'two'}, another place of the run" in fenced.reason
        with pytest.raises(FencedError, match="takes it over"):
            host.call(
                host.service.attach(
                    stranger(trainer.group, attempt=trainer.attempt), trainer.process.pid
                )
            )
        host.settle()
        assert manifest_path(host.run, 5).exists(), "what was sealed is made durable"
        assert host.agent.leaves_in_secs() == 0.0


def test_a_takeover_at_another_place_ends_an_agent_that_lingers_without_a_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The agent does not leave in this test.
    monkeypatch.setattr(service, "LEAVE_SECS", 0.0)
    with in_process_host(tmp_path) as host:
        host.start_agent()
        trainer = host.attach()
        host.save(trainer, 5)
        host.kill_trainer(trainer)
        host.settle()
        with pytest.raises(AgentUnavailableError, match="leaves by itself"):
            host.call(host.service.attach(at_another_place(tmp_path / "one"), 1))
        assert host.agent.leaves_in_secs() != 0.0
        rejoining = at_another_place(tmp_path / "two", takeover=True, attempt=trainer.attempt)
        with pytest.raises(AgentUnavailableError, match="leaves by itself"):
            host.call(host.service.attach(rejoining, 1))
        assert host.agent.leaves_in_secs() != 0.0, "this is no start"
        request = at_another_place(tmp_path / "three", takeover=True)
        with pytest.raises(AgentUnavailableError, match="leaves by itself"):
            host.call(host.service.attach(request, 1))
        host.settle()
        assert host.agent.leaves_in_secs() == 0.0


def test_an_agent_gives_way_before_other_hosts_are_given_its_address(tmp_path: Path) -> None:
    with in_process_host(tmp_path) as host:
        host.start_agent()
        host.attach()
        start = at_another_place(tmp_path / "one", takeover=True)
        own = protocol.Expect(run=str(host.run), takeover=True)
        other = protocol.Expect(run=start.run, directory=start.directory)
        for stays in (own, other):
            status = host.call(host.service.expect(stays, os.getpid()))
            assert status.leaves_in_secs != 0.0
            assert host.agent.trainers.group is not None
        takes = msgspec.structs.replace(other, takeover=True)
        assert host.call(host.service.expect(takes, os.getpid())).leaves_in_secs == 0.0
        assert host.agent.trainers.group is None


def test_a_trainer_whose_agent_made_room_for_another_place_is_fenced_there(tmp_path: Path) -> None:
    with in_process_host(tmp_path) as host:
        host.start_agent()
        trainer = host.attach()
        earlier = AttemptId(trainer.attempt.number - 1, "0" * TOKEN_CHARS)
        with pytest.raises(FencedError, match=r"attempt 1 at .*, another place of the run, has"):
            host.call(host.service.attach(at_another_place(tmp_path / "other", attempt=earlier), 1))
        assert host.agent.trainers.group is not None
