"""Count the requests to the durable tier: a bucket in memory, an agent in this process.

docs/stores.md has the formulas.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.engine.lifecycle.commit import remove
from holdfast.engine.lifecycle.newest import NewestListing
from holdfast.engine.lifecycle.run import create_run, read_run
from holdfast.engine.reading.view import newest_view_of, view_of
from holdfast.engine.tiers.remote_checkpoints import RemoteCheckpoints
from holdfast.errors import ObjectNotFoundError
from holdfast.format.json_codec import decode
from holdfast.format.names import (
    RUN_FILE,
    CheckpointId,
    attempt_keys,
    manifest_key,
    parse_manifest_key,
)
from holdfast.host.driver.agent_run import AgentRun, RemoteTarget
from holdfast.host.metering.meters import Metering
from holdfast.host.tiers.opening_listing import listing_in
from holdfast.host.wire import protocol
from holdfast.host.wire.config import AgentConfig
from holdfast.observe.events.uploaded_segments import SegmentUploads
from holdfast.policy import (
    preservation_evaluation,
    save_evaluation,
)
from holdfast.policy.save_decision_policy import FixedIntervalPolicy
from holdfast.store.bucket.bucket import BucketStore
from holdfast.store.contract import REMOTE
from holdfast.store.durable import DurableStore
from tests.buckets.object_server import ObjectServer, Plan, Trouble, no_trouble, troubles
from tests.engine.making import memory_folder
from tests.trust.in_process import (
    RUN_ID,
    InProcessHost,
    StepClock,
    Trainer,
    read_checkpoint,
    right_array,
)

PREFIX = "runs/one/"
PAGE = 1000


class BucketOfRun(BucketStore):
    """A bucket beside a folder, in which leases and events lie."""

    def __init__(self, server: ObjectServer, folder: DurableStore) -> None:
        super().__init__(server, PREFIX, StepClock())
        self.home, self.fleeting = folder.home, folder.fleeting  # type: ignore[assignment]


class HostOfBucket(InProcessHost):
    """A host whose durable tier is a bucket."""

    def __init__(
        self, root: Path, server: ObjectServer, remote: ObjectServer | None = None
    ) -> None:
        super().__init__(root)
        self.server = server
        self.remote: BucketStore | None = None
        if remote is not None:
            self.remote = BucketStore(remote, PREFIX, StepClock(), tier=REMOTE)
            self.remote_request = protocol.RemoteRequest(
                place=self.remote.home.location_text,
                save=save_evaluation.encode(FixedIntervalPolicy(1)).decode(),
                preserve=preservation_evaluation.encode(self.preserve).decode(),
            )

    @property
    def bucket(self) -> BucketStore:
        return BucketStore(self.server, PREFIX, StepClock())

    def opened_run(self, config: AgentConfig, metering: Metering) -> AgentRun:
        run = super().opened_run(config, metering)
        run.durable = BucketOfRun(self.server, run.durable)
        if self.remote is not None:
            # Events are uploaded by time, and counted in tests/observe/events.
            uploads = SegmentUploads(run.durable.home, self.remote, config.host, self.clock)
            checkpoints = RemoteCheckpoints(run.durable, self.remote)
            run.remote = RemoteTarget(
                place=self.remote.home.location_text,
                store=self.remote,
                checkpoints=checkpoints,
                uploads=uploads,
            )
        return run

    def open_run(self) -> None:
        self.run.mkdir(parents=True, exist_ok=True)
        if PREFIX + RUN_FILE not in self.server.objects:
            create_run(self.bucket, PREFIX, RUN_ID, self.clock.now())


@contextlib.contextmanager
def host_of(server: ObjectServer, remote: ObjectServer | None = None) -> Iterator[HostOfBucket]:
    with memory_folder() as folder:
        host = HostOfBucket(Path(folder), server, remote)
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
    found = (parse_manifest_key(key.removeprefix(PREFIX)) for key in server.objects)
    return sorted(f for f in found if f is not None)


@pytest.mark.parametrize("ranks", [1, 64])
def test_a_checkpoint_takes_so_many_requests(ranks: int) -> None:
    server = ObjectServer(StepClock())
    with host_of(server) as host:
        trainer = host.attach(ranks)
        for step in range(1, 6):
            before, counted = Counter(server.requests), host.agent.run.durable.request_count
            host.save(trainer, step)
            host.settle()
            found = server.requests - before
            # What `progress` records, and a report shows.
            assert host.agent.run.durable.request_count == (counted or 0) + found.total()
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
        before = Counter(server.requests)
        newest = newest_view_of([host.bucket], host.bucket)
        newest.sources(newest.timeline[-1])
        found_newest = server.requests - before
    assert array.tobytes() == right_array(one).tobytes()
    # Both listings have one page; the attempt's record, the manifest, the records.
    assert found == {"list_page": 2, "get": 1 + 1 + 8}
    # The attempts, the manifests, the objects of the newest checkpoint; and the same records.
    assert found_newest == {"list_page": 3, "get": 1 + 1 + 8}


def test_the_first_commit_of_an_attempt_checks_all_records() -> None:
    server, requests = ObjectServer(StepClock()), []
    with host_of(server) as host:
        for attempt in (1, 2, 3):
            trainer = host.attach()
            if attempt == 3:
                damage = PREFIX + attempt_keys(1)[1]
                data, version = server.objects[damage]
                server.objects[damage] = data.replace(b"host", b"hose"), version
            for step in (1, 2):
                before = Counter(server.requests)
                host.save(trainer, 10 * attempt + step)
                host.settle()
                requests.append(server.requests - before)
            host.detach(trainer)
        # The copy of a record is damaged, which nothing reads before.
        good = server.objects[PREFIX + attempt_keys(1)[0]][0]
        assert server.objects[damage][0] == good
    *_, first, second = requests
    # All records and their copies, the damaged one twice, the run's record, the own record; the
    # attempts are listed. And the leases, which are in a folder here.
    assert first - second == {"get": 2 * 3 + 1 + 1 + 1, "list_page": 1, "put": 1}


def fill(server: ObjectServer, newest: CheckpointId) -> None:
    """Give the run a checkpoint of each earlier step."""
    keys = [key for key in server.objects if f"/{newest}/" in key]
    manifest = server.objects[PREFIX + manifest_key(newest)][0]
    for step in range(1, newest.step):
        one = CheckpointId(step, newest.attempt)
        for key in keys:
            server.put(key.replace(str(newest), str(one)), [server.objects[key][0]])
        server.put(PREFIX + manifest_key(one), [manifest])


def listing_of_agent(host: HostOfBucket, trainer: Trainer) -> NewestListing:
    """The listing that a trainer gets from its agent."""
    assert host.service is not None
    request = protocol.WantListing(attempt=trainer.attempt)
    answer = host.call(host.service.listing(request, trainer.process.pid))
    return listing_in(decode(msgspec.json.encode(answer), protocol.DurableListing))


@pytest.mark.parametrize("ranks", [1, 8])
def test_opening_and_restoring_takes_12_requests_with_5000_checkpoints(ranks: int) -> None:
    server, count = ObjectServer(StepClock()), 5000 if ranks == 1 else 1100
    with host_of(server) as host:
        trainer = host.attach(ranks)
        newest = host.save(trainer, count)
        host.settle()
        host.detach(trainer)
        host.crash_agent()
        fill(server, newest)
        before = Counter(server.requests)
        # As a trainer opens it: it reads the run's record, and starts the agent.
        read_run(host.bucket, PREFIX)
        host.start_agent()
        again = host.attach(ranks)
        host.settle()
        bucket = host.bucket
        view = newest_view_of([bucket], bucket, listing_of_agent(host, again))
        assert view.timeline[-1] == newest
        assert view.sources(newest).id == newest
        assert again.place.origin == newest
        found = server.requests - before
    assert found == {
        # The attempts, the newest manifests, and the objects of the newest checkpoint.
        "list_page": 3,
        # The run's record by the trainer, and before the attempt is begun; the record of the
        # previous attempt; the manifest and the part records.
        "get": 2 + 1 + 1 + ranks,
        # The attempt's record, and its copy.
        "create": 1,
        "put": 1,
    }
    # And the attempt's lease, twice, which is in a folder here.
    assert found.total() + 2 == 11 + ranks
    assert ranks > 1 or found.total() + 2 <= 12


def test_opening_two_tiers_takes_as_many_requests_with_5000_checkpoints_as_with_5() -> None:
    found = [requests_of_two_tiers(count) for count in (5, 5000)]
    assert found[0] == found[1]
    of_directory, of_remote = found[0]
    assert of_directory == {
        # The attempts, the newest manifests, the objects of the newest checkpoint; and the attempts
        # before the new one begins, which the other tier may lack.
        "list_page": 4,
        # The run's record by the trainer, and before the attempt is begun; the record of the
        # previous attempt, and before the new one begins again, and its copy.
        "get": 2 + 1 + 3,
        # The attempt's record, and its copy.
        "create": 1,
        "put": 1,
    }
    assert of_remote == {
        # The same for the start; the trainer lists the first three again.
        "list_page": 4 + 3,
        # The run's record by the agent; the records as in the directory, and that of the previous
        # attempt by the trainer; the manifest and the part record; the lease of that attempt.
        "get": 1 + 1 + 3 + 2 + 1,
        "create": 1,
        # The copy of the attempt's record; the lease, twice.
        "put": 1 + 2,
    }


async def leases_written(host: InProcessHost) -> None:
    """Wait until the leases are written, as far as they were due, in both tiers."""
    worker = host.agent.storage_worker
    await asyncio.wait(worker.leases._call_leases(lambda writer: None))


def requests_of_two_tiers(count: int) -> tuple[Counter[str], Counter[str]]:
    """The requests to both tiers until the records of the newest checkpoint are read.

    The remote tier alone has it.
    """
    server, remote = ObjectServer(StepClock()), ObjectServer(StepClock())
    with host_of(server) as host:
        trainer = host.attach()
        newest = host.save(trainer, count)
        host.settle()
        host.detach(trainer)
    fill(server, newest)
    for key, (data, _) in server.objects.items():
        remote.put(key, [data])
    server.delete([key for key in server.objects if str(newest) in key])
    before = Counter(server.requests), Counter(remote.requests)
    with host_of(server, remote) as host:
        read_run(host.bucket, PREFIX)
        again = host.attach()
        host.settle()
        assert host.service is not None
        host.call(leases_written(host))
        bucket, other = host.bucket, host.remote
        assert other is not None
        view = newest_view_of([bucket, other], bucket, listing_of_agent(host, again), remote=other)
        assert view.timeline[-1] == newest
        assert again.place.origin == newest
        assert view.timeline[-1] == newest
        assert view.sources(newest).id == newest
        return server.requests - before[0], remote.requests - before[1]


def test_a_live_attempt_goes_on_while_the_attempts_of_its_remote_tier_are_damaged() -> None:
    server, remote = ObjectServer(StepClock()), ObjectServer(StepClock())
    with host_of(server) as host:
        host.detach(host.attach())
    for key, (data, _) in server.objects.items():
        remote.put(key, [data])
    with host_of(server, remote) as host:
        trainer = host.attach()
        host.settle()
        host.crash_agent()
        for key in attempt_keys(trainer.attempt.number):
            remote.put(PREFIX + key, [b"{}"])
        host.start_agent()
        # The restarted agent lists both tiers for the attempt that it finds.
        host.join(trainer, attempt=trainer.attempt)
        newest = host.save(trainer, 1)
        host.settle()
        assert stored(server) == [newest]


def test_a_trainer_that_has_saved_is_given_no_listing_of_its_opening() -> None:
    server = ObjectServer(StepClock())
    with host_of(server) as host:
        trainer = host.attach()
        host.save(trainer, 1)
        host.settle()
        assert listing_of_agent(host, trainer).numbers == ()
        host.detach(trainer)
        again = host.attach()
        assert listing_of_agent(host, again).checkpoints.keys() == {
            CheckpointId(1, trainer.attempt)
        }
        host.seal(again, CheckpointId(2, again.attempt))
        host.tell_sealed(again, CheckpointId(2, again.attempt))
        assert listing_of_agent(host, again).numbers == ()


def test_a_reader_of_a_stale_listing_does_not_get_a_deleted_checkpoint() -> None:
    server = ObjectServer(StepClock())
    with host_of(server) as host:
        trainer = host.attach()
        for step in (1, 2):
            host.save(trainer, step)
            host.settle()
        host.detach(trainer)
        host.crash_agent()
        host.start_agent()
        again, bucket = host.attach(), host.bucket
        listing = listing_of_agent(host, again)
        # Another host deletes the newest one meanwhile.
        newest = CheckpointId(2, trainer.attempt)
        remove(bucket, newest, listing.checkpoints[newest])
        view = newest_view_of([bucket], bucket, listing)
        with pytest.raises(ObjectNotFoundError):
            view.sources(newest)
        assert view.newest_sound() == CheckpointId(1, trainer.attempt)


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
        assert again.place.origin == CheckpointId(5, trainer.attempt)
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
            self.committed.append(notice.id.step)


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
            assert origin.step >= committed[-1], count
            step = origin.step + 1
            host.save(trainer, step)
            host.settle()
            view = view_of([host.bucket], host.bucket)
            assert [one.step for one in view.timeline] == [origin.step, step], count
            check_readable(host)
            # Nothing is left of other checkpoints.
            folders = {key.split("/")[3] for key in server.objects if "/checkpoints/" in key}
            assert folders - {"manifests"} == {str(one) for one in view.timeline}, count
            assert stored(server) == [*view.timeline], count


def test_an_upload_counts_its_parts_its_begin_and_its_end() -> None:
    server = ObjectServer(StepClock())
    store = BucketStore(server, PREFIX, StepClock(), part_size_bytes=100)
    store.put("x/a", bytes(950))
    assert store.request_count == 10 + 2
    store.put("x/b", bytes(90))
    assert len(list(store.list("x"))) == 2
    assert store.request_count == 12 + 1 + 1
