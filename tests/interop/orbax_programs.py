"""Programs that run with Orbax and with Holdfast in its place, and what they see.

`orbax_sequences.py` runs them. They are written as programs for Orbax are: they know nothing of
Holdfast.
"""

from __future__ import annotations

import builtins
import dataclasses
import datetime
import os
from collections import namedtuple

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

PROGRAMS = {}
Layer = namedtuple("Layer", "kernel bias")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    params: object
    step: object


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def shown(tree):
    """A tree as JSON: containers, types, dtypes, shardings and elements."""
    if isinstance(tree, dict):
        return {"dict": [[repr(key), shown(value)] for key, value in sorted(tree.items())]}
    if isinstance(tree, list | tuple):
        return {type(tree).__name__: [shown(one) for one in tree]}
    if isinstance(tree, TrainState):
        return {"TrainState": [shown(tree.params), shown(tree.step)]}
    if isinstance(tree, jax.Array):
        if jax.dtypes.issubdtype(tree.dtype, jax.dtypes.prng_key):
            return ["key", str(tree.dtype), jax.random.key_data(tree).tolist()]
        where = tree.sharding
        spec = str(where.spec) if isinstance(where, NamedSharding) else "single"
        elements = np.asarray(tree).astype(np.float64).tolist()
        return ["jax", str(tree.dtype), spec, len(where.device_set), elements]
    if isinstance(tree, np.ndarray):
        return ["numpy", str(tree.dtype), tree.tolist()]
    return [type(tree).__name__, repr(tree)]


def attempt(call, show=shown):
    """What a call returns, or the names of the builtin classes of its error."""
    try:
        return show(call())
    except Exception as error:
        names = [c.__name__ for c in type(error).__mro__ if hasattr(builtins, c.__name__)]
        return {"error": names, "message": str(error)}


def plain(value):
    return value


def state():
    return {
        "w": jnp.arange(6.0).reshape(2, 3),
        "n": np.arange(4),
        "layers": [Layer(jnp.ones(2), np.zeros(1)), (jnp.int32(3), 7)],
        "train": TrainState(jnp.ones(3, jnp.bfloat16), 5),
        "rate": 0.5,
        "flag": True,
        "none": None,
        "nothing": {},
    }


def standard(ocp, tree=None):
    return ocp.args.StandardSave(state() if tree is None else tree)


@program
def what_was_saved(ocp, folder):
    with ocp.CheckpointManager(folder) as manager:
        seen = [manager.save(0, args=standard(ocp)), manager.all_steps(), manager.latest_step()]
        manager.wait_until_finished()
        seen += [shown(manager.restore(0)), shown(manager.restore(None))]
        seen.append(shown(manager.restore(0, args=ocp.args.StandardRestore())))
        seen.append(shown(manager.restore(0, args=ocp.args.StandardRestore(state()))))
    with ocp.CheckpointManager(folder) as manager:
        return [*seen, shown(manager.restore(0)), manager.all_steps()]


@program
def restored_as_asked(ocp, folder):
    tree = {"w": jnp.arange(6.0).reshape(2, 3), "n": np.arange(4), "i": 3, "l": [jnp.ones(2), 1]}
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    sharded = NamedSharding(mesh, PartitionSpec("y", None))
    abstract = jax.ShapeDtypeStruct
    with ocp.CheckpointManager(folder) as manager:
        manager.save(0, args=standard(ocp, tree))
        manager.wait_until_finished()

        def restored(strict=True, **changed):
            target = {**tree, **changed}
            return attempt(
                lambda: manager.restore(0, args=ocp.args.StandardRestore(target, strict=strict))
            )

        return [
            restored(w=abstract((2, 3), jnp.float32, sharding=sharded)),
            restored(w=abstract((2, 3), jnp.bfloat16)),
            restored(w=abstract((2, 3), jnp.int32)),
            restored(w=np.zeros((2, 3), np.float64)),
            restored(n=jnp.zeros(4, jnp.float32)),
            restored(n=abstract((4,), jnp.float32)),
            restored(i=jnp.zeros(())),
            restored(i=np.zeros(())),
            restored(i=1.0),
            restored(l=(jnp.ones(2), 1)),
            restored(l={"0": jnp.ones(2), "1": 1}),
            restored(w=None),
            restored(w=1.0),
            restored(w=jnp.ones((2, 4))),
            restored(w=jnp.ones((3, 2)), strict=False),
            restored(extra=1),
            attempt(lambda: manager.restore(0, args=ocp.args.StandardRestore({"w": tree["w"]}))),
            attempt(lambda: manager.restore(0, items=tree)),
        ]


