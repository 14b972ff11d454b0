"""The states that a crash can leave, computed from a log of operations.

There are two kinds of crash:

- The processes die (`deaths`). All operations up to some point are present in every tier; the last
  write may be torn (half present).
- Power is lost (`power_losses`). In the durable folders all synced operations are present, and any
  subset of the others; everything else is lost.

Synced means what POSIX guarantees and no more. A file's bytes and size survive after a `sync` of
the file. A name (made, linked, renamed or removed, of a file or a folder) survives after a `sync`
of the folder that contains it; a file's sync does not cover its name, and a folder's not its own. A
rename within one folder is atomic; one between folders may be half present. A write that was not
synced is present, absent or torn; the bytes before it in the file are zeros unless written. The
contents of a folder whose name is lost are lost too.

If the operations that were not synced have more than `all_max` combinations, these are tried: all,
none, each one alone, each one missing, all up to each one, and a sample drawn with `seed`.

Not modelled: a disk that acknowledges a sync without doing it, and one that destroys data that was
not being written. For an example see `tests.store.recording`.
"""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.store.recording import (
    Log,
    Mark,
    NameChange,
    NameTable,
    Operation,
    RecordedTree,
    Resize,
    Sync,
    Write,
)

ALL_MAX = 1024
SAMPLE_COUNT = 64

LOST, KEPT, TORN = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashState:
    """The state after a crash. `description` names the crash; equal states have equal `key`s."""

    done_count: int
    description: str
    tree: RecordedTree
    key: Hashable


def deaths(log: Log, first: int = 0) -> Iterator[CrashState]:
    """Yield the state after each death of all processes, after `first` operations or more.

    A state may be repeated, after operations that changed no bytes and no names.
    """
    tree = log.prefix(first).tree()
    yield _state(tree.copy(), first, "killed")
    for count, operation in enumerate(log.operations[first:], first + 1):
        if isinstance(operation, Write) and len(operation.data) > 1:
            torn = tree.copy()
            torn.apply(_torn(operation))
            yield _state(torn, count - 1, "killed within a write")
        tree.apply(operation)
        yield _state(tree.copy(), count, "killed")


def power_losses(
    log: Log,
    durable: Collection[str],
    first: int = 0,
    *,
    all_max: int = ALL_MAX,
    sample_count: int = SAMPLE_COUNT,
    seed: int = 0,
) -> Iterator[CrashState]:
    """Yield the states after each loss of power, after `first` operations or more.

    `durable` are the keys of the folders that survive it; the others are empty afterwards. A state
    is not repeated until the next mark; after a mark all states are yielded again.
    """
    disk = _Disk(log, durable)
    chance = random.Random(seed)
    # Whether all states after the previous operation were yielded, and the pending count then.
    has_all, pending_count = False, 0
    for count, operation in enumerate([*log.operations, None]):
        counts = disk.option_counts()
        last = log.operations[count - 1] if count else None
        if count >= first:
            choices = _choices(counts, all_max, sample_count, chance)
            if has_all and not isinstance(last, Mark):
                # Only combinations with the newest operation are new; a sync adds none.
                is_new = len(counts) > pending_count
                choices = (c for c in choices if is_new and c[-1] != LOST)
            for choice in choices:
                description = f"power lost, kept {disk.describe(choice)}"
                yield _state(disk.tree(choice), count, description)
            has_all, pending_count = math.prod(counts) <= all_max, len(counts)
        if operation is not None:
            disk.do(operation)


def at_rest(state: CrashState, log: Log) -> Log:
    """Return a log that continues from `state`: its contents are synced, its marks are kept."""
    made: list[Operation] = []
    reached = [node for node in state.tree.roots.values() if node in state.tree.folders]
    while reached:
        folder = reached.pop()
        for name, node in state.tree.folders[folder].items():
            is_folder = node in state.tree.folders
            change = NameChange(folder=folder, name=name, node=node, is_folder=is_folder)
            made.append(NameTable((change,)))
            if is_folder:
                reached.append(node)
            else:
                made += [Resize(node, 0), Write(node, 0, state.tree.files[node]), Sync(node)]
        made.append(Sync(folder))
    return Log(log.roots, [*made, *map(Mark, log.marks(state.done_count))])


def materialise(tree: RecordedTree, folders: Mapping[str, Path]) -> None:
    """Create the contents of `tree`, with hard links, in empty folders by its roots' keys."""
    places: dict[int, str] = {}
    for key, node in tree.roots.items():
        if key in folders:
            _materialise_folder(tree, node, os.fspath(folders[key]), places)


