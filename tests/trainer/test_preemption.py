"""Preemption: told by a signal, saved at the next step, and left without a loss."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast import save_decision_policy
from holdfast.host.wire.control_block import NEVER as NEVER_STEP
from holdfast.host.wire.control_block import TARGET_PREEMPTION
from holdfast.policy.preservation_policy import LatestN
from holdfast.trainer.options import Options
from holdfast.trainer.process.end_report import reported_ends
from holdfast.trainer.process.preemption import REPEAT_SECS, PreemptionSignals
from holdfast.trainer.save.patience import CUT_CLOSE_SECS
from holdfast.trainer.save.preemption_stop import AGREE_SECS, CONFIRM_SECS, PreemptionStop
from holdfast.trainer.save.save_schedule import SaveSchedule
from tests.hosts import Host, events, finished, wait_until
from tests.ports import free_address
from tests.said import Said
from tests.trust.in_process import StepClock

TRAINER = Path(__file__).with_name("trainer.py")
NEVER = save_decision_policy.SpecificStepsPolicy([10**9])
OPTIONS = Options(save=NEVER, preservation=LatestN(1), ram=None, takeover=False)


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_sigterm_saves_the_next_step_whatever_the_policy(one_host: Host, tmp_path: Path) -> None:
    with holdfast.CheckpointManager(tmp_path / "run", save_decision_policy=NEVER) as manager:
        assert not manager.save(0, {"n": 0})
        assert not manager.reached_preemption(0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.save(1, {"n": 1})
        assert manager.reached_preemption(1)
        assert not manager.save(2, {"n": 2})
    with holdfast.CheckpointManager(tmp_path / "run") as again:
        assert again.resume({"n": -1}) == (2, {"n": 1})


def test_a_notice_that_is_no_signal_is_announced_on_any_thread(
    one_host: Host, tmp_path: Path
) -> None:
    with holdfast.CheckpointManager(tmp_path / "run", save_decision_policy=NEVER) as manager:
        assert not manager.save(0, {"n": 0})
        notice = threading.Thread(target=manager.announce_preemption)
        notice.start()
        notice.join()
        # Launchers often send the signal some seconds after the notice. It ends no wait.
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.save(1, {"n": 1})
        assert manager.reached_preemption(1)
        manager.announce_preemption()
        assert not manager.save(2, {"n": 2})
        manager.wait_until_finished()
    manager.announce_preemption()
    with holdfast.CheckpointManager(tmp_path / "run") as again:
        assert again.latest_step() == 1


def test_a_notice_that_no_step_follows_is_reported_to_the_supervisor(
    one_host: Host, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, holdfast\n"
        "with holdfast.CheckpointManager(sys.argv[1]) as manager:\n"
        "    manager.save(0, {'n': 0}, force=True)\n"
        "    manager.announce_preemption()\n"
    )
    trainer = one_host.start(
        script, tmp_path / "run", stem="numpy", HOLDFAST_SUPERVISED=str(tmp_path)
    )
    finished(trainer)
    assert [end.is_preempted for end in reported_ends(tmp_path)] == [True]


def test_a_loop_that_ends_at_a_notice_without_a_save_is_warned(
    one_host: Host, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = save_decision_policy.FixedIntervalPolicy(10)
    with holdfast.CheckpointManager(tmp_path, save_decision_policy=policy) as manager:
        assert manager.save(0, {"x": np.zeros(3)})
        assert not manager.save(1, {"x": np.zeros(3)})
        os.kill(os.getpid(), signal.SIGTERM)
    assert "closing after step 1, but the newest checkpoint is of step 0" in caplog.text


def test_a_signal_before_the_manager_has_joined_the_agent_is_announced_then() -> None:
    notified = []
    earlier = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    try:
        signals = PreemptionSignals(
            [signal.SIGUSR1], (), lambda: notified.append(signals.has_arrived), StepClock()
        )
        os.kill(os.getpid(), signal.SIGUSR1)
        notified.clear()
        signals.install()
        assert notified == [True]
        signals.close()
    finally:
        signal.signal(signal.SIGUSR1, earlier)


def test_other_signals_can_be_named_and_earlier_handlers_are_still_called(
    one_host: Host, tmp_path: Path
) -> None:
    called = []
    earlier = signal.signal(signal.SIGUSR1, lambda number, frame: called.append(number))
    before = signal.getsignal(signal.SIGTERM)
    try:
        handler = signal.getsignal(signal.SIGUSR1)
        with holdfast.CheckpointManager(
            tmp_path / "run",
            save_decision_policy=NEVER,
            process=holdfast.ProcessHooks(preemption_signals=(signal.SIGUSR1,)),
        ) as manager:
            assert signal.getsignal(signal.SIGTERM) == before
            os.kill(os.getpid(), signal.SIGUSR1)
            assert called == [signal.SIGUSR1]
            assert manager.save(0, {"n": 0})
            assert manager.reached_preemption(0)
        assert signal.getsignal(signal.SIGUSR1) is handler
    finally:
        signal.signal(signal.SIGUSR1, earlier)


def test_a_handler_that_c_code_had_set_is_still_called_and_put_back(
    one_host: Host, tmp_path: Path
) -> None:
    called = []
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(called.append)
    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    address = ctypes.cast(handler, ctypes.c_void_p).value
    libc.signal(signal.SIGUSR2, address)
    try:
        with holdfast.CheckpointManager(
            tmp_path / "run",
            save_decision_policy=NEVER,
            process=holdfast.ProcessHooks(preemption_signals=(signal.SIGUSR2,)),
        ) as manager:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert called == [signal.SIGUSR2]
            assert manager.save(0, {"n": 0})
        assert libc.signal(signal.SIGUSR2, None) == address
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_jax_hears_of_a_signal_only_while_no_manager_watches_it(
    one_host: Host, tmp_path: Path
) -> None:
    """Its processes would agree on a last step too, and stand still where they leave before."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys, time, jax, holdfast\n"
        "jax.distributed.initialize(sys.argv[2], 1, 0)\n"
        "with holdfast.CheckpointManager(sys.argv[1]) as manager:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    assert manager.save(5, {'n': 1}) and manager.reached_preemption(5)\n"
        # JAX's thread would have logged the first signal long before the second one.
        "    time.sleep(1)\n"
        "print('left', file=sys.stderr, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "while not os.path.exists(sys.argv[3]): time.sleep(0.01)\n"
        "jax.distributed.shutdown()\n"
    )
    process = Said(
        one_host.start(script, tmp_path / "run", free_address(), tmp_path / "heard", stem="jax")
    )
    # The framework logs it on a thread of its own.
    wait_until(lambda: "SIGTERM caught" in "".join(process.errors))
    (tmp_path / "heard").touch()
    process.finish()
    before, after = "".join(process.errors).split("left\n")
    assert "SIGTERM caught" not in before
    assert "SIGTERM caught" in after


