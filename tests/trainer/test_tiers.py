"""Each tier has its own policies, and the run goes on when one of them is not to be had."""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import holdfast
from holdfast import errors, preservation_policy, save_decision_policy
from holdfast.host.wire.control_block import NEVER, TARGET_DURABLE
from holdfast.observe.events.reader import EventReader
from holdfast.observe.reports.goodput import report_run
from holdfast.store.disk import DiskStore
from tests.adapt.stand_in_device import StandInDevice
from tests.hosts import Host, await_events, events, wait_until
from tests.trainer.slots import slots_of, wait_for_a_slot, wait_for_a_whole_slot

EVERY_STEP = save_decision_policy.FixedIntervalPolicy(1)
STATE = {"w": np.arange(300_000.0)}


def test_ram_is_saved_as_often_as_its_own_policy_says(one_host: Host, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ram = holdfast.RamTier(save_decision_policy=EVERY_STEP)
    durable = save_decision_policy.FixedIntervalPolicy(10)
    with holdfast.CheckpointManager(run, save_decision_policy=durable, ram=ram) as manager:
        for step in range(25):
            assert manager.save(step, STATE)
        wait_until(lambda: manager.latest_step() == 24)
        manager.wait_until_finished()
        # The agent is told of a part after the part shows; then it gives the older one up.
        wait_until(lambda: manager.all_steps() == [0, 10, 20, 24])
    assert [e["step"] for e in await_events(run, "sealed", count=25)] == list(range(25))
    # The last one is made durable when its trainer leaves.
    wait_until(lambda: [e["step"] for e in events(run, "committed")] == [0, 10, 20, 24])


def test_continuous_checkpoints_are_committed_in_their_order_each_with_its_time(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    # Copied faster than written, so that writes begin while the checkpoint before is committed.
    slow = {"w": np.arange(5_000_000.0)}
    with holdfast.CheckpointManager(run) as manager:
        saved, steps = 0, itertools.count()

        def has_saved_eight() -> bool:
            nonlocal saved
            # Else the bytes of the step before would be kept, and nothing written.
            slow["w"] += 1
            saved += manager.save(next(steps), slow)
            return saved >= 8

        wait_until(has_saved_eight)
    story = await_events(run, "sealed", "committed", count=2 * saved)
    sealed = [e["step"] for e in story if e["event"] == "sealed"]
    committed = {e["step"]: e["secs"] for e in story if e["event"] == "committed"}
    assert sealed == [*committed]
    assert all(committed.values())
    changes = (1 if e["event"] == "sealed" else -1 for e in story)
    waiting = [*itertools.accumulate(changes)]
    assert (min(waiting), waiting[-1]) == (0, 0)


def test_a_step_that_continuous_asks_for_while_no_slot_is_ready_is_made_up_for_at_once(
    one_host: Host, tmp_path: Path
) -> None:
    # The agent clears the request as soon as it sees that the training has passed the step, and
    # makes no other one for a while.
    with holdfast.CheckpointManager(tmp_path / "run") as manager:
        cells, saver = manager._session.place.control.cells, manager._parts.position.saver
        steps = itertools.count()
        wait_until(lambda: manager.save(next(steps), STATE))
        manager.wait_until_finished()
        wait_until(lambda: not saver.should_wait(is_saving=False))
        wait_until(lambda: manager._steps.last < cells[TARGET_DURABLE] < NEVER)
        step = next(steps)
        assert step >= cells[TARGET_DURABLE]
        with saver._patience.preparing():
            assert not manager.save(step, STATE)
            assert not manager.save(next(steps), STATE)
            wait_until(lambda: cells[TARGET_DURABLE] == NEVER)
        saver.get_ready()
        wait_until(lambda: slots_of(manager).has_ready and not saver.should_wait(is_saving=False))
        assert manager.save(next(steps), STATE)


def test_preservation_keeps_what_it_says_and_always_the_newest(
    one_host: Host, tmp_path: Path
) -> None:
    keep = preservation_policy.AnyPreservationPolicy(
        [
            preservation_policy.EveryNSteps(4),
            preservation_policy.BestN(1, metric="loss"),
        ]
    )
    losses = [5.0, 4.0, float("nan"), 1.0, 6.0, 7.0, 8.0, 9.0, 9.5, 9.9]
    with holdfast.CheckpointManager(
        tmp_path / "run", save_decision_policy=EVERY_STEP, preservation_policy=keep
    ) as manager:
        for step, loss in enumerate(losses):
            assert manager.save(step, {"n": step}, metrics={"loss": loss})
            manager.wait_until_finished()
        wait_until(lambda: manager.all_steps() == [0, 3, 4, 8, 9])


class OnMillions:
    """A policy of a user's own: a step after each million."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def should_save(self, step, previous_steps, *, context) -> bool:
        assert context.now.tzinfo is not None
        assert [c.step for c in previous_steps] == sorted(c.step for c in previous_steps)
        self.asked.append(step)
        return step % 10**6 == 0


class KeepEven:
    """A preservation policy of a user's own."""

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        return [checkpoint.step % 2 == 0 for checkpoint in checkpoints]


def test_a_users_own_save_policy_is_asked_for_every_step(one_host: Host, tmp_path: Path) -> None:
    saved, step, policy = [], 0, OnMillions()
    with holdfast.CheckpointManager(
        tmp_path / "run",
        save_decision_policy=policy,
        preservation_policy=preservation_policy.LatestN(100),
    ) as manager:
        while len(saved) < 4:
            if is_saved := manager.save(step, {"n": step}):
                saved.append(step)
            wait_until(lambda step=step: step in policy.asked)
            step = len(saved) * 10**6 if is_saved else step + 1
    assert [step // 10**6 for step in saved] == [0, 1, 2, 3]


def test_a_users_own_preservation_policy_decides_and_the_newest_stays(
    one_host: Host, tmp_path: Path
) -> None:
    with holdfast.CheckpointManager(
        tmp_path / "run", save_decision_policy=EVERY_STEP, preservation_policy=KeepEven()
    ) as manager:
        for step in range(6):
            manager.save(step, {"n": step})
            manager.wait_until_finished()
        wait_until(lambda: manager.all_steps() == [0, 2, 4, 5])


def test_a_users_policy_that_raises_is_told_at_the_next_save(
    one_host: Host, tmp_path: Path
) -> None:
    class Broken:
        def should_save(self, step, previous_steps, *, context) -> bool:
            raise RuntimeError("my own mistake")

    def train() -> None:
        with holdfast.CheckpointManager(tmp_path / "run", save_decision_policy=Broken()) as manager:
            for step in range(200):
                manager.save(step, {"n": step})
                time.sleep(0.01)

    with pytest.raises(holdfast.errors.HoldfastError, match="my own mistake"):
        train()


def test_without_a_ram_tier_the_run_checkpoints_straight_to_disk(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with holdfast.CheckpointManager(run, save_decision_policy=EVERY_STEP, ram=None) as manager:
        for step in range(5):
            manager.save(step, STATE | {"n": step})
            manager.wait_until_finished()
        restored = manager.restore()
        assert restored["n"] == 4
        np.testing.assert_array_equal(restored["w"], STATE["w"])
        assert manager.last_restore is not None
        assert set(manager.last_restore.sources) == {"durable"}
        assert one_host.agent().ram_bytes == 0
    assert {e["tier"] for e in await_events(run, "sealed", count=5)} == {"durable"}
    # The trainer has written the bytes; the agent, which commits, does not know for how long.
    assert {e["secs"] for e in await_events(run, "committed", count=5)} == {None}
    took_secs = [e["secs"] for e in await_events(run, "part_saved", count=5)]
    assert report_run("run", EventReader(run).read()).tiers["durable"].secs == statistics.median(
        took_secs
    )


@pytest.fixture
def small_ram(one_host: Host) -> Iterator[Path]:
    """The host's RAM folder as a tmpfs of two megabytes."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    options = ["-o", "size=2m,mode=700"]
    subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", str(one_host.folder)], check=True)
    try:
        yield one_host.folder
    finally:
        one_host.end()
        subprocess.run(["umount", "-l", str(one_host.folder)], check=True)


def test_a_tmpfs_that_is_too_small_sends_the_run_straight_to_disk_and_says_so_once(
    small_ram: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    with holdfast.CheckpointManager(run, save_decision_policy=EVERY_STEP) as manager:
        for step in range(4):
            assert manager.save(step, STATE | {"n": step})
            manager.wait_until_finished()
        assert manager.restore()["n"] == 3
    assert caplog.text.count("no RAM for checkpoints") == 1
    assert len(await_events(run, "ram_unavailable", count=1)) == 1
    assert {e["tier"] for e in await_events(run, "sealed", count=4)} == {"durable"}


def test_a_save_for_ram_alone_that_finds_no_room_is_not_said_to_go_to_disk(
    one_host: Host, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    never = save_decision_policy.SpecificStepsPolicy([10**9])
    ram = holdfast.RamTier(save_decision_policy=EVERY_STEP, limit_bytes=100_000)
    with holdfast.CheckpointManager(
        tmp_path / "run", save_decision_policy=never, ram=ram
    ) as manager:
        for step in range(2):
            assert manager.save(step, STATE)
            with pytest.raises(errors.SaveFailedError):
                manager.wait_until_finished()
    (warning,) = [text for text in caplog.messages if "no RAM for checkpoints" in text]
    assert "step 0 and later ones that are due in RAM alone are not saved" in warning
    assert "limit of 100000 bytes" in warning
    assert "directly to the durable tier" not in caplog.text


def fill_up(file: FileIO) -> None:
    with contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_tmpfs_that_fills_up_between_saves_is_no_end_and_room_is_used_again(
    small_ram: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    small = {"w": np.arange(100_000.0)}
    with holdfast.CheckpointManager(run, save_decision_policy=EVERY_STEP) as manager:
        manager.save(0, small)
        manager.wait_until_finished()
        with (small_ram / "filler").open("wb", buffering=0) as filler:
            fill_up(filler)
        manager.save(1, small)
        manager.wait_until_finished()
        manager.save(2, small)
        manager.wait_until_finished()
        (small_ram / "filler").unlink()
        manager.save(3, small)
        manager.wait_until_finished()
        assert manager.latest_step() == 3
    tiers = [e["tier"] for e in await_events(run, "sealed", count=4)]
    assert tiers[0] == tiers[3] == "ram"
    assert "durable" in tiers


def test_a_state_in_a_slot_that_finds_no_room_for_its_record_goes_to_the_disk(
    small_ram: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with holdfast.CheckpointManager(run, save_decision_policy=EVERY_STEP) as manager:
        manager.save(0, {"w": np.full(100_000, 0.0)})
        manager.wait_until_finished()
        wait_for_a_whole_slot(manager)
        with (small_ram / "filler").open("wb", buffering=0) as filler:
            fill_up(filler)
        assert manager.save(1, {"w": np.full(100_000, 1.0)})
        manager.wait_until_finished()
        sealed = await_events(run, "sealed", count=2)
        assert [event["tier"] for event in sealed] == ["ram", "durable"]
        assert not list(small_ram.glob("*/ram/checkpoints/000000001.1-*/*"))
        assert (manager.restore(1)["w"] == 1.0).all()
        (small_ram / "filler").unlink()


def test_a_state_that_a_device_copied_goes_to_the_disk_where_its_record_finds_no_room(
    small_ram: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with (
        StandInDevice().serving() as device,
        holdfast.CheckpointManager(run, save_decision_policy=EVERY_STEP) as manager,
    ):
        manager.save(0, {"w": jnp.full(100_000, 0.0)})
        manager.wait_until_finished()
        wait_for_a_slot(manager)
        with (small_ram / "filler").open("wb", buffering=0) as filler:
            fill_up(filler)
        assert manager.save(1, {"w": jnp.full(100_000, 1.0)})
        manager.wait_until_finished()
        sealed = await_events(run, "sealed", count=2)
        assert [event["tier"] for event in sealed] == ["ram", "durable"]
        assert sum(device.copied_bytes.values()) == 2 * 400_000
        assert (manager.restore(1)["w"] == 1.0).all()
        (small_ram / "filler").unlink()


def test_the_limit_of_the_ram_tier_is_kept(one_host: Host, tmp_path: Path) -> None:
    ram = holdfast.RamTier(limit_bytes=6_000_000)
    with holdfast.CheckpointManager(
        tmp_path / "run", save_decision_policy=EVERY_STEP, ram=ram
    ) as manager:
        taken = []
        for step in range(6):
            if manager.save(step, STATE):
                taken.append(step)
            assert one_host.agent().ram_bytes <= 6_000_000
        manager.wait_until_finished()
        assert manager.latest_step() == taken[-1] >= 2


def test_continuous_goes_on_after_going_back_before_it_is_where_it_was(
    one_host: Host, tmp_path: Path
) -> None:
    keep_all, newest = preservation_policy.LatestN(1000), 10**6
    with holdfast.CheckpointManager(tmp_path / "run", preservation_policy=keep_all) as manager:
        manager.save(0, {"n": 0}, force=True)
        for _ in range(2):
            manager.save(newest, {"n": newest}, force=True)
            manager.wait_until_finished()
            manager.resume({"n": 0}, step=0)
            steps, saved = itertools.count(1), []

            def saves_again(steps: Iterator[int] = steps, saved: list[int] = saved) -> bool:
                step = next(steps)
                if manager.save(step, {"n": step}):
                    saved.append(step)
                return len(saved) == 3

            wait_until(saves_again)
            assert saved[-1] < newest
            manager.wait_until_finished()


def test_save_does_not_wait_for_storage_without_a_ram_tier(
    one_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, put = threading.Event(), DiskStore.put

    def held(*arguments: Any) -> None:
        assert goes_on.wait(240)
        put(*arguments)

    with holdfast.CheckpointManager(
        tmp_path / "run", save_decision_policy=EVERY_STEP, ram=None
    ) as manager:
        monkeypatch.setattr(DiskStore, "put", held)
        taken = [manager.save(step, {"w": jnp.full(1000, step)}) for step in range(6)]
        assert taken[0]
        assert not all(taken)
        assert not manager.all_steps()
        goes_on.set()
        manager.wait_until_finished()
        assert manager.all_steps()[-1] == max(step for step in range(6) if taken[step])