@program
def shardings_that_come_back(ocp, folder):
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    spec = PartitionSpec(("x", "y"))
    tree = {"a": jax.device_put(jnp.arange(16.0), NamedSharding(mesh, spec))}
    with ocp.CheckpointManager(folder) as manager:
        manager.save(0, args=standard(ocp, tree))
        manager.wait_until_finished()
        return [shown(manager.restore(0)), shown(tree)]


@program
def the_same_errors(ocp, folder):
    with ocp.CheckpointManager(folder) as manager:
        seen = [attempt(lambda: manager.restore(None)), attempt(lambda: manager.delete(3), plain)]
        manager.save(1, args=standard(ocp))
        # Each at a step of its own: what a refused save leaves behind, Orbax removes later.
        calls = [
            lambda: manager.save(1, args=standard(ocp)),
            lambda: manager.save(1, args=standard(ocp), force=True),
            lambda: manager.save(2),
            lambda: manager.save(3, ocp.args.StandardSave(state())),
            lambda: manager.save(4, args=ocp.args.Composite(a=standard(ocp))),
            lambda: manager.save(5, args=standard(ocp, jnp.ones(2))),
            lambda: manager.save(6, args=standard(ocp, {})),
            lambda: manager.save(7, args=standard(ocp, {"o": object()})),
            lambda: manager.restore(9),
            lambda: manager.restore(1, args=ocp.args.Composite(a=ocp.args.StandardRestore())),
            lambda: manager.restore(1, args=ocp.args.JsonRestore()),
            lambda: manager.metadata(9),
            lambda: manager.metrics(9),
            lambda: manager.delete(9),
        ]
        manager.wait_until_finished()
        return seen + [attempt(call, plain) for call in calls] + [manager.all_steps()]


@program
def options_that_are_refused(ocp, folder):
    made = ocp.CheckpointManagerOptions
    return [
        attempt(lambda: made(best_mode="best") and None, plain),
        attempt(lambda: made(max_to_keep=-1) and None, plain),
        attempt(lambda: made(todelete_subdir="a", todelete_full_path="b") and None, plain),
    ]


@program
def several_items(ocp, folder):
    args = ocp.args
    tree = {"a": jnp.ones(2), "b": 1}
    with ocp.CheckpointManager(folder) as manager:
        items = {
            "tree": args.StandardSave(tree),
            "py": args.PyTreeSave(tree),
            "json": args.JsonSave({"a": [1, 2.5, None], "b": "x"}),
            "array": args.ArraySave(jnp.arange(3)),
            "key": args.JaxRandomKeySave(jax.random.key(7)),
            "random": args.NumpyRandomKeySave(np.random.RandomState(3).get_state()),
        }
        seen = [manager.save(0, args=args.Composite(**items), custom_metadata={"lr": 0.1})]
        manager.save(1, args=args.Composite(tree=args.StandardSave(tree)))
        manager.wait_until_finished()

        def restored(step, **wanted):
            return attempt(
                lambda: dict(manager.restore(step, args=args.Composite(**wanted)).items())
            )

        seen += [
            shown(dict(manager.restore(0).items())),
            shown(dict(manager.restore(1).items())),
            restored(0, json=args.JsonRestore()),
            restored(0, json=None, array=args.ArrayRestore()),
            restored(0, tree=args.StandardRestore(tree), key=args.JaxRandomKeyRestore()),
            restored(1, json=args.JsonRestore()),
            restored(0, json=args.StandardRestore()),
            attempt(lambda: manager.restore(0, args=args.StandardRestore(tree))),
            attempt(lambda: manager.save(2, args=args.StandardSave(tree)), plain),
            manager.metadata(0).custom_metadata,
            sorted(manager.item_metadata(0).keys()),
        ]
    with ocp.CheckpointManager(folder) as manager:
        return [*seen, shown(manager.restore(0)["json"]), shown(manager.restore(1).tree)]


