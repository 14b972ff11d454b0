"""Check cases of the model that were found by thought, step by step, each with its promise."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import FencedError, HoldfastError, StorageError
from holdfast.host.driver.attached_trainers import Policies
from holdfast.host.wire import protocol
from holdfast.policy.preservation_policy import LatestN
from holdfast.store.disk import DiskStore
from tests.attempts import checkpoint_id
from tests.engine.making import memory_folder
from tests.trust.in_process import Trainer
from tests.trust.model_host import ModelHost, check_offered, named, real_policy
from tests.trust.model_oracle import Id


@pytest.fixture
def host() -> Iterator[ModelHost]:
    with memory_folder() as root:
        made = ModelHost(Path(root))
        try:
            made.start_agent()
            yield made
        finally:
            made.close()


def sealed(host: ModelHost, trainer: Trainer, one: Id, rank: int) -> None:
    """Seal one rank's part in RAM without reporting it."""
    slot = host.want_slot(trainer, one, rank)
    assert slot.name is not None
    host.fill(trainer, one, rank, slot.name)


# RAM.


def test_an_abandoned_step_is_given_up_in_ram_once_the_new_branch_has_one(host: ModelHost) -> None:
    trainer = host.attach()
    for step in (10, 70):
        host.save(trainer, step)
        host.settle()
    host.branch(trainer, host.look().find(10))
    host.save(trainer, 20, durable=False)
    assert host.in_ram() == {Id(20, 2): {0}}


def test_a_half_of_an_older_attempt_is_dropped_once_the_new_one_saves(host: ModelHost) -> None:
    trainer = host.attach(count=2)
    first = host.save(trainer, 10)
    host.settle()
    half = Id(20, 1)
    sealed(host, trainer, half, 1)
    host.tell_sealed(trainer, host.real(*half), 1)
    host.branch(trainer, first)
    host.save(trainer, 15)
    host.settle()
    assert host.in_ram() == {Id(15, 2): {0, 1}}
    assert host.answers()[half] == "left behind"


def test_a_half_is_answered_when_its_trainers_went_back(host: ModelHost) -> None:
    trainer = host.attach(count=2)
    first = host.save(trainer, 10)
    host.settle()
    half = Id(20, 1)
    sealed(host, trainer, half, 1)
    host.tell_sealed(trainer, host.real(*half), 1)
    host.branch(trainer, first)
    host.settle()
    assert host.answers()[half] == "left behind"


def test_what_all_ranks_sealed_is_kept_where_one_of_them_died_untold(host: ModelHost) -> None:
    trainer = host.attach(count=2)
    host.settle()
    one = Id(10, 1)
    for rank in (0, 1):
        sealed(host, trainer, one, rank)
    host.tell_sealed(trainer, host.real(*one), 0)
    check_offered(host, [one])
    host.kill_trainer(trainer)
    host.settle()
    check_offered(host, [one])
    assert host.committed_on_disk() == {one}


def test_a_new_agent_does_not_write_again_what_is_committed(host: ModelHost) -> None:
    """The agent finds it in RAM, and cannot know at once whether a trainer waits for it."""
    trainer = host.attach()
    one = host.save(trainer, 10)
    host.settle()
    image = host.run / "checkpoints" / str(one) / "image-00000-of-00001.safetensors"
    written = image.stat()
    host.crash_agent()
    host.start_agent()
    host.join(trainer, attempt=trainer.attempt)
    host.settle()
    again = image.stat()
    assert (again.st_ino, again.st_mtime_ns) == (written.st_ino, written.st_mtime_ns)
    assert host.in_ram() == {named(one): {0}}


@pytest.mark.parametrize("how", ["taken over", "agent killed"])
def test_a_slot_of_before_is_not_filled_over_a_sealed_image(host: ModelHost, how: str) -> None:
    """A trainer that got a slot and was delayed finds it in use by another."""
    late = host.attach(count=2)
    old = Id(10, 1)
    slot = host.want_slot(late, old, 0)
    if how == "taken over":
        trainer = host.attach(count=2, takeover=True)
    else:
        host.crash_agent()
        host.start_agent()
        host.join(late, attempt=late.attempt)
        trainer = late
    one = Id(20, trainer.attempt.number)
    for rank in (1, 0):
        sealed(host, trainer, one, rank)
        host.tell_sealed(trainer, host.real(*one), rank)
    with contextlib.suppress(StorageError):
        host.fill(late, old, 0, slot.name)
    check_offered(host, [one])


