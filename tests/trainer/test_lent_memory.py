"""A state that came back from RAM is the RAM tier's memory itself, and nothing can harm either."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import holdfast
from holdfast import save_decision_policy
from holdfast.adapt.contract import Snapshot
from holdfast.format.layout import Chunk
from holdfast.format.names import CheckpointId
from holdfast.trainer.planning import Taking
from holdfast.trainer.save.save_queue import SaveRequest
from tests.hosts import Host
from tests.trainer.slots import slots_of, wait_for_a_whole_slot

SIZE = 1_000_000
EVERY_STEP = save_decision_policy.FixedIntervalPolicy(1)


def manager(run: Path) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(run, save_decision_policy=EVERY_STEP)


def state(value: float) -> dict:
    return {"w": jnp.full(SIZE, value), "host": np.full(100, value), "b": jnp.full((8, 8), value)}


def address(array: jax.Array) -> int:
    return array.addressable_data(0).unsafe_buffer_pointer()


def is_of_a_slot(array: jax.Array) -> bool:
    """Whether the array's memory is a mapped file of a RAM tier."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, stop = line.split()[0].partition("-")
        if int(start, 16) <= address(array) < int(stop, 16):
            return "/ram/checkpoints/" in line
    raise AssertionError


def test_a_restore_from_ram_copies_no_array_of_jax(one_host: Host, tmp_path: Path) -> None:
    with manager(tmp_path / "run") as saving:
        saving.save(0, state(1.0))
    with manager(tmp_path / "run") as again:
        _, restored = again.resume(state(0.0))
        assert again.last_restore.sources.keys() == {"ram"}
        assert is_of_a_slot(restored["w"])
        restored["host"] += 1
        assert (restored["host"] == 2.0).all()


def test_a_donated_step_does_not_write_into_the_checkpoint(one_host: Host, tmp_path: Path) -> None:
    step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    with manager(tmp_path / "run") as saving:
        saving.save(0, state(1.0))
    with manager(tmp_path / "run") as again:
        _, restored = again.resume(state(0.0))
        after = step(restored)
        assert (np.asarray(after["w"]) == 2.0).all()
        assert not is_of_a_slot(after["w"])
        assert (np.asarray(again.restore(0)["w"]) == 1.0).all()


def test_a_state_that_is_kept_stays_as_it_was_restored_whatever_is_saved_later(
    one_host: Host, tmp_path: Path
) -> None:
    with manager(tmp_path / "run") as saving:
        saving.save(0, state(1.0))
    with manager(tmp_path / "run") as again:
        _, kept = again.resume(state(0.0))
        assert is_of_a_slot(kept["w"])
        for number in range(1, 8):
            assert again.save(number, state(float(number)))
            again.wait_until_finished()
            assert (np.asarray(kept["w"]) == 1.0).all()
    assert (np.asarray(kept["w"]) == 1.0).all()


@pytest.mark.parametrize(("count", "dtype"), [(1, "float32"), (2, "float32"), (2, "bfloat16")])
def test_a_save_copies_the_state_at_once_when_a_slot_is_ready(
    one_host: Host, tmp_path: Path, count: int, dtype: str
) -> None:
    """So that donating the state needs no fresh memory: no view of it is held."""
    step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    arrays = {f"w{i}": jnp.zeros(SIZE, dtype) for i in range(count)}
    with manager(tmp_path / "run") as saving:
        for number in range(3):
            saving.save(number, arrays)
            saving.wait_until_finished()
            arrays = step(arrays)
        before = {name: address(array) for name, array in arrays.items()}
        wait_for_a_whole_slot(saving)
        assert saving.save(3, arrays)
        arrays = step(arrays)
        assert {name: address(array) for name, array in arrays.items()} == before
        saving.wait_until_finished()
        for name, array in saving.restore(3).items():
            assert (np.asarray(array) == 3.0).all(), name


def test_the_first_save_after_resume_is_copied_into_a_slot_that_stands_ready(
    one_host: Host, tmp_path: Path
) -> None:
    with manager(tmp_path / "run") as saving:
        saving.resume(state(1.0))
        wait_for_a_whole_slot(saving)
        filled = slots_of(saving)._ready
        assert saving.save(0, state(1.0))
        assert filled is not None
        assert any(filled.view()[-4:].tobytes())
        saving.wait_until_finished()
        assert (np.asarray(saving.restore(0)["w"]) == 1.0).all()


class _Interrupting:
    """A snapshot whose copying is interrupted once, as by a Ctrl-C; it ends as any other."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self.is_interrupted = False
        self.outline = snapshot.outline
        self.values, self.process_values = snapshot.values, snapshot.process_values
        self.marks, self.pin = snapshot.marks, snapshot.pin
        self.hold, self.on_devices = snapshot.hold, snapshot.on_devices

    def chunk_bytes(self, chunk: Chunk) -> memoryview:
        if not self.is_interrupted:
            self.is_interrupted = True
            raise KeyboardInterrupt
        return self._snapshot.chunk_bytes(chunk)

    def release(self) -> None:
        self._snapshot.release()


def test_a_copy_that_is_interrupted_is_made_by_the_background_thread(
    one_host: Host, tmp_path: Path
) -> None:
    with manager(tmp_path / "run") as saving:
        saving.resume(state(7.0))
        wait_for_a_whole_slot(saving)
        snapshot = _Interrupting(saving._process.framework.snapshot(state(7.0)))
        taken = CheckpointId(0, saving._session.place.attempt)
        taking = Taking(id=taken, time=saving._clock.now(), metrics=None)
        plan = saving._parts.due_saves.planner.plan(snapshot, taking)
        with pytest.raises(KeyboardInterrupt):
            saving._parts.position.saver.submit(
                SaveRequest(
                    plan=plan,
                    snapshot=snapshot,
                    is_durable_due=True,
                    is_by_step=True,
                    asked_secs=0.0,
                )
            )
        saving.wait_until_finished()
        assert (np.asarray(saving.restore(0)["w"]) == 7.0).all()
