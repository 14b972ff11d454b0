"""What a trainer publishes of the times in which it may make no step."""

from __future__ import annotations

import sys

from tests.cli.command_line import holdfast
from tests.hosts import Host

CODE = """
import sys
import numpy as np
import holdfast
from holdfast.host.wire.agents_here import living

def shown():
    ((trainer,),) = [status.trainers for status in living()]
    return trainer.busy or "none"

class Loader:
    def get_state(self):
        said.append(shown())
        return {}
    def set_state(self, state):
        pass

said = []
state = {"w": np.zeros(3)}
with holdfast.CheckpointManager(sys.argv[1], framework="numpy") as manager:
    said.append(shown())
    manager.save(0, state)
    said.append(shown())
    manager.save(1, state)
    said.append(shown())
    for reason in ("data", "evaluation", "other"):
        with manager.waiting(reason):
            said.append(shown())
    manager.save(2, state | {"loader": Loader()}, force=True)
    said.append(shown())
print(*said)
"""


def test_a_trainer_publishes_why_it_may_make_no_step(one_host: Host, tmp_path) -> None:
    command = [sys.executable, "-c", CODE, str(tmp_path / "run")]
    done = holdfast(one_host, "run", "--", *command)
    before, between, *later = done.stdout.split()
    assert (before, between) == ("starting", "starting")
    # The state of an object is read inside of the manager's call.
    assert later == ["none", "none", "evaluation", "other", "call", "none"]
