"""The remote tier of one agent in this process, with storage that fails on purpose."""

from __future__ import annotations

import asyncio
import errno
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.coordination.leader.mirror import PAUSE_SECS_MAX
from holdfast.engine.lifecycle.attempts import AttemptStart, begin_attempt
from holdfast.engine.lifecycle.catalog import list_checkpoints, read_manifests
from holdfast.engine.lifecycle.commit import remove
from holdfast.engine.lifecycle.run import create_run
from holdfast.engine.reading.sources import find_sources
from holdfast.engine.tiers.checkpoint_copy import copy_part_once
from holdfast.engine.tiers.remote_checkpoints import RemoteCheckpoints
from holdfast.engine.tiers.shared_attempts import share_attempts
from holdfast.errors import NotARunError
from holdfast.format.names import CheckpointId
from holdfast.host.driver.agent_run import RemoteTarget
from holdfast.host.tiers import mirror_worker
from holdfast.host.tiers.mirroring import Mirroring
from holdfast.host.wire.protocol import Delete, RemoteRequest, Uploaded, Vouched
from holdfast.observe.events.schema import RemoteDeleted
from holdfast.observe.events.uploaded_segments import SegmentUploads
from holdfast.policy import preservation_evaluation, save_evaluation
from holdfast.policy.preservation_policy import LatestN
from holdfast.policy.save_decision_policy import (
    ContinuousCheckpointingPolicy,
    FixedIntervalPolicy,
    SaveDecisionPolicy,
    SpecificStepsPolicy,
)
from holdfast.store.contract import StoredObject
from holdfast.store.disk import DiskStore
from tests.attempts import attempt_id, checkpoint_id
from tests.engine.making import memory_folder
from tests.hosts import events, wait_until
from tests.manifests import manifest_path
from tests.store.failing_files import CHANGES, FailingFileSystem, FailurePlan, Fault
from tests.trust.in_process import (
    RUN_ID,
    InProcessHost,
    Trainer,
    in_process_host,
    read_checkpoint,
    right_array,
)

NO_ROOM = Fault(errno=errno.ENOSPC)
DENIED = Fault(errno=errno.EIO)


class Rig:
    """An agent, its trainer, and a remote tier whose file system fails by `plan`."""

    def __init__(self, root: Path, host: InProcessHost, trainer: Trainer) -> None:
        self.host = host
        self.trainer = trainer
        self.files = FailingFileSystem()
        self.place = root / "remote"
        self.place.mkdir()
        self.remote = DiskStore(self.place, host.clock, self.files, tier="remote")
        create_run(self.remote, str(self.place), RUN_ID, host.clock.now())
        share_attempts(host.agent.run.durable, self.remote)
        self.use(FixedIntervalPolicy(1))

    @property
    def mirroring(self) -> Mirroring:
        assert self.host.service is not None
        return self.host.agent.mirroring

    def use(self, policy: SaveDecisionPolicy, keep: int = 2) -> None:
        run = self.host.agent.run
        run.remote = RemoteTarget(
            place=str(self.place),
            store=self.remote,
            checkpoints=RemoteCheckpoints(run.durable, self.remote),
            uploads=SegmentUploads(run.durable.home, self.remote, "host-a", run.clock),
            save=policy,
            preserve=LatestN(keep),
        )
        self.act()

    def act(self) -> None:
        """Lets the agent choose and copy, after its longest pause."""
        self.host.clock.sleep(PAUSE_SECS_MAX)
        self.host.call(self.mirroring.act())
        self.host.settle()

    def save(self, *steps: int) -> None:
        for step in steps:
            self.host.save(self.trainer, step)
            self.host.settle()

    def fail(self, plan: FailurePlan | None) -> None:
        self.files.plan = plan or FailurePlan(None)

    def steps(self, store: DiskStore | None = None) -> list[int]:
        listed = list_checkpoints(store or self.remote)
        return [c.step for c, listing in listed.items() if listing.is_committed]

    def check(self) -> None:
        """Each checkpoint that the remote tier shows is whole and right."""
        listings = {"remote": list_checkpoints(self.remote)}
        for checkpoint, listing in listings["remote"].items():
            if listing.is_committed:
                found, array = read_checkpoint(find_sources(checkpoint, [self.remote], listings))
                assert found == checkpoint
                assert array.tobytes() == right_array(checkpoint).tobytes()

    def events(self, name: str, count: int = 1) -> list[dict]:
        """The events of that name, once as many are written."""
        wait_until(lambda: len(events(self.host.run, name)) >= count)
        return events(self.host.run, name)