def test_an_agent_that_stood_still_gives_nothing_up_that_is_due(host: ModelHost) -> None:
    """It was stopped, or its machine was busy, for longer than it waits for a silent host."""
    trainer = host.attach()
    due = [named(host.save(trainer, step)) for step in (10, 20)]
    host.clock.sleep(60.0)
    due.append(named(host.save(trainer, 30)))
    assert host.in_ram().keys() == set(due)
    host.settle()
    assert host.answers() == dict.fromkeys(due, "committed")


def test_a_ram_policy_that_keeps_ever_more_does_not_stop_later_saves(host: ModelHost) -> None:
    trainer = host.attach()
    host.agent.trainers.job.ram = Policies(preserve=LatestN(1000))
    for step in range(70):
        host.save(trainer, step, durable=False)
    last = named(host.save(trainer, 70))
    host.settle()
    assert host.answers() == {last: "committed"}
    assert last in host.in_ram()


def test_what_the_ram_policy_keeps_is_kept_by_an_agent_that_starts_anew(host: ModelHost) -> None:
    host.ram_preserve = LatestN(3)
    trainer = host.attach()
    kept = {named(host.save(trainer, step, durable=False)) for step in (10, 20, 30)}
    host.settle()
    host.crash_agent()
    host.start_agent()
    host.settle()
    assert host.in_ram().keys() == kept, "before the trainer has come back to it"
    host.join(trainer, attempt=trainer.attempt)
    host.settle()
    assert host.in_ram().keys() == kept
    kept.add(named(host.save(trainer, 40, durable=False)))
    host.settle()
    assert host.in_ram().keys() == kept - {Id(10, 1)}


# The timeline.


def test_what_was_left_behind_in_ram_is_never_committed(host: ModelHost) -> None:
    trainer = host.attach()
    first = host.save(trainer, 10)
    host.settle()
    host.save(trainer, 20, durable=False)
    host.branch(trainer, first)
    host.kill_trainer(trainer)
    host.settle()
    assert host.committed_on_disk() == {Id(10, 1)}
    assert [named(c) for c in host.look().timeline] == [Id(10, 1)]
    check_offered(host, [Id(10, 1)])


def test_the_step_after_the_one_gone_back_to_is_not_offered(host: ModelHost) -> None:
    host.preserve = real_policy(("latest", 3))
    trainer = host.attach()
    first = host.save(trainer, 10)
    host.save(trainer, 11)
    host.settle()
    host.branch(trainer, first)
    check_offered(host, [Id(10, 1)])


@pytest.mark.parametrize("how", ["left", "agent killed"])
def test_what_is_due_on_an_abandoned_branch_is_answered_and_keeps_no_agent(
    host: ModelHost, how: str
) -> None:
    trainer = host.attach()
    first = host.save(trainer, 10)
    host.settle()
    host.save(trainer, 20, durable=how == "left")
    host.branch(trainer, first)
    if how == "agent killed":
        host.crash_agent()
        host.kill_trainer(trainer)
        # The next agent cannot know whether a trainer waits for it.
        host.start_agent()
    else:
        host.detach(trainer)
    host.settle()
    assert host.answers()[Id(20, 1)] == "left behind"
    assert host.in_ram().keys() <= {Id(10, 1)}
    assert host.committed_on_disk() == {Id(10, 1)}
    host.clock.sleep(host.agent.trainers.job.linger_secs + 60.0)
    assert host.agent.leaves_in_secs() == 0.0


def test_what_is_due_on_an_abandoned_branch_takes_no_room_from_later_saves(host: ModelHost) -> None:
    """Otherwise a trainer that needs a slot waits for storage, which never gets its data."""
    trainer = host.attach()
    first = host.save(trainer, 10)
    host.settle()
    for step in (20, 30, 40):
        host.save(trainer, step)
    host.branch(trainer, first)
    assert host.agent.driver.view.waiting_count(checkpoint_id(11, 2)) == 0


def test_parts_that_an_abandoned_branch_made_durable_are_cleared_by_the_next_commit(
    host: ModelHost,
) -> None:
    trainer = host.attach()
    first = host.save(trainer, 10)
    host.settle()
    left = checkpoint_id(20)
    store = DiskStore(host.run, host.clock)
    host.write_part(store, *host.begin_part(store, trainer, left, 0))
    assert host.written_on_disk() == {named(left)}
    host.branch(trainer, first)
    host.save(trainer, 15)
    host.settle()
    assert host.written_on_disk() == set()
    assert host.unfinished() == []


def test_parts_of_a_step_that_was_saved_anew_are_cleared_by_its_commit(host: ModelHost) -> None:
    trainer = host.attach()
    left = host.save(trainer, 10, durable=False)
    store = DiskStore(host.run, host.clock)
    host.write_part(store, *host.begin_part(store, trainer, left, 0))
    assert host.written_on_disk() == {named(left)}
    host.branch(trainer, left)
    host.save(trainer, 10)
    host.settle()
    assert host.committed_on_disk() == {Id(10, 2)}
    assert host.unfinished() == []


