"""Directories of Orbax that are imported, and runs that are exported, and what is different.

`python orbax_round_trips.py FOLDER RESULT [NAME...]` does all of them, or those named, and writes a
list for each as JSON. An empty list means that nothing is different.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shutil
import sys
import threading
import traceback
import warnings
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

import holdfast
import holdfast.interop.orbax as own
from holdfast.cli.main import main
from holdfast.errors import CheckpointDamagedError, InvalidArgumentError
from holdfast.interop.orbax.orbax_export import export_orbax
from holdfast.interop.orbax.orbax_import import import_orbax

TRIPS = {}


def trip(function):
    TRIPS[function.__name__] = function
    return function


class CounterHandler(ocp.CheckpointHandler):
    """A handler of another package: one file, as iterators have."""

    def save(self, directory, args):
        (directory / "process_0-of-1.json").write_text(json.dumps({"at": args.at}))

    def restore(self, directory, args):
        return json.loads((directory / "process_0-of-1.json").read_text())["at"]


@ocp.args.register_with_handler(CounterHandler, for_save=True)
class CounterSave(ocp.args.CheckpointArgs):
    def __init__(self, at):
        self.at = at


@ocp.args.register_with_handler(CounterHandler, for_restore=True)
class CounterRestore(ocp.args.CheckpointArgs):
    pass


def command(*arguments):
    """Run a command; return its exit status and what it printed for people, in one line."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        status = main([str(argument) for argument in arguments])
    return status, " ".join(said.getvalue().split())


def done(*arguments):
    status, said = command(*arguments)
    return [] if status == 0 else [said]


def differences(one, other, place="", *, types=True):
    """Return where two trees differ: in a structure, a type, a dtype, a sharding or a bit."""
    if isinstance(one, dict | list | tuple):
        keys = sorted(one) if isinstance(one, dict) else range(len(one))
        if type(one) is not type(other) or len(one) != len(other):
            return [f"{place}: {one!r} {other!r}"]
        if isinstance(one, dict) and sorted(other) != keys:
            return [f"{place}: {keys} {sorted(other)}"]
        return [
            found
            for key in keys
            for found in differences(one[key], other[key], f"{place}/{key}", types=types)
        ]
    if types and type(one) is not type(other):
        return [f"{place}: {type(one)} {type(other)}"]
    if isinstance(one, jax.Array) and jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    if isinstance(one, jax.Array) and types and one.sharding != other.sharding:
        return [f"{place}: {one.sharding} {other.sharding}"]
    if isinstance(one, jax.Array | np.ndarray):
        one, other = np.asarray(one), np.asarray(other)
        same = (one.dtype, one.shape) == (other.dtype, other.shape)
        return [] if same and one.tobytes() == other.tobytes() else [f"{place}: {one} {other}"]
    return [] if one == other else [f"{place}: {one!r} {other!r}"]


def state_at(step):
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    params = {
        "w": jax.device_put(
            jnp.arange(32.0).reshape(8, 4) + step, NamedSharding(mesh, PartitionSpec("x", "y"))
        ),
        "b": jnp.array([1.5, -0.0, np.nan, np.inf], jnp.bfloat16) * step,
    }
    return {
        "params": params,
        "opt": optax.adamw(1e-3).init(params),
        "key": jax.random.split(jax.random.key(step), 3),
        "old_key": jax.random.PRNGKey(step),
        "zero": jnp.float32(step),
        "f8": jnp.ones(4, jnp.float8_e4m3fn),
        "i4": np.array([1, -2, 3], ml_dtypes.int4),
        "numpy": np.arange(5),
        "large": np.random.default_rng(step).random(2000),
        "numpy_zero": np.array(2.5),
        "numbers": [step, 0.5 * step, (np.float64(1) / 3).item()],
        "nested": (jnp.zeros(2), [np.ones((2, 2), np.complex64)]),
        "nothing": None,
        "empty": {},
        "an.odd/key": jnp.int8(3),
    }


