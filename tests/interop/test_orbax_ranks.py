"""Mistakes of one process of a job that uses `holdfast.interop.orbax`, and managers left behind."""

from __future__ import annotations

import gc
import json
import logging
import resource
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import jax.numpy as jnp
import pytest

import holdfast.interop.orbax as ocp
from tests.hosts import Host, ending
from tests.ports import free_address

SCRIPT = Path(__file__).with_name("orbax_ranks.py")
DEVICES = "--xla_force_host_platform_device_count=2"
SIZE_MAX_BYTES = 200_000
WAIT_SECS = 240


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_an_error_of_one_rank_ends_the_calls_of_the_others_and_holds_no_manager_up(
    one_host: Host, tmp_path: Path
) -> None:
    address = free_address()
    with ExitStack() as held:
        processes = [
            held.enter_context(
                ending(
                    subprocess.Popen(
                        [sys.executable, "-W", "ignore", SCRIPT, tmp_path, address, str(rank)],
                        env=one_host.environment | {"XLA_FLAGS": DEVICES},
                        stdout=subprocess.PIPE,
                        text=True,
                    )
                )
            )
            for rank in range(2)
        ]
        outputs = [process.communicate(timeout=WAIT_SECS)[0] for process in processes]
    first, second = (json.loads(output.partition("ENDED")[2]) for output in outputs)
    assert second["structure"][0] == "StructureMismatchError"
    assert second["arguments"][0] == "InvalidArgumentError"
    for name in ("structure", "arguments"):
        assert first[name][0] == "StructureMismatchError"
        assert "rank 1" in first[name][1]
        assert second[name][1].splitlines()[0][:60] in first[name][1]
    assert (first["save"], second["save"][0]) == (["ok", "True"], "InvalidArgumentError")
    tiered = ("emergency", "replicator", "p2p", "p2p without a directory", "policy")
    for name in ("options", "handlers", "context", *tiered):
        assert first[name][0] == second[name][0] == "InvalidArgumentError"
        assert first[name][1] == f"rank 1: {second[name][1]}"
    assert second["native"] == ["InvalidArgumentError", f"rank 0: {first['native'][1]}"]
    assert (first["elsewhere"], second["elsewhere"]) == ([7.0, 7.0], [])
    for seen in (first, second):
        assert seen["new"] == [[True], [1]]
        assert seen["restored"] == [1.0, 1.0]
        assert seen["another"] == [[True], [1]]
        assert seen["dropped"] == [[True, True], [1, 3, 4]]


def test_a_step_that_another_manager_removed_is_a_missing_file(
    one_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in one_host.environment.items():
        monkeypatch.setenv(name, value)
    args = ocp.args.StandardSave({"w": jnp.zeros(4)})
    with ocp.CheckpointManager(tmp_path) as manager, ocp.CheckpointManager(tmp_path) as other:
        for step in range(2):
            manager.save(step, args=args)
        manager.wait_until_finished()
        other.reload()
        manager.delete(0)
        with pytest.raises(FileNotFoundError, match="restore step 0"):
            other.restore(0)
        # It is removed between the listing and the reading of what was listed.
        listed = other._reader.saved_steps
        monkeypatch.setattr(other._reader, "saved_steps", lambda: [0, *listed()])
        other.reload()
        assert list(other.all_steps()) == [1]


def test_a_manager_that_was_dropped_after_its_save_failed_fails_no_save_of_a_later_one(
    one_host: Host,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in one_host.environment.items():
        monkeypatch.setenv(name, value)
    state = {"w": jnp.zeros(SIZE_MAX_BYTES)}
    manager = ocp.CheckpointManager(tmp_path)
    manager.save(1, args=ocp.args.StandardSave(state))
    manager.wait_until_finished()
    agent = one_host.agent().pid
    before = resource.prlimit(agent, resource.RLIMIT_FSIZE)
    resource.prlimit(agent, resource.RLIMIT_FSIZE, (SIZE_MAX_BYTES, before[1]))
    manager.save(2, args=ocp.args.StandardSave(state))
    del manager
    gc.collect()
    with caplog.at_level(logging.WARNING), ocp.CheckpointManager(tmp_path) as later:
        later.save(3, args=ocp.args.StandardSave({"w": jnp.ones(1)}))
        later.wait_until_finished()
        assert later.all_steps(read=True) == [1, 3]
    assert "whose manager was dropped" in caplog.text
    resource.prlimit(agent, resource.RLIMIT_FSIZE, before)
