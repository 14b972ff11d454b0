"""Collect the rows of `ls`, one for each checkpoint, from one listing of each tier and its records.

One record is read for each shown row, and only the fields that the row needs are decoded. Images
are never opened: the listing shows whether each exists with the size that the manifest states.

See docs/decisions/0015.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec

from holdfast.engine.lifecycle.attempts import newest_tier, read_attempts
from holdfast.engine.lifecycle.catalog import Listing, Listings, list_stores, listed_size_bytes
from holdfast.engine.reading.run import ReadableRun
from holdfast.engine.reading.sources import readable
from holdfast.errors import CheckpointDamagedError, HoldfastError, ObjectNotFoundError
from holdfast.format.names import ATTEMPTS, CheckpointId, image_key, manifest_key, part_key
from holdfast.format.records import PartReference, Time
from holdfast.format.sealed import FORMAT_VERSION, unseal
from holdfast.format.timeline import on_timeline
from holdfast.store.contract import ReadableStore
from holdfast.store.durable import DurableStore


class State(enum.Enum):
    """The state of a checkpoint."""

    COMMITTED = "committed"
    IN_RAM = "in RAM"
    UNCOMMITTED = "uncommitted"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One checkpoint.

    Attributes:
        id: Its step and attempt.
        time: When it was taken; None if unknown.
        size_bytes: The size of the images that it consists of, as `CheckpointMetadata` counts it.
        written_bytes: The size of those of them that were written for it.
        origins: The steps of the checkpoints whose images it reuses, if it is committed.
        tiers: The tiers that hold parts of it.
        state: Its state.
        is_on_timeline: None if it is not complete, or a damaged attempt record hides the timeline.
        metrics: Its metrics.
        problem: Why it is damaged, or which copy of it is while another tier's is intact.
    """

    id: CheckpointId
    time: datetime | None
    size_bytes: int
    written_bytes: int
    origins: tuple[int, ...]
    tiers: tuple[str, ...]
    state: State
    is_on_timeline: bool | None
    metrics: dict[str, float | str] | None
    problem: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The rows in ascending order of steps, of `count` checkpoints; `problems` are of the run."""

    rows: tuple[Row, ...]
    count: int
    latest_step: int | None
    problems: tuple[str, ...]


class _Spec(msgspec.Struct, frozen=True):
    time: Time
    metrics: dict[str, float | str] | None


class _Head(msgspec.Struct, frozen=True):
    """The fields that a row needs of a manifest, or of rank 0's part record without `parts`."""

    checkpoint: _Spec
    format_version: int = FORMAT_VERSION
    parts: tuple[PartReference, ...] = ()


def take_inventory(run: ReadableRun, limit: int | None) -> Inventory:
    """Return all checkpoints, or the `limit` newest ones.

    Raises:
        StorageError: A tier cannot be listed.
    """
    stores, problems = run.stores, []
    remote: DurableStore | None = None
    try:
        remote = run.find_remote()
        stores += [remote] if remote is not None else []
    except HoldfastError as error:
        problems.append(f"the remote tier is not shown: {error}")
    listings, unlisted = list_stores(stores)
    problems += [f"a tier is not shown: {reason}" for reason in unlisted]
    complete = set(readable(listings))
    timeline: set[CheckpointId] | None = None
    try:
        tiers = [run.durable, *([remote] if remote is not None else [])]
        attempts = read_attempts(newest_tier(tiers))
        if attempts or not complete:
            timeline = set(on_timeline(complete, attempts))
        else:
            problems.append(
                f"the timeline is not known: {ATTEMPTS}/ has no record of an attempt; bring them "
                "back from another copy of the run (`holdfast verify` names them)"
            )
    except HoldfastError as error:
        problems.append(f"the timeline is not known: {error}")
    every = sorted({checkpoint for tier in listings.values() for checkpoint in tier})
    shown = every if limit is None else every[-limit:]
    rows = []
    for checkpoint in shown:
        held = {
            store: listings[store.name][checkpoint]
            for store in stores
            if checkpoint in listings[store.name]
        }
        row = _row(checkpoint, held, listings, checkpoint in complete, timeline)
        if row is not None:
            rows.append(row)
    rows = _without_deleted(rows, stores)
    # Folders with nothing but images that later checkpoints reuse are no checkpoints.
    origins = {CheckpointId(step, row.id.attempt) for row in rows for step in row.origins}
    rows = [row for row in rows if row.id not in origins or _has_records(row.id, listings)]
    return Inventory(
        rows=tuple(rows),
        count=len(every) - (len(shown) - len(rows)),
        latest_step=_latest_step(rows, timeline),
        problems=tuple(problems),
    )


def _without_deleted(rows: list[Row], stores: Sequence[ReadableStore]) -> list[Row]:
    """Return the rows without checkpoints that were being deleted while they were listed.

    A deletion removes the manifest first. What it has left looks like a save without a commit, but
    a second listing no longer has it.
    """
    if not any(row.state is State.UNCOMMITTED for row in rows):
        return rows
    listings, _ = list_stores(stores)
    return [
        row
        for row in rows
        if row.state is not State.UNCOMMITTED or any(row.id in tier for tier in listings.values())
    ]