def written(folder, steps=(1, 2, 5), **options):
    """Write steps with Orbax as a training program does."""
    options = {"best_fn": lambda metrics: metrics["loss"], "best_mode": "min"} | options
    with ocp.CheckpointManager(
        folder, options=ocp.CheckpointManagerOptions(**options), metadata={"run": "one"}
    ) as manager:
        for step in steps:
            manager.save(
                step,
                args=ocp.args.StandardSave(state_at(step)),
                metrics={"loss": 3.0 - step % 3, "note": "x"},
                custom_metadata={"seed": step},
            )
    return folder


@trip
def a_directory_of_several_steps_comes_along(folder):
    written(folder / "orbax", step_prefix="ckpt", step_format_fixed_length=6)
    found = done("import", folder / "orbax", folder / "run")
    options = {"best_fn": lambda metrics: metrics["loss"], "best_mode": "min"}
    names = {"step_prefix": "ckpt", "step_format_fixed_length": 6}
    with (
        ocp.CheckpointManager(
            folder / "orbax", options=ocp.CheckpointManagerOptions(**options, **names)
        ) as there,
        own.CheckpointManager(
            folder / "run", options=own.CheckpointManagerOptions(**options)
        ) as here,
    ):
        found += differences(list(there.all_steps()), list(here.all_steps()), "steps")
        found += differences(there.best_step(), here.best_step(), "best")
        for step in there.all_steps():
            found += differences(there.metrics(step), here.metrics(step), "metrics")
            found += differences(
                there.metadata(step).custom_metadata, here.metadata(step).custom_metadata, "custom"
            )
            found += differences(
                there.metadata(step).init_timestamp_nsecs // 10**6,
                here.metadata(step).init_timestamp_nsecs // 10**6,
                "time",
            )
            found += differences(
                there.restore(step, args=ocp.args.StandardRestore()),
                here.restore(step),
                f"as saved {step}",
            )
            found += differences(
                there.restore(step, args=ocp.args.StandardRestore(state_at(0))),
                here.restore(step, args=own.args.StandardRestore(state_at(0))),
                f"like {step}",
            )
    return found


@trip
def a_run_that_was_imported_goes_on_and_goes_back(folder):
    written(folder / "orbax")
    found = done("import", folder / "orbax", folder / "run")
    state = state_at(7)
    with own.CheckpointManager(folder / "run") as here:
        found += differences(5, here.latest_step(), "latest")
        here.save(7, args=own.args.StandardSave(state), metrics={"loss": 0.5})
    for step in (5, 7):
        found += done("export", folder / "run", step, "--orbax", folder / "back")
    with ocp.CheckpointManager(folder / "back") as back:
        found += differences([5, 7], list(back.all_steps()), "steps")
        found += differences({"loss": 0.5}, back.metrics(7), "metrics")
        found += differences(state, back.restore(7, args=ocp.args.StandardRestore(state)), "7")
        found += differences({"seed": 5}, back.metadata(5).custom_metadata, "custom")
        with ocp.CheckpointManager(folder / "orbax") as there:
            found += differences(
                there.restore(5, args=ocp.args.StandardRestore()),
                back.restore(5, args=ocp.args.StandardRestore()),
                "5",
            )
    return found


@trip
def holdfast_alone_reads_what_was_imported(folder):
    written(folder / "orbax", steps=(3,))
    found = done("import", folder / "orbax", folder / "run")
    state = state_at(3)
    with holdfast.open_run(folder / "run") as run:
        read = run.restore()["default"]
        found += differences({"loss": 3.0}, run.metadata(3).metrics, "metrics")
        weights = run.restore(only="default/params", like={"default": {"params": state["params"]}})
    found += differences(np.asarray(state["params"]["w"]), read["params"]["w"], "w")
    found += differences(state["numbers"], [*read["numbers"].values()], "numbers")
    opt = run_again(folder / "run", state)
    return [
        *found,
        *differences(state["params"], weights["default"]["params"], "like"),
        *differences(state["opt"], opt, "opt"),
    ]


