"""Count the requests to the durable tier: a bucket in memory, an agent in this process.

docs/stores.md has the formulas.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.agent import protocol
from holdfast.agent.config import AgentConfig
from holdfast.agent.state import AgentState, open_state
from holdfast.engine.lifecycle.run import create_run
from holdfast.engine.reading.view import view_of
from holdfast.format.names import CheckpointId, parse_checkpoint_name
from holdfast.store.bucket import BucketStore
from holdfast.store.durable import DurableStore
from holdfast.testing.object_server import ObjectServer, Plan, Trouble, no_trouble, troubles
from tests.engine.making import memory_folder
from tests.trust.in_process import RUN_ID, InProcessHost, StepClock, read_checkpoint, right_array

PREFIX = "runs/one/"
PAGE = 1000


class BucketOfRun(BucketStore):
    """A bucket beside a folder, in which leases and events lie."""

    def __init__(self, server: ObjectServer, folder: DurableStore) -> None:
        super().__init__(server, PREFIX, StepClock())
        self.home, self.fleeting = folder.home, folder.fleeting  # type: ignore[assignment]


class HostOfBucket(InProcessHost):
    """A host whose durable tier is a bucket."""

    def __init__(self, root: Path, server: ObjectServer) -> None:
        super().__init__(root)
        self.server = server

    @property
    def bucket(self) -> BucketStore:
        return BucketStore(self.server, PREFIX, StepClock())

    def opened_state(self, config: AgentConfig) -> AgentState:
        state = open_state(config, self.clock, self.files)
        state.durable = BucketOfRun(self.server, state.durable)
        return state

    def open_run(self) -> None:
        self.run.mkdir(parents=True, exist_ok=True)
        create_run(self.bucket, PREFIX, RUN_ID, self.clock.now())


@contextlib.contextmanager
def host_of(server: ObjectServer) -> Iterator[HostOfBucket]:
    with memory_folder() as folder:
        host = HostOfBucket(Path(folder), server)
        host.start_agent()
        try:
            yield host
        finally:
            host.close()


def check_readable(host: HostOfBucket) -> None:
    """Check that every checkpoint of the bucket has the right bytes."""
    view = view_of([host.bucket], host.bucket)
    for checkpoint in view.timeline:
        one, array = read_checkpoint(view.sources(checkpoint))
        assert array.tobytes() == right_array(one).tobytes()


def stored(server: ObjectServer) -> list[CheckpointId]:
    """The checkpoints that have a manifest."""
    names = (key.removeprefix(f"{PREFIX}checkpoints/") for key in server.objects)
    found = (
        parse_checkpoint_name(n.partition("/")[0]) for n in names if n.endswith("/manifest.json")
    )
    return sorted(f for f in found if f is not None)


@pytest.mark.parametrize("ranks", [1, 64])
def test_a_checkpoint_takes_so_many_requests(ranks: int) -> None:
    server = ObjectServer(StepClock())
    with host_of(server) as host:
        trainer = host.attach(ranks)
        for step in range(1, 6):
            before = Counter(server.requests)
            host.save(trainer, step)
            host.settle()
            found = server.requests - before
        assert [one.step for one in stored(server)] == [4, 5]
    assert found == {
        # An image and a record of each rank.
        "put": 2 * ranks,
        # The records that the manifest names, and the run's record.
        "get": ranks + 1,
        # The manifest.
        "create": 1,
        # The attempts: before the bytes, the manifest, the decision and the deletion. And once the
        # checkpoints, of which three have 3 * (2 * 64 + 1) objects: one page.
        "list_page": 5,
        # The manifest, the records, the images.
        "delete": 3,
    }
    assert found.total() == 3 * ranks + 10


@pytest.mark.parametrize("count", [1, 40])
def test_a_restore_takes_so_many_requests(count: int) -> None:
    server = ObjectServer(StepClock())
    with host_of(server) as host:
        trainer = host.attach(8)
        for step in range(1, count + 1):
            host.save(trainer, step)
            host.settle()
        before = Counter(server.requests)
        view = view_of([host.bucket], host.bucket)
        sources = view.sources(view.timeline[-1])
        found = server.requests - before
        one, array = read_checkpoint(sources)
    assert array.tobytes() == right_array(one).tobytes()
    # Both listings have one page; the attempt's record, the manifest, the records.
    assert found == {"list_page": 2, "get": 1 + 1 + 8}


def test_an_opening_takes_so_many_requests() -> None:
    server, count = ObjectServer(StepClock()), 700
    with host_of(server) as host:
        trainer = host.attach(1)
        newest = host.save(trainer, count)
        host.settle()
        host.detach(trainer)
        host.crash_agent()
        keys = [key for key in server.objects if str(newest) in key]
        for step in range(1, count):
            for key in keys:
                name = key.replace(str(newest), str(CheckpointId(step, 1)))
                server.put(name, [server.objects[key][0]])
        before = Counter(server.requests)
        host.start_agent()
        again = host.attach(1)
        host.settle()
        view = view_of([host.bucket], host.bucket)
        assert view.sources(view.timeline[-1]).id == newest
        assert again.place.origin == (newest.step, newest.attempt)
        found = server.requests - before
    pages = -(-count * 3 // PAGE)
    assert found == {
        # Listed by the start, by its leader, for the recovery and for the restore.
        "list_page": 4 * pages + 6,
        "get": 13,
        # The run's record, which exists, and the attempt's; and the copy of that.
        "create": 2,
        "put": 1,
    }


@pytest.mark.parametrize("seed", range(5))
def test_saves_and_retention_over_a_bucket_in_trouble_lose_nothing(seed: int) -> None:
    server = ObjectServer(StepClock(), troubles(seed))
    with host_of(server) as host:
        trainer = host.attach(2)
        for step in range(1, 6):
            host.save(trainer, step)
            host.settle()
        assert [one.step for one in stored(server)] == [4, 5]
        check_readable(host)
        host.detach(trainer)
        host.crash_agent()
        host.start_agent()
        again = host.attach(2)
        assert again.place.origin == (5, 1)
    assert not server.uploads


class Death:
    """A plan by which no request after the first `count` has an effect; the last has no answer."""

    def __init__(self, count: int, *, is_done: bool) -> None:
        self._left = count
        self._is_done = is_done

    def __call__(self, request: str, key: str) -> Trouble | None:
        self._left -= 1
        return Trouble(is_done=self._is_done and self._left == -1) if self._left < 0 else None


class Told(HostOfBucket):
    """A host that records which steps its trainers were notified of as committed."""

    def __init__(self, root: Path, server: ObjectServer) -> None:
        super().__init__(root, server)
        self.committed: list[int] = []

    def posted(self, notice: protocol.Notice) -> None:
        if notice.kind == "committed" and notice.id is not None:
            self.committed.append(notice.id[0])


def save_until_death(server: ObjectServer, plan: Plan) -> list[int]:
    """Save four steps, keep two; return the committed steps. The host and its RAM are lost."""
    with memory_folder() as folder:
        host = Told(Path(folder), server)
        host.start_agent()
        try:
            trainer = host.attach()
            host.save(trainer, 1)
            host.settle()
            server.plan = plan
            for step in (2, 3, 4):
                host.save(trainer, step)
                host.settle()
        finally:
            host.close()
    return host.committed


@pytest.mark.parametrize("is_done", [False, True])
def test_a_death_after_any_request_loses_nothing_that_was_acknowledged(is_done: bool) -> None:
    counting = Death(1 << 30, is_done=False)
    assert save_until_death(ObjectServer(StepClock()), counting) == [1, 2, 3, 4]
    request_count = (1 << 30) - counting._left
    assert request_count > 30
    for count in range(0, request_count, 2):
        server = ObjectServer(StepClock())
        committed = save_until_death(server, Death(count, is_done=is_done))
        server.plan = no_trouble
        with host_of(server) as host:
            check_readable(host)
            trainer = host.attach()
            origin = trainer.place.origin
            assert origin is not None, count
            assert origin[0] >= committed[-1], count
            step = origin[0] + 1
            host.save(trainer, step)
            host.settle()
            view = view_of([host.bucket], host.bucket)
            assert [one.step for one in view.timeline] == [origin[0], step], count
            check_readable(host)
            # Nothing is left of other checkpoints.
            folders = {key.split("/")[3] for key in server.objects if "/checkpoints/" in key}
            assert folders == {str(one) for one in view.timeline}, count