def _latest_step(rows: Iterable[Row], timeline: set[CheckpointId] | None) -> int | None:
    if timeline is None:
        return None
    damaged = {row.id for row in rows if row.state is State.DAMAGED}
    return max((c.step for c in timeline - damaged), default=None)


def _has_records(checkpoint: CheckpointId, listings: Listings) -> bool:
    return any(tier[checkpoint].has_records for tier in listings.values() if checkpoint in tier)


def _row(
    checkpoint: CheckpointId,
    held: Mapping[ReadableStore, Listing],
    listings: Listings,
    is_complete: bool,
    timeline: set[CheckpointId] | None,
) -> Row | None:
    """Return the row; None if the checkpoint was removed after it was listed."""
    committed = [store for store, listing in held.items() if listing.is_committed]
    head, problem, is_damaged = None, None, False
    try:
        if committed:
            head, problem = _read_manifest(checkpoint, committed, listings)
        else:
            head = _read_first_record(checkpoint, held)
    except ObjectNotFoundError:
        return None
    except HoldfastError as error:
        problem, is_damaged = str(error), True
    if is_damaged:
        state = State.DAMAGED
    elif committed:
        state = State.COMMITTED
    elif is_complete and any(store.is_in_memory and held[store].parts for store in held):
        state = State.IN_RAM
    else:
        state = State.UNCOMMITTED
    size_bytes, written_bytes = _sizes(head, held.values())
    return Row(
        id=checkpoint,
        time=head.checkpoint.time if head else None,
        size_bytes=size_bytes,
        written_bytes=written_bytes,
        origins=tuple(sorted({step for part in head.parts for step, _ in part.origins}))
        if head
        else (),
        tiers=tuple(store.tier for store, listing in held.items() if listing.parts),
        state=state,
        is_on_timeline=_is_on(timeline, checkpoint, is_complete),
        metrics=head.checkpoint.metrics if head else None,
        problem=problem,
    )


def _is_on(
    timeline: set[CheckpointId] | None, checkpoint: CheckpointId, is_complete: bool
) -> bool | None:
    """Return whether it is on the timeline; None if it is incomplete, which is on no branch."""
    return checkpoint in timeline if timeline is not None and is_complete else None


def _read_first_record(
    checkpoint: CheckpointId, held: Mapping[ReadableStore, Listing]
) -> _Head | None:
    for store, listing in held.items():
        if 0 in listing.parts:
            key = part_key(checkpoint, 0, listing.parts[0])
            return unseal(store.get(key), _Head, key)
    return None


def _read_manifest(
    checkpoint: CheckpointId, committed: Sequence[ReadableStore], listings: Listings
) -> tuple[_Head, str | None]:
    """Return the manifest, and what is damaged in a tier whose place another one takes.

    Raises:
        ObjectNotFoundError: The checkpoint was removed after it was listed.
        HoldfastError: It is damaged in all tiers, by their listings and manifests.
    """
    key = manifest_key(checkpoint)
    head, problems, errors = None, list[str](), list[HoldfastError]()
    for store in committed:
        try:
            head = unseal(store.get(key), _Head, key)
            break
        except ObjectNotFoundError as error:
            errors.append(error)
        except HoldfastError as error:
            errors.insert(0, error)
            problems.append(f"{store.tier}: {error}")
    if head is None:
        raise errors[0]
    for rank in range(len(head.parts)):
        misfits = list[str]()
        for store in committed:
            misfit = _misfit(checkpoint, rank, head.parts, listings[store.name])
            if misfit is None:
                break
            misfits.append(misfit)
            problems.append(f"{store.tier}: {misfit}")
        else:
            raise CheckpointDamagedError(misfits[0])
    if not problems:
        return head, None
    return head, f"a copy is damaged, another tier's is intact; {problems[0]}"


def _misfit(
    checkpoint: CheckpointId,
    rank: int,
    parts: Sequence[PartReference],
    tier: Mapping[CheckpointId, Listing],
) -> str | None:
    """Return how the listing of a part contradicts the manifest's `parts`; None if it does not."""
    count = len(parts)
    record = part_key(checkpoint, rank, count)
    if listed_size_bytes(tier, record) is None:
        return f"{record} is missing"
    images = {image_key(checkpoint, rank, count): parts[rank].image_size_bytes}
    for step, size_bytes in parts[rank].origins:
        origin = CheckpointId(step, checkpoint.attempt)
        images[image_key(origin, rank, count)] = size_bytes
    for key, expected in images.items():
        listed_bytes = listed_size_bytes(tier, key)
        if listed_bytes is None:
            return f"{key} is missing"
        if listed_bytes != expected:
            return f"{key} has {listed_bytes} bytes, expected {expected} by the manifest"
    return None


def _sizes(head: _Head | None, listings: Iterable[Listing]) -> tuple[int, int]:
    """Return the bytes of all images of a checkpoint, and of those written for it."""
    if head is not None and head.parts:
        return (
            sum(part.size_bytes for part in head.parts),
            sum(part.image_size_bytes for part in head.parts),
        )
    return max((listing.size_bytes, listing.written_bytes) for listing in listings)