def test_managers_closed_in_any_order_leave_the_default_action_behind(
    one_host: Host, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys, holdfast\n"
        "one = holdfast.CheckpointManager(sys.argv[1])\n"
        "two = holdfast.CheckpointManager(sys.argv[2])\n"
        "one.close(); two.close()\n"
        "three = holdfast.CheckpointManager(sys.argv[1])\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "assert three.save(5, {'n': 1}) and three.reached_preemption(5)\n"
        "three.close()\n"
        "print('told', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "print('survived', flush=True)\n"
    )
    process = one_host.start(script, tmp_path / "a", tmp_path / "b", stem="numpy")
    out, err = process.communicate(timeout=240)
    assert out.split() == ["told"], err
    assert process.returncode == -signal.SIGTERM


ENDLESS = """
import sys, time, holdfast
from holdfast import save_decision_policy
never = save_decision_policy.SpecificStepsPolicy([10**9])
with holdfast.CheckpointManager(sys.argv[1], save_decision_policy=never) as manager:
    for step in range(10**6):
        if manager.save(step, {"n": step}):
            print("saved", step, flush=True)
        elif step == 0:
            print("begun", flush=True)
        time.sleep(float(sys.argv[2]))
"""


def endless(
    host: Host, tmp_path: Path, step_secs: float, prelude: str = ""
) -> subprocess.Popen[str]:
    """A training loop that never asks whether it has to stop."""
    script = tmp_path / "script.py"
    script.write_text(prelude + ENDLESS)
    process = host.start(script, tmp_path / "run", step_secs, stem="numpy")
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGTERM)
    return process


