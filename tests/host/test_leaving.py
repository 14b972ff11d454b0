"""When an agent leaves, and what it leaves behind."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.coordination.messages import TargetKind
from holdfast.engine.lifecycle.attempts import AttemptStart, begin_attempt
from holdfast.engine.lifecycle.catalog import list_checkpoints
from holdfast.host.leaving import CLOSED_SECS, EXPECTED_SECS, STOPPING_SECS
from holdfast.host.wire import protocol
from tests.attempts import attempt_id
from tests.coordination.cases import make, running, until
from tests.engine.making import memory_folder
from tests.trust.in_process import RUN_ID, InProcessHost, in_process_host

LINGER_SECS = 600.0


@pytest.fixture
def host() -> Iterator[InProcessHost]:
    with memory_folder() as root, in_process_host(Path(root)) as made:
        made.start_agent()
        yield made


def leaves_in_secs(host: InProcessHost) -> float | None:
    host.settle()
    assert host.service is not None
    return host.agent.leaves_in_secs()


def test_an_agent_leaves_soon_after_a_close_with_everything_durable(host: InProcessHost) -> None:
    trainer = host.attach(count=2)
    host.save(trainer, 1)
    assert leaves_in_secs(host) is None
    host.detach(trainer)
    assert leaves_in_secs(host) == CLOSED_SECS
    host.clock.sleep(CLOSED_SECS)
    assert leaves_in_secs(host) == 0.0


def test_an_agent_stays_for_a_process_that_meets_the_other_hosts(host: InProcessHost) -> None:
    host.detach(host.attach())
    assert host.service is not None
    process = host.start_process()
    try:
        host.call(host.service.expect(protocol.Expect(), process.pid))
        host.clock.sleep(EXPECTED_SECS / 2)
        assert leaves_in_secs(host) is None
    finally:
        process.kill()
        process.wait()
    # A process that has ended is not awaited.
    assert leaves_in_secs(host) == 0.0
    status = host.call(host.service.expect(protocol.Expect(), process.pid))
    assert status.leaves_in_secs == 0.0


def test_an_agent_stays_no_longer_once_the_awaited_process_has_attached(
    host: InProcessHost,
) -> None:
    host.detach(host.attach())
    assert host.service is not None
    host.call(host.service.expect(protocol.Expect(), os.getpid()))
    assert leaves_in_secs(host) is None
    host.clock.sleep(EXPECTED_SECS)
    assert leaves_in_secs(host) == 0.0
    host.call(host.service.expect(protocol.Expect(), os.getpid()))
    host.agent.leaving.expected.remove_process(os.getpid())
    assert leaves_in_secs(host) == 0.0


def test_an_agent_makes_the_newest_checkpoint_durable_before_it_leaves(host: InProcessHost) -> None:
    trainer = host.attach()
    newest = host.save(trainer, 1, durable=False)
    host.settle()
    assert newest not in list_checkpoints(host.agent.run.durable)
    host.detach(trainer)
    host.clock.sleep(CLOSED_SECS)
    assert leaves_in_secs(host) == 0.0
    assert list_checkpoints(host.agent.run.durable)[newest].is_committed


def test_an_agent_that_has_to_exit_is_not_kept_by_trainers_that_save_on(
    host: InProcessHost,
) -> None:
    trainer = host.attach()
    first = host.save(trainer, 1)
    host.agent.leave_soon()
    host.save(trainer, 2)
    host.clock.sleep(STOPPING_SECS + 1)
    assert first in host.agent.driver.view.pending_ids()
    assert host.agent.leaves_in_secs() is None
    host.settle()
    newest = host.save(trainer, 3)
    host.agent.tick()
    assert host.agent.driver.view.pending_ids() == [newest]
    assert host.agent.leaves_in_secs() == 0.0
    assert not host.agent.is_all_durable, "the next agent finds it in RAM"


def test_an_agent_that_has_to_exit_waits_a_while_for_the_last_save_of_its_trainers(
    host: InProcessHost,
) -> None:
    trainer = host.attach()
    host.agent.leave_soon()
    host.save(trainer, 1)
    assert host.agent.leaves_in_secs() is None
    host.clock.sleep(STOPPING_SECS + 1)
    assert host.agent.leaves_in_secs() == 0.0


def test_an_agent_lingers_for_a_trainer_that_died(host: InProcessHost) -> None:
    trainer = host.attach()
    host.save(trainer, 1)
    host.settle()
    host.kill_trainer(trainer)
    host.call(asyncio.sleep(0.05))
    host.clock.sleep(10 * CLOSED_SECS)
    left_secs = leaves_in_secs(host)
    assert left_secs is not None
    assert left_secs > LINGER_SECS / 2


def test_an_agent_stays_while_a_start_waits(host: InProcessHost) -> None:
    host.detach(host.attach())
    host.clock.sleep(LINGER_SECS)
    assert leaves_in_secs(host) == 0.0
    assert host.service is not None
    host.agent.sessions._starts["token"] = None  # type: ignore[assignment]
    assert host.agent.leaves_in_secs() is None
    host.agent.sessions._starts.clear()


def test_an_agent_whose_run_another_host_has_taken_over_leaves_and_frees_its_ram(
    host: InProcessHost,
) -> None:
    trainer = host.attach()
    host.save(trainer, 1)
    host.settle()
    start = AttemptStart(run_id=RUN_ID, origin=None, host="host-b", pid=1, time=host.clock.now())
    assert begin_attempt(host.agent.run.durable, attempt_id(2), start) is not None
    host.save(trainer, 2)
    host.settle()
    assert host.agent.trainers.group is None
    assert host.service is not None
    assert not host.agent.driver.view.is_settled
    host.clock.sleep(CLOSED_SECS)
    assert leaves_in_secs(host) == 0.0
    assert host.agent.is_all_durable


def test_hosts_know_that_a_job_was_closed_only_once_every_rank_has_detached() -> None:
    world = make(3)
    job = running(world)
    world.wish(job.leader, TargetKind.DURABLE)
    hosts = list(world.hosts.values())

    def closed() -> list[bool]:
        return [host.agent is not None and host.view.is_closed for host in hosts]

    *first, last = job.trainers
    for trainer in first:
        trainer.leave()
    world.run(world.now + 5)
    assert not any(closed())
    last.leave()
    until(world, lambda: all(closed()))


def test_hosts_of_a_job_that_lost_a_rank_do_not_count_it_as_closed() -> None:
    world = make(3)
    job = running(world)
    first, *others = job.trainers
    first.die()
    for trainer in others:
        trainer.leave()
    world.run(world.now + 30)
    hosts = world.hosts.values()
    assert not any(host.agent is not None and host.view.is_closed for host in hosts)
