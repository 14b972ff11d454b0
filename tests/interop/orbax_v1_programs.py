"""Programs for Orbax's second interface, which run with Orbax and with Holdfast in its place.

They are part of `PROGRAMS` of `orbax_programs.py`, and know nothing of Holdfast.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from tests.interop.orbax_programs import PROGRAMS as PROGRAMS
from tests.interop.orbax_programs import attempt, plain, program, shown

ALERT_SECS = 60


@dataclasses.dataclass
class Point:
    x: int
    y: int


@dataclasses.dataclass
class Model:
    tree: object


class AbstractPoint:
    pass


class Counter:
    """An object that saves its own state."""

    def __init__(self, count):
        self.count = count

    async def save(self, directory):
        text = str(self.count)

        async def write():
            path = await directory.await_creation()
            (path / f"count-{jax.process_index()}.txt").write_text(text)

        return write()

    async def load(self, directory):
        async def read():
            self.count = int((directory / f"count-{jax.process_index()}.txt").read_text())

        return read()


def point_handler(ocp, file="point.json"):
    class PointHandler(ocp.handlers.CheckpointableHandler[Point, AbstractPoint]):
        async def save(self, directory, checkpointable):
            text = json.dumps(dataclasses.asdict(checkpointable))

            async def write():
                path = await directory.await_creation()
                (path / "inner").mkdir()
                (path / "inner" / file).write_text(text)

            return write()

        async def load(self, directory, abstract_checkpointable=None):
            async def read():
                return Point(**json.loads((directory / "inner" / file).read_text()))

            return read()

        async def metadata(self, directory):
            assert (directory / "inner" / file).exists()
            return AbstractPoint()

        def is_handleable(self, checkpointable):
            return isinstance(checkpointable, Point)

        def is_abstract_handleable(self, abstract_checkpointable):
            return isinstance(abstract_checkpointable, AbstractPoint)

    return PointHandler


def shown_all(items):
    return [[name, shown(item)] for name, item in sorted(items.items())]


@program
def handlers_of_a_program(module, folder):
    ocp = module.v1
    registry = ocp.handlers.local_registry()
    registry.add(point_handler(ocp))
    registry.add(ocp.handlers.JsonHandler, checkpointable_name="config")
    context = ocp.Context()
    context.checkpointables.registry = registry
    tree = {"w": jnp.arange(3.0)}
    items = {"point": Point(1, 2), "state": tree, "config": {"a": [1, None]}, "n": Counter(5)}
    wanted = {"point": AbstractPoint(), "n": Counter(0)}
    with context:
        ocp.save_checkpointables(folder / "a", items)
        loaded = ocp.load_checkpointables(folder / "a", wanted)
        described = ocp.checkpointables_metadata(folder / "a").metadata
        seen = [
            shown(loaded["point"]),
            [loaded["n"].count, loaded["n"] is wanted["n"]],
            shown_all(ocp.load_checkpointables(folder / "a", {"point": None, "config": None})),
            shown(ocp.load(folder / "a")),
            [[name, type(described[name]).__name__] for name in sorted(described)],
            attempt(lambda: ocp.load_checkpointables(folder / "a")),
            attempt(lambda: ocp.load_checkpointables(folder / "a", {"none": None})),
            attempt(lambda: ocp.load(folder / "a", checkpointable_name="point")),
        ]
        manager = ocp.training.Checkpointer(folder / "run")
    with manager as checkpointer:
        seen.append(checkpointer.save_checkpointables(1, items, metrics={"loss": 1.5}))
        loaded = checkpointer.load_checkpointables(1, {**wanted, "state": tree})
        seen += [shown(loaded["point"]), loaded["n"].count, shown(loaded["state"])]
        seen.append(checkpointer.checkpointables_metadata(1).metrics)
    seen += [
        attempt(lambda: ocp.save_checkpointables(folder / "b", items)),
        attempt(lambda: ocp.load_checkpointables(folder / "a", {"point": AbstractPoint()})),
        attempt(lambda: ocp.save_checkpointables(folder / "b", {"x": object()})),
    ]
    return seen


@program
def registries(module, folder):
    ocp = module.v1
    handler, other = point_handler(ocp), point_handler(ocp, "other.json")
    empty = ocp.handlers.local_registry(include_global_registry=False)
    local = ocp.handlers.local_registry(empty.add(handler))
    return [
        local.has("state"),
        [empty.has("a"), len(empty.get_all_entries())],
        attempt(lambda: empty.add(handler), plain),
        attempt(lambda: local.add(handler, checkpointable_name="state"), plain),
        local.add(handler, checkpointable_name="p").get("p") is handler,
        attempt(lambda: local.get("none"), plain),
        local.add(other, secondary_typestrs=["old"]).get_secondary_typestrs(other) == ["old"]
        or list(local.get_secondary_typestrs(other)) == ["old"],
        attempt(lambda: ocp.Context().checkpointables.registry.add(handler), plain),
        attempt(lambda: empty.add(handler()), plain),
        isinstance(Counter(1), ocp.StatefulCheckpointable),
        isinstance(Point(1, 2), ocp.StatefulCheckpointable),
    ]


@program
def options_of_a_context(module, folder):
    ocp = module.v1
    context = ocp.Context()
    context.array.saving.use_zarr3 = False
    context.memory.write_concurrent_bytes = 10
    context.asynchronous.timeout_secs = 7
    context.checkpoint_layout = "auto"
    copied = ocp.Context(context)
    copied.asynchronous.timeout_secs = 8

    def changed(of):
        def change():
            of.asynchronous.timeout_secs = 9

        return change

    def relaid():
        context.checkpoint_layout = "orbax"

    seen = [context.asynchronous.timeout_secs, copied.array.saving.use_zarr3]
    seen += [copied.checkpoint_layout.name, copied.deletion_options.gcs_deletion_options is None]
    with context as entered:
        seen += [entered is context, attempt(changed(context)), attempt(relaid)]
        seen += [attempt(changed(copied)), copied.asynchronous.timeout_secs]
        with ocp.Context() as inner:
            seen += [inner.asynchronous.timeout_secs, attempt(changed(context))]
    changed(context)()
    options = ocp.options
    given = ocp.Context(async_options=options.AsyncOptions(timeout_secs=3))
    return [
        *seen,
        [given.asynchronous.timeout_secs, given.async_options.timeout_secs],
        attempt(lambda: ocp.Context(checkpoint_layout="other")),
        [layout.value for layout in options.CheckpointLayout],
        options.MemoryOptions().deepcopy_host_arrays,
        options.ArrayOptions.Saving.StorageOptions(dtype=np.int8).dtype is np.int8,
    ]


@program
def arrays_that_are_converted(module, folder):
    ocp = module.v1
    tree = {"a": jnp.arange(3.0), "b": {"c": np.arange(2.0)}, "n": 3}
    context = ocp.Context()
    context.array.saving.storage_options.dtype = jnp.bfloat16

    def only_b(keypath, value):
        if "b" in jax.tree_util.keystr(keypath):
            return ocp.options.ArrayOptions.Saving.StorageOptions(dtype=np.float32)
        return None

    with context:
        ocp.save(folder / "all", {"a": tree["a"], "n": 3})
    scoped = ocp.Context()
    scoped.array.saving.scoped_storage_options_creator = only_b
    with scoped:
        ocp.save(folder / "some", tree)
    padded = ocp.Context()
    padded.array.loading.enable_padding_and_truncation = True
    longer = {"a": jnp.zeros(5), "b": {"c": np.zeros(2)}, "n": 0}
    seen = [shown(ocp.load(folder / "all")), shown(ocp.load(folder / "some"))]
    seen.append(attempt(lambda: ocp.load(folder / "some", longer)))
    of_numpy = {"a": np.zeros(0), "b": {"c": np.zeros((3, 5), np.int32)}, "n": 0}
    seen.append(shown(ocp.load(folder / "some", of_numpy)))
    with padded:
        seen.append(shown(ocp.load(folder / "some", longer)["a"]))
    return seen


@program
def parts_of_a_tree(module, folder):
    ocp = module.v1
    path, partial = folder / "a", ocp.partial
    seen = [attempt(lambda: partial.finalize(path))]
    partial.save(path, {"a": jnp.arange(2.0), "c": {"x": 1}}, custom_metadata={"k": 1})
    seen += [partial.save_async(path, {"b": np.ones(3), "c": {"y": 2.5}}).result()]
    seen += [attempt(lambda: ocp.load(path)), (folder / "a").exists()]
    partial.finalize(path)
    seen += [shown(ocp.load(path)), ocp.metadata(path).custom_metadata]
    return [
        *seen,
        attempt(lambda: partial.save(path, {"d": 1})),
        attempt(lambda: partial.finalize(path)),
        sorted(found.name for found in folder.iterdir()),
    ]


@program
def what_no_call_takes(module, folder):
    ocp = module.v1
    tree = {"a": jnp.ones(2)}
    ocp.save(folder / "there", tree)
    ocp.save_checkpointables(folder / "two", {"x": tree, "y": tree})
    names = ({}, [], "text", None, {"": tree}, {"metrics": tree}, {"AUTO": tree}, {"a": None})
    seen = [attempt(lambda n=n: ocp.save_checkpointables(folder / "b", n)) for n in names]
    trees = (None, {}, [], {"a": 2j}, {"a": object()}, Point(1, 2))
    seen += [attempt(lambda t=t: ocp.save(folder / "b", t)) for t in trees]
    loads = ("metrics", "", "none")
    seen += [attempt(lambda n=n: ocp.load(folder / "there", checkpointable_name=n)) for n in loads]
    seen += [
        attempt(lambda: ocp.load(folder / "there", {"a": object()})),
        attempt(lambda: ocp.load_checkpointables(folder / "there", ["state"])),
        attempt(lambda: ocp.load_checkpointables(folder / "there", {"metrics": None})),
        attempt(lambda: ocp.load_checkpointables(folder / "none")),
        attempt(lambda: ocp.metadata(folder / "none")),
        [ocp.is_orbax_checkpoint(folder / "there"), ocp.is_orbax_checkpoint(folder / "none")],
        shown(ocp.load(folder / "two")),
        (folder / "b").exists(),
    ]
    caught = []
    for path in ("none", "there"):
        try:
            ocp.load(folder / path, checkpointable_name="other")
        except ocp.errors.InvalidLayoutError:
            caught.append(path)
    return [*seen, caught]


@program
def checkpoints_that_are_deleted(module, folder):
    ocp = module.v1
    tree = {"a": jnp.ones(2)}
    ocp.save(folder / "a", tree)
    (folder / "other").mkdir()
    (folder / "other" / "file").write_text("")
    seen = [
        attempt(lambda: ocp.delete(folder / "none"), plain),
        ocp.delete(folder / "none", missing_ok=True),
        attempt(lambda: ocp.delete(folder / "a", missing_ok=1), plain),
        attempt(lambda: ocp.delete(folder / "other"), plain),
        ocp.delete(folder / "a"),
        (folder / "a").exists(),
        ocp.delete_async(folder / "a", missing_ok=True).result(),
    ]
    errors = ocp.training.errors
    with ocp.training.Checkpointer(folder / "run") as checkpointer:
        checkpointer.save(1, tree)
        checkpointer.save(2, tree)
        try:
            checkpointer.save(2, tree)
        except errors.StepAlreadyExistsError:
            seen.append("there")
        try:
            checkpointer.load(7)
        except errors.StepNotFoundError:
            seen.append("not there")
        seen += [
            attempt(lambda: checkpointer.delete(None), plain),
            attempt(lambda: checkpointer.delete(-1), plain),
            checkpointer.delete_async(7, missing_ok=True).result(),
            checkpointer.delete_async(1).result(),
            [found.step for found in checkpointer.checkpoints],
        ]
    return seen


@program
def checkpointables_that_are_deleted(module, folder):
    ocp = module.v1
    registry = ocp.handlers.local_registry()
    registry.add(point_handler(ocp))
    context = ocp.Context()
    context.checkpointables.registry = registry
    key = jax.random.split(jax.random.key(3), 2)
    tree = {"a": jnp.arange(4.0), "b": [np.ones(2), None, 3], "c": {"d": "text", "e": {}}}
    items = {"state": tree, "point": Point(1, 2), "big": {"x": jnp.ones(9)}, "keys": {"k": key}}
    if module.__name__ == "orbax.checkpoint":
        # Orbax loads a typed key as its words.
        items["keys"] = {"k": jax.random.key_data(key)}

    def left(loaded):
        words = jax.random.key_data(loaded.pop("keys")["k"]).tolist()
        return [words, shown_all(loaded)]

    def removed(delete, load, describe):
        seen = [
            attempt(lambda: delete("none"), plain),
            delete("none", missing_ok=True),
            attempt(lambda: delete(1), plain),
            attempt(lambda: delete(""), plain),
            delete("big"),
            attempt(lambda: delete("big"), plain),
            left(load(None)),
            attempt(lambda: load({"big": None})),
            sorted(describe().metadata),
            describe().custom_metadata,
        ]
        seen += [delete(name) for name in ("keys", "state")]
        return [*seen, attempt(lambda: delete("point")), shown_all(load(None))]

    with context:
        path = folder / "a"
        ocp.save_checkpointables(path, items, custom_metadata={"lr": 1})
        seen = removed(
            lambda name, **more: ocp.delete(path, checkpointable_name=name, **more),
            lambda wanted: ocp.load_checkpointables(path, wanted),
            lambda: ocp.checkpointables_metadata(path),
        )
        with ocp.training.Checkpointer(folder / "run") as checkpointer:
            for step in (1, 2):
                metrics = {"loss": float(step)}
                checkpointer.save_checkpointables(
                    step, dict(items), metrics=metrics, custom_metadata={"lr": 1}
                )
            seen += removed(
                lambda name, **more: checkpointer.delete(2, checkpointable_name=name, **more),
                lambda wanted: checkpointer.load_checkpointables(2, wanted),
                lambda: checkpointer.checkpointables_metadata(2),
            )
            seen.append([[found.step, found.metrics] for found in checkpointer.checkpoints])
            checkpointer.save_checkpointables(3, items)
            seen.append(left(checkpointer.load_checkpointables(3)))
    return seen


@program
def saves_that_are_cancelled(module, folder):
    ocp = module.v1
    tree = {"a": jnp.ones(2)}
    with ocp.training.Checkpointer(folder) as checkpointer:
        checkpointer.save(1, tree)
        checkpointer.cancel()
        seen = [[found.step for found in checkpointer.checkpoints]]
        checkpointer.save(2, tree)
        seen.append(checkpointer.cancel(2))
        checkpointer.cancel(7)
        seen.append([found.step for found in checkpointer.checkpoints])
        checkpointer.save_async(3, tree)
        checkpointer.cancel(3)
        checkpointer.wait()
        seen.append([found.step for found in checkpointer.checkpoints])
    return seen


@program
def a_handler_that_leaves_its_tree_to_another(module, folder):
    ocp = module.v1

    class ModelHandler(ocp.handlers.CheckpointableHandler[Model, Model]):
        def __init__(self):
            self._trees = ocp.handlers.PyTreeHandler()

        async def save(self, directory, checkpointable):
            return await self._trees.save(directory, checkpointable.tree)

        async def load(self, directory, abstract_checkpointable=None):
            wanted = None if abstract_checkpointable is None else abstract_checkpointable.tree
            reading = await self._trees.load(directory, wanted)

            async def read():
                return Model(await reading)

            return read()

        async def metadata(self, directory):
            return Model(await self._trees.metadata(directory))

        def is_handleable(self, checkpointable):
            return isinstance(checkpointable, Model)

        def is_abstract_handleable(self, abstract_checkpointable):
            return isinstance(abstract_checkpointable, Model)

    registry = ocp.handlers.local_registry()
    registry.add(ModelHandler)
    context = ocp.Context()
    context.checkpointables.registry = registry
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    tree = {"w": jax.device_put(jnp.arange(8.0), split), "b": [np.ones(2), 3]}
    wanted = Model(
        {
            "w": jax.ShapeDtypeStruct((8,), jnp.bfloat16, sharding=split),
            "b": [np.zeros(2, np.float32), 0],
        }
    )
    with context:
        ocp.save_checkpointables(folder / "a", {"model": Model(tree)})
        loaded = ocp.load_checkpointables(folder / "a", {"model": wanted})["model"].tree
        described = ocp.checkpointables_metadata(folder / "a").metadata["model"].tree
        return [
            [shown(loaded), loaded["w"].sharding == split],
            shown(ocp.load_checkpointables(folder / "a")["model"].tree),
            [list(described["w"].shape), str(described["w"].dtype), type(described["b"]).__name__],
            attempt(lambda: ocp.save_checkpointables(folder / "b", {"model": Model({"a": 2j})})),
            (folder / "b").exists(),
        ]


@program
def handlers_that_fail_in_the_background(module, folder):
    ocp = module.v1

    class Careless(Counter):
        async def save(self, directory):
            async def write():
                raise ZeroDivisionError

            return write()

    items = {"n": Careless(1)}
    response = ocp.save_checkpointables_async(folder / "a", items)
    seen = [attempt(response.result), (folder / "a").exists()]
    seen += [attempt(lambda: ocp.save_checkpointables(folder / "a", items))]
    # Orbax raises the same error again at each later call.
    calls = (
        lambda checkpointer: checkpointer.save_checkpointables_async(1, items).result(),
        lambda checkpointer: [
            checkpointer.save_checkpointables_async(1, items),
            checkpointer.wait(),
        ],
        lambda checkpointer: checkpointer.save_checkpointables(1, items),
    )
    for number, call in enumerate(calls):
        checkpointer = ocp.training.Checkpointer(folder / f"run{number}")
        seen.append(attempt(lambda c=call, on=checkpointer: c(on)))
        attempt(checkpointer.close)
    return seen


@program
def names_of_before(module, folder):
    ocp, tree = module.v1, {"a": np.ones(1)}
    with ocp.training.Checkpointer(folder / "run") as checkpointer:
        calls = [
            lambda: ocp.save_pytree(folder / "a", tree),
            lambda: shown(ocp.load_pytree(folder / "a")),
            lambda: sorted(ocp.pytree_metadata(folder / "a").metadata),
            lambda: ocp.save_pytree_async(folder / "b", tree).result(),
            lambda: checkpointer.save_pytree(1, tree),
            lambda: checkpointer.save_pytree_async(2, tree).result(),
            lambda: shown(checkpointer.load_pytree(1)),
            lambda: sorted(checkpointer.pytree_metadata(1).metadata),
        ]
        seen = []
        for call in calls:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = call()
            kinds = {warning.category.__name__ for warning in caught}
            seen.append([found, "DeprecationWarning" in kinds])
    return seen


@program
def callbacks_without_a_wait(module, folder):
    ocp = module.v1
    finalized, completed, results = threading.Event(), threading.Event(), []

    def note(result):
        results.append(result)
        completed.set()

    context = ocp.Context()
    context.asynchronous.post_finalization_callback = lambda: finalized.set()
    checkpointer = ocp.training.Checkpointer(folder, context=context)
    response = checkpointer.save_async(1, {"a": jnp.ones(2)})
    response.on_complete(note)
    seen = [finalized.wait(ALERT_SECS), completed.wait(ALERT_SECS), results]
    checkpointer.close()
    return seen


@program
def an_iterator_of_grain_in_the_second_interface(module, folder):
    import grain.python as grain

    ocp = module.v1
    data = grain.MapDataset.source(range(64)).seed(7).shuffle().repeat().to_iter_dataset()
    iterator = iter(data)
    seen = [[int(next(iterator)) for _ in range(5)]]
    tree = {"w": np.ones(2)}
    with ocp.training.Checkpointer(folder) as checkpointer:
        checkpointer.save_checkpointables(1, {"state": tree, "data": iterator})
        seen.append([int(next(iterator)) for _ in range(4)])
        fresh = iter(data)
        loaded = checkpointer.load_checkpointables(1, {"state": tree, "data": fresh})
        return [*seen, [int(next(loaded["data"])) for _ in range(4)], loaded["data"] is fresh]


@program
def files_of_safetensors(module, folder):
    ocp = module.v1
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b.c": np.arange(3)}
    header, offset, body = {"__metadata__": {"format": "pt"}}, 0, b""
    for name, array in arrays.items():
        kind, end = {"f": "F32", "i": "I64"}[array.dtype.kind], offset + array.nbytes
        shape = list(array.shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [offset, end]}
        offset, body = end, body + array.tobytes()
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)
    (folder / "empty").mkdir()
    context = ocp.Context()
    context.checkpoint_layout = "safetensors"
    wanted = {"a": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)}
    with context:
        loaded = ocp.load(folder, wanted)
        described = ocp.metadata(folder / "model.safetensors")
        seen = [
            shown_all(ocp.load(folder)),
            [str(loaded["a"].dtype), len(loaded["a"].devices()), loaded["a"].tolist()],
            [[name, list(leaf.shape)] for name, leaf in sorted(described.metadata.items())],
            described.custom_metadata,
            attempt(lambda: ocp.load(folder / "empty")),
            attempt(lambda: ocp.load(folder, {"none": jnp.ones(1)})),
            attempt(lambda: ocp.load(folder, {"a": jnp.ones(1)})),
            attempt(lambda: ocp.load(folder, {"a": {"b": jnp.ones(1)}})),
            attempt(lambda: ocp.save(folder / "other", {"a": jnp.ones(1)})),
        ]
    seen.append(attempt(lambda: ocp.load(folder)))
    context = ocp.Context(context)
    context.checkpoint_layout = "auto"
    with context:
        seen += [shown(ocp.load(folder)["b.c"])]
        ocp.save(folder / "tree", {"a": np.ones(1)})
        return [*seen, shown(ocp.load(folder / "tree"))]


@program
def items_that_are_gone_or_damaged(module, folder):
    ocp = module.v1
    tree = {"a": jnp.arange(2.0)}
    written = importlib.import_module("orbax.checkpoint").v1
    for path in ("a", "b"):
        written.save_checkpointables(folder / path, {"one": tree, "two": {"b": 1}})
    written.save_checkpointables(folder / "c", {"one": tree, "two": {"b": 1}})
    with written.training.Checkpointer(folder / "run") as checkpointer:
        for step in (1, 2):
            checkpointer.save_checkpointables(step, {"one": tree, "two": {"b": 1}})
    shutil.rmtree(folder / "a" / "two")
    (folder / "b" / "two" / "_METADATA").write_text("")
    deleted = [
        attempt(lambda: ocp.delete(folder / "c", checkpointable_name="none"), plain),
        ocp.delete(folder / "c", checkpointable_name="two"),
        shown_all(ocp.load_checkpointables(folder / "c")),
        attempt(lambda: ocp.delete(folder / "c", checkpointable_name="one"), plain),
    ]
    with ocp.training.Checkpointer(folder / "run") as checkpointer:
        deleted += [
            checkpointer.delete(1, checkpointable_name="two"),
            checkpointer.delete(1, checkpointable_name="two", missing_ok=True),
            shown_all(checkpointer.load_checkpointables(1)),
            [found.step for found in checkpointer.checkpoints],
        ]
    return [
        deleted,
        shown_all(ocp.load_checkpointables(folder / "a")),
        attempt(lambda: ocp.load_checkpointables(folder / "a", {"two": None}), plain),
        shown(ocp.load(folder / "b", checkpointable_name="one")),
        sorted(ocp.checkpointables_metadata(folder / "b").metadata),
        ocp.checkpointables_metadata(folder / "b").metadata["two"] is None,
    ]


@program
def trees_that_are_merged(module, folder):
    first, second = {"a": 1, "b": {"c": 2}, "l": [{"x": 1}, None]}, {"d": 3, "b": {"e": 4}}
    longer, other = {"l": [{"y": 2}, 5, 6]}, {"l": [{"y": 2}, 5]}
    pairs = [(first, second), (first, {"a": 9}), (first, longer), (first, other), (first, {"b": 7})]
    return [
        shown(module.merge_trees(first, second)),
        module.v1.tree.merge(),
        *(attempt(lambda p=p: module.v1.tree.merge(*p)) for p in pairs),
        *(attempt(lambda p=p: module.v1.tree.merge(*p, overwrite=True)) for p in pairs),
    ]


@program
def handlers_of_the_first_interface(module, folder):
    registry = module.handlers.DefaultCheckpointHandlerRegistry()
    args, handler = module.args, module.StandardCheckpointHandler()
    registry.add("a", args.StandardSave, handler)
    copied = module.handlers.DefaultCheckpointHandlerRegistry(registry)
    return [
        registry.get("a", args.StandardSave) is handler,
        [registry.has("a", args.StandardRestore), copied.has("a", args.StandardSave)],
        attempt(lambda: registry.add("a", args.StandardSave, handler), plain),
        attempt(lambda: registry.get("b", args.StandardSave), plain),
        [item for item, _ in copied.get_all_entries()],
    ]