@program
def items_with_names(ocp, folder):
    save, kinds = ocp.args.StandardSave, ("a", "b")
    with ocp.CheckpointManager(folder, item_names=kinds) as manager:
        tree = {"x": jnp.ones(1)}
        seen = [
            attempt(lambda: manager.save(0, args=save(tree)), plain),
            attempt(lambda: manager.save(0, args=ocp.args.Composite(a=save(tree))), plain),
        ]
        manager.wait_until_finished()
        seen.append(attempt(lambda: manager.save(1, args=ocp.args.Composite(c=save(tree))), plain))
        return seen


@program
def items_that_do_not_fit(ocp, folder):
    args, tree = ocp.args, {"x": jnp.ones(1)}
    items = {"s": ocp.StandardCheckpointHandler(), "j": ocp.JsonCheckpointHandler()}
    with ocp.CheckpointManager(folder, item_handlers=items) as manager:
        seen = [
            attempt(lambda: args.Composite(__s=args.StandardSave(tree)) and None, plain),
            attempt(lambda: manager.save(0, args=args.Composite(s=args.JsonSave({}))), plain),
            attempt(lambda: manager.save(1, args=args.Composite(j=args.StandardSave(tree))), plain),
        ]
        made = args.Composite(s=args.StandardSave(tree), j=args.JsonSave({"k": 1}))
        seen.append(manager.save(2, args=made))
        manager.wait_until_finished()
        return [*seen, manager.latest_step()]


@program
def metadata_of_a_manager_that_reads(ocp, folder):
    def opened(name, read_only, metadata):
        options = ocp.CheckpointManagerOptions(read_only=read_only)
        (folder / name).mkdir(exist_ok=True)
        with ocp.CheckpointManager(folder / name, options=options, metadata=metadata) as manager:
            return dict(manager.metadata().custom_metadata)

    return [
        opened("stored", False, {"a": 1}),
        opened("stored", True, {"b": 2}),
        opened("none", True, {"c": 3}),
        opened("none", True, None),
    ]


@program
def deletions_that_do_not_block(ocp, folder):
    options = ocp.CheckpointManagerOptions(max_to_keep=2, todelete_subdir="gone")
    with ocp.CheckpointManager(folder, options=options) as manager:
        for step in range(4):
            manager.save(step, args=ocp.args.StandardSave({"x": jnp.ones(1)}))
        manager.wait_until_finished()
        manager.delete(2)
        return manager.all_steps()


@program
def old_programs(ocp, folder):
    tree = {"x": jnp.ones(2), "y": 3}
    handler = ocp.PyTreeCheckpointHandler()
    with ocp.CheckpointManager(
        folder / "one", ocp.Checkpointer(handler), ocp.CheckpointManagerOptions(max_to_keep=2)
    ) as manager:
        seen = [manager.save(step, tree) for step in range(4)]
        seen += [manager.all_steps(), shown(manager.restore(3)), shown(manager.restore(3, tree))]
    items = {"s": ocp.PyTreeCheckpointHandler(), "j": ocp.JsonCheckpointHandler()}
    with ocp.CheckpointManager(folder / "many", item_handlers=items) as manager:
        made = ocp.args.Composite(s=ocp.args.PyTreeSave(tree), j=ocp.args.JsonSave({"k": 1}))
        seen.append(manager.save(5, args=made))
        manager.wait_until_finished()
        return [*seen, shown(dict(manager.restore(5).items()))]