def run_again(directory, state):
    """Return the optimizer's state, which has nodes without leaves, by Holdfast's own call."""
    like = {"default": {"opt": jax.tree.map(jnp.zeros_like, state["opt"])}}
    return holdfast.load(directory, like=like, only="default/opt")["default"]["opt"]


@trip
def items_of_all_kinds_come_along_and_go_back(folder):
    np.random.seed(3)
    tree = {"w": jnp.arange(3.0), "name": "gpt", "deep": {"n": np.int32(4)}}
    items = {
        "state": (tree, ocp.args.PyTreeSave(tree), ocp.args.PyTreeRestore()),
        "extra": ({"a": [1, None]}, ocp.args.JsonSave({"a": [1, None]}), ocp.args.JsonRestore()),
        "key": (jax.random.key(1), None, ocp.args.JaxRandomKeyRestore()),
        "array": (jnp.arange(4.0), None, ocp.args.ArrayRestore()),
        "random": (np.random.get_state(), None, ocp.args.NumpyRandomKeyRestore()),
        "data": (17, CounterSave(17), CounterRestore()),
    }
    saves = {name: save for name, (_, save, _) in items.items()}
    saves["key"] = ocp.args.JaxRandomKeySave(jax.random.key(1))
    saves["array"] = ocp.args.ArraySave(jnp.arange(4.0))
    saves["random"] = ocp.args.NumpyRandomKeySave(np.random.get_state())
    restores = ocp.args.Composite(**{name: one for name, (_, _, one) in items.items()})
    with ocp.CheckpointManager(folder / "orbax") as manager:
        manager.save(4, args=ocp.args.Composite(**saves))
        manager.wait_until_finished()
        there = dict(manager.restore(4, args=restores).items())
    found = done("import", folder / "orbax", folder / "run")
    with own.CheckpointManager(folder / "run") as manager:
        here = dict(manager.restore(4, args=restores).items())
    found += done("export", folder / "run", "--orbax", folder / "back")
    with ocp.CheckpointManager(folder / "back") as manager:
        back = dict(manager.restore(4, args=restores).items())
    return [
        *found,
        *differences(there, here, "imported"),
        *differences(there, back, "exported"),
        *differences(17, here["data"], "data"),
    ]


@trip
def checkpoints_of_each_file_format_come_along(folder):
    tree = {"a": np.arange(300_000), "n": {"k": jnp.ones((3, 4), jnp.bfloat16)}, "i": 4}
    names = []
    for ocdbt in (False, True):
        for zarr3 in (False, True):
            names.append(f"{ocdbt}-{zarr3}")
            handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
            with ocp.Checkpointer(handler) as checkpointer:
                checkpointer.save(folder / "formats" / names[-1], tree)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "step_12", tree)
    status, said = command("import", folder / "formats", folder / "run")
    found = (
        []
        if status == 1 and f"others that have checkpoints: {', '.join(names)}" in said
        else [said]
    )
    for name in names:
        found += done("import", folder / "formats" / name, folder / f"run-{name}")
        with own.CheckpointManager(folder / f"run-{name}") as manager:
            found += differences(tree, manager.restore(0), name)
    found += done("import", folder / "step_12", folder / "run")
    with own.CheckpointManager(folder / "run") as manager:
        found += differences(tree, manager.restore(12), "standard")
    return found


@trip
def several_managers_are_not_imported_as_one(folder):
    for name in ("run_1", "run_2"):
        written(folder / "all" / name, steps=(1, 2))
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / "single" / name / "1000", {"w": np.arange(3)})
    found = []
    for name in ("all", "single"):
        status, said = command("import", folder / name, folder / "run")
        is_named = "found a folder with others that have checkpoints: run_1, run_2" in said
        found += [] if status == 1 and is_named else [said]
    return [*found, *(["a run was made"] if (folder / "run").exists() else [])]


