"""Read the checkpoints that Orbax left in a program's directory, where they are.

Invariants:
- Nothing is written to what Orbax wrote. A checkpoint of Orbax is removed by `delete` alone.
- Listing needs the names and JSON files only. Orbax is imported by the first restore.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from holdfast.errors import CheckpointDamagedError, InvalidArgumentError
from holdfast.interop.orbax import orbax_directory
from holdfast.interop.orbax.errors import ItemNotFoundError
from holdfast.interop.orbax.orbax_directory import OrbaxItem, OrbaxStep
from holdfast.interop.orbax.records import DEFAULT_ITEM, ItemRecord, StepRecord

DELETED = ".deleted-"
log = logging.getLogger(__name__)

_NUMBER = re.compile(r"0|[1-9]\d*")


class OldSteps:
    """The checkpoints of Orbax in one directory.

    Args:
        directory: The program's directory, or one checkpoint, which is step 0.
        name_format: What names the folders of steps; None: plain numbers.
    """

    def __init__(self, directory: Path, name_format: Any = None) -> None:
        self._directory = directory
        self._names = name_format
        self._paths: dict[int, Path] = {}
        self._reported: set[int] = set()
        """Damaged steps that were logged."""

    def old_steps(self) -> list[int]:
        """Return the steps that are there now, in any order."""
        self._paths = self._find()
        return list(self._paths)

    def __contains__(self, step: int) -> bool:
        return step in self._paths or step in self.old_steps()

    def _find(self) -> dict[int, Path]:
        folder = self._directory
        if not folder.is_dir():
            return {}
        if orbax_directory.is_checkpoint(folder, as_item=True):
            return {0: folder}
        paths = {}
        if self._names is None or hasattr(self._names, "step_of"):
            for path in folder.iterdir():
                step = self._step_of(path.name)
                if step is not None:
                    paths[step] = path
        else:
            paths = {
                named_step.step: Path(os.fspath(named_step.path))
                for named_step in self._names.find_all(folder)
            }
        return {step: path for step, path in paths.items() if orbax_directory.is_checkpoint(path)}

    def _step_of(self, name: str) -> int | None:
        if self._names is not None:
            step: int | None = self._names.step_of(name)
            return step
        return int(name) if _NUMBER.fullmatch(name) else None

    def read_step(self, step: int) -> OrbaxStep:
        """Return what the checkpoint of `step` has, without its trees.

        Raises:
            CheckpointDamagedError: A file is missing or damaged; the message names it.
        """
        return orbax_directory.read_step(step, self._paths[step])

    def info(self, step: int) -> StepRecord:
        """Return the time, the metrics and the custom metadata of `step`, without its items.

        A damaged step, which only its restore refuses, has the time of its folder and no metrics;
        the damage is logged once.
        """
        path = self._paths[step]
        try:
            content = self.read_step(step)
        except CheckpointDamagedError as error:
            if step not in self._reported:
                log.warning("step %d is damaged, and cannot be restored: %s", step, error)
            self._reported.add(step)
            time = datetime.fromtimestamp(path.stat().st_mtime, tz=UTC)
            return StepRecord(items={}, is_default=False, time=time)
        return StepRecord(
            items={},
            is_default=False,
            time=content.time,
            metrics=content.metrics,
            custom_metadata=content.custom_metadata,
        )

    def record_of(self, step: int) -> StepRecord:
        """Return the record of `step`, as a save by this package writes it.

        A damaged item is refused by its own restore, and does not keep others from being read.

        Raises:
            CheckpointDamagedError: The metadata of the step, or its one item, is damaged.
            InvalidArgumentError: Orbax cannot be imported.
        """
        from holdfast.interop.orbax import orbax_files

        content = self.read_step(step)
        items: dict[str, ItemRecord] = {}
        for item in content.items:
            try:
                items[item.name] = orbax_files.read_outline(item)
            except CheckpointDamagedError as error:
                if len(content.items) == 1:
                    raise
                items[item.name] = ItemRecord(kind=item.kind, damage=str(error))
        return StepRecord(
            items=items,
            is_default=[*items] == [DEFAULT_ITEM],
            time=content.time,
            metrics=content.metrics,
            custom_metadata=content.custom_metadata,
        )

    def item(self, step: int, name: str) -> OrbaxItem:
        """Return the item `name` of `step`."""
        return next(item for item in self.read_step(step).items if item.name == name)

    def item_files(self, step: int, name: str) -> dict[str, bytes]:
        """Return the files of an item by their paths; nothing if `step` has no such item.

        Raises:
            CheckpointDamagedError: A file is damaged; the message names it.
        """
        for item in self.read_step(step).items:
            if item.name == name:
                return orbax_directory.read_files(item.path)
        return {}

    def read(
        self, step: int, name: str, record: ItemRecord, like: Mapping[tuple[Any, ...], Any]
    ) -> dict[tuple[Any, ...], Any]:
        """Return leaves of an item, each like the one in `like` at its path.

        Raises:
            CheckpointDamagedError: A file is missing or damaged; the message names it.
        """
        from holdfast.interop.orbax import orbax_files

        return orbax_files.read_like(self.item(step, name), record, like)

    def delete(self, step: int) -> None:
        """Remove the folder of `step`. After a crash it is there whole, or no step any more."""
        delete_folder(self._paths.pop(step))

    def delete_item(self, step: int, name: str) -> None:
        """Remove one item of `step`, as Orbax does it: all processes call this.

        Raises:
            InvalidArgumentError: Orbax cannot be imported, or refuses it.
            ItemNotFoundError: There is no such item.
        """
        try:
            from orbax.checkpoint import v1
        except ImportError as error:
            raise InvalidArgumentError(
                f"delete {name!r} of step {step}: Orbax wrote the checkpoint, and an Orbax with "
                f"v1.delete has to be there to change it ({error})"
            ) from error
        try:
            v1.delete(self._paths[step], checkpointable_name=name)
        except FileNotFoundError as error:
            raise ItemNotFoundError(
                f"delete {name!r} of step {step}: there is no such item"
            ) from error
        except ValueError as error:
            raise InvalidArgumentError(f"delete {name!r} of step {step}: {error}") from error


def delete_folder(path: Path) -> None:
    """Remove the folder of a checkpoint. After a crash it is there whole, or none any more."""
    doomed = path.with_name(f"{DELETED}{path.name}")
    path.rename(doomed)
    shutil.rmtree(doomed)