@program
def leaf_by_leaf(ocp, folder):
    tree = {"a": jnp.arange(4.0), "b": np.ones(2), "c": 3}
    args = ocp.args
    with ocp.CheckpointManager(folder) as manager:
        cast = jax.tree_util.tree_map(lambda _: ocp.SaveArgs(dtype=np.dtype("float16")), tree)
        manager.save(0, args=args.PyTreeSave(tree))
        manager.save(1, args=args.PyTreeSave({"a": tree["a"]}, save_args={"a": cast["a"]}))
        manager.wait_until_finished()
        as_numpy = jax.tree_util.tree_map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        asked = ocp.checkpoint_utils.construct_restore_args(tree)
        wide = {**asked, "a": ocp.ArrayRestoreArgs(dtype=jnp.bfloat16)}

        def restored(*given, step=0, **named):
            return attempt(lambda: manager.restore(step, args=args.PyTreeRestore(*given, **named)))

        return [
            restored(),
            restored(tree),
            restored(tree, restore_args=as_numpy),
            restored(tree, restore_args=asked),
            restored(restore_args=wide),
            restored({"a": tree["a"]}),
            restored({"a": tree["a"]}, partial_restore=True),
            restored({"a": ocp.PLACEHOLDER, "b": tree["b"], "c": 0}),
            restored(step=1),
        ]


@program
def intervals(ocp, folder):
    made = ocp.CheckpointManagerOptions
    tree = {"x": jnp.ones(1)}
    found = []
    for name, options in {
        "interval": made(save_interval_steps=3, max_to_keep=2),
        "on_steps": made(
            save_interval_steps=10,
            save_on_steps={2, 5, 7},
            max_to_keep=3,
            enable_async_checkpointing=False,
        ),
        "function": made(
            should_save_fn=lambda step, last: step % 4 == 1,
            max_to_keep=1,
            keep_time_interval=datetime.timedelta(hours=1),
        ),
        "names": made(step_prefix="ckpt", step_format_fixed_length=8, max_to_keep=1, keep_period=3),
    }.items():
        with ocp.CheckpointManager(folder / name, options=options) as manager:
            saved = [manager.save(step, args=standard(ocp, tree)) for step in range(1, 8)]
            due = [manager.should_save(step) for step in range(5, 14)]
            found.append([saved, due, manager.all_steps(), manager.latest_step()])
            manager.wait_until_finished()
            manager.reload()
            found.append([list(manager.all_steps()), manager.best_step()])
    return found


@program
def the_best(ocp, folder):
    made, tree = ocp.CheckpointManagerOptions, {"x": jnp.ones(1)}
    losses = [5.0, 3.0, 4.0, 1.0, 2.0]
    found = []
    for mode in ("min", "max"):
        options = made(max_to_keep=3, best_fn=lambda metrics: metrics["loss"], best_mode=mode)
        with ocp.CheckpointManager(folder / mode, options=options) as manager:
            for step, loss in enumerate(losses[:4] if mode == "max" else losses):
                loss = loss if mode == "min" else -loss
                manager.save(step, args=standard(ocp, tree), metrics={"loss": loss, "n": {"m": 1}})
            manager.wait_until_finished()
            found += [list(manager.all_steps()), manager.best_step(), manager.metrics(3)]
        with ocp.CheckpointManager(folder / mode, options=options) as manager:
            found += [list(manager.all_steps()), manager.best_step(), manager.metrics(3)]
    return found