def _materialise_folder(tree: RecordedTree, folder: int, path: str, places: dict[int, str]) -> None:
    for name, node in tree.folders[folder].items():
        place = f"{path}/{name}"
        if node in tree.folders:
            os.mkdir(place, 0o700)
            _materialise_folder(tree, node, place, places)
        elif node in places:
            os.link(places[node], place)
        else:
            places[node] = place
            fd = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(fd, "wb", buffering=0) as file:
                file.write(tree.files[node])


class _Disk:
    """The durable folders: the synced state, and the pending operations with their options."""

    def __init__(self, log: Log, durable: Collection[str]) -> None:
        self._safe = RecordedTree(log.roots, {node: {} for node in log.roots.values()}, {})
        self._pending: list[Operation] = []
        # Nodes below the durable roots; the first name of a node decides its root.
        self._own = {node for key, node in log.roots.items() if key in durable}

    def do(self, operation: Operation) -> None:
        """Apply one operation; operations outside the durable folders are ignored."""
        if isinstance(operation, NameTable):
            changes = tuple(c for c in operation.changes if c.folder in self._own)
            self._own |= {c.node for c in changes if c.node is not None}
            if changes:
                self._pending.append(NameTable(changes))
        elif isinstance(operation, Write | Resize):
            if operation.node in self._own:
                self._pending.append(operation)
        elif isinstance(operation, Sync) and operation.node in self._own:
            self._sync(operation.node)

    def option_counts(self) -> list[int]:
        """Return the number of options per pending operation: lost, kept, and torn for a write."""
        return [3 if isinstance(o, Write) and len(o.data) > 1 else 2 for o in self._pending]

    def tree(self, choice: Sequence[int]) -> RecordedTree:
        """Return the contents if each pending operation has the given fate."""
        tree = self._safe.copy()
        for operation, fate in zip(self._pending, choice, strict=True):
            if isinstance(operation, Write) and fate == TORN:
                tree.apply(_torn(operation))
            elif fate != LOST:
                tree.apply(operation)
        return tree

    def describe(self, choice: Sequence[int]) -> str:
        """Return a choice as text."""
        words = {KEPT: "", TORN: "half of "}
        kept = [words[c] + _described(o) for o, c in zip(self._pending, choice, strict=True) if c]
        return ", ".join(kept) or "nothing"

    def _sync(self, node: int) -> None:
        left: list[Operation] = []
        for operation in self._pending:
            if isinstance(operation, NameTable):
                safe = tuple(c for c in operation.changes if c.folder == node)
                rest = tuple(c for c in operation.changes if c.folder != node)
                self._safe.apply(NameTable(safe))
                if rest:
                    left.append(NameTable(rest))
            elif isinstance(operation, Write | Resize) and operation.node == node:
                self._safe.apply(operation)
            else:
                left.append(operation)
        self._pending = left


def _choices(
    counts: Sequence[int], all_max: int, sample_count: int, chance: random.Random
) -> Iterator[Sequence[int]]:
    """Yield the fates to try: all combinations if they are few, else as the module describes."""
    if math.prod(counts) <= all_max:
        yield from itertools.product(*map(range, counts))
        return
    size = len(counts)
    yield [LOST] * size
    yield [KEPT] * size
    for index in range(size):
        for fate in range(1, counts[index]):
            yield [fate if i == index else LOST for i in range(size)]
            yield [KEPT if i < index else (fate if i == index else LOST) for i in range(size)]
        yield [LOST if i == index else KEPT for i in range(size)]
    for _ in range(sample_count):
        yield [chance.randrange(count) for count in counts]


def _torn(write: Write) -> Write:
    return Write(write.node, write.offset_bytes, write.data[: len(write.data) // 2])


def _described(operation: Operation) -> str:
    if isinstance(operation, NameTable):
        return " and ".join(_described_name(c) for c in operation.changes)
    if isinstance(operation, Write):
        return f"write of {len(operation.data)} bytes to node {operation.node}"
    if isinstance(operation, Resize):
        return f"size {operation.size_bytes} of node {operation.node}"
    if isinstance(operation, Mark):
        return str(operation.value)
    return f"sync of node {operation.node}"


def _described_name(change: NameChange) -> str:
    if change.node is None:
        return f"removal of {change.name}"
    return f"{change.name} as node {change.node}"


def _state(tree: RecordedTree, done_count: int, description: str) -> CrashState:
    groups: dict[int, int] = {}
    key = tuple(_key(tree, node, groups) for node in tree.roots.values())
    return CrashState(done_count=done_count, description=description, tree=tree, key=key)


def _key(tree: RecordedTree, node: int, groups: dict[int, int]) -> Hashable:
    """Return the contents below `node`, with files numbered by first visit to expose hard links."""
    if node in tree.folders:
        names = sorted(tree.folders[node].items())
        return tuple((name, _key(tree, below, groups)) for name, below in names)
    return groups.setdefault(node, len(groups)), tree.files[node]
