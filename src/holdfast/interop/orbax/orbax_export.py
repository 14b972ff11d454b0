"""Export a checkpoint of a run to a directory that Orbax's `CheckpointManager` opens.

Invariants:
- Orbax writes a step into a hidden folder of the directory, which its process locks. One rename
  puts the complete step in place, so of several exports of one step one succeeds.
- The next export to the directory removes what an interrupted one left there.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from holdfast import Run
from holdfast.clock import SystemClock
from holdfast.errors import InvalidArgumentError, UnsupportedLeafError

try:
    import jax
    import numpy as np
    import orbax.checkpoint as ocp
except ImportError as error:
    raise InvalidArgumentError(
        f"Orbax's files are read and written by Orbax, which cannot be imported ({error}): "
        "pip install 'holdfast-checkpoint[orbax]'"
    ) from error

from holdfast.building import locked_directory, put_in_place, remove_leftovers
from holdfast.errors import translated
from holdfast.interop import scratch_memory
from holdfast.interop.orbax import args as own_args
from holdfast.interop.orbax import outlines, records
from holdfast.interop.orbax.item_forms import ItemRestore
from holdfast.interop.orbax.orbax_files import array_over
from holdfast.interop.orbax.records import DEFAULT_ITEM, RECORD, StepRecord
from holdfast.interop.orbax.run_reader import value_at
from holdfast.interop.scratch_memory import Progress, read_whole_step, scratch_folder
from holdfast.reading import StoredArray

_BUILDING = "export"
"""Part of the names of the hidden folders in which exports are built."""
_REFUSED = (OSError, ValueError, KeyError, TypeError, RuntimeError)


class _FilesHandler(ocp.CheckpointHandler):  # type: ignore[misc]
    """Writes the files of an item as they were."""

    def save(self, directory: Any, args: Any) -> None:
        """Write the files of `args` to `directory`."""
        for name, data in args.files.items():
            path = Path(os.fspath(directory)) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def restore(self, directory: Any, args: Any) -> Any:
        """Refuse: the handler that the files are for restores them."""
        raise InvalidArgumentError(f"restore {directory}: give the arguments of the item's handler")


@ocp.args.register_with_handler(_FilesHandler, for_save=True, for_restore=True)
class _FilesSave(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Save files by their paths."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = files


def export_orbax(
    run: Run,
    step: int,
    target: str | os.PathLike[str],
    progress: Progress = lambda size_bytes: None,
) -> None:
    """Write the checkpoint of `step` as step `step` of the Orbax directory `target`.

    Items, metrics and metadata are those of the program, if it saved through
    `holdfast.interop.orbax`; else the whole state is the one unnamed item. What is read is in a
    scratch file beside `target`, so the state may be larger than RAM.

    Args:
        run: The run.
        step: A step of it.
        target: It is made if it is missing. The step is there whole, or not at all.
        progress: See `Progress`.

    Raises:
        InvalidArgumentError: The directory has the step, or Orbax cannot write it.
        UnsupportedLeafError: Orbax has no such leaf; the message has the path.
        StepNotFoundError, CheckpointDamagedError, StorageError: The checkpoint.
        OutOfSpaceError: There is no room for the scratch file.
    """
    step_folder = Path(os.path.abspath(target)) / str(step)
    if os.path.lexists(step_folder):
        raise _existing(step, target)
    metadata = run.metadata(step)
    with jax.enable_x64(True):
        folder = scratch_folder(target)
        state = read_whole_step(run.directory, step, folder, _array_of, progress)
        if isinstance(metadata.values.get(RECORD), str):
            record = records.decoded(str(metadata.values[RECORD]))
            items = _items(run, step, state, record)
            args: Any = items[DEFAULT_ITEM] if record.is_default else ocp.args.Composite(**items)
            metrics, custom_metadata = record.metrics, record.custom_metadata
        else:
            args = _tree_args(state, "", None)
            metrics, custom_metadata = metadata.metrics, None
        with translated("export to", step_folder.parent), _new_step(step_folder) as building:
            _write(step, building, target, args, metrics, custom_metadata)


def _existing(step: int, directory: str | os.PathLike[str]) -> InvalidArgumentError:
    return InvalidArgumentError(f"export to {directory}: it has step {step}; give a new path")


@contextlib.contextmanager
def _new_step(target: Path) -> Iterator[Path]:
    """Yield an empty folder; what is written below the name of `target` there is put in place.

    Raises:
        InvalidArgumentError: The step exists.
        OSError: The directory cannot be made or written.
    """
    directory = target.parent
    is_new = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    remove_leftovers(directory / _BUILDING)
    try:
        with locked_directory(directory / _BUILDING, SystemClock()) as building:
            yield building
            try:
                put_in_place(building / target.name, target)
            except InvalidArgumentError as error:
                raise _existing(int(target.name), directory) from error
    finally:
        if is_new:
            # Only an export that failed leaves the directory empty.
            with contextlib.suppress(OSError):
                directory.rmdir()


def _array_of(array: np.ndarray, stored: StoredArray) -> Any:
    if not _is_of_jax(array.dtype):
        raise UnsupportedLeafError(
            f"export {stored.name}: expected a dtype of JAX, found {stored.dtype}; convert it and "
            "save it again, or use --torch"
        )
    elements = array_over(array)
    if stored.prng_impl is None:
        return elements
    return jax.random.wrap_key_data(elements, impl=stored.prng_impl)


@functools.cache
def _is_of_jax(dtype: np.dtype) -> bool:
    try:
        array_over(np.zeros(1, dtype))
    except (RuntimeError, TypeError):
        return False
    return True


def _items(run: Run, step: int, state: Any, record: StepRecord) -> dict[str, Any]:
    host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    restored: dict[str, Any] = {}
    for name, item in record.items.items():
        if item.kind == "folder":
            continue
        args = own_args.StandardRestore(fallback_sharding=host) if item.kind == "tree" else None
        restore = ItemRestore(name, item, args)
        restored[name] = restore.finish(
            {path: _leaf(state, (name, *path), like) for path, like in restore.wanted.items()}
        )
    item_args = {}
    for name, item in record.items.items():
        match item.kind:
            case "tree":
                item_args[name] = _tree_args(restored[name], name, item.custom_metadata)
            case "array":
                _check_leaf(restored[name], name)
                item_args[name] = ocp.args.ArraySave(restored[name])
            case "json":
                item_args[name] = ocp.args.JsonSave(restored[name])
            case "key":
                item_args[name] = ocp.args.JaxRandomKeySave(restored[name])
            case "numpy_random":
                item_args[name] = ocp.args.NumpyRandomKeySave(restored[name])
            case _:
                files: dict[str, bytes] = {}
                for of_process in run.process_values(step)[name]:
                    files |= of_process
                item_args[name] = _FilesSave(files)
    return item_args


def _leaf(state: Any, path: tuple[Any, ...], like: Any) -> Any:
    """Return the leaf at `path`, as a restore like `like` would."""
    if like is None:
        return None
    leaf = value_at(state, path)
    if isinstance(like, np.ndarray):
        return np.asarray(leaf)
    if isinstance(like, jax.ShapeDtypeStruct) and like.sharding != leaf.sharding:
        return jax.device_put(leaf, like.sharding)
    return leaf


def _tree_args(tree: Any, name: str, custom_metadata: Any) -> Any:
    """Return the arguments that save a tree; `StandardSave` takes no strings."""
    leaves, _ = outlines.flattened(tree)
    for path, leaf in leaves:
        _check_leaf(leaf, "/".join([name, *(str(entry.key) for entry in path)]).strip("/"))
    has_text = any(isinstance(leaf, str) for _, leaf in leaves)
    kind = ocp.args.PyTreeSave if has_text else ocp.args.StandardSave
    return kind(tree, custom_metadata=custom_metadata)


def _check_leaf(leaf: Any, path: str) -> None:
    if isinstance(leaf, bytes):
        raise UnsupportedLeafError(f"export {path}: Orbax has no leaves of bytes")
    if isinstance(leaf, jax.Array | np.ndarray) and leaf.size == 0:
        raise UnsupportedLeafError(
            f"export {path}: Orbax has no arrays without elements, found the shape {leaf.shape}"
        )


_TREE_HANDLERS = {
    ocp.args.StandardSave: ocp.StandardCheckpointHandler,
    ocp.args.PyTreeSave: ocp.PyTreeCheckpointHandler,
}
_HANDLERS = {
    ocp.args.ArraySave: ocp.ArrayCheckpointHandler,
    ocp.args.JsonSave: ocp.JsonCheckpointHandler,
    ocp.args.JaxRandomKeySave: ocp.JaxRandomKeyCheckpointHandler,
    ocp.args.NumpyRandomKeySave: ocp.NumpyRandomKeyCheckpointHandler,
    _FilesSave: _FilesHandler,
}


def _handlers(args: Any) -> Any:
    """Return the handler of the one item, or of each item by name: Orbax wants all or none."""
    if isinstance(args, ocp.args.Composite):
        return {name: _handler_of(argument) for name, argument in args.items()}
    return _handler_of(args)


def _handler_of(given: Any) -> Any:
    """Return a handler; those of trees write few arrays at a time, of which one has to fit."""
    if type(given) not in _TREE_HANDLERS:
        return _HANDLERS[type(given)]()
    sizes_bytes = (getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(given.item))
    limit_bytes = max(scratch_memory.GROUP_SIZE_BYTES, 2 * max(sizes_bytes, default=0))
    return _TREE_HANDLERS[type(given)](save_concurrent_gb=limit_bytes / 10**9)


def _write(
    step: int,
    building: Path,
    directory: str | os.PathLike[str],
    args: Any,
    metrics: Any,
    custom_metadata: Any,
) -> None:
    """Write the step to the folder `building`; errors name `directory`."""
    options = ocp.CheckpointManagerOptions(
        enable_async_checkpointing=False,
        # Without a function that ranks checkpoints, Orbax stores no metrics.
        best_fn=None if metrics is None else lambda _: 0.0,
    )
    level = logging.getLogger("absl").level
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    try:
        with ocp.CheckpointManager(
            building, options=options, item_handlers=_handlers(args)
        ) as manager:
            manager.save(
                step, args=args, metrics=metrics, custom_metadata=custom_metadata, force=True
            )
    except _REFUSED as error:
        first = str(error).partition("\n")[0]
        raise InvalidArgumentError(
            f"export step {step} to {directory}: Orbax refuses it: {first}"
        ) from error
    finally:
        logging.getLogger("absl").setLevel(level)