@pytest.fixture
def rig() -> Iterator[Rig]:
    with memory_folder() as root, in_process_host(Path(root)) as host:
        host.start_agent()
        yield Rig(Path(root), host, host.attach())


@pytest.mark.parametrize("is_live", [False, True])
def test_a_start_uses_a_remote_tier_that_was_deleted_and_made_anew(is_live: bool) -> None:
    with memory_folder() as root, in_process_host(Path(root)) as host:
        host.start_agent()
        place = Path(root, "remote")

        def create() -> DiskStore:
            place.mkdir()
            store = DiskStore(place, host.clock, tier="remote")
            create_run(store, str(place), RUN_ID, host.clock.now())
            share_attempts(host.agent.run.durable, store)
            return store

        create()
        host.remote_request = RemoteRequest(
            place=str(place),
            save=save_evaluation.encode(FixedIntervalPolicy(1)).decode(),
            preserve=preservation_evaluation.encode(LatestN(2)).decode(),
        )
        trainer = host.attach()
        host.save(trainer, 1)
        host.settle()
        if not is_live:
            host.kill_trainer(trainer)
            host.settle()
        shutil.rmtree(place)
        anew = create()
        trainer = host.attach(takeover=is_live)
        host.save(trainer, 2)
        host.settle()
        host.clock.sleep(PAUSE_SECS_MAX)
        host.call(host.agent.mirroring.act())
        host.settle()
        assert [
            c.step for c, listing in list_checkpoints(anew).items() if listing.is_committed
        ] == [2]


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_start_from_the_remote_tier_finishes_a_copy_that_lacks_its_commit(is_whole: bool) -> None:
    with memory_folder() as root, in_process_host(Path(root)) as host:
        place = Path(root, "remote")
        place.mkdir()
        remote = DiskStore(place, host.clock, tier="remote")
        create_run(remote, str(place), RUN_ID, host.clock.now())
        host.remote_request = RemoteRequest(
            place=str(place),
            save=save_evaluation.encode(FixedIntervalPolicy(1)).decode(),
            preserve=preservation_evaluation.encode(LatestN(2)).decode(),
        )
        host.start_agent()
        trainer = host.attach()
        for step in (1, 2):
            host.save(trainer, step)
            host.settle()
            host.clock.sleep(PAUSE_SECS_MAX)
            host.call(host.agent.mirroring.act())
            host.settle()
        manifest_path(place, 2).unlink()
        if not is_whole:
            next(place.glob("checkpoints/000000002.*/part-*")).unlink()
        host.kill_trainer(trainer)
        host.crash_agent()
        # The machine is lost.
        for lost in (host.run, host.folder):
            shutil.rmtree(lost)
            lost.mkdir(mode=0o700)
        host.open_run()
        share_attempts(DiskStore(host.run, host.clock), remote)
        host.start_agent()
        assert host.attach().place.origin.step == (2 if is_whole else 1)
        assert manifest_path(place, 2).exists() == is_whole


def test_the_newest_vouched_checkpoint_stays_in_the_remote_tier(rig: Rig) -> None:
    remote = rig.host.agent.run.remote
    assert remote is not None
    remote.preserve, remote.is_guarded = LatestN(1), True
    for step in range(4):
        rig.save(step)
        rig.act()
    # Nothing is removed before it is known what is vouched for.
    assert rig.steps() == [0, 1, 2, 3]
    assert rig.host.service is not None
    rig.host.call(rig.host.service.vouched(Vouched(step=1), 0))
    for step in (4, 5):
        rig.save(step)
        rig.act()
    # 1 is vouched for, 2 is next, and 5 is the newest.
    assert rig.steps() == [1, 2, 5]