@program
def policies(ocp, folder):
    decide = ocp.checkpoint_managers.save_decision_policy
    keep = ocp.checkpoint_managers.preservation_policy
    tree = {"x": jnp.ones(1)}

    class Odd:
        def should_save(self, step, previous_steps, *, context):
            return step.step % 2 == 1 and not context.reached_preemption

    class Late:
        def should_preserve(self, checkpoints, *, context):
            return [one.step > 4 or one is checkpoints[-1] for one in checkpoints]

    any_of = decide.AnySavePolicy([decide.FixedIntervalPolicy(5), decide.InitialSavePolicy()])
    steps, newest = keep.CustomSteps([2, 4]), keep.LatestN(1)
    cases = [
        (Odd(), Late()),
        (any_of, keep.LatestDuration(datetime.timedelta(hours=1))),
        (
            decide.SpecificStepsPolicy({2, 3, 8, 9}),
            keep.AnyPreservationPolicy([keep.EveryNSteps(4), steps, newest]),
        ),
        (decide.FixedIntervalPolicy(2), keep.EveryNStepsClosest(interval_steps=5)),
    ]
    found = []
    for number, (decision, kept) in enumerate(cases):
        options = ocp.CheckpointManagerOptions(
            save_decision_policy=decision, preservation_policy=kept
        )
        with ocp.CheckpointManager(folder / str(number), options=options) as manager:
            saved = [manager.save(step, args=standard(ocp, tree)) for step in range(1, 11)]
            manager.wait_until_finished()
            found.append([saved, list(manager.all_steps())])
    return found


@program
def two_managers(ocp, folder):
    tree = {"x": jnp.arange(3.0)}
    with ocp.CheckpointManager(folder) as first, ocp.CheckpointManager(folder) as second:
        first.save(1, args=standard(ocp, tree))
        first.wait_until_finished()
        seen = [second.all_steps(), second.latest_step()]
        second.reload()
        seen += [second.all_steps(), shown(second.restore(1))]
        second.save(2, args=standard(ocp, tree))
        second.wait_until_finished()
        return [*seen, first.all_steps(), first.all_steps(read=True)]


@program
def read_only(ocp, folder):
    tree = {"x": jnp.arange(3.0)}
    with ocp.CheckpointManager(folder) as manager:
        manager.save(1, args=standard(ocp, tree))
    options = ocp.CheckpointManagerOptions(read_only=True)
    with ocp.CheckpointManager(folder, options=options) as manager:
        seen = [manager.save(2, args=standard(ocp, tree)), manager.should_save(3)]
        manager.delete(1)
        return [*seen, manager.all_steps(), shown(manager.restore(1))]


@program
def foreign_folders(ocp, folder):
    for name in ("notes", "12.backup", "tmp.7"):
        (folder / name).mkdir()
    (folder / "config.json").write_text("{}")
    with ocp.CheckpointManager(folder, metadata={"version": 1}) as manager:
        manager.save(3, args=standard(ocp, {"x": 1}))
        manager.wait_until_finished()
        manager.reload()
        seen = [list(manager.all_steps()), manager.metadata().custom_metadata]
    with ocp.CheckpointManager(folder, metadata={"version": 2}) as manager:
        return [*seen, manager.metadata().custom_metadata]


@program
def deleting(ocp, folder):
    with ocp.CheckpointManager(folder) as manager:
        for step in range(3):
            manager.save(step, args=standard(ocp, {"x": step}))
        manager.wait_until_finished()
        manager.delete(1)
        seen = [list(manager.all_steps()), attempt(lambda: manager.restore(1))]
        manager.reload()
        seen += [list(manager.all_steps()), shown(manager.restore(2))]
        # Without a later checkpoint, an older step may be saved.
        for step in (5, 3):
            seen.append(manager.save(step, args=standard(ocp, {"x": step})))
            manager.wait_until_finished()
            if step == 5:
                manager.delete(step)
        return [*seen, list(manager.all_steps(read=True)), shown(manager.restore(3))]