def test_a_loop_that_never_asks_is_told_and_ended_by_the_second_signal(
    one_host: Host, tmp_path: Path
) -> None:
    text = "does not call manager.reached_preemption(step)"
    process = Said(endless(one_host, tmp_path, 0.05))
    wait_until(lambda: text in "".join(process.errors))
    time.sleep(REPEAT_SECS + 0.2)
    assert process.process.poll() is None
    process.process.send_signal(signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM, process.told()
    assert "".join(process.errors).count(text) == 1
    with holdfast.CheckpointManager(tmp_path / "run") as again:
        assert again.latest_step() is not None


def test_of_two_signals_that_come_together_one_repeats_the_other() -> None:
    called, notified, clock = [], [], StepClock()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: called.append(number))
    signals = PreemptionSignals([signal.SIGUSR1], (), lambda: notified.append(1), clock)
    try:
        # A launcher signals a process and its group.
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR1)
        clock.sleep(REPEAT_SECS - 0.1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (len(notified), len(called)) == (3, 3)
        clock.sleep(0.1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (len(notified), len(called)) == (3, 4)
        assert signal.getsignal(signal.SIGUSR1) != signals._handle
    finally:
        signals.close()
        signal.signal(signal.SIGUSR1, before)


def test_the_second_signal_reaches_the_handler_that_was_there_before(
    one_host: Host, tmp_path: Path
) -> None:
    prelude = (
        "import signal\n"
        "def handler(number, frame, seen=[]):\n"
        "    seen.append(number)\n"
        "    if len(seen) == 2: raise SystemExit(7)\n"
        "signal.signal(signal.SIGTERM, handler)\n"
    )
    process = endless(one_host, tmp_path, 0.05, prelude)
    assert process.stdout.readline().startswith("saved")
    time.sleep(REPEAT_SECS + 0.2)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 7, err


def test_a_loop_of_long_steps_is_told_after_some_seconds(caplog: pytest.LogCaptureFixture) -> None:
    stop = PreemptionStop()
    stop.at = 4
    for step, now_secs in ((4, 100.0), (5, 101.0), (5, 105.9)):
        stop.warn_unasked(step, now_secs)
    assert not caplog.records
    stop.warn_unasked(6, 106.1)
    stop.warn_unasked(7, 120.0)
    (record,) = caplog.records
    assert "step 4 is saved for it" in record.message


def test_a_rank_whose_hosts_agree_on_no_step_stops_alone_within_its_grace() -> None:
    steps, cells = SaveSchedule(None, OPTIONS, 2), [NEVER_STEP] * 16
    assert not steps.stop.is_left_alone(cells, 100.0)
    assert not steps.stop.is_left_alone(cells, 100.0 + AGREE_SECS - 0.1)
    cells[TARGET_PREEMPTION] = 7
    assert not steps.stop.is_left_alone(cells, 100.0 + AGREE_SECS)
    cells[TARGET_PREEMPTION] = NEVER_STEP
    assert steps.stop.is_left_alone(cells, 100.0 + AGREE_SECS)
    assert steps.due(5, cells, decided=4, is_stopping_alone=True, force=False).is_preemption
    assert AGREE_SECS + CUT_CLOSE_SECS < 30.0
    assert CONFIRM_SECS + CUT_CLOSE_SECS < 30.0


def test_a_rank_that_stops_alone_says_what_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    stop = PreemptionStop()
    stop.note_alone(5, "the newest secured step is 4")
    (record,) = caplog.records
    assert "stopping at step 5" in record.message
    assert record.message.endswith("the newest secured step is 4")
    assert stop.is_unconfirmed


def test_a_stop_that_no_other_host_confirms_is_awaited_for_a_bounded_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stop, cells, clock = PreemptionStop(), [NEVER_STEP] * 16, StepClock()
    cells[TARGET_PREEMPTION] = 5
    began_secs = clock.monotonic()
    stop.await_confirmation(5, cells, clock)
    assert clock.monotonic() - began_secs < CONFIRM_SECS + 1
    assert stop.is_unconfirmed
    assert "did not confirm" in caplog.text


def test_a_loop_that_asks_is_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    stop = PreemptionStop()
    stop.has_asked = True
    stop.at = 4
    for step in range(5, 20):
        stop.warn_unasked(step, float(step))
    assert not caplog.records


def test_a_preemption_during_a_save_still_saves_the_newest_step(
    one_host: Host, tmp_path: Path
) -> None:
    state = {"w": np.zeros(20_000_000)}
    with holdfast.CheckpointManager(tmp_path / "run", ram=None) as manager:
        assert manager.save(0, state, force=True)
        os.kill(os.getpid(), signal.SIGTERM)
        state["w"][:] = 1
        assert manager.save(1, state)
        assert manager.reached_preemption(1)
        manager.wait_until_finished()
        assert manager.latest_step() == 1
        assert manager.restore(1)["w"].max() == 1


def test_a_trainer_killed_at_the_end_of_its_grace_period_loses_nothing(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = json.dumps({"interval": 10**9, "sleep": 0.01})
    trainer = one_host.start(TRAINER, run, 10**9, options, stem="numpy")
    trainer.stdout.readline()
    trainer.stdout.readline()
    trainer.send_signal(signal.SIGTERM)
    wait_until(lambda: [e for e in events(run, "sealed") if e["step"] > 0])
    trainer.kill()
    sealed = events(run, "sealed")[-1]["step"]
    wait_until(lambda: [e["step"] for e in events(run, "committed")][-1:] == [sealed])
    left = [line["left"] for line in lines(trainer.communicate()[0]) if "left" in line]
    assert left in ([], [sealed])


def test_a_preempted_trainer_leaves_by_itself_with_its_step_saved(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    trainer = one_host.start(
        TRAINER, run, 10**9, json.dumps({"interval": 10**9, "sleep": 0.01}), stem="numpy"
    )
    trainer.stdout.readline()
    trainer.stdout.readline()
    trainer.send_signal(signal.SIGTERM)
    said = lines(finished(trainer))
    (left,) = [line["left"] for line in said if "left" in line]
    assert [line["saved"] for line in said if line.get("step") == left] == [True]
    again = one_host.start(TRAINER, run, left + 3, json.dumps({"interval": 10**9}), stem="numpy")
    first = lines(finished(again))[0]
    assert first["start"] == left + 1
    assert first["fingerprint"] == said[-1]["fingerprint"]


def test_signals_are_not_watched_off_the_main_thread_and_that_is_said(
    one_host: Host, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import threading

    def work() -> None:
        holdfast.CheckpointManager(tmp_path / "run").close()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "SIGTERM" in caplog.text
    assert "are not handled" in caplog.text


def test_a_signal_to_a_manager_whose_end_was_cut_off_is_no_error(
    one_host: Host, tmp_path: Path
) -> None:
    manager = holdfast.CheckpointManager(tmp_path / "run", save_decision_policy=NEVER)
    # As an exception in the middle of `close` leaves it: the agent's memory is released.
    manager._session.close()
    signal.raise_signal(signal.SIGTERM)
    manager.close()