# A run that is put back.


@pytest.mark.parametrize("how", ["agent lives", "agent killed"])
def test_a_run_that_was_put_back_goes_on_from_where_another_host_took_it(
    host: ModelHost, tmp_path: Path, how: str
) -> None:
    """RAM here has newer steps of an attempt 2 that the run lost; another host began its own."""
    first = host.attach()
    host.save(first, 10)
    host.settle()
    host.detach(first)
    shutil.copytree(host.run, tmp_path / "before")
    lost = host.attach()
    for step in (20, 90):
        host.save(lost, step)
        host.settle()
    host.kill_trainer(lost)
    host.settle()
    # An agent that lives notices a replaced directory, but not replaced contents.
    for name in ("attempts", "checkpoints"):
        shutil.rmtree(host.run / name)
        shutil.copytree(tmp_path / "before" / name, host.run / name)
    with contextlib.closing(ModelHost(tmp_path / "other", run=host.run)) as other:
        other.clock.tokens = 100
        other.start_agent()
        trainer = other.attach()
        newest = other.save(trainer, 20)
        other.settle()
        other.detach(trainer)
    if how == "agent killed":
        host.crash_agent()
        host.start_agent()
    again = host.attach(takeover=True)
    assert newest.attempt.number == lost.attempt.number == 2
    assert newest.attempt != lost.attempt
    assert (again.attempt.number, again.place.origin) == (3, newest)
    assert host.look().timeline[-1] == newest


# The fenced.


def test_a_fenced_trainer_that_gives_up_does_not_free_a_slot_of_the_new_one(
    host: ModelHost,
) -> None:
    """A manager does so whenever a save of its was refused."""
    zombie = host.attach(count=2)
    trainer = host.attach(count=2, takeover=True)
    one = Id(10, trainer.attempt.number)
    first = host.want_slot(trainer, one, 0)
    with pytest.raises(FencedError):
        host.abandon(zombie, Id(10, zombie.attempt.number), 0)
    second = host.want_slot(trainer, one, 1)
    assert first.name != second.name


def test_a_fenced_trainer_can_delete_nothing(host: ModelHost) -> None:
    zombie = host.attach()
    trainer = host.attach(takeover=True)
    one = named(host.save(trainer, 10))
    host.settle()
    request = protocol.Delete(ids=(host.real(*one),))
    with pytest.raises(FencedError):
        host.call(host.service.delete(request, zombie.process.pid))
    check_offered(host, [one])


# People.


def test_a_save_that_is_deleted_on_its_way_is_answered(host: ModelHost) -> None:
    """Otherwise a wait until it is durable never ends."""
    trainer = host.attach()
    one = named(host.save(trainer, 10))
    host.delete(10)
    host.settle()
    check_offered(host, [])
    assert one in host.answers()


def test_an_attempt_does_not_begin_at_a_checkpoint_that_is_gone(host: ModelHost) -> None:
    """It was read, and preservation removed it: what is left must stay on the timeline."""
    host.preserve = real_policy(("latest", 1))
    trainer = host.attach()
    first = host.save(trainer, 10)
    host.settle()
    check_offered(host, [named(first)])
    second = host.save(trainer, 20)
    host.settle()
    with pytest.raises(HoldfastError):
        host.branch(trainer, first)
    check_offered(host, [named(second)])


def test_a_save_that_was_dropped_is_answered_by_the_next_agent_too(host: ModelHost) -> None:
    """The agent died before its notice; the trainer asks the new one, which has nothing."""
    trainer = host.attach(count=2)
    half = Id(10, 1)
    sealed(host, trainer, half, 1)
    host.tell_sealed(trainer, host.real(*half), 1)
    host.save(trainer, 20)
    host.settle()
    host.crash_agent()
    host.start_agent()
    host.join(trainer, attempt=trainer.attempt)
    host.tell_again(trainer, half, 1)
    host.settle()
    assert host.answers()[half] == "dropped"


def test_a_save_whose_ram_is_gone_counts_as_dropped(host: ModelHost) -> None:
    """The trainer lives, its agent and the tmpfs were cleared."""
    trainer = host.attach()
    kept = named(host.save(trainer, 5))
    host.settle()
    lost = named(host.save(trainer, 10))
    host.crash_agent()
    shutil.rmtree(host.folder)
    host.folder.mkdir(mode=0o700)
    host.start_agent()
    host.join(trainer, attempt=trainer.attempt)
    host.tell_again(trainer, lost, 0)
    host.settle()
    assert host.answers()[lost] == "dropped"
    check_offered(host, [kept])