@program
def checkpointers(ocp, folder):
    tree = {"w": jnp.ones(2), "n": np.arange(3), "i": 4}
    seen = []
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "a", tree)
        checkpointer.wait_until_finished()
        seen.append(attempt(lambda: checkpointer.save(folder / "a", tree), plain))
        checkpointer.save(folder / "a", {**tree, "i": 5}, force=True)
        checkpointer.wait_until_finished()
        seen += [shown(checkpointer.restore(folder / "a"))]
        target = {**tree, "w": jax.ShapeDtypeStruct((2,), jnp.bfloat16)}
        seen.append(shown(checkpointer.restore(folder / "a", target)))
        seen.append(attempt(lambda: checkpointer.restore(folder / "b")))
        seen.append(attempt(lambda: checkpointer.restore(folder / "a", {"w": jnp.ones(2)})))
    py = ocp.PyTreeCheckpointer()
    py.save(folder / "c", tree)
    seen += [shown(py.restore(folder / "c"))]
    named = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
    named.save(
        folder / "d",
        args=ocp.args.Composite(s=ocp.args.StandardSave(tree), j=ocp.args.JsonSave({"a": 1})),
    )
    named.wait_until_finished()
    found = named.restore(
        folder / "d",
        args=ocp.args.Composite(s=ocp.args.StandardRestore(tree), j=ocp.args.JsonRestore()),
    )
    named.close()
    plain_one = ocp.Checkpointer(ocp.JsonCheckpointHandler())
    plain_one.save(folder / "e", args=ocp.args.JsonSave({"k": [1, 2]}))
    return [*seen, shown(found.s), found.j, plain_one.restore(folder / "e")]


@program
def second_interface(ocp, folder):
    v1, tree = (
        ocp.v1,
        {"w": jnp.arange(2.0), "n": np.arange(3), "i": 3, "l": [1.5, {"z": jnp.ones(1)}]},
    )
    abstract = {**tree, "w": jax.ShapeDtypeStruct((2,), jnp.bfloat16), "n": np.ndarray, "i": int}
    v1.save_pytree(folder / "a", tree, custom_metadata={"lr": 1})
    found = v1.pytree_metadata(folder / "a")
    seen = [
        attempt(lambda: v1.save_pytree(folder / "a", tree)),
        shown(v1.load_pytree(folder / "a")),
        shown(v1.load_pytree(folder / "a", abstract)),
        shown(v1.load_pytree(folder / "a", found)),
        attempt(lambda: v1.load_pytree(folder / "none")),
        attempt(lambda: v1.load_pytree(folder / "a", {"w": tree["w"]})),
        attempt(lambda: v1.load_pytree(folder / "a", {**tree, "w": jnp.ones(3)})),
        shown(v1.load_checkpointables(folder / "a")),
        [found.custom_metadata, found.metadata["i"], list(found.metadata["w"].shape)],
    ]
    v1.save_pytree(folder / "a", {"w": jnp.zeros(1)}, overwrite=True)
    v1.save_checkpointables(folder / "b", {"x": tree, "y": {"a": 1}})
    response = v1.save_async(folder / "c", tree)
    seen += [response.result(), shown(v1.load(folder / "a"))]
    seen += [shown(v1.load_checkpointables(folder / "b"))]
    seen += [shown(v1.load_checkpointables(folder / "b", {"y": {"a": 0}}))]
    seen += [shown(v1.load(folder / "b", checkpointable_name="y"))]
    with v1.Context() as context:
        pass
    context = v1.Context()
    context.pytree.loading.partial_load = True
    with context:
        seen.append(shown(v1.load(folder / "c", {"w": tree["w"]})))
    return seen


