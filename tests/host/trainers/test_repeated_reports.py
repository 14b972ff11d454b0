"""What was reported of an attempt is not reported again to the next one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.coordination.effects import Reached
from holdfast.coordination.messages import CheckpointStatus
from holdfast.host.wire.protocol import Notice, Watch
from tests.attempts import checkpoint_id
from tests.engine.making import memory_folder
from tests.hosts import events
from tests.trust.in_process import InProcessHost, in_process_host


@pytest.fixture
def agent() -> Iterator[InProcessHost]:
    with memory_folder() as root, in_process_host(Path(root)) as host:
        host.start_agent()
        yield host


def test_the_status_of_a_checkpoint_is_one_event(agent: InProcessHost) -> None:
    assert agent.service is not None
    for status in (CheckpointStatus.COMPLETE, CheckpointStatus.FAILED) * 2:
        agent.agent.carry_out(Reached(checkpoint_id(7), status, True, "no room"))
    agent.agent.carry_out(Reached(checkpoint_id(8), CheckpointStatus.FAILED, True, "no room"))
    agent.agent.run.events.close()
    found = sorted((e["event"], e["step"]) for e in events(agent.run, "sealed", "failed"))
    assert found == [("failed", 7), ("failed", 8), ("sealed", 7)]


def test_a_warning_of_an_earlier_attempt_is_not_sent_to_the_next_one(agent: InProcessHost) -> None:
    agent.attach()
    agent.agent.trainers.notices.post(Notice(kind="warning", reason="cannot delete"))
    later = agent.attach(takeover=True)
    agent.agent.trainers.notices.post(Notice(kind="warning", reason="cannot list"))
    assert agent.service is not None
    request = Watch(group=later.group, rank=0, cursor=later.place.cursor)
    seen = agent.call(agent.service.watch(request, later.process.pid))
    assert [one.reason for one in seen.notices if one.kind == "warning"] == ["cannot list"]
