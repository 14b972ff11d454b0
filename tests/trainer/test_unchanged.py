"""What has not changed is not written again, and every step is restored as it was saved."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import holdfast
from holdfast import preservation_policy, save_decision_policy
from holdfast.adapt.contract import EVERYTHING
from holdfast.adapt.jax.state import JaxFramework
from holdfast.adapt.nested import NestedRestoration
from holdfast.clock import SystemClock
from holdfast.engine.reading.restore import fill_targets
from holdfast.engine.saving.incremental import SealedPart
from holdfast.engine.saving.part_writer import PartWriter, write_part
from holdfast.engine.saving.slots import RamSlots
from holdfast.errors import StorageError
from holdfast.store.disk import DiskStore
from holdfast.store.slots import SlotPool
from holdfast.trainer.planning import Planner, Taking
from tests.attempts import checkpoint_id
from tests.engine.making import TIME, memory_folder, sources_of
from tests.hosts import Host, events, wait_until
from tests.trainer.slots import slots_of, wait_for_a_slot

MIB = 1 << 20
SIZE = 300_000
WHOLE_BYTES = 9 * SIZE * 4
EVERY_STEP = save_decision_policy.FixedIntervalPolicy(1)
ALL = preservation_policy.LatestN(100)
train = jax.jit(lambda x: x + 1, donate_argnums=0)
# XLA gives back what passes through it in a new array object.
step_all = jax.jit(
    lambda s: s | {"tuned": jax.tree.map(lambda x: x + 1, s["tuned"])}, donate_argnums=0
)


def manager(run: Path, **options: Any) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(
        run,
        **{"save_decision_policy": EVERY_STEP, "preservation_policy": ALL} | options,
    )


def begun() -> dict[str, Any]:
    """8 arrays that stay, in one of which the position stands, and one that is trained."""
    base = {f"b{i}": jnp.arange(SIZE, dtype=jnp.float32) + i for i in range(8)}
    return {"base": base, "tuned": {"t": jnp.zeros(SIZE)}, "n": 0}


def right(step: int) -> dict[str, Any]:
    """What step `step` of training `begun` has to give."""
    return jax.tree.map(np.asarray, begun()) | {
        "tuned": {"t": np.full(SIZE, step, np.float32)},
        "n": step,
    }


def assert_same(found: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def trained(state: dict[str, Any], way: str) -> dict[str, Any]:
    """The state after one step more: the base the very same objects, or passed through XLA."""
    n = state["n"] + 1
    if way == "donated":
        arrays = step_all({"base": state["base"], "tuned": state["tuned"]})
        return arrays | {"n": n}
    return state | {"tuned": {"t": train(state["tuned"]["t"])}, "n": n}


def restored(saving: holdfast.CheckpointManager, step: int) -> Any:
    """What is saved of a step; the run does not go back to it."""
    view = saving._parts.position.views.load()
    sources = view.sources(view.find(step))
    restoration = NestedRestoration(sources.spec)
    fill_targets(sources, restoration.targets)
    return restoration.finish({})


def written_bytes(saving: holdfast.CheckpointManager) -> dict[int, int]:
    return {step: saving.metadata(step).written_bytes for step in saving.all_steps()}


@pytest.mark.parametrize("ram", [holdfast.RamTier(), None], ids=["ram", "no ram"])
@pytest.mark.parametrize(("way", "whole_count"), [("frozen", 1), ("donated", 2)])
def test_a_base_that_stays_is_written_once(
    one_host: Host, tmp_path: Path, way: str, whole_count: int, ram: holdfast.RamTier | None
) -> None:
    state = begun()
    with manager(tmp_path / "run", ram=ram) as saving:
        for step in range(6):
            assert saving.save(step, state)
            state = trained(state, way)
            saving.wait_until_finished()
        written = list(written_bytes(saving).values())
        assert min(written[:whole_count]) > WHOLE_BYTES
        assert max(written[whole_count:]) < WHOLE_BYTES / 8
        for step in (5, 3, 0, 1, 4, 2):
            assert_same(restored(saving, step), right(step))
    inodes = {
        path.stat().st_ino: path.stat().st_size
        for path in (tmp_path / "run/checkpoints").rglob("*.safetensors")
    }
    assert sum(inodes.values()) == sum(written)


@pytest.mark.parametrize("ram", [holdfast.RamTier(), None], ids=["ram", "no ram"])
def test_the_checkpoint_that_wrote_it_may_be_deleted(
    one_host: Host, tmp_path: Path, ram: holdfast.RamTier | None
) -> None:
    state = begun()
    with manager(
        tmp_path / "run", ram=ram, preservation_policy=preservation_policy.LatestN(1)
    ) as saving:
        for step in range(5):
            assert saving.save(step, state)
            state = trained(state, "frozen")
            saving.wait_until_finished()
        wait_until(lambda: saving.all_steps() == [4])
        assert saving.metadata(4).written_bytes < WHOLE_BYTES / 8
        assert [reused.step for reused in saving.metadata(4).reused] == [0]
    with manager(tmp_path / "run", ram=ram) as again:
        next_step, found = again.resume(begun())
        assert next_step == 5
        assert_same(found, right(4))


def test_the_training_thread_copies_only_what_has_changed(one_host: Host, tmp_path: Path) -> None:
    state = begun()
    with manager(tmp_path / "run") as saving:
        for step in range(3):
            saving.save(step, state)
            state = trained(state, "frozen")
            saving.wait_until_finished()
        small = saving.metadata(2).written_bytes
        slots = slots_of(saving)
        wait_until(lambda: slots.has_ready and slots.is_ready(small))
        taken_by = []
        acquire = slots.acquire

        def recording(size_bytes: int, held: contextlib.ExitStack | None = None) -> Any:
            writer = acquire(size_bytes, held)
            taken_by.append((threading.get_ident(), writer is not None))
            return writer

        # The saver may prepare the next slot before `save` returns, so that `has_ready` shows
        # nothing. Which thread took the slot is the claim.
        slots.acquire = recording
        assert saving.save(3, state)
        assert taken_by[0] == (threading.get_ident(), True)
        saving.wait_until_finished()
        assert saving.metadata(3).written_bytes == small
        assert_same(restored(saving, 3), right(3))


def test_one_whole_slot_and_two_small_ones_have_the_room_of_two(
    one_host: Host, tmp_path: Path
) -> None:
    state = begun()
    limit = 2 * WHOLE_BYTES + 16 * 4096
    with manager(tmp_path / "run", ram=holdfast.RamTier(limit_bytes=limit)) as saving:
        for step in range(6):
            saving.save(step, state)
            state = trained(state, "frozen")
            saving.wait_until_finished()
            used = saving.metadata(step).written_bytes
            wait_for_a_slot(saving)
            assert one_host.agent().ram_bytes <= limit
        assert used < WHOLE_BYTES / 8
        assert one_host.agent().ram_bytes < WHOLE_BYTES * 1.4
    assert events(tmp_path / "run", "ram_unavailable") == []


def test_the_first_save_after_going_on_from_elsewhere_is_whole(
    one_host: Host, tmp_path: Path
) -> None:
    state = begun()
    run = tmp_path / "run"
    with manager(run) as saving:
        for step in range(3):
            saving.save(step, state)
            state = trained(state, "frozen")
            saving.wait_until_finished()
    with manager(run) as again:
        _, state = again.resume(begun())
        for step in (3, 4):
            state = trained(state, "frozen")
            again.save(step, state)
            again.wait_until_finished()
        found = written_bytes(again)
        assert found[3] > WHOLE_BYTES > 8 * found[4]
        # Back to where it is.
        _, state = again.resume(begun())
        again.save(5, trained(state, "frozen"))
        again.wait_until_finished()
        assert again.metadata(5).attempt == again.metadata(4).attempt
        assert written_bytes(again)[5] > WHOLE_BYTES
        # Back to an earlier step: another attempt.
        _, state = again.resume(begun(), step=1)
        for step in (2, 3):
            state = trained(state, "frozen")
            again.save(step, state)
            again.wait_until_finished()
        found = written_bytes(again)
        assert found[2] > WHOLE_BYTES > 8 * found[3]
        # Another structure.
        again.save(4, trained(state, "frozen") | {"more": jnp.zeros(3)})
        again.wait_until_finished()
        assert written_bytes(again)[4] > WHOLE_BYTES
        for step in (0, 1, 2, 3):
            assert_same(restored(again, step), right(step))


def test_a_numpy_array_that_was_changed_in_place_is_written(one_host: Host, tmp_path: Path) -> None:
    state = {"a": np.zeros(SIZE), "b": np.zeros(4 * SIZE)}
    with manager(tmp_path / "run") as saving:
        for step in range(12):
            state["a"] += 1
            if step in (4, 8):
                state["b"][-1] = step
            saving.save(step, state)
            saving.wait_until_finished()
        found = written_bytes(saving)
        # What was the same once only is not looked at: it has to be twice.
        assert [step for step in found if found[step] > 4 * SIZE * 8] == [0, 1, 4, 5, 8, 9]
        for step in range(12):
            saved = restored(saving, step)
            assert (saved["a"] == step + 1).all()
            assert saved["b"][-1] == max([s for s in (4, 8) if s <= step], default=0)


def test_a_checkpoint_that_was_deleted_meanwhile_is_not_missed(
    one_host: Host, tmp_path: Path
) -> None:
    state = begun()
    with manager(tmp_path / "run") as saving:
        for step in range(5):
            saving.save(step, state)
            saving.wait_until_finished()
            state = trained(state, "frozen")
            if step == 2:
                saving.delete(2)
        found = written_bytes(saving)
        assert [step for step in found if found[step] > WHOLE_BYTES] == [0, 3]
        for step in (0, 1, 3, 4):
            assert_same(restored(saving, step), right(step))


def _changed(state: dict[str, Any], chance: random.Random, step: int) -> dict[str, Any]:
    """Each leaf as it was, the same bytes in another object, or other bytes."""
    made = dict(state)
    for name, leaf in state.items():
        what = chance.choice(["same", "same", "same", "equal", "other"])
        if isinstance(leaf, np.ndarray):
            if what == "other":
                leaf[chance.randrange(len(leaf))] = step
            elif what == "equal":
                made[name] = leaf.copy()
        elif what == "other" and leaf.size:
            made[name] = leaf.at[chance.randrange(len(leaf))].set(step)
        elif what == "equal":
            made[name] = jnp.array(np.asarray(leaf))
    return made


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 2, 3))])
def test_whatever_changes_and_whoever_dies_each_step_is_restored_exactly(
    one_host: Host, tmp_path: Path, seed: int
) -> None:
    print(f"replay: seed {seed}")
    chance = random.Random(seed)
    state: dict[str, Any] = {f"w{i}": jnp.arange(SIZE, dtype=jnp.float32) for i in range(4)}
    state |= {"host": np.zeros(SIZE), "small": jnp.zeros(7), "none": jnp.zeros((0, 3))}
    expected: dict[int, Any] = {}
    with manager(tmp_path / "run") as saving:
        for step in range(24):
            state = _changed(state, chance, step)
            expected[step] = jax.tree.map(lambda leaf: np.array(leaf), state)
            assert saving.save(step, state, force=True)
            match chance.randrange(8):
                case 0:
                    wait_until(one_host.agents)
                    one_host.kill_agent()
                case 1:
                    saving.wait_until_finished()
                    gone = chance.choice(saving.all_steps())
                    saving.delete(gone)
                    del expected[gone]
                case 2 | 3 | 4:
                    saving.wait_until_finished()
        saving.wait_until_finished()
        assert saving.all_steps() == sorted(expected)
        sizes = written_bytes(saving)
        assert min(sizes.values()) < max(sizes.values()) / 2
        for step in chance.sample(sorted(expected), len(expected)):
            assert_same(restored(saving, step), expected[step])
    # And from the disk alone.
    with manager(tmp_path / "run", ram=None) as again:
        for step in sorted(expected):
            assert_same(restored(again, step), expected[step])


# Without an agent: what is filled already when the RAM tier fails.


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_folder() as folder:
        yield Path(folder) / "ram"


@pytest.fixture
def slots(root: Path) -> Iterator[RamSlots]:
    made = RamSlots(lambda: root, SystemClock())
    yield made
    made.close()


def begin_next(
    slots: RamSlots, root: Path, plan: Any, snapshot: Any, last: SealedPart | None
) -> PartWriter:
    """Begin a part in a slot of its size."""
    part = PartWriter(slots.store(), plan, snapshot, last)
    layout = part.images.own
    name = SlotPool(root, None, SystemClock()).reserve(layout.size_bytes)
    assert part.open(slots.begin(name, layout))
    return part


def seal_next(
    slots: RamSlots, root: Path, plan: Any, snapshot: Any, last: SealedPart | None
) -> SealedPart:
    with contextlib.closing(begin_next(slots, root, plan, snapshot, last)) as part:
        return part.complete()


def test_a_part_whose_ram_is_removed_under_it_still_has_all_its_bytes(
    slots: RamSlots, root: Path, tmp_path: Path
) -> None:
    """Also those that it had only reused: nothing else holds the state any more."""
    durable = DiskStore(tmp_path, SystemClock())
    planner, framework = Planner("r", 0, 1), JaxFramework()
    state = begun()

    def taking(step: int) -> tuple[Any, Any]:
        snapshot = framework.snapshot(state)
        taking = Taking(id=checkpoint_id(step), time=TIME, metrics=None)
        return planner.plan(snapshot, taking), snapshot

    last = seal_next(slots, root, *taking(0), None)
    state = trained(state, "frozen")
    plan, snapshot = taking(1)
    with contextlib.closing(begin_next(slots, root, plan, snapshot, last)) as part:
        assert len(part.images.reused) == 1
        assert part.copy()
        shutil.rmtree(root)
        with pytest.raises(StorageError, match="the RAM tier was removed"):
            part.complete()
        part.discard()
        assert part.is_whole
        write_part(durable, plan, part.chunk_bytes())
    sources = sources_of(plan.id, durable)
    restoration = framework.restoration(sources.spec, EVERYTHING)
    fill_targets(sources, restoration.targets)
    assert_same(restoration.finish({}), right(1))


@pytest.mark.parametrize("is_written", [False, True])
def test_a_part_that_is_not_sealed_leaves_no_name_behind(
    slots: RamSlots, root: Path, is_written: bool
) -> None:
    planner, framework = Planner("r", 0, 1), JaxFramework()
    state, last = begun(), None
    for step in range(3):
        snapshot = framework.snapshot(state)
        plan = planner.plan(snapshot, Taking(id=checkpoint_id(step), time=TIME, metrics=None))
        if step < 2:
            last = seal_next(slots, root, plan, snapshot, last)
        state = trained(state, "frozen")
    folder = root / "checkpoints"
    assert sorted(os.listdir(folder)) == [str(checkpoint_id(0)), str(checkpoint_id(1))]
    with contextlib.closing(begin_next(slots, root, plan, snapshot, last)) as part:
        assert len(part.images.reused) == 1
        if is_written:
            part.copy()
        assert len(os.listdir(folder / str(checkpoint_id(2)))) == 1
    assert sorted(os.listdir(folder)) == [str(checkpoint_id(0)), str(checkpoint_id(1))]
    part.close()


def test_a_slot_whose_filling_ended_early_is_never_sealed(slots: RamSlots, root: Path) -> None:
    snapshot = JaxFramework().snapshot(begun())
    taking = Taking(id=checkpoint_id(0), time=TIME, metrics=None)
    plan = Planner("r", 0, 1).plan(snapshot, taking)
    with contextlib.closing(begin_next(slots, root, plan, snapshot, None)) as part:
        part.end()
        assert not part.copy()
        with pytest.raises(StorageError, match="not filled whole"):
            part.complete()
        assert not part.is_whole
    assert not list((root / "checkpoints").glob("*/*"))