@program
def second_interface_in_training(ocp, folder):
    training, tree = ocp.v1.training, {"w": jnp.arange(2.0), "i": 3}
    decide, keep = training.save_decision_policies, training.preservation_policies
    made = training.Checkpointer(
        folder,
        save_decision_policy=decide.FixedIntervalPolicy(2),
        preservation_policy=keep.LatestN(2),
        custom_metadata={"run": 1},
    )
    with made as checkpointer:
        seen = [checkpointer.latest, attempt(lambda: checkpointer.load())]
        for step in range(6):
            state = {**tree, "i": step}
            seen.append(checkpointer.save(step, state, custom_metadata={"at": step}))
        seen += [
            [one.step for one in checkpointer.checkpoints],
            checkpointer.latest.step,
            checkpointer.latest.path.name,
            attempt(lambda: checkpointer.save(4, tree)),
            checkpointer.save(4, {**tree, "i": 9}, overwrite=True),
            shown(checkpointer.load()),
            shown(checkpointer.load(checkpointer.checkpoints[0])),
            shown(checkpointer.load(4, {**tree, "w": jax.ShapeDtypeStruct((2,), jnp.bfloat16)})),
            attempt(lambda: checkpointer.load(3)),
            attempt(lambda: checkpointer.load(4, checkpointable_name="other")),
            checkpointer.metadata(2).custom_metadata,
            checkpointer.metadata(4).metadata["i"],
            checkpointer.root_metadata().custom_metadata,
            [checkpointer.should_save(7), checkpointer.should_save(8)],
        ]
        response = checkpointer.save_async(7, tree, force=True)
        seen += [response.result(), checkpointer.save_async(9, tree)]
        seen += [checkpointer.save_checkpointables(10, {"p": tree, "q": {"a": 1}}, force=True)]
        seen += [shown(checkpointer.load_checkpointables(10))]
        seen += [shown(checkpointer.load_checkpointables(10, {"q": {"a": 0}}))]
        checkpointer.delete(7)
        seen += [attempt(lambda: checkpointer.delete(7)), attempt(lambda: checkpointer.load(7))]
    with training.Checkpointer(folder) as checkpointer:
        return [*seen, [one.step for one in checkpointer.checkpoints]]


@program
def named_steps(ocp, folder):
    names = ocp.step.standard_name_format(step_prefix="step", step_format_fixed_length=5)
    options = ocp.CheckpointManagerOptions(step_name_format=names)
    tree = {"w": jnp.arange(2.0)}
    with ocp.CheckpointManager(folder, options=options) as manager:
        for step in (3, 12):
            manager.save(step, args=standard(ocp, tree))
    found = ocp.step.latest_step_metadata(folder, names)
    with ocp.StandardCheckpointer() as checkpointer:
        one = checkpointer.restore(ocp.step.find_step_path(folder, names, step=3) / "default")
    return [
        names.build_name(7),
        sorted(one.step for one in names.find_all(folder)),
        [found.step, found.path.name],
        names.find_step(folder, 3).path.name,
        ocp.step.build_step_path(folder, names, 9).name,
        attempt(lambda: names.find_step(folder, 4)),
        ocp.step.step_from_checkpoint_name("step_00012"),
        shown(one),
    ]


@program
def metadata_that_says_what_to_restore(ocp, folder):
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    sharding = NamedSharding(mesh, PartitionSpec("x", None))
    state = {
        "w": jax.device_put(jnp.ones((4, 2), jnp.bfloat16), sharding),
        "layers": [Layer(jnp.ones(2), None), {"x": np.arange(3)}],
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(1), 3),
        "step": 3,
        "rate": 0.5,
        "number": np.float32(3),
    }
    seen = []
    for of in ("Standard", "PyTree"):
        save, restore = getattr(ocp.args, f"{of}Save"), getattr(ocp.args, f"{of}Restore")
        with ocp.CheckpointManager(folder / of) as manager:
            manager.save(1, args=save(state))
            manager.wait_until_finished()
            found = manager.item_metadata(1)
            seen += [
                [[str(path), type(leaf).__name__, leaf.shape, str(leaf.dtype)]]
                for path, leaf in jax.tree_util.tree_flatten_with_path(found)[0]
            ]
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, found.tree)
            asked = ocp.checkpoint_utils.construct_restore_args
            mapped = jax.tree.map(ocp.utils.to_shape_dtype_struct, found)
            given = [restore(abstract), restore(mapped)]
            if of == "PyTree":
                # Of the shardings in its metadata, Orbax makes those of JAX only in this way.
                given += [restore(found), restore(found.tree)]
                given += [restore(restore_args=asked(tree)) for tree in (abstract, mapped)]
                given += [restore(abstract, restore_args=asked(abstract))]
            seen += [shown(manager.restore(1, args=one)) for one in given]
            target = state | {"number": np.float64(0)}
            seen.append(shown(manager.restore(1, args=restore(target))))
    return seen


