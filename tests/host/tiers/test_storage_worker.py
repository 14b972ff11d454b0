"""The agent's operations on its stores: which of them wait for which."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from holdfast.clock import SystemClock
from holdfast.coordination import effects, inputs
from holdfast.engine.lifecycle.attempts import AttemptStart, begin_attempt
from holdfast.engine.lifecycle.catalog import list_checkpoints
from holdfast.engine.lifecycle.commit import remove
from holdfast.engine.lifecycle.leases import Leases
from holdfast.engine.tiers.remote_checkpoints import RemoteCheckpoints
from holdfast.errors import RunBusyError
from holdfast.format.names import NO_ATTEMPT, AttemptId
from holdfast.format.records import Manifest
from holdfast.host.agent import Agent
from holdfast.host.driver.agent_run import RemoteTarget, open_run
from holdfast.host.metering.meters import Metering
from holdfast.host.tiers.retention import Retention
from holdfast.host.tiers.storage_worker import StorageWorker
from holdfast.host.wire.config import AgentConfig
from holdfast.observe.events.uploaded_segments import SegmentUploads
from holdfast.peers.address import PeerAddress
from holdfast.peers.directory import PeerDirectory
from holdfast.peers.store import PeerStore
from holdfast.store.files.file_system import LOCAL
from tests.attempts import attempt_id, checkpoint_id
from tests.engine.making import RUN_ID, TIME, Made, memory_folder

WAIT_SECS = 10.0


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    with memory_folder() as folder:
        config = AgentConfig(run=str(tmp_path), run_id=RUN_ID, host="a", folder=folder)
        metering = Metering(SystemClock())
        agent = Agent(open_run(config, SystemClock(), LOCAL, metering.note_event), metering)
        start = AttemptStart(run_id=RUN_ID, origin=None, host="a", pid=1, time=TIME)
        begin_attempt(agent.run.durable, attempt_id(1), start)
        yield agent
        agent.close()


def worker_of(
    agent: Agent, peers: PeerDirectory, on_commit: Callable[[Manifest, float | None], None]
) -> StorageWorker:
    return StorageWorker(agent.run, agent.ram, agent.trainers, peers, on_commit)


def retention_of(
    agent: Agent, worker: StorageWorker, *, is_leading: bool, attempt: AttemptId | None = None
) -> Retention:
    view = SimpleNamespace(is_leading=is_leading, pending_ids=list)
    present = attempt_id(1) if attempt is None else attempt
    driver: Any = SimpleNamespace(attempt=present, view=view)
    return Retention(agent.run, agent.ram, agent.trainers, driver, worker)


@pytest.fixture
def told() -> list[int]:
    """The steps whose manifests were written."""
    return []


@pytest.fixture
def storage_worker(agent: Agent, told: list[int]) -> Iterator[StorageWorker]:
    peers = PeerDirectory(RUN_ID, SystemClock())
    worker = worker_of(agent, peers, lambda manifest, secs: told.append(manifest.step))
    yield worker
    worker.threads.close()


@pytest.fixture
def made(agent: Agent) -> Made:
    """A checkpoint whose only part is durable."""
    made = Made()
    made.add(("w",), np.arange(8))
    made.write(agent.run.durable)
    return made


def test_a_commit_does_not_wait_for_the_bytes_of_the_next_checkpoint(
    storage_worker: StorageWorker, made: Made, told: list[int]
) -> None:
    """They may take as long as the ones before: what is durable would count that much later."""
    is_written = threading.Event()

    async def both() -> inputs.CommitWritten | inputs.CommitFailed:
        writing = asyncio.create_task(storage_worker.threads.write(is_written.wait, WAIT_SECS))
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(WAIT_SECS / 2):
                return await storage_worker.commit(effects.Commit(made.id, 1))
        finally:
            is_written.set()
            await writing

    assert asyncio.run(both()) == inputs.CommitWritten(made.id)
    assert told == [made.id.step]


def test_the_time_of_a_checkpoint_is_known_whose_write_begins_before_the_last_commit(
    agent: Agent, made: Made
) -> None:
    later = Made(id=checkpoint_id(11))
    later.add(("w",), np.arange(8))
    later.write(agent.run.durable)
    took_secs: list[float | None] = []
    peers = PeerDirectory(RUN_ID, SystemClock())
    worker = worker_of(agent, peers, lambda manifest, secs: took_secs.append(secs))

    async def write() -> None:
        for checkpoint in (made.id, later.id):
            await worker.persist(effects.Persist(checkpoint, frozenset({0})))
        for checkpoint in (made.id, later.id):
            await worker.commit(effects.Commit(checkpoint, 1))

    with contextlib.closing(worker.threads):
        asyncio.run(write())
    assert all(took_secs)
    assert len(took_secs) == 2


def test_what_is_being_removed_is_not_committed(
    agent: Agent, storage_worker: StorageWorker, made: Made, told: list[int]
) -> None:
    async def both() -> inputs.CommitWritten | inputs.CommitFailed:
        with storage_worker.threads.alone_with(made.id):
            committing = asyncio.create_task(storage_worker.commit(effects.Commit(made.id, 1)))
            await asyncio.sleep(0.2)
            assert not committing.done()
            (listing,) = list_checkpoints(agent.run.durable).values()
            remove(agent.run.durable, made.id, listing)
        return await committing

    assert isinstance(asyncio.run(both()), inputs.CommitFailed)
    assert not told
    assert not list_checkpoints(agent.run.durable)


def test_a_removal_waits_for_the_commit_of_what_it_removes(
    agent: Agent, storage_worker: StorageWorker, made: Made
) -> None:
    retention = retention_of(agent, storage_worker, is_leading=True)
    with ThreadPoolExecutor(1) as pool:
        with storage_worker.threads.alone_with(made.id):
            removing = pool.submit(retention._remove_everywhere, made.id)
            with pytest.raises(TimeoutError):
                removing.result(0.2)
            assert list_checkpoints(agent.run.durable)
        removing.result(WAIT_SECS)
    assert not list_checkpoints(agent.run.durable)


class OneSilentHost(PeerDirectory):
    """Host `z` of rank 0 has sent a message and sends none any more; nothing may be asked of it."""

    def __init__(self) -> None:
        super().__init__(RUN_ID, SystemClock(), "token")
        self.update_address("z", PeerAddress("192.0.2.1", 9))
        self.leaders, self.silence_secs = ("z", "a"), 0.0
        self.note_message("z")

    def store_of(self, host: str) -> PeerStore:
        raise AssertionError(f"{host} was asked")


def test_the_record_of_a_silent_hosts_rank_is_awaited_in_the_durable_tier(agent: Agent) -> None:
    """The host is cut off, and writes its part there once it misses this one."""
    worker = worker_of(agent, OneSilentHost(), lambda manifest, secs: None)
    late = Made()
    late.add(("w",), np.arange(8))
    with contextlib.closing(worker.threads), ThreadPoolExecutor(1) as pool:
        found = pool.submit(worker._spec, late.id, 1)
        with pytest.raises(TimeoutError):
            found.result(0.5)
        late.write(agent.run.durable)
        assert found.result(WAIT_SECS).arrays


@pytest.mark.parametrize("is_leading", [True, False])
def test_only_the_host_that_leads_removes_images(
    agent: Agent, storage_worker: StorageWorker, made: Made, is_leading: bool
) -> None:
    """Another one could not exclude a commit that reuses them."""
    retention_of(agent, storage_worker, is_leading=is_leading)._remove_everywhere(made.id)
    names = [stored.key.rpartition("/")[2] for stored in agent.run.durable.list("checkpoints")]
    assert names == ([] if is_leading else ["image-00000-of-00001.safetensors"])


def test_nothing_is_removed_while_a_start_here_waits_for_an_attempt_elsewhere(
    agent: Agent, storage_worker: StorageWorker, made: Made
) -> None:
    waiting = retention_of(agent, storage_worker, is_leading=False, attempt=NO_ATTEMPT)
    with pytest.raises(RunBusyError, match="attempt 1, of another host, has ended; try again"):
        waiting._remove_everywhere(made.id)
    assert made.id in list_checkpoints(agent.run.durable)


class SilentTier:
    """A durable tier whose service answers nothing until it is released."""

    def __init__(self) -> None:
        self.calls = 0
        self.is_released = threading.Event()

    @property
    def fleeting(self) -> SilentTier:
        return self

    def put(self, key: str, data: bytes) -> None:
        self.calls += 1
        self.is_released.wait(WAIT_SECS)

    def list(self, prefix: str) -> Iterator[Any]:
        self.is_released.wait(WAIT_SECS)
        return iter(())

    def delete(self, *keys: str) -> None:
        self.is_released.wait(WAIT_SECS)


@pytest.fixture
def silent(agent: Agent) -> Iterator[SilentTier]:
    """The remote tier of the agent; it answers nothing."""
    made = SilentTier()
    store: Any = made
    agent.run.remote = RemoteTarget(
        place="s3://bucket/run",
        store=store,
        checkpoints=RemoteCheckpoints(agent.run.durable, store),
        uploads=SegmentUploads(agent.run.durable.home, store, "a", agent.run.clock),
    )
    yield made
    made.is_released.set()


@pytest.mark.parametrize("is_directory_silent", [False, True])
def test_a_durable_tier_that_does_not_answer_delays_no_renewal_of_the_lease_in_the_other(
    agent: Agent,
    storage_worker: StorageWorker,
    silent: SilentTier,
    is_directory_silent: bool,
) -> None:
    answering = agent.run.durable
    if is_directory_silent:
        assert agent.run.remote is not None
        agent.run.durable, agent.run.remote.store = agent.run.remote.store, agent.run.durable
    leases = Leases(answering.fleeting, RUN_ID)

    async def renew_often() -> None:
        for counter in range(1, 5):
            async with asyncio.timeout(WAIT_SECS / 2):
                await storage_worker.leases.renew(effects.RenewLease(attempt_id(1), 1, counter))
            seen = leases.read(1)
            assert seen is not None
            assert seen.stamp.startswith(f"1.{counter}.")
        silent.is_released.set()
        await storage_worker.leases.release(effects.ReleaseLease(attempt_id(1)))
        assert leases.read(1) is None

    asyncio.run(renew_often())
    # Of the renewals that waited, the last one was replaced by the release.
    assert silent.calls == 1


def test_a_remote_tier_that_does_not_answer_holds_no_release_of_the_lease_for_long(
    agent: Agent,
    storage_worker: StorageWorker,
    silent: SilentTier,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The agent ends after the release, and the thread that writes removes what is older."""
    monkeypatch.setattr("holdfast.host.tiers.attempt_leases.RELEASE_SECS", 0.2)
    leases = Leases(agent.run.durable.fleeting, RUN_ID)

    async def release() -> None:
        await renew(storage_worker, 1)
        async with asyncio.timeout(WAIT_SECS / 2):
            await storage_worker.leases.release(effects.ReleaseLease(attempt_id(1)))

    asyncio.run(release())
    assert leases.read(1) is None
    asyncio.run(renew(storage_worker, 2))
    began_secs = agent.run.clock.monotonic()
    storage_worker.leases.remove_old(attempt_id(3))
    assert agent.run.clock.monotonic() - began_secs < WAIT_SECS / 2
    assert leases.read(2) is None


async def renew(storage_worker: StorageWorker, number: int) -> None:
    await storage_worker.leases.renew(effects.RenewLease(attempt_id(number), 1, 1))
