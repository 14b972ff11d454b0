"""Check every record and block of every copy for `verify`, and yield each problem with its range.

A restore fails at the first bad record of a copy. This module continues with everything that can be
checked without that record: the other parts' images, the other copies, the other checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.engine.lifecycle.attempts import attempt_numbers, read_attempt_at
from holdfast.engine.lifecycle.catalog import Listing, list_checkpoints, list_folder
from holdfast.engine.lifecycle.commit import is_committed, parse_part
from holdfast.engine.reading.run import ReadableRun
from holdfast.engine.reading.sources import (
    CheckpointSources,
    PartSource,
    part_source,
    readable,
)
from holdfast.engine.reading.verify import BlockCheck, verify
from holdfast.engine.saving.part_layouts import PartLayouts
from holdfast.errors import (
    CheckpointDamagedError,
    HoldfastError,
    NewerFormatError,
    ObjectNotFoundError,
)
from holdfast.format.check import check_manifest
from holdfast.format.names import (
    CheckpointId,
    attempt_keys,
    manifest_key,
    parse_part_name,
    part_key,
)
from holdfast.format.records import CheckpointSpec, Manifest, PartRecord
from holdfast.format.sealed import record_digest, unseal
from holdfast.store.contract import ReadableStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One checkpoint in one tier, with its listing."""

    store: ReadableStore
    id: CheckpointId
    listing: Listing


def copies_of(run: ReadableRun) -> list[Copy]:
    """Return all copies to verify, ordered by step.

    These are committed ones, those in this host's RAM, and the parts in the durable tier of a
    checkpoint that is whole but not committed: a restore reads it.
    """
    stores = run.stores
    listings = {store.name: list_checkpoints(store) for store in stores}
    whole = set(readable(listings))
    copies = [
        Copy(store=store, id=checkpoint, listing=listing)
        for store in stores
        for checkpoint, listing in listings[store.name].items()
        if listing.is_committed or (listing.parts and (store.is_in_memory or checkpoint in whole))
    ]
    return sorted(copies, key=lambda copy: (copy.id, copy.store.tier))


def check_attempts(run: ReadableRun) -> Iterator[BlockCheck]:
    """Read both copies of every attempt's record, and yield a result for each bad or missing one.

    Without the record of its attempt a checkpoint is not on the timeline: no training continues
    from it. So a record is missing if the number has checkpoints, or another attempt continued from
    it. The second copy of the newest attempt may be missing: it is written after the first one,
    perhaps just now, or a power loss prevented it.
    """
    numbers = attempt_numbers(run.durable)
    newest_copy = attempt_keys(max(numbers, default=0))[1]
    saved = {checkpoint.attempt.number for checkpoint in list_checkpoints(run.durable)}
    unread, problems = {*numbers, *saved}, list[BlockCheck]()
    while unread:
        # Origins are earlier attempts, so none is added that was read before.
        number = max(unread)
        unread.remove(number)
        for key in reversed(attempt_keys(number)):
            try:
                origin = read_attempt_at(run.durable, key, number).origin
            except HoldfastError as error:
                if not isinstance(error, ObjectNotFoundError) or key != newest_copy:
                    problems.append(bad_record(run.durable, key, error))
            else:
                if origin is not None and 0 < origin.attempt.number < number:
                    unread.add(origin.attempt.number)
    yield from reversed(problems)


def check_copy(copy: Copy) -> Iterator[BlockCheck]:
    """Read one whole copy, and yield a result for each bad record and for each block."""
    problems: list[BlockCheck] = []
    sources = _sources(copy, problems)
    yield from problems
    if sources is not None:
        yield from verify(sources)


def is_gone(copy: Copy) -> bool:
    """Return whether it was deleted, or its memory released, after it was listed."""
    if copy.listing.is_committed:
        return not is_committed(copy.store, copy.id)
    # Images that later checkpoints reuse may stay in the folder.
    return not copy.listing.parts.items() <= list_folder(copy.store, copy.id).parts.items()


def bad_record(store: ReadableStore, key: str, error: HoldfastError | str) -> BlockCheck:
    """Return the result for a damaged, missing or newer record, whose range is the whole file."""
    try:
        size_bytes = len(store.get(key))
    except HoldfastError:
        size_bytes = 0
    return BlockCheck(
        tier=store.tier,
        key=key,
        start_bytes=0,
        stop_bytes=size_bytes,
        expected="",
        found=None,
        problem=str(error).removeprefix(f"read {key}: "),
        is_newer=isinstance(error, NewerFormatError),
    )


def _sources(copy: Copy, problems: list[BlockCheck]) -> CheckpointSources | None:
    """Return the parts whose records are good, and append the problems of the others."""
    manifest = _manifest(copy, problems)
    if any(problem.is_newer for problem in problems):
        # What its parts should be is not known here.
        return None
    named = [numbers for name in copy.listing.sizes_bytes if (numbers := parse_part_name(name))]
    if manifest is not None:
        count, ranks = len(manifest.parts), set(range(len(manifest.parts)))
    else:
        count = max((count for _, count in named), default=0)
        ranks = {rank for rank, of in named if of == count}
    parts = {rank: _part(copy, rank, count, manifest, problems) for rank in sorted(ranks)}
    first = parts.get(0)
    spec = manifest.checkpoint if manifest else first.checkpoint if first else None
    if spec is None:
        return None
    sources, layouts = [], PartLayouts(spec.arrays)
    for rank in range(count):
        part = parts.get(rank)
        source = _laid_out(copy, part, spec, layouts, problems) if part is not None else None
        sources.append((source,) if source is not None else ())
    return CheckpointSources(
        id=copy.id, spec=spec, parts=tuple(sources), layouts=layouts, passed_over=()
    )


def _manifest(copy: Copy, problems: list[BlockCheck]) -> Manifest | None:
    if not copy.listing.is_committed:
        return None
    key = manifest_key(copy.id)
    try:
        manifest = unseal(copy.store.get(key), Manifest, key)
        check_manifest(manifest, key)
        if manifest.id != copy.id:
            raise CheckpointDamagedError(f"read {key}: it is the manifest of {manifest.id}")
    except HoldfastError as error:
        problems.append(bad_record(copy.store, key, error))
        return None
    return manifest


def _part(
    copy: Copy, rank: int, count: int, manifest: Manifest | None, problems: list[BlockCheck]
) -> PartRecord | None:
    key = part_key(copy.id, rank, count)
    try:
        data = copy.store.get(key)
        part = parse_part(data, key, copy.id, rank, count)
        digest = record_digest(data)
        expected = manifest.parts[rank].record_digest if manifest else digest
        if expected != digest:
            raise CheckpointDamagedError(
                f"read {key}: digest of bytes [0, {len(data)}) expected {expected}, found {digest}"
                "; this is not the committed record"
            )
    except HoldfastError as error:
        problems.append(bad_record(copy.store, key, error))
        return None
    return part


def _laid_out(
    copy: Copy,
    part: PartRecord,
    spec: CheckpointSpec,
    layouts: PartLayouts,
    problems: list[BlockCheck],
) -> PartSource | None:
    """Return the part if its record matches the arrays; else append the problem."""
    try:
        return part_source(copy.store, part, spec, layouts)
    except HoldfastError as error:
        key = part_key(copy.id, part.rank, part.part_count)
        problems.append(bad_record(copy.store, key, error))
        return None
