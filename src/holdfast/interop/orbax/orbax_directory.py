"""Find the checkpoints of a directory that Orbax wrote, and what each has, without its arrays.

The names and JSON files are those of Orbax 0.5 and later, which write `_METADATA` for each tree.
"""

from __future__ import annotations

import base64
import json
import logging
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from holdfast.errors import CheckpointDamagedError, InvalidArgumentError
from holdfast.interop.orbax.outlines import Entry, TreePath
from holdfast.interop.orbax.records import DEFAULT_ITEM

OF_STEP = "_CHECKPOINT_METADATA"
OF_TREE = "_METADATA"
OF_ROOT = "_ROOT_METADATA"
SHARDINGS = "_sharding"
ARRAYS = "array_metadatas"
MANIFEST = "manifest.ocdbt"
METRICS = "metrics"
JSON_FILE = "metadata"
SUCCESS = "commit_success.txt"
OF_V1 = "orbax.checkpoint"
"""Marks a checkpoint of Orbax's second interface, but not a step of its managers."""

log = logging.getLogger(__name__)

_STEP_NAME = re.compile(r"(?:.*_)?(\d+)")
_V1_MODULE = ".experimental.v1."
_DEVICE_ID = re.compile(r"\d+")
"""JAX prints a device as cpu:0, TFRT_CPU_0, cuda:0 or TPU_0(process=0,(0,0,0,0))."""
_SEQUENCE = 1
_KINDS = {
    "StandardCheckpointHandler": "tree",
    "PyTreeCheckpointHandler": "tree",
    "ArrayCheckpointHandler": "array",
    "JsonCheckpointHandler": "json",
    "JaxRandomKeyCheckpointHandler": "key",
    "NumpyRandomKeyCheckpointHandler": "numpy_random",
    "PyTreeHandler": "tree",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OrbaxItem:
    """One item: `kind` is as in `ItemRecord`; `handler` is the class that wrote it, if known."""

    name: str
    path: Path
    kind: str
    handler: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OrbaxStep:
    """One checkpoint. `is_dated` is whether Orbax recorded `time`; else it is the folder's."""

    step: int
    path: Path
    items: tuple[OrbaxItem, ...]
    metrics: Any
    custom_metadata: Any
    time: datetime
    is_dated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OrbaxLeaf:
    """One leaf of a tree: `value_type` is Orbax's name of its type."""

    path: TreePath
    value_type: str
    sharding: Any


def find_steps(source: Path) -> list[tuple[int, Path]]:
    """Return the steps of an Orbax directory with their folders, ascending.

    Args:
        source: The directory of a `CheckpointManager`, or one checkpoint. A checkpoint whose
            folder's name does not end with a number has step 0.

    Empty folders named as steps are skipped, and logged.

    Raises:
        InvalidArgumentError: There is no checkpoint at `source`, or folders of several managers.
        CheckpointDamagedError: The folder of a step has no checkpoint, or two are of one step.
    """
    if not source.is_dir():
        raise InvalidArgumentError(f"import {source}: expected a directory, found none")
    if is_checkpoint(source):
        return [(_step_of(source.name) or 0, source)]
    folders: dict[int, Path] = {}
    named = [path for path in sorted(source.iterdir()) if path.is_dir()]
    steps = [(number, path) for path in named if (number := _step_of(path.name)) is not None]
    if not any(is_checkpoint(path) for _, path in steps):
        inside = [path.name for path in named if _has_checkpoints(path)]
        raise InvalidArgumentError(
            f"import {source}: expected the directory of an Orbax CheckpointManager, one of its "
            "checkpoints, or a folder of torch.distributed.checkpoint, found "
            + (
                f"a folder with others that have checkpoints: {', '.join(inside)}; import each of "
                "them into a run of its own"
                if inside
                else "none of them"
            )
        )
    for number, path in steps:
        if not is_checkpoint(path):
            if not any(file.is_file() for file in path.rglob("*")):
                log.warning("import %s: it is empty; skipped", path)
                continue
            raise CheckpointDamagedError(
                f"import {path}: expected a checkpoint of Orbax, found neither {OF_STEP} nor "
                f"{OF_TREE} in it; move the folder away to import the others"
            )
        if number in folders:
            raise CheckpointDamagedError(
                f"import {path}: expected one folder for step {number}, found {folders[number]} too"
            )
        folders[number] = path
    return sorted(folders.items())


def _has_checkpoints(folder: Path) -> bool:
    """Return whether a folder is a checkpoint, or has one in it."""
    return is_checkpoint(folder) or any(
        is_checkpoint(path) for path in folder.iterdir() if path.is_dir()
    )


def _step_of(name: str) -> int | None:
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


def is_checkpoint(path: Path, *, as_item: bool = False) -> bool:
    """Return whether a folder has a file that marks a checkpoint of Orbax.

    With `as_item` the files must be in the folder itself, not in that of an item. A folder in it
    that is marked as a step is a checkpoint by itself, and no item.
    """
    own = (OF_STEP, OF_TREE, MANIFEST)
    if any((path / name).exists() for name in own):
        return True
    if as_item or any(path.glob(f"*/{OF_STEP}")):
        return False
    return any(path.glob(f"*/{OF_TREE}"))


def read_step(step: int, path: Path) -> OrbaxStep:
    """Return what the checkpoint in the folder `path` has.

    Raises:
        CheckpointDamagedError: A file is damaged; the message names it.
    """
    of_step: dict[str, Any] = read_json(path / OF_STEP) if (path / OF_STEP).exists() else {}
    written = of_step.get("item_handlers")
    handlers = written if isinstance(written, dict) else {DEFAULT_ITEM: written or ""}
    nsecs = of_step.get("init_timestamp_nsecs")
    secs = nsecs / 1e9 if nsecs else path.stat().st_mtime
    if (path / OF_TREE).exists() or (path / MANIFEST).exists() or isinstance(written, str):
        items = [_item(DEFAULT_ITEM, path, handlers.get(DEFAULT_ITEM) or "")]
    else:
        folders = {folder.name: folder for folder in sorted(path.iterdir()) if folder.is_dir()}
        names = {*folders, *(name for name, handler in handlers.items() if handler)} - {METRICS}
        items = []
        # In its second interface a program may remove a checkpointable by removing its folder.
        if (path / OF_V1).exists() or any(_V1_MODULE in (of or "") for of in handlers.values()):
            names &= folders.keys()
        for name in sorted(names):
            if name not in folders:
                raise CheckpointDamagedError(
                    f"read {path / name}: expected the item {name}, found nothing"
                )
            items.append(_item(name, folders[name], handlers.get(name) or ""))
    metrics = path / METRICS / METRICS
    return OrbaxStep(
        step=step,
        path=path,
        items=tuple(items),
        metrics=read_json(metrics) if metrics.exists() else None,
        custom_metadata=_custom_metadata(of_step) or None,
        time=datetime.fromtimestamp(secs, tz=UTC),
        is_dated=bool(nsecs),
    )


def _item(name: str, path: Path, handler: str) -> OrbaxItem:
    files = {file.name for file in path.iterdir()} - {SUCCESS}
    kind = _KINDS.get(handler.rpartition(".")[2])
    if kind is None and (OF_TREE in files or MANIFEST in files):
        kind = "tree"
    if kind is None and files == {JSON_FILE} and not handler:
        kind = "json"
    return OrbaxItem(name=name, path=path, kind=kind or "folder", handler=handler)


def read_leaves(folder: Path) -> tuple[list[OrbaxLeaf], Any]:
    """Return the leaves of the tree in `folder`, and its custom metadata.

    Raises:
        CheckpointDamagedError: A file is missing or damaged; the message names it.
    """
    content = read_json(folder / OF_TREE)
    try:
        if content.get("use_ocdbt") and not (folder / MANIFEST).exists():
            raise CheckpointDamagedError(f"read {folder / MANIFEST}: expected a file, found none")
        entries = [
            (
                tuple(_entry(key) for key in entry["key_metadata"]),
                str(entry["value_metadata"]["value_type"]),
            )
            for entry in content["tree_metadata"].values()
        ]
        custom = content.get("custom_metadata")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointDamagedError(
            f"read {folder / OF_TREE}: expected the metadata of a tree, found {error!r}"
        ) from error
    placed = _read_shardings(folder / SHARDINGS)
    return [
        OrbaxLeaf(
            path=path,
            value_type=value_type,
            sharding=placed.get(".".join(str(entry.key) for entry in path)),
        )
        for path, value_type in entries
    ], custom


def _entry(key: dict[str, Any]) -> Entry:
    if key["key_type"] == _SEQUENCE:
        return Entry(int(key["key"]), in_sequence=True)
    return Entry(str(key["key"]), in_sequence=False)


def _read_shardings(file: Path) -> dict[str, Any]:
    """Return the shardings of arrays by name, as this package describes them."""
    if not file.exists():
        return {}
    try:
        return {
            base64.b64decode(name).decode(): _described(json.loads(text))
            for name, text in read_json(file).items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointDamagedError(
            f"read {file}: expected the shardings of arrays, found {error!r}"
        ) from error


def _described(orbax: dict[str, Any]) -> dict[str, Any]:
    mesh = orbax.get("device_mesh") or orbax.get("device_metadata_mesh")
    if orbax["sharding_type"] == "SingleDeviceSharding":
        number = _DEVICE_ID.search(orbax["device_str"])
        return {"single": int(number[0]) if number else 0}
    if orbax["sharding_type"] != "NamedSharding" or not mesh:
        return {"other": json.dumps(orbax)[:500]}
    return {
        "named": {
            "names": orbax["axis_names"],
            "shape": orbax["shape"],
            "devices": _device_ids(mesh["mesh"]),
            "axis_types": [str(kind).rpartition(".")[2] for kind in orbax.get("axis_types") or ()],
            "spec": orbax["partition_spec"],
            "memory": orbax.get("memory_kind"),
        }
    }


def _device_ids(mesh: Any) -> list[int]:
    if isinstance(mesh, dict):
        return [mesh["id"]]
    return [device_id for part in mesh for device_id in _device_ids(part)]


def read_json(file: Path) -> Any:
    """Return the JSON in a file.

    Raises:
        CheckpointDamagedError: It is missing or damaged.
    """
    try:
        return json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        problem = "none" if isinstance(error, FileNotFoundError) else str(error)
        raise CheckpointDamagedError(
            f"read {file}: expected a file with JSON, found {problem}"
        ) from error


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the files of an item by their paths, without those that Orbax adds.

    Raises:
        CheckpointDamagedError: A file cannot be read.
    """
    try:
        return {
            str(file.relative_to(folder)): file.read_bytes()
            for file in sorted(folder.rglob("*"))
            if file.is_file() and file.name != SUCCESS
        }
    except OSError as error:
        raise CheckpointDamagedError(f"read {folder}: expected files, found {error}") from error


def read_key_kinds(folder: Path) -> dict[str, str]:
    """Return the implementations of the typed keys of `jax.random` in a tree, by name.

    Raises:
        CheckpointDamagedError: A file is damaged; the message names it.
    """
    kinds = {}
    for file in sorted((folder / ARRAYS).glob("process_*")):
        content = read_json(file)
        try:
            for entry in content["array_metadatas"]:
                described = entry["array_metadata"]
                kind = (described.get("ext_metadata") or {}).get("random_key_impl")
                if kind is not None:
                    kinds[described["param_name"]] = kind
        except (AttributeError, KeyError, TypeError) as error:
            raise CheckpointDamagedError(
                f"read {file}: expected the metadata of arrays, found {error!r}"
            ) from error
    return kinds


def read_root_metadata(directory: Path) -> dict[str, Any]:
    """Return the metadata of a manager's directory that a program gave; {} if there are none.

    Raises:
        CheckpointDamagedError: The file is damaged.
    """
    file = directory / "metadata" / OF_ROOT
    content = read_json(file) if file.exists() else {}
    custom = _custom_metadata(content) if isinstance(content, dict) else None
    return custom if isinstance(custom, dict) else {}


def _custom_metadata(content: dict[str, Any]) -> Any:
    """Return what a program gave as metadata, which Orbax names `custom` before 0.11.8."""
    return content.get("custom_metadata") or content.get("custom")
