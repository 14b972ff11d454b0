"""Export a checkpoint of a run to a directory that Orbax's `CheckpointManager` opens."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.errors import InvalidArgumentError, UnsupportedLeafError
from holdfast.manager import Run

try:
    import jax
    import numpy as np
    import orbax.checkpoint as ocp
except ImportError as error:
    raise InvalidArgumentError(
        f"Orbax's files are read and written by Orbax, which cannot be imported ({error}): "
        "pip install 'holdfast-checkpoint[orbax]'"
    ) from error

from holdfast.interop.orbax import args as own_args
from holdfast.interop.orbax import outlines, records
from holdfast.interop.orbax.records import DEFAULT_ITEM, RECORD, StepRecord
from holdfast.interop.orbax.run_reader import RunReader

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


def export_orbax(run: Run, step: int, directory: str | os.PathLike[str]) -> None:
    """Write the checkpoint of `step` as step `step` of the Orbax directory `directory`.

    Items, metrics and metadata are those of the program, if it saved through
    `holdfast.interop.orbax`; else the whole state is the one unnamed item.

    Args:
        run: The run.
        step: A step of it.
        directory: It is made if it is missing. The step is there whole, or not at all.

    Raises:
        InvalidArgumentError: The directory has the step, or Orbax cannot write it.
        UnsupportedLeafError: Orbax has no such leaf; the message has the path.
        StepNotFoundError, CheckpointDamagedError, StorageError: The checkpoint.
    """
    values = run.metadata(step).values
    with jax.enable_x64(True):
        if isinstance(values.get(RECORD), str):
            record = records.decoded(str(values[RECORD]))
            items = _items(run, step, record)
            args: Any = items[DEFAULT_ITEM] if record.is_default else ocp.args.Composite(**items)
            _write(step, directory, args, record.metrics, record.custom_metadata)
        else:
            state = run.restore(step, framework="jax")
            _write(step, directory, _tree_args(state, "", None), run.metadata(step).metrics, None)


def _items(run: Run, step: int, record: StepRecord) -> dict[str, Any]:
    host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    wanted = {
        name: own_args.StandardRestore(fallback_sharding=host) if item.kind == "tree" else None
        for name, item in record.items.items()
        if item.kind != "folder"
    }
    restored = RunReader(run.directory).restore(step, wanted)
    found = {}
    for name, item in record.items.items():
        match item.kind:
            case "tree":
                found[name] = _tree_args(restored[name], name, item.custom_metadata)
            case "array":
                _check_leaf(restored[name], name)
                found[name] = ocp.args.ArraySave(restored[name])
            case "json":
                found[name] = ocp.args.JsonSave(restored[name])
            case "key":
                found[name] = ocp.args.JaxRandomKeySave(restored[name])
            case "numpy_random":
                found[name] = ocp.args.NumpyRandomKeySave(restored[name])
            case _:
                files: dict[str, bytes] = {}
                for state in run.process_values(step)[name]:
                    files |= state
                found[name] = _FilesSave(files)
    return found


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


def _write(
    step: int, directory: str | os.PathLike[str], args: Any, metrics: Any, custom_metadata: Any
) -> None:
    options = ocp.CheckpointManagerOptions(
        enable_async_checkpointing=False,
        # Without a function that ranks checkpoints, Orbax stores no metrics.
        best_fn=None if metrics is None else lambda _: 0.0,
    )
    level = logging.getLogger("absl").level
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    try:
        with ocp.CheckpointManager(os.path.abspath(directory), options=options) as manager:
            if step in manager.all_steps():
                raise InvalidArgumentError(
                    f"export to {directory}: it has step {step}; give a new path"
                )
            manager.save(
                step, args=args, metrics=metrics, custom_metadata=custom_metadata, force=True
            )
    except InvalidArgumentError:
        raise
    except _REFUSED as error:
        first = str(error).partition("\n")[0]
        raise InvalidArgumentError(
            f"export step {step} to {directory}: Orbax refuses it: {first}"
        ) from error
    finally:
        logging.getLogger("absl").setLevel(level)