def test_each_failing_operation_leaves_no_half_checkpoint_and_the_next_try_succeeds(
    rig: Rig,
) -> None:
    rig.save(1)
    counting = FailurePlan(None, operations=CHANGES)
    rig.fail(counting)
    rig.act()
    assert rig.steps() == [1]
    assert counting.seen > 5
    for number in range(1, counting.seen + 1):
        for is_done in (False, True):
            step = rig.steps()[-1] + 1
            rig.fail(
                FailurePlan(Fault(errno=errno.EIO, is_done=is_done), at=number, operations=CHANGES)
            )
            rig.save(step)
            rig.act()
            rig.check()
            rig.fail(None)
            rig.act()
            assert rig.steps()[-1] == step, (number, is_done)
            rig.check()


def test_a_remote_tier_that_fails_is_reported_once_and_gets_the_newest_one_later(
    rig: Rig,
) -> None:
    rig.fail(FailurePlan(NO_ROOM, until=float("inf"), operations={"write"}))
    for step in (1, 2, 3):
        rig.save(step)
        rig.act()
    assert rig.steps() == []
    assert rig.steps(rig.host.agent.run.durable) == [2, 3]
    assert [event["step"] for event in rig.events("upload_failed")] == [1]
    status = rig.mirroring.upload_status()
    assert status is not None
    assert "space" in status.problem
    assert status.is_behind
    rig.fail(None)
    rig.act()
    assert rig.steps() == [3]
    assert rig.mirroring.upload_status().problem == ""
    rig.fail(FailurePlan(NO_ROOM, until=float("inf"), operations={"write"}))
    rig.save(4)
    rig.act()
    assert [event["step"] for event in rig.events("upload_failed", 2)] == [1, 4]


class SlowRemote(DiskStore):
    """A remote tier whose next listing waits for `go`."""

    def wait_in_listing(self) -> None:
        self.reached, self.go = threading.Event(), threading.Event()

    def list_some(self, prefix: str, **range_of: Any) -> list[StoredObject]:
        if hasattr(self, "go") and not self.reached.is_set():
            self.reached.set()
            assert self.go.wait(240)
        return super().list_some(prefix, **range_of)


@pytest.fixture
def slow(rig: Rig) -> SlowRemote:
    """The remote tier, which has steps 1 and 2, as the directory does; its next listing waits."""
    slow = SlowRemote(rig.place, rig.host.clock, rig.files, tier="remote")
    rig.remote = slow
    rig.use(FixedIntervalPolicy(1))
    for step in (1, 2):
        rig.save(step)
        rig.act()
    assert rig.steps() == [1, 2]
    slow.wait_in_listing()
    return slow


def act_while_listing(rig: Rig, slow: SlowRemote, meanwhile: Callable[[], None]) -> None:
    """Let the agent read both tiers again, and do something while it lists the remote one."""

    async def act() -> None:
        acting = asyncio.create_task(rig.mirroring.act())
        await asyncio.to_thread(slow.reached.wait, 20)
        meanwhile()
        slow.go.set()
        await acting

    rig.mirroring.forget_timeline()
    rig.host.call(act())


def test_a_checkpoint_committed_while_the_tiers_are_listed_is_the_newest_one(
    rig: Rig, slow: SlowRemote
) -> None:
    (manifest,) = read_manifests(rig.host.agent.run.durable, [CheckpointId(2, rig.trainer.attempt)])
    later = msgspec.structs.replace(manifest, step=3)
    act_while_listing(rig, slow, lambda: rig.mirroring.on_committed(later))
    assert rig.mirroring.awaited_place == str(rig.place)


def test_preservation_spares_a_checkpoint_until_it_is_uploaded(rig: Rig) -> None:
    rig.use(SpecificStepsPolicy([1]))
    rig.fail(FailurePlan(DENIED, until=float("inf"), operations={"write"}))
    rig.save(1, 2, 3, 4)
    rig.act()
    assert rig.steps(rig.host.agent.run.durable) == [1, 3, 4]
    rig.fail(None)
    rig.act()
    rig.act()
    assert rig.steps() == [1]
    assert rig.steps(rig.host.agent.run.durable) == [3, 4]