@trip
def an_empty_folder_does_not_end_an_import(folder):
    written(folder / "orbax", steps=(1, 3))
    (folder / "orbax" / "2" / "default").mkdir(parents=True)
    found = done("import", folder / "orbax", folder / "run")
    with own.CheckpointManager(folder / "run") as manager:
        return found + differences([1, 3], manager.all_steps(), "steps")


@trip
def an_import_into_a_run_of_holdfasts_own_calls_is_refused(folder):
    written(folder / "orbax", steps=(2,))
    with holdfast.CheckpointManager(folder / "run") as manager:
        manager.finish(1, {"w": jnp.ones(2)})
    status, said = command("import", folder / "orbax", folder / "run")
    is_refused = status == 1 and "found step 1, which Holdfast's own calls saved" in said
    with holdfast.open_run(folder / "run") as run:
        found = differences([1], run.all_steps(), "steps")
    return [*found, *([] if is_refused else [said])]


@trip
def a_damaged_small_file_does_not_keep_a_manager_from_opening(folder):
    written(folder / "orbax", steps=(1, 2))
    damage(folder / "orbax/2/_CHECKPOINT_METADATA", "cut")
    damage(folder / "orbax/metadata/_ROOT_METADATA", "cut")
    with own.CheckpointManager(folder / "orbax", metadata={"run": "new"}) as manager:
        found = differences([1, 2], manager.all_steps(), "steps")
        found += differences(state_at(1), manager.restore(1, args=restore_like(1)), "1")
        try:
            manager.restore(2, args=restore_like(2))
            found.append("nothing raised")
        except CheckpointDamagedError as error:
            is_named = str(folder / "orbax/2/_CHECKPOINT_METADATA") in str(error)
            found += [] if is_named else [str(error)]
        manager.delete(2)
        return found + differences([1], manager.all_steps(), "deleted")


@trip
def an_old_directory_is_used_in_place(folder):
    options = {"best_fn": lambda metrics: metrics["loss"], "best_mode": "min"}
    names = {"step_prefix": "ckpt", "step_format_fixed_length": 6}
    written(folder, **names)
    (folder / "ckpt_000004").mkdir()
    found = []
    with (
        ocp.CheckpointManager(
            folder, options=ocp.CheckpointManagerOptions(**options, **names)
        ) as there,
        own.CheckpointManager(
            folder, options=own.CheckpointManagerOptions(max_to_keep=1, **names)
        ) as here,
    ):
        found += differences([1, 2, 5], here.all_steps(), "steps")
        found += differences({"run": "one"}, here.metadata().custom_metadata, "of the run")
        for step in (1, 2, 5):
            found += differences(there.metrics(step), here.metrics(step), "metrics")
            found += differences(
                there.metadata(step).custom_metadata, here.metadata(step).custom_metadata, "custom"
            )
            found += differences(
                there.restore(step, args=ocp.args.StandardRestore()),
                here.restore(step),
                f"as saved {step}",
            )
            like = state_at(0)
            found += differences(
                there.restore(step, args=ocp.args.StandardRestore(like)),
                here.restore(step, args=own.args.StandardRestore(like)),
                f"like {step}",
            )
        part = {"params": state_at(0)["params"]}
        read = here.restore(5, args=own.args.PyTreeRestore(part, partial_restore=True))
        found += differences(state_at(5)["params"], read["params"], "part")
        for step in (6, 7):
            here.save(step, args=own.args.StandardSave(state_at(step)))
        here.wait_until_finished()
        found += differences([1, 2, 5, 7], here.all_steps(), "after two saves")
    with own.CheckpointManager(
        folder,
        options=own.CheckpointManagerOptions(
            step_name_format=own.step.standard_name_format(**names)
        ),
    ) as again:
        found += differences([1, 2, 5, 7], again.all_steps(), "opened again")
        found += differences(state_at(7), again.restore(None, args=restore_like(7)), "newest")
        again.delete(1)
        found += differences([2, 5, 7], again.all_steps(), "deleted")
    with own.StandardCheckpointer() as checkpointer:
        for name in ("ckpt_000005", "ckpt_000005/default", "ckpt_000007", "ckpt_000007/default"):
            step = int(name[5:11])
            read = checkpointer.restore(folder / name, state_at(0))
            found += differences(state_at(step), read, name)
    with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(**names)) as there:
        found += differences(state_at(5), there.restore(5, args=restore_like(5, ocp)), "Orbax")
    return found


