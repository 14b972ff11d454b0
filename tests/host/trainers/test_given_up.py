"""Check that abandoned checkpoints are in the events, and that their users are warned."""

from __future__ import annotations

from pathlib import Path

from holdfast.coordination.effects import GivenUp
from holdfast.coordination.messages import CheckpointStatus
from tests.attempts import checkpoint_id
from tests.engine.making import memory_folder
from tests.hosts import await_events
from tests.trust.in_process import in_process_host


def test_a_checkpoint_that_is_given_up_is_named_with_the_reason() -> None:
    with memory_folder() as root, in_process_host(Path(root)) as agent:
        agent.start_agent()
        assert agent.service is not None
        lost = GivenUp(
            checkpoint_id(234), CheckpointStatus.PROTECTED, "no host holds the parts of rank 1"
        )
        agent.agent.carry_out(lost)
        trainer = agent.attach()
        assert trainer.place.warnings == (
            "step 234 of attempt 1 was protected, and the run continues without it: no host holds "
            "the parts of rank 1",
        )
        (told,) = await_events(Path(agent.agent.run.config.run), "given_up", count=1)
        assert (told["step"], told["attempt"], told["status"]) == (234, 1, "protected")
        assert told["reason"] == lost.reason
        assert agent.attach(takeover=True).place.warnings == ()