def test_parts_are_read_from_ram_and_where_that_is_gone_from_the_directory(rig: Rig) -> None:
    rig.save(1)
    ram = rig.host.agent.ram.store
    (checkpoint,) = list_checkpoints(ram)
    image = next(rig.host.run.glob("checkpoints/*/image-*"))
    right = image.read_bytes()
    # The first one is read from RAM, so bad bytes on the disk do not matter.
    image.write_bytes(bytes(len(right)))
    rig.act()
    assert rig.steps() == [1]
    rig.check()
    rig.save(2)
    newest = CheckpointId(2, checkpoint.attempt)
    remove(ram, newest, list_checkpoints(ram)[newest])
    rig.act()
    assert rig.steps() == [1, 2]
    rig.check()


def test_a_deleted_checkpoint_is_not_uploaded_and_is_removed_from_both_tiers(rig: Rig) -> None:
    rig.save(1)
    rig.act()
    rig.fail(FailurePlan(DENIED, until=float("inf"), operations={"write"}))
    rig.save(2)
    rig.act()
    rig.fail(None)
    rig.host.delete(2)
    rig.act()
    rig.act()
    assert rig.steps() == [1]
    rig.host.delete(1)
    rig.act()
    assert rig.steps() == []
    assert [(e["step"], e["reason"]) for e in rig.events("remote_deleted")] == [(1, "asked")]


def test_an_attempt_that_the_remote_tier_alone_knows_fences_this_one(rig: Rig) -> None:
    rig.save(1)
    rig.act()
    start = AttemptStart(
        run_id=RUN_ID,
        origin=checkpoint_id(1),
        host="elsewhere",
        pid=1,
        time=rig.host.clock.now(),
    )
    assert begin_attempt(rig.remote, attempt_id(2), start) is not None
    rig.save(2)
    rig.act()
    assert rig.steps() == [1]
    assert [event["by_attempt"] for event in rig.events("fenced")] == [2]
    assert rig.host.agent.trainers.group is None


def test_attempts_of_another_run_at_the_place_of_the_remote_tier_fence_nothing(rig: Rig) -> None:
    rig.use(SpecificStepsPolicy([1]))
    record = rig.place / "holdfast.json"
    record.unlink()
    other = "f" * 32
    create_run(rig.remote, str(rig.place), other, rig.host.clock.now())
    for number in (2, 3):
        start = AttemptStart(
            run_id=other, origin=None, host="elsewhere", pid=1, time=rig.host.clock.now()
        )
        assert begin_attempt(rig.remote, attempt_id(number), start) is not None
    for _ in range(3):
        rig.host.call(rig.host.agent.takeovers.look())
        rig.host.settle()
    assert rig.host.agent.trainers.group is not None


def test_an_attempt_that_began_in_the_remote_tier_fences_one_that_uploads_nothing(rig: Rig) -> None:
    rig.use(SpecificStepsPolicy([1]))
    rig.save(1)
    rig.act()

    def begin(number: int) -> None:
        start = AttemptStart(
            run_id=RUN_ID,
            origin=checkpoint_id(1),
            host="elsewhere",
            pid=1,
            time=rig.host.clock.now(),
        )
        assert begin_attempt(rig.remote, attempt_id(number), start) is not None

    rig.host.call(rig.host.agent.takeovers.look())
    begin(2)
    # It may be this host's own, which is recorded there first.
    rig.host.call(rig.host.agent.takeovers.look())
    rig.host.settle()
    assert rig.host.agent.trainers.group is not None
    rig.host.call(rig.host.agent.takeovers.look())
    rig.host.settle()
    assert rig.host.agent.trainers.group is None
    assert [event["by_attempt"] for event in rig.events("fenced")] == [2]


def test_a_time_based_policy_counts_from_the_last_uploaded_checkpoint(rig: Rig) -> None:
    rig.use(ContinuousCheckpointingPolicy(minimum_interval_secs=3600))
    rig.save(1)
    rig.act()
    rig.save(2, 3)
    rig.act()
    assert rig.steps() == [1]
    # No other commit is needed for the newest one to become due.
    rig.host.clock.sleep(3600)
    rig.act()
    assert rig.steps() == [1, 3]