def restore_like(step, module=own):
    return module.args.StandardRestore(state_at(step))


@trip
def items_of_all_kinds_are_read_in_place(folder):
    np.random.seed(3)
    tree = {"w": jnp.arange(3.0), "name": "gpt", "deep": {"n": np.int32(4)}}
    saves = {
        "state": ocp.args.PyTreeSave(tree),
        "extra": ocp.args.JsonSave({"a": [1, None]}),
        "key": ocp.args.JaxRandomKeySave(jax.random.key(1)),
        "array": ocp.args.ArraySave(jnp.arange(4.0)),
        "random": ocp.args.NumpyRandomKeySave(np.random.get_state()),
        "data": CounterSave(17),
    }
    restores = ocp.args.Composite(
        state=ocp.args.PyTreeRestore(),
        extra=ocp.args.JsonRestore(),
        key=ocp.args.JaxRandomKeyRestore(),
        array=ocp.args.ArrayRestore(),
        random=ocp.args.NumpyRandomKeyRestore(),
        data=CounterRestore(),
    )
    with ocp.CheckpointManager(folder) as manager:
        manager.save(4, args=ocp.args.Composite(**saves))
        manager.wait_until_finished()
        there = dict(manager.restore(4, args=restores).items())
    with own.CheckpointManager(folder) as manager:
        here = dict(manager.restore(4, args=restores).items())
        described = manager.item_metadata(4)["state"]["w"]
        try:
            manager.restore(4, args=own.args.Composite(gone=own.args.StandardRestore()))
            missing = "nothing raised"
        except FileNotFoundError as error:
            missing = str(error)
    return [
        *differences(there, here),
        *differences(((3,), "float32"), (described.shape, str(described.dtype)), "metadata"),
        *([] if "expected the item 'gone', found array, data" in missing else [missing]),
    ]


@trip
def each_file_format_is_read_in_place(folder):
    tree = {"a": np.arange(300_000), "n": {"k": jnp.ones((3, 4), jnp.bfloat16)}, "i": 4}
    found = []
    for ocdbt in (False, True):
        for zarr3 in (False, True):
            name = f"{ocdbt}-{zarr3}"
            handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
            with ocp.Checkpointer(handler) as checkpointer:
                checkpointer.save(folder / name, tree)
            found += differences(tree, own.PyTreeCheckpointer().restore(folder / name), name)
    return found


@trip
def a_tree_that_orbax_named_pytree_is_the_state(folder):
    with ocp.v1.training.Checkpointer(folder) as there:
        there.save(1, state_at(1), checkpointable_name="pytree")
    with own.v1.training.Checkpointer(folder) as here:
        return [
            *differences(state_at(1), here.load(1, state_at(0)), "tree"),
            *differences(sorted(state_at(1)), sorted(here.metadata(1).metadata), "metadata"),
        ]


def batches(iterator, count):
    return [np.asarray(next(iterator)).tolist() for _ in range(count)]


