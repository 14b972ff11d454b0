"""Both generations of MaxText's checkpointing are served, and each continues the other's runs.

The package here has the functions that MaxText 0.2.5 calls its checkpointer from, with the calls
that it makes. A training with it needs MaxText itself, which `make trainers` has.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import types
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="JAX cannot be had here", exc_type=ImportError)

from holdfast.interop.trainers import maxtext
from tests.hosts import host

pytestmark = pytest.mark.timeout(300)

CHECKPOINTING = """
from orbax.checkpoint import v1 as ocp

def build_context(**options): ...

def create_orbax_checkpoint_manager(
    checkpoint_dir, enable_checkpointing, use_async, save_interval_steps, dataset_type=None,
    enable_continuous_checkpointing=False,
):
    return ocp.training.Checkpointer(checkpoint_dir, context=build_context())

def _should_save_checkpoint_at_step(checkpoint_manager, step, config, force):
    return force

def reached_preemption(checkpoint_manager, step):
    raise RuntimeError("jax.distributed is not initialized")

def save_checkpoint(checkpoint_manager, step, state, config, data_iterator, force):
    ...
"""
TRAIN_UTILS = "def create_checkpoint_manager(config, mesh, init_state_fn): ..."
PROGRAM = """
import sys, types
import grain.python as grain
import jax, jax.numpy as jnp
from orbax.checkpoint import v1 as ocp
from holdfast.interop import orbax as first
from holdfast.interop.trainers import maxtext
from maxtext.common import checkpointing

maxtext.install()
directory = sys.argv[1]
config = types.SimpleNamespace(save_checkpoint_on_start=False)
data = grain.MapDataset.source(range(64)).seed(7).shuffle().repeat().to_iter_dataset()
like = {"w": jax.ShapeDtypeStruct((2,), jnp.float32)}

def second():
    return checkpointing.create_orbax_checkpoint_manager(directory, True, True, 2, "grain")

def train(manager, iterator, steps):
    for step in steps:
        next(iterator)
        if checkpointing._should_save_checkpoint_at_step(manager, step, config, False):
            items = {"items": {"w": jnp.full(2, step, jnp.float32)}, "iter": iterator}
            manager.save_checkpointables_async(step, items, force=False, custom_metadata={})
        assert not checkpointing.reached_preemption(manager, step)
    manager.wait()

manager, iterator = second(), iter(data)
assert isinstance(manager, ocp.training.Checkpointer)
train(manager, iterator, range(6))
expected = [int(next(iterator)) for _ in range(3)]
assert [each.step for each in manager.checkpoints] == [2, 4] and manager.latest.step == 4
try:
    manager.save_checkpointables(4, {"items": {"w": jnp.ones(2)}}, force=True)
except FileExistsError:
    print("there")
manager.close()

manager, iterator = second(), iter(data)
assert (manager.directory / "4" / "iter").exists()
assert not (manager.directory / "3" / "iter").exists()
restored = manager.load_checkpointables(4, {"items": like, "iter": iterator})
next(iterator)
assert [int(next(iterator)) for _ in range(3)] == expected
assert restored["items"]["w"].tolist() == [4, 4]
manager.close()

old, iterator = maxtext._create(directory, True, True, 2), iter(data)
args = first.args
wanted = {"items": args.PyTreeRestore(like), "iter": grain.PyGrainCheckpointRestore(iterator)}
assert old.restore(4, args=args.Composite(**wanted))["items"]["w"].tolist() == [4, 4]
next(iterator)
assert [int(next(iterator)) for _ in range(3)] == expected
items = {"items": args.PyTreeSave({"w": jnp.full(2, 6.0)})}
items["iter"] = grain.PyGrainCheckpointSave(iterator)
old.save(6, args=args.Composite(**items))
old.close()

manager, iterator = second(), iter(data)
restored = manager.load_checkpointables(6, {"items": like, "iter": iterator})
assert restored["items"]["w"].tolist() == [6, 6]
assert int(next(iterator)) not in expected
manager.close()
print("done")
"""


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("orbax", "grain")),
    reason="Orbax and Grain cannot be had here",
)
def test_the_generations_continue_each_others_runs(tmp_path: Path) -> None:
    files = {
        "maxtext/common/checkpointing.py": CHECKPOINTING,
        "maxtext/common/emergency_checkpointing.py": "",
        "maxtext/utils/train_utils.py": TRAIN_UTILS,
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with host() as made:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", PROGRAM, tmp_path / "run"],
            env=made.environment | {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"},
            capture_output=True,
            text=True,
            timeout=250,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["there", "done"]


def module_with(source: str) -> types.SimpleNamespace:
    names: dict[str, object] = {}
    exec(source, names)
    return types.SimpleNamespace(**names)


@pytest.mark.parametrize(
    ("body", "is_second"),
    [("return ocp.CheckpointManagerOptions()", False), ("return build_context()", True)],
)
def test_a_generation_is_known_by_what_it_creates(body: str, is_second: bool) -> None:
    source = f"def create_orbax_checkpoint_manager(): {body}\ndef reached_preemption(): ..."
    assert maxtext._is_second_generation(module_with(source)) is is_second


@pytest.mark.parametrize(
    "source",
    [
        "def create_orbax_checkpoint_manager(): return v2.Manager()\ndef reached_preemption(): ...",
        "def create_orbax_checkpoint_manager(): return build_context()",
    ],
)
def test_another_generation_is_refused_by_what_it_lacks(source: str) -> None:
    with pytest.raises(ImportError, match="uses neither CheckpointManagerOptions nor build_cont"):
        maxtext._is_second_generation(module_with(source))