def test_each_tier_keeps_by_its_own_policy(rig: Rig) -> None:
    rig.use(FixedIntervalPolicy(3), keep=2)
    for step in range(11):
        rig.save(step)
        rig.act()
    assert rig.steps() == [6, 9]
    assert rig.steps(rig.host.agent.run.durable) == [9, 10]
    rig.check()
    assert [event["step"] for event in rig.events("uploaded", 4)] == [0, 3, 6, 9]
    dropped = [(event["step"], event["reason"]) for event in rig.events("remote_deleted", 2)]
    assert dropped == [(0, "preservation"), (3, "preservation")]


def test_a_step_that_the_remote_tier_alone_has_is_removed_from_it(rig: Rig) -> None:
    rig.use(FixedIntervalPolicy(1), keep=9)
    for step in (1, 2, 3, 4):
        rig.save(step)
        rig.act()
    assert (rig.steps(rig.host.agent.run.durable), rig.steps()) == ([3, 4], [1, 2, 3, 4])
    delete(rig, CheckpointId(1, rig.trainer.attempt))
    assert rig.steps() == [2, 3, 4]


def delete(rig: Rig, checkpoint: CheckpointId) -> None:
    """Delete a checkpoint as `holdfast rm` asks the agent to."""
    assert rig.host.service is not None
    request = Delete(ids=(checkpoint,), by_user=True)
    rig.host.call(rig.host._while_it_acts(rig.host.service.delete(request, 0)))


def test_nothing_is_removed_from_a_run_that_has_replaced_the_remote_tier(rig: Rig) -> None:
    for step in (1, 2):
        rig.save(step)
        rig.act()
    # As it is where another run with steps of the same numbers was copied to the place.
    (rig.place / "holdfast.json").unlink()
    create_run(rig.remote, str(rig.place), "f" * 32, rig.host.clock.now())
    delete(rig, CheckpointId(1, rig.trainer.attempt))
    assert (rig.steps(rig.host.agent.run.durable), rig.steps()) == ([2], [1, 2])


@pytest.mark.parametrize("harm", ["", "deleted", "replaced by another run"])
def test_events_are_uploaded_to_the_remote_tier_unless_it_is_gone(rig: Rig, harm: str) -> None:
    run = rig.host.agent.run
    run.remote = None
    run.use_remote(str(rig.place))
    if harm:
        shutil.rmtree(rig.place)
    if harm == "replaced by another run":
        rig.place.mkdir()
        other = DiskStore(rig.place, rig.host.clock)
        create_run(other, str(rig.place), "f" * 32, rig.host.clock.now())
    run.events.write(RemoteDeleted(step=1, attempt=1, reason="asked"))
    run.events.close()
    assert (rig.place / "events").exists() == (not harm)


def noticed(rig: Rig) -> list[int]:
    """The steps that trainers were notified of as copied."""
    board = rig.host.agent.trainers.notices
    notices = rig.host.call(board.after(max(board.count - 1000, 0))).notices if board.count else ()
    return [notice.id.step for notice in notices if notice.kind == "uploaded" and notice.id]


def test_trainers_are_notified_of_each_copy_and_get_the_newest_one_if_they_ask_for_it(
    rig: Rig,
) -> None:
    rig.use(SpecificStepsPolicy([1]))
    rig.save(1)
    rig.act()
    assert noticed(rig) == [1]
    rig.save(2)
    rig.act()
    rig.act()
    newest = CheckpointId(2, rig.trainer.attempt)
    rig.fail(FailurePlan(DENIED, until=float("inf"), operations={"write"}))
    assert rig.mirroring.upload(newest) == Uploaded(is_there=False)
    rig.act()
    answer = rig.mirroring.upload(newest)
    assert not answer.is_there
    assert "Input/output error" in answer.problem
    rig.fail(None)
    rig.act()
    assert noticed(rig) == [1, 2]
    assert rig.mirroring.upload(newest) == Uploaded(is_there=True)
    assert rig.mirroring.upload(CheckpointId(1, rig.trainer.attempt)).is_there
    # It was there: the next one is due by the policy alone.
    rig.save(3)
    rig.act()
    assert rig.steps() == [1, 2]