def datasets_of_grain():
    """A shuffled dataset of batches, and a loader of shuffled samples."""
    import grain.python as grain

    sampler = grain.IndexSampler(64, grain.ShardOptions(0, 1), shuffle=True, num_epochs=3, seed=5)
    made = grain.MapDataset.source(range(64)).seed(7).shuffle().repeat().batch(3)
    return {
        "dataset": made.to_iter_dataset(),
        "loader": grain.DataLoader(data_source=range(64), sampler=sampler, worker_count=0),
    }


@trip
def iterators_of_grain_that_the_second_interface_saved_go_on(folder):
    import grain.python as grain

    found = []
    for name, data in datasets_of_grain().items():
        iterator, place = iter(data), folder / name
        seen = batches(iterator, 5)
        items = {"state": {"w": jnp.arange(3.0)}, "data": iterator}
        ocp.v1.save_checkpointables(place / "path", dict(items))
        with ocp.v1.training.Checkpointer(place / "run") as there:
            there.save_checkpointables(1, dict(items))
        expected = batches(iterator, 4)
        found += [] if expected != seen[:4] else [f"{name}: the batches are the first ones"]
        import_orbax(place / "run", place / "imported")
        fresh = iter(data)
        own.v1.load_checkpointables(place / "path", {"data": fresh})
        found += differences(expected, batches(fresh, 4), f"{name} at a path")
        for run in ("run", "imported"):
            fresh = iter(data)
            with own.v1.training.Checkpointer(place / run) as here:
                here.load_checkpointables(1, {"state": None, "data": fresh})
                found += differences(expected[:2], batches(fresh, 2), f"{name} in {run}")
                here.save_checkpointables(2, {"state": items["state"], "data": fresh})
            with own.v1.training.Checkpointer(place / run) as again:
                fresh = iter(data)
                again.load_checkpointables(2, {"data": fresh})
                found += differences(expected[2:], batches(fresh, 2), f"{name} saved in {run}")
            with own.CheckpointManager(place / run) as first:
                fresh = iter(data)
                wanted = {"data": grain.PyGrainCheckpointRestore(fresh)}
                first.restore(1, args=own.args.Composite(**wanted))
                found += differences(expected, batches(fresh, 4), f"{name} by v0 in {run}")
    return found


@trip
def a_damaged_file_is_named_in_place(folder):
    written(folder / "good", steps=(1, 5))
    found = []
    for number, (name, how) in enumerate(DAMAGES):
        if "/plain" in name:
            continue
        bad = folder / f"bad{number}"
        shutil.copytree(folder / "good", bad)
        file = max(bad.glob(name), key=lambda path: path.stat().st_size)
        damage(file, how)
        named = '"large/0" in OCDBT' if "ocdbt.process_0" in name else str(file)
        try:
            with own.CheckpointManager(bad) as manager:
                manager.restore(5)
            found.append(f"{name} {how}: nothing raised")
        except CheckpointDamagedError as error:
            if named not in str(error):
                found.append(f"{name} {how}: {error}")
        shutil.rmtree(bad)
    return found


@trip
def an_import_goes_on_where_it_ended(folder):
    written(folder / "orbax", steps=(1, 2))
    status, first = command("import", folder / "orbax", folder / "run")
    written(folder / "orbax", steps=(3,))
    again, second = command("import", folder / "orbax", folder / "run")
    third = command("import", folder / "orbax", folder / "run")[1]
    with holdfast.open_run(folder / "run") as run:
        steps = run.all_steps()
    return [
        *differences([0, 0, [1, 2, 3]], [status, again, steps]),
        *([] if "step 1: imported" in first and "imported 2 steps" in first else [first]),
        *([] if "step 2: skipped" in second and "step 3: imported" in second else [second]),
        *([] if "imported 0 steps, skipped 3" in third else [third]),
    ]


