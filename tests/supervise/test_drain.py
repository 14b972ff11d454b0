"""What `holdfast run` reports of saves after its command has ended."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from holdfast.clock import SystemClock
from holdfast.observe.events.schema import TrainerLost
from holdfast.observe.events.writer import EventWriter
from holdfast.store.location import open_durable
from holdfast.supervise.agents import AgentOfRun
from holdfast.supervise.drain import _cut_short


@pytest.mark.parametrize(
    ("undone", "is_lost"), [({(1, 4)}, True), ({(1, 5)}, False), ({(2, 1)}, False)]
)
def test_a_save_that_ended_with_its_trainer_is_lost_unless_it_or_a_later_one_is_complete(
    tmp_path: Path, undone: set[tuple[int, int]], is_lost: bool
) -> None:
    clock = SystemClock()
    writer = EventWriter(open_durable(str(tmp_path), clock).home, "h", clock)
    writer.attempt = 1
    writer.write(TrainerLost(rank=0, pid=1, last_step=5, accepted_step=5))
    writer.close()
    served = AgentOfRun(run=str(tmp_path), run_id="r", host="h")
    lines = _cut_short(served, datetime.min.replace(tzinfo=UTC), undone, clock)
    assert [line.partition(" of ")[0] for line in lines] == ["step 5 (attempt 1)"] * is_lost