def test_an_agent_that_takes_over_finds_what_is_copied_and_an_earlier_step_is_copied_after_a_return(
    rig: Rig,
) -> None:
    rig.use(FixedIntervalPolicy(2))
    for step in (1, 2):
        rig.save(step)
        rig.act()
    first, second = (CheckpointId(step, rig.trainer.attempt) for step in (1, 2))
    assert rig.steps() == [2]
    rig.host.crash_agent()
    rig.host.start_agent()
    rig.host.join(rig.trainer, attempt=rig.trainer.attempt)
    rig.use(FixedIntervalPolicy(2))
    assert rig.mirroring.upload(second).is_there
    rig.host.branch(rig.trainer, first)
    rig.use(FixedIntervalPolicy(1000))
    assert not rig.mirroring.upload(first).is_there
    rig.act()
    assert rig.mirroring.upload(first).is_there
    assert rig.steps() == [1, 2]
    rig.host.delete(1)
    assert not rig.mirroring.upload(first).is_there


def test_an_agent_without_trainers_stays_until_the_newest_checkpoint_is_uploaded(
    rig: Rig,
) -> None:
    rig.use(SpecificStepsPolicy([1]))
    rig.save(1)
    rig.act()
    rig.save(2)
    rig.fail(FailurePlan(DENIED, until=float("inf"), operations={"write"}))
    rig.host.detach(rig.trainer)
    rig.host.settle()
    agent = rig.host.agent
    assert agent.leaves_in_secs() is None
    rig.act()
    assert agent.leaves_in_secs() is None
    assert rig.mirroring.awaited_place == str(rig.place)
    rig.fail(None)
    rig.act()
    assert rig.steps() == [1, 2]
    assert agent.leaves_in_secs() is not None
    assert rig.mirroring.awaited_place == ""


def test_an_agent_gives_up_a_remote_tier_that_fails_for_an_hour(rig: Rig) -> None:
    rig.fail(FailurePlan(DENIED, until=float("inf"), operations={"write"}))
    rig.save(1)
    rig.act()
    # A failure before the trainers have ended does not count.
    rig.host.clock.sleep(3700)
    rig.host.detach(rig.trainer)
    rig.host.settle()
    agent = rig.host.agent
    assert agent.leaves_in_secs() is None
    rig.host.clock.sleep(3700)
    rig.act()
    assert agent.leaves_in_secs() is not None


def test_attempts_are_copied_both_ways_and_other_ones_are_refused(rig: Rig, tmp_path: Path) -> None:
    durable, clock = rig.host.agent.run.durable, rig.host.clock

    def begin(store: DiskStore, number: int, host: str) -> None:
        start = AttemptStart(run_id=RUN_ID, origin=None, host=host, pid=1, time=clock.now())
        assert begin_attempt(store, attempt_id(number), start) is not None

    def records(place: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (place / "attempts").iterdir()}

    begin(rig.remote, 2, "there")
    share_attempts(durable, rig.remote)
    begin(durable, 3, "here")
    share_attempts(durable, rig.remote)
    assert records(rig.host.run) == records(rig.place)
    assert len(records(rig.place)) == 6
    begin(durable, 4, "here")
    begin(rig.remote, 4, "there")
    begin(rig.remote, 5, "there")
    before = records(rig.host.run), records(rig.place)
    with pytest.raises(NotARunError, match="attempt 4 was begun on host here"):
        share_attempts(durable, rig.remote)
    assert (records(rig.host.run), records(rig.place)) == before


def test_an_agent_uploads_two_parts_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, running, most = threading.Lock(), [0], [0]

    def counted(*arguments: Any) -> int:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        try:
            time.sleep(0.02)
            return copy_part_once(*arguments)
        finally:
            with lock:
                running[0] -= 1

    monkeypatch.setattr(mirror_worker, "copy_part_once", counted)
    with memory_folder() as root, in_process_host(Path(root)) as host:
        host.start_agent()
        rig = Rig(Path(root), host, host.attach(count=6))
        rig.save(1)
        rig.act()
        assert rig.steps() == [1]
        rig.check()
    assert most == [2]
