"""What an agent notifies its trainers of: only what concerns them, and the end of each save."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.coordination import effects
from holdfast.coordination.messages import DELETED, CheckpointStatus
from holdfast.errors import ObjectNotFoundError
from holdfast.format.names import CheckpointId
from holdfast.host.tiers.retention import Retention
from holdfast.host.tiers.storage_worker import StorageWorker
from holdfast.host.wire import protocol
from holdfast.peers.directory import PeerDirectory
from tests.attempts import checkpoint_id
from tests.trust.in_process import InProcessHost, Trainer, in_process_host

NO_PART = "the ranks did not meet at one step"


@pytest.fixture
def host(tmp_path: Path) -> Iterator[InProcessHost]:
    with in_process_host(tmp_path) as made:
        made.start_agent()
        yield made


def watched(host: InProcessHost, trainer: Trainer, **asked: Any) -> protocol.Notices:
    """What a `watch` answers that has something to answer."""
    assert host.service is not None
    request = protocol.Watch(group=trainer.group, rank=0, **asked)
    return host.call(asyncio.wait_for(host.service.watch(request, trainer.process.pid), 5.0))


def report_again(host: InProcessHost, trainer: Trainer, checkpoint: CheckpointId) -> None:
    assert host.service is not None
    report = protocol.Sealed(
        rank=0, id=checkpoint, part_count=1, tier=protocol.PartTier.RAM, durable=True, again=True
    )
    host.call(host.service.sealed(report, trainer.process.pid))
    host.settle()


def test_a_trainer_is_not_notified_of_what_was_before_its_group_came(host: InProcessHost) -> None:
    first = host.attach()
    host.save(first, 1)
    host.settle()
    host.agent.trainers.notices.post(protocol.Notice(kind="warning", reason="it is full"))
    host.detach(first)
    second = host.attach()
    host.agent.trainers.notices.post(protocol.Notice(kind="warning", reason="it is full again"))
    told = watched(host, second, cursor=second.place.cursor).notices
    assert [notice.reason for notice in told if notice.kind == "warning"] == ["it is full again"]
    assert {notice.id for notice in told} == {None}


def test_a_save_that_the_agent_does_not_know_is_named_and_ends(host: InProcessHost) -> None:
    trainer = host.attach()
    known = host.save(trainer, 1)
    lost = CheckpointId(2, trainer.attempt)
    told = watched(host, trainer, cursor=0, pending=(known, lost))
    assert told.unknown == (lost,)
    report_again(host, trainer, lost)
    after = watched(host, trainer, cursor=told.cursor).notices
    (end,) = [notice for notice in after if notice.id == lost]
    # No failure by itself: the trainer knows whether a newer checkpoint replaces it.
    assert (end.kind, end.reason) == ("dropped", "its part is no longer in RAM")


def test_a_commit_that_no_notice_has_named_is_named_when_it_is_asked_for(
    host: InProcessHost,
) -> None:
    trainer = host.attach()
    first = host.save(trainer, 1)
    host.settle()
    for step in (2, 3):
        last = host.save(trainer, step)
        host.settle()
    end = host.agent.trainers.notices.count
    told = watched(host, trainer, cursor=0, pending=(first,))
    assert told.unknown == (first,)
    report_again(host, trainer, last)
    after = watched(host, trainer, cursor=end).notices
    assert ("committed", last) in [(notice.kind, notice.id) for notice in after]


@pytest.fixture
def retention(host: InProcessHost) -> Retention:
    host.attach()
    assert host.service is not None
    return host.agent.retention


def kinds_of(
    host: InProcessHost,
    retention: Retention,
    *ends: tuple[int, CheckpointStatus, str],
    is_due: bool = True,
) -> list[str]:
    """The kinds of the notices that these are posted as."""
    before = host.agent.trainers.notices.count
    for step, status, reason in ends:
        checkpoint = CheckpointId(step, retention._driver.attempt)
        retention.on_outcome(effects.ReportOutcome(checkpoint, status, reason, is_due))
    count = host.agent.trainers.notices.count - before
    return [notice.kind for notice in host.board.posted[-count:]] if count else []


def test_a_protected_durable_one_is_named_only_where_an_older_one_was_dropped(
    host: InProcessHost, retention: Retention
) -> None:
    # The first one of an agent: it does not know what one before it has dropped.
    assert kinds_of(host, retention, (1, CheckpointStatus.PROTECTED, "")) == ["protected"]
    assert kinds_of(host, retention, (2, CheckpointStatus.PROTECTED, "")) == []
    # Of one for RAM alone nothing else is posted.
    assert kinds_of(host, retention, (2, CheckpointStatus.PROTECTED, ""), is_due=False) == [
        "protected"
    ]
    dropped = (4, CheckpointStatus.DROPPED, NO_PART)
    assert kinds_of(host, retention, dropped, (3, CheckpointStatus.PROTECTED, "")) == ["dropped"]
    newer = ((5, CheckpointStatus.PROTECTED, ""), (6, CheckpointStatus.PROTECTED, ""))
    assert kinds_of(host, retention, *newer) == ["protected"]


def test_what_was_deleted_or_left_behind_is_not_called_dropped(
    host: InProcessHost, retention: Retention
) -> None:
    assert kinds_of(host, retention, (3, CheckpointStatus.DROPPED, DELETED)) == ["deleted"]
    retention.on_outcome(
        effects.ReportOutcome(checkpoint_id(3, 0), CheckpointStatus.DROPPED, "an abandoned branch")
    )
    assert host.board.posted[-1].kind == "left behind"


def test_a_part_that_is_gone_at_its_source_is_reported_only_if_it_is_still_wanted(
    host: InProcessHost,
) -> None:
    storage_worker = StorageWorker(
        host.agent.run,
        host.agent.ram,
        host.agent.trainers,
        PeerDirectory("run", host.clock),
        lambda manifest, secs: None,
    )
    pull = effects.Pull(checkpoint_id(1), 0, 2, "host-b")
    gone = ObjectNotFoundError("status 404")
    assert storage_worker.may_be_recycled(pull, gone)
    assert not storage_worker.may_be_recycled(pull, gone)
    assert not storage_worker.may_be_recycled(pull, OSError("the network is down"))
    storage_worker.threads.close()
