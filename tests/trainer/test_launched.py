"""Processes that a launcher has started as ranks of one job, and whose framework does not know it.

The trainings of a sweep look the same, until two of them open one directory.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.errors import InvalidArgumentError
from holdfast.store.files.mounts import MEMORY_FILE_SYSTEMS, file_system_type
from holdfast.trainer.process.preemption import PreemptionSignals
from tests.hosts import Host, await_events, host
from tests.said import Said
from tests.test_launchers import SLURM
from tests.trust.in_process import StepClock

TRAINER = Path(__file__).with_name("launched_trainer.py")


def task(on: Host, rank: int, run: Path, *arguments: str) -> Said:
    variables = SLURM | {"SLURM_PROCID": str(rank), "SLURM_RESTART_COUNT": "3"}
    return Said(on.start(TRAINER, run, *arguments, stem="numpy", **variables))


@pytest.mark.parametrize("is_same_host", [True, False], ids=["same host", "another host"])
def test_the_second_rank_that_opens_a_run_alone_is_told_what_to_call(
    one_host: Host, tmp_path: Path, is_same_host: bool
) -> None:
    first = task(one_host, 0, tmp_path / "run", "stay")
    first.await_line("opened")
    with host() as other:
        second = task(one_host if is_same_host else other, 1, tmp_path / "run")
        refused = second.await_line("error")
        second.wait()
    assert refused["error"] == "RunBusyError"
    message = refused["message"]
    assert one_host.name in message
    assert str(first.process.pid) in message
    assert "started by Slurm (job 12) as rank 1 of 2, and its framework has 1" in message
    assert "jax.distributed.initialize() or torch.distributed.init_process_group()" in message
    assert "a directory of its own" in message
    assert "takeover" not in message
    first.kill()


def test_ranks_that_do_not_know_each_other_do_not_fence_each_other(
    one_host: Host, tmp_path: Path
) -> None:
    first = task(one_host, 1, tmp_path / "run", "stay", "takeover")
    first.await_line("opened")
    with host() as other:
        again = task(other, 1, tmp_path / "run", "takeover")
        refused = again.await_line("error")
        assert refused["error"] == "RunBusyError"
        assert "started by Slurm (job 12) as rank 1 of 2" in refused["message"]
        again.finish()
        assert "takeover=True is not used" in "".join(again.errors)
        took_over = task(other, 0, tmp_path / "run", "takeover")
        assert took_over.await_line("opened")
        took_over.kill()
    first.kill()


def test_the_trainings_of_a_sweep_have_a_run_each_and_record_their_launcher(
    one_host: Host, tmp_path: Path
) -> None:
    tasks = [task(one_host, rank, tmp_path / str(rank)) for rank in range(2)]
    for rank, said in enumerate(tasks):
        said.finish()
        assert said.together() == {"opened": True}
        line = f"started by Slurm (job 12) as rank {rank} of 2, and the framework has 1"
        assert line in "".join(said.errors)
        (opened,) = await_events(tmp_path / str(rank), "manager_opened", count=1)
        assert (opened["launchers"], opened["restarts"]) == (["slurm"], {"slurm": 3})


def test_launchers_that_contradict_each_other_open_nothing(
    one_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (SLURM | {"RANK": "0", "WORLD_SIZE": "3"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgumentError, match=r"rank 0 of 3 and by Slurm .*rank 1 of 2"):
        holdfast.CheckpointManager(tmp_path / "run", framework="numpy")
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("HOLDFAST_LAUNCHER", "none")
    with holdfast.CheckpointManager(tmp_path / "run", framework="numpy"):
        pass


def test_a_number_that_is_none_and_ram_on_a_disk_are_warned_of(
    one_host: Host,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if file_system_type(tmp_path) in MEMORY_FILE_SYSTEMS:
        pytest.skip(f"{tmp_path} is in memory")
    variables = {"HOLDFAST_RAM": str(tmp_path / "ram"), "RANK": "x", "WORLD_SIZE": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ram = holdfast.RamTier(linger_secs=0)
    with holdfast.CheckpointManager(tmp_path / "run", framework="numpy", ram=ram):
        pass
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "of RANK and WORLD_SIZE: expected numbers, found RANK=x; they are not used" in warnings
    (of_ram,) = [warning for warning in warnings if "not in memory" in warning]
    assert of_ram.startswith(
        f"the RAM tier, {tmp_path / 'ram'}, is on {file_system_type(tmp_path)}"
    )


def test_slurms_signal_is_a_notice(
    one_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    never = holdfast.save_decision_policy.SpecificStepsPolicy([10**9])
    with holdfast.CheckpointManager(
        tmp_path / "run", framework="numpy", save_decision_policy=never
    ) as manager:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert manager.save(0, {"w": np.zeros(3)})
        assert manager.reached_preemption(0)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


@pytest.mark.parametrize("action", [lambda *_: None, signal.SIG_IGN], ids=["handler", "ignored"])
def test_signals_of_the_launcher_that_the_program_uses_itself_are_left_alone(
    action: object,
) -> None:
    users = (signal.SIGUSR1, signal.SIGUSR2)
    before = signal.signal(signal.SIGUSR1, action)  # type: ignore[arg-type]
    try:
        signals = PreemptionSignals(None, users, lambda: None, StepClock())
        signals.install()
        assert set(signals.handled) == {signal.SIGTERM, signal.SIGUSR2}
        assert signal.getsignal(signal.SIGUSR1) is action
        signals.close()
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
        # Signals that the user has named are obeyed.
        for named in ((signal.SIGTERM,), ()):
            chosen = PreemptionSignals(named, users, lambda: None, StepClock())
            chosen.install()
            assert chosen.handled == named
            chosen.close()
    finally:
        signal.signal(signal.SIGUSR1, before)