@trip
def an_import_that_does_not_fit_the_run_is_refused(folder):
    written(folder / "orbax", steps=(1, 2))
    written(folder / "other", steps=(2, 3))
    written(folder / "older", steps=(0,))
    found = done("import", folder / "orbax", folder / "run")
    for source, expected in (
        ("other", "has another checkpoint of step 2"),
        ("older", "expected a step after 2"),
    ):
        status, said = command("import", folder / source, folder / "run")
        found += [] if status == 1 and expected in said else [said]
    return found


@trip
def what_is_no_directory_of_orbax_is_refused(folder):
    (folder / "empty").mkdir()
    (folder / "numbered" / "3").mkdir(parents=True)
    found = []
    for name in ("empty", "numbered", "gone"):
        status, said = command("import", folder / name, folder / "run")
        found += [] if status == 1 and f"import {folder / name}: expected" in said else [said]
    return [*found, *(["a run was made"] if (folder / "run").exists() else [])]


DAMAGES = [
    ("5/_CHECKPOINT_METADATA", "cut"),
    ("5/default/_METADATA", "cut"),
    ("5/default/_METADATA", "removed"),
    ("5/default/_sharding", "cut"),
    ("5/default/manifest.ocdbt", "removed"),
    ("5/default/manifest.ocdbt", "cut"),
    ("5/default/manifest.ocdbt", "changed"),
    ("5/default/d/*", "removed"),
    ("5/default/d/*", "cut"),
    ("5/default/d/*", "changed"),
    ("5/default/ocdbt.process_0/d/*", "removed"),
    ("5/default/ocdbt.process_0/d/*", "cut"),
    ("5/metrics/metrics", "cut"),
    ("5/plain/w/0.0", "removed"),
    ("5/plain/w/0.0", "cut"),
    ("5/plain/w/.zarray", "removed"),
    ("5/plain/w/.zarray", "cut"),
    ("5/plain3/w/c/0/0", "removed"),
]


def damage(file, how):
    data = file.read_bytes()
    middle = len(data) // 2
    match how:
        case "removed":
            file.unlink()
        case "cut":
            file.write_bytes(data[:middle])
        case "changed":
            file.write_bytes(data[:middle] + bytes([data[middle] ^ 255]) + data[middle + 1 :])


@trip
def a_damaged_file_is_named(folder):
    written(folder / "good", steps=(1, 5))
    plain = {"w": jax.random.normal(jax.random.key(0), (100, 100))}
    for name, zarr3 in (("plain", False), ("plain3", True)):
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=zarr3)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(folder / name, plain)
        shutil.copytree(folder / name, folder / "good" / "5" / name)
    text = json.loads((folder / "good/5/_CHECKPOINT_METADATA").read_text())
    for name in ("plain", "plain3"):
        text["item_handlers"][name] = "PyTreeCheckpointHandler"
    (folder / "good/5/_CHECKPOINT_METADATA").write_text(json.dumps(text))
    found = done("import", folder / "good", folder / "run")
    bad = folder / "bad"
    for name, how in DAMAGES:
        shutil.copytree(folder / "good", bad)
        # A run is made by the first step that can be read, so each of these imports makes none.
        shutil.rmtree(bad / "1")
        found += damage_that_is_not_named(bad, name, how, folder / "none")
        shutil.rmtree(bad)
    shutil.copytree(folder / "good", bad)
    found += damage_that_is_not_named(bad, *DAMAGES[0], folder / "part")
    with holdfast.open_run(folder / "part") as run:
        found += differences([1], run.all_steps(), "the steps before")
    return [*found, *(["a run was made"] if (folder / "none").exists() else [])]


def damage_that_is_not_named(bad, name, how, run):
    """Damage a file and import the directory; return what is wrong with the refusal."""
    file = max(bad.glob(name), key=lambda path: path.stat().st_size)
    damage(file, how)
    status, said = command("import", bad, run)
    # Orbax names the array, and not the file, where one of these lacks bytes.
    named = '"large/0" in OCDBT' if "ocdbt.process_0" in name else str(file)
    is_named = status == 1 and named in said and "Traceback" not in said
    return [] if is_named else [f"{name} {how}: {status} {said}"]


