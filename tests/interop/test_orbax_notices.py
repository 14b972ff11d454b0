"""Items that a step does not have, and preemptions that JAX's own service reports."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import pytest

from holdfast.errors import InvalidArgumentError
from holdfast.interop import orbax as ocp
from tests.hosts import Host, finished
from tests.ports import free_address

NOTIFIED = """
import os, signal, sys, time
import jax, jax.numpy as jnp
from holdfast.interop import orbax as ocp

jax.distributed.initialize(sys.argv[1], num_processes=1, process_id=0)
os.kill(os.getpid(), signal.SIGTERM)  # the handler is JAX's: no run is open
policies = ocp.checkpoint_managers
options = ocp.CheckpointManagerOptions(
    save_decision_policy=policies.PreemptionCheckpointingPolicy()
)
manager = ocp.CheckpointManager(sys.argv[2], options=options)
step = 0
while not manager.should_save(step):
    assert not manager.reached_preemption(step)
    step += 1
    time.sleep(0.01)
assert manager.reached_preemption(step)
assert manager.save(step, args=ocp.args.StandardSave({"w": jnp.ones(2)}))
manager.close()
print(step, manager.reached_preemption(step + 1), manager.reached_preemption(step - 1))
"""


def test_none_stands_for_an_item_that_a_step_does_not_have(
    one_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in one_host.environment.items():
        monkeypatch.setenv(name, value)
    args = ocp.args
    with ocp.CheckpointManager(tmp_path) as manager:
        tree = args.StandardSave({"w": jnp.ones(2)})
        assert manager.save(0, args=args.Composite(state=tree, data=None))
        assert [*manager.restore(0)] == ["state"]
        with pytest.raises(InvalidArgumentError, match="at least one item, found None for data"):
            manager.save(1, args=args.Composite(data=None))


def test_a_notice_to_jax_is_a_preemption(one_host: Host, tmp_path: Path) -> None:
    process = one_host.start("-c", NOTIFIED, free_address(), tmp_path, stem="jax")
    step, after, before = finished(process).split()
    assert (after, before) == ("True", "False")
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [int(step)]
