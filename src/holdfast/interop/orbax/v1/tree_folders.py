"""Store a tree in a folder, for handlers of a program that leave trees to `PyTreeHandler`.

The folder has a checkpoint as `save` makes it, which the first process writes. Its files are part
of the checkpoint of the program's handler.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from holdfast.errors import InvalidArgumentError
from holdfast.interop.orbax import args as ocp_args
from holdfast.interop.orbax import handlers as ocp_handlers
from holdfast.interop.orbax.checkpointers import Checkpointer, located
from holdfast.interop.orbax.records import DEFAULT_ITEM
from holdfast.interop.orbax.v1 import trees
from holdfast.interop.orbax.v1.context import current

FOLDER = "tree"


def writing(directory: Any, tree: Any) -> Awaitable[None]:
    """Copy `tree`, and return what writes it below `directory`.

    Args:
        directory: A folder that can be awaited.
        tree: Arrays and values; of an array of several processes each has to have all.

    Raises:
        InvalidArgumentError: A leaf cannot be saved.
    """
    trees.check_state(tree)
    local = jax.tree_util.tree_map_with_path(_local, trees.converted(tree, current()))

    async def write() -> None:
        path = await directory.await_creation()
        if jax.process_index() == 0:
            with Checkpointer(ocp_handlers.PyTreeCheckpointHandler()) as checkpointer:
                checkpointer.save(path / FOLDER, args=ocp_args.PyTreeSave(local))

    return write()


def reading(directory: Any, abstract: Any) -> Awaitable[Any]:
    """Return what reads the tree below `directory`, like `abstract`."""
    trees.check_abstract(abstract)

    args = None if abstract is None else trees.tree_args(abstract, current())

    async def read() -> Any:
        with Checkpointer(ocp_handlers.PyTreeCheckpointHandler()) as checkpointer:
            return checkpointer.restore(directory / FOLDER, args=args)

    return read()


def described(directory: Any) -> Any:
    """Return the abstract form of the tree below `directory`."""
    place = located(Path(os.fspath(directory)) / FOLDER)
    outline = place.reader.step_record(place.step).items[DEFAULT_ITEM].outline
    return None if outline is None else trees.abstract_tree(outline)


def _local(path: Any, leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return leaf
    if leaf.is_fully_replicated:
        return leaf.addressable_data(0)
    raise InvalidArgumentError(
        f"PyTreeHandler.save {jax.tree_util.keystr(path)}: expected an array that each process has "
        "whole, found one that is divided among processes; give the tree a name of its own in "
        "save_checkpointables"
    )