@trip
def a_run_of_holdfasts_own_is_exported(folder):
    state = {
        "params": {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(2, jnp.bfloat16)},
        "key": jax.random.key(5),
        "epoch": 3,
        "name": "gpt",
        "wide": np.arange(3, dtype=np.int64) + 2**40,
    }
    with holdfast.CheckpointManager(folder / "run") as manager:
        manager.finish(9, state, metrics={"loss": 0.25})
    found = done("export", folder / "run", "--orbax", folder / "orbax")
    with jax.enable_x64(True), ocp.CheckpointManager(folder / "orbax") as manager:
        read = manager.restore(9, args=ocp.args.PyTreeRestore())
        found += differences({"loss": 0.25}, manager.metrics(9), "metrics")
    return [*found, *differences(state, read, types=False)]


@trip
def of_exports_of_a_step_at_once_one_succeeds(folder):
    state = {"w": jnp.arange(4.0)}
    for number in range(4):
        holdfast.save(folder / f"run{number}", {"w": state["w"] + number})
    left = folder / "out" / f".export.{'0' * 12}.unfinished"
    (left / "0.orbax-checkpoint-tmp").mkdir(parents=True)
    start, results = threading.Barrier(4), {}

    def export(number):
        with holdfast.open_run(folder / f"run{number}") as run:
            start.wait()
            try:
                export_orbax(run, 0, folder / "out")
                results[number] = "done"
            except InvalidArgumentError as error:
                results[number] = str(error)

    threads = [threading.Thread(target=export, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    best = [number for number, text in results.items() if text == "done"]
    refused = f"export to {folder / 'out'}: it has step 0; give a new path"
    found = differences([1, 3], [len(best), [*results.values()].count(refused)], str(results))
    with ocp.CheckpointManager(folder / "out") as manager:
        read = manager.restore(0, args=ocp.args.StandardRestore(state))
    found += differences({"w": state["w"] + best[0]}, read, "read")
    return found + differences(["0"], sorted(os.listdir(folder / "out")), "left")


@trip
def what_orbax_cannot_hold_is_named(folder):
    found = []
    for number, (state, expected) in enumerate(
        (
            ({"a": {"b": b"bytes"}}, "export a/b: Orbax has no leaves of bytes"),
            ({"a": [jnp.zeros((0, 3))]}, "export a/0: Orbax has no arrays without elements"),
            ({"a": np.zeros(2, ml_dtypes.float6_e2m3fn)}, "export a: expected a dtype of JAX"),
            ({"a": np.zeros(2, [("real", "<f2"), ("imag", "<f2")])}, "found complex32; convert it"),
        )
    ):
        holdfast.save(folder / f"run{number}", state)
        status, said = command("export", folder / f"run{number}", "--orbax", folder / "out")
        found += [] if status == 1 and expected in said else [said]
    found += ["a directory was left"] if (folder / "out").exists() else []
    holdfast.save(folder / "run", {"w": jnp.ones(3)})
    found += done("export", folder / "run", "--orbax", folder / "orbax")
    status, said = command("export", folder / "run", "--orbax", folder / "orbax")
    found += [] if status == 1 and "it has step 0" in said else [said]
    status, said = command("export", folder / "run", "--orbax", folder / "o", "--prefix", "w")
    return [
        *found,
        *([] if status == 1 and "--prefix and --dtype are for --hf" in said else [said]),
    ]


def run_all(folder, result, names=()):
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    seen = {}
    for name, function in TRIPS.items():
        if names and name not in names:
            continue
        (folder / name).mkdir(parents=True)
        try:
            seen[name] = function(folder / name)
        except Exception:
            seen[name] = [traceback.format_exc()]
    result.write_text(json.dumps(seen))


if __name__ == "__main__":
    run_all(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
