"""Orbax's emergency, multi-tier and P2P managers keep checkpoints in RAM that outlive a process."""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path

import jax
import pytest

import holdfast
import holdfast.interop.orbax as ocp
from holdfast.errors import InvalidArgumentError
from holdfast.interop.orbax.experimental.emergency import checkpoint_manager as emergency
from holdfast.interop.orbax.experimental.emergency import p2p
from holdfast.interop.orbax.experimental.emergency import (
    replicator_checkpoint_manager as replicator,
)
from tests.hosts import Host

SCRIPT = Path(__file__).with_name("orbax_tiers.py")


@pytest.mark.parametrize("kind", ["emergency", "replicator", "p2p"])
def test_a_killed_training_continues_from_ram_with_its_iterator(
    one_host: Host, tmp_path: Path, kind: str
) -> None:
    first = one_host.start(SCRIPT, kind, tmp_path, 8, "kill")
    said, errors = first.communicate(timeout=100)
    assert first.returncode == -signal.SIGKILL, errors
    assert json.loads(said) == {}
    second = one_host.start(SCRIPT, kind, tmp_path, 10, "close")
    said, errors = second.communicate(timeout=100)
    assert second.returncode == 0, errors
    seen = json.loads(said)
    assert seen["at"] == seen["step"] == seen["steps"][-1] == 8
    assert seen["w"] == [9.0, "P('data',)"]
    assert seen["iterator"] == 9
    with holdfast.open_run(tmp_path / "persistent" / "holdfast") as run:
        durable = run.all_steps()
    # The first step and each fifth, or as many as storage took. Of a trainer that was killed the
    # agent may make the last step durable.
    assert durable[-1] == 10
    assert kind == "replicator" or {0, 5, 10} <= {*durable} <= {0, 5, 8, 10}
    assert not (tmp_path / "local").exists()


def test_options_that_cannot_be_honoured_are_refused_by_name(tmp_path: Path) -> None:
    mesh = jax.make_mesh((1, 1), ("replica", "data"))
    local = emergency.LocalCheckpointOptions
    for given, named in (
        (local(should_save_fn=lambda step, last: True), "should_save_fn"),
        (local(debug_use_full_global_mesh=True), "debug_use_full_global_mesh"),
        (
            local(preservation_policy=ocp.checkpoint_managers.preservation_policy.PreserveAll()),
            r"preservation_policy=\.\.\.\): expected LatestN",
        ),
        (
            local(
                save_decision_policy=ocp.checkpoint_managers.save_decision_policy.InitialSavePolicy()
            ),
            "found InitialSavePolicy",
        ),
    ):
        options = emergency.CheckpointManagerOptions(local=given)
        with pytest.raises(InvalidArgumentError, match=named):
            emergency.CheckpointManager(tmp_path, tmp_path, mesh, {}, options=options)
    with pytest.raises(InvalidArgumentError, match="use_colocated_python"):
        replicator.ReplicatorCheckpointManager(
            tmp_path,
            replicator.ReplicatorCheckpointManagerOptions(use_colocated_python=True),
            global_mesh=mesh,
        )
    with pytest.raises(InvalidArgumentError, match="persistent_directory=None"):
        p2p.checkpoint_manager.CheckpointManager(mesh, {}, tmp_path)
    with pytest.raises(InvalidArgumentError, match="expected no max_to_keep"):
        emergency.PersistentCheckpointOptions(
            max_to_keep=1,
            preservation_policy=ocp.checkpoint_managers.preservation_policy.PreserveAll(),
        )


def test_the_options_have_the_fields_of_orbax() -> None:
    modules = pytest.importorskip(
        "orbax.checkpoint.experimental.emergency.checkpoint_manager",
        reason="Orbax cannot be had here",
    )
    from orbax.checkpoint.experimental.emergency import replicator_checkpoint_manager as theirs
    from orbax.checkpoint.experimental.emergency.p2p import options as peers

    for own, orbax in (
        (emergency.CheckpointManagerOptions, modules.CheckpointManagerOptions),
        (emergency.LocalCheckpointOptions, modules.LocalCheckpointOptions),
        (emergency.PersistentCheckpointOptions, modules.PersistentCheckpointOptions),
        (
            replicator.ReplicatorCheckpointManagerOptions,
            theirs.ReplicatorCheckpointManagerOptions,
        ),
        (p2p.options.CheckpointManagerOptions, peers.CheckpointManagerOptions),
        (p2p.options.LocalCheckpointOptions, peers.LocalCheckpointOptions),
        (p2p.options.PersistentCheckpointOptions, peers.PersistentCheckpointOptions),
    ):
        assert [one.name for one in dataclasses.fields(own)] == [
            one.name for one in dataclasses.fields(orbax)
        ]