@program
def trees_that_are_flattened(ocp, folder):
    tree = {"a": {"b": jnp.ones(2), "c": [1, (2.5,)]}, "e": {}, "l": Layer(jnp.ones(1), None)}
    flat = ocp.tree.to_flat_dict(tree)
    return [
        sorted(map(list, flat)),
        sorted(ocp.tree.to_flat_dict(tree, sep="/")),
        sorted(map(list, ocp.tree.to_flat_dict(tree, keep_empty_nodes=True))),
        shown(ocp.tree.from_flat_dict(flat, target=tree)),
        shown(ocp.tree.from_flat_dict({"a/b": 1, "a/c": 2, "d": 3}, sep="/")),
        shown(ocp.tree.serialize_tree(tree)),
        shown(ocp.tree.deserialize_tree(ocp.tree.serialize_tree(tree), tree)),
        shown(ocp.tree.get_param_names({"a": {"b": 1, "c": [1, 2]}})),
        [ocp.tree.is_flat_dict({"a": 1}), ocp.tree.is_flat_dict(tree)],
        str(jax.tree.map(ocp.tree.to_shape_dtype_struct, {"x": jnp.ones(2), "n": np.ones(1)})),
    ]


@program
def followed_by_an_evaluator(ocp, folder):
    waiting, tree = ocp.checkpoint_utils, {"w": jnp.arange(2.0)}
    brief = {"seconds_to_sleep": 0.05, "timeout": 0.2}

    def waited(**given):
        with waiting.wait_for_new_checkpoint(folder, **brief, **given) as step:
            return step

    seen = [waited(), waited(until_step=1)]
    with ocp.CheckpointManager(folder) as manager:
        for step in (1, 3):
            manager.save(step, args=standard(ocp, tree))
        manager.wait_until_finished()
        seen += [waited(), waited(until_step=2), waited(until_step=3), waited(until_step=4)]
        found = waiting.checkpoints_iterator(folder, **brief)
        seen += [next(found)]
        manager.save(4, args=standard(ocp, tree))
        manager.wait_until_finished()
        seen += list(found)
        asked = []
        ended = waiting.checkpoints_iterator(
            folder, **brief, timeout_fn=lambda: asked.append(1) or len(asked) > 2
        )
        return [*seen, list(ended), len(asked) > 2]


@program
def an_iterator_of_grain(ocp, folder):
    import grain.python as grain

    data = grain.MapDataset.source(range(64)).seed(7).shuffle().repeat().to_iter_dataset()
    iterator, args = iter(data), ocp.args
    seen = [[int(next(iterator)) for _ in range(5)]]
    with ocp.CheckpointManager(folder) as manager:
        state = args.StandardSave({"w": np.ones(2)})
        items = {"state": state, "iter": grain.PyGrainCheckpointSave(iterator)}
        manager.save(1, args=args.Composite(**items))
        manager.wait_until_finished()
        seen.append([int(next(iterator)) for _ in range(4)])
        wanted = {"state": args.StandardRestore()}
        wanted["iter"] = grain.PyGrainCheckpointRestore(iter(data))
        found = manager.restore(1, args=args.Composite(**wanted))
        return [*seen, [int(next(found["iter"])) for _ in range(4)], sorted(found.keys())]
