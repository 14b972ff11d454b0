"""What an agent does and reports while other hosts are silent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.coordination import effects
from holdfast.format.names import CheckpointId
from holdfast.host.outages import OutageReports
from holdfast.host.trainers.save_tracker import IDLE_SECS
from holdfast.host.wire import protocol
from holdfast.host.wire.protocol import Notice
from tests.engine.making import memory_folder
from tests.trust.in_process import InProcessHost, Trainer, in_process_host


@pytest.fixture
def host() -> Iterator[InProcessHost]:
    with memory_folder() as root, in_process_host(Path(root)) as made:
        made.start_agent()
        yield made


def slot_for(host: InProcessHost, trainer: Trainer, step: int) -> protocol.Slot:
    assert host.service is not None
    wanted = CheckpointId(step, trainer.attempt)
    request = protocol.WantSlot(rank=0, id=wanted, size_bytes=1 << 20)
    return host.call(host.service.want_slot(request, trainer.process.pid))


@pytest.mark.parametrize("durable", [True, False])
def test_ranks_wait_a_bounded_time_for_checkpoints_that_no_other_rank_completes(
    host: InProcessHost, durable: bool
) -> None:
    trainer = host.attach(count=2)
    limit = protocol.pending_limit(2 << 20)
    for step in range(limit):
        checkpoint = CheckpointId(step, trainer.attempt)
        host.seal(trainer, checkpoint)
        host.tell_sealed(trainer, checkpoint, durable=durable)
    assert slot_for(host, trainer, limit).busy
    host.clock.sleep(IDLE_SECS / 2)
    assert slot_for(host, trainer, limit).busy
    host.clock.sleep(IDLE_SECS / 2)
    slot = slot_for(host, trainer, limit)
    assert not slot.busy
    assert slot.reason.startswith(f"{limit} earlier checkpoints wait for other hosts")


def test_ranks_wait_on_while_storage_writes(host: InProcessHost) -> None:
    trainer = host.attach()
    limit = protocol.pending_limit(1 << 20)
    for step in range(limit):
        host.save(trainer, step)
    for _ in range(5):
        assert slot_for(host, trainer, limit).busy
        host.clock.sleep(IDLE_SECS)


@pytest.mark.parametrize(
    ("effect", "event", "warning"),
    [
        (effects.HostSilent("b", 10.0), "host_silent", "host b has sent nothing for 10 s"),
        (effects.HostHeard("b"), "host_heard", ""),
        (effects.LeaderChanged("b", "a", False), "leader_changed", "host a is silent and host b"),
        (effects.LeaderChanged("a", "b", True), "leader_changed", ""),
        (effects.ProtectionLate(3, 9, 30.0), "protection_late", "steps 3 to 9 wait"),
    ],
)
def test_outages_are_events_and_warnings_and_their_ends_are_events(
    host: InProcessHost,
    monkeypatch: pytest.MonkeyPatch,
    effect: effects.Effect,
    event: str,
    warning: str,
) -> None:
    posted: list[Notice] = []
    written: list[str] = []
    monkeypatch.setattr(host.agent.trainers.notices, "post", posted.append)
    monkeypatch.setattr(
        host.agent.run.events, "write", lambda one: written.append(one.__struct_config__.tag)
    )
    OutageReports(host.agent.run.events, host.agent.trainers.notices).on_effect(effect)
    assert written == [event]
    assert [notice.kind for notice in posted] == ["warning"] * bool(warning)
    assert all(warning in notice.reason for notice in posted)
