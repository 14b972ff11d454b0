"""What a run holds: one row a checkpoint, from one listing of each tier and the newest records.

A record is read for each row that is shown, and of it only what the row needs. An image is never
opened: the listing tells whether it is there and as long as the manifest says.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

import msgspec

from holdfast.engine.lifecycle.attempts import read_attempts
from holdfast.engine.lifecycle.catalog import Listing, list_stores
from holdfast.engine.reading.run import ReadableRun
from holdfast.engine.reading.sources import readable
from holdfast.errors import HoldfastError, ObjectNotFoundError
from holdfast.format.names import (
    CheckpointId,
    image_key,
    manifest_key,
    parse_kept_image_name,
    part_key,
)
from holdfast.format.records import PartReference, Time
from holdfast.format.sealed import FORMAT_VERSION, unseal
from holdfast.format.timeline import on_timeline
from holdfast.store.contract import Store


class State(enum.Enum):
    """What a checkpoint has come to."""

    COMMITTED = "committed"
    IN_RAM = "in RAM"
    UNCOMMITTED = "uncommitted"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One checkpoint. `is_on_timeline` is None where a damaged attempt record hides that."""

    id: CheckpointId
    time: datetime | None
    size_bytes: int
    tiers: tuple[str, ...]
    state: State
    is_on_timeline: bool | None
    metrics: dict[str, float | str] | None
    problem: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The rows by ascending step, of `count` checkpoints; `problems` concern the whole run."""

    rows: tuple[Row, ...]
    count: int
    latest_step: int | None
    problems: tuple[str, ...]


class _Spec(msgspec.Struct, frozen=True):
    time: Time
    metrics: dict[str, float | str] | None


class _Head(msgspec.Struct, frozen=True):
    """What a row needs of a manifest, or of rank 0's part record, which has no `parts`."""

    checkpoint: _Spec
    format_version: int = FORMAT_VERSION
    parts: tuple[PartReference, ...] = ()


def take_inventory(run: ReadableRun, limit: int | None) -> Inventory:
    """All checkpoints, or the `limit` newest steps.

    Raises:
        StorageError: a tier cannot be listed.
    """
    stores = run.stores
    listings, _ = list_stores(stores)
    complete = set(readable(listings))
    problems = []
    timeline: set[CheckpointId] | None = None
    try:
        timeline = set(on_timeline(complete, read_attempts(run.durable)))
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
        row = _row(checkpoint, held, checkpoint in complete, timeline)
        if row is not None:
            rows.append(row)
    return Inventory(
        rows=tuple(rows),
        count=len(every) - (len(shown) - len(rows)),
        latest_step=_latest_step(rows, timeline),
        problems=tuple(problems),
    )


def _latest_step(rows: Iterable[Row], timeline: set[CheckpointId] | None) -> int | None:
    if timeline is None:
        return None
    damaged = {row.id for row in rows if row.state is State.DAMAGED}
    return max((c.step for c in timeline - damaged), default=None)


def _row(
    checkpoint: CheckpointId,
    held: Mapping[Store, Listing],
    is_complete: bool,
    timeline: set[CheckpointId] | None,
) -> Row | None:
    """The row, or None for a checkpoint that went away after it was listed."""
    committed = next((s for s, listing in held.items() if listing.is_committed), None)
    head, problem = None, None
    try:
        head = _read_head(checkpoint, held, committed)
        if head is not None and committed is not None:
            problem = _misfit(checkpoint, head, held[committed])
    except ObjectNotFoundError:
        return None
    except HoldfastError as error:
        problem = str(error)
    if problem is not None:
        state = State.DAMAGED
    elif committed is not None:
        state = State.COMMITTED
    elif is_complete and any(store.tier == "ram" and held[store].parts for store in held):
        state = State.IN_RAM
    else:
        state = State.UNCOMMITTED
    return Row(
        id=checkpoint,
        time=head.checkpoint.time if head else None,
        size_bytes=max(listing.size_bytes for listing in held.values()),
        tiers=tuple(store.tier for store, listing in held.items() if listing.parts),
        state=state,
        is_on_timeline=_is_on(timeline, checkpoint, is_complete),
        metrics=head.checkpoint.metrics if head else None,
        problem=problem,
    )


def _is_on(
    timeline: set[CheckpointId] | None, checkpoint: CheckpointId, is_complete: bool
) -> bool | None:
    """Whether it stands on the timeline; what was only begun is neither on it nor beside it."""
    return checkpoint in timeline if timeline is not None and is_complete else None


def _read_head(
    checkpoint: CheckpointId, held: Mapping[Store, Listing], committed: Store | None
) -> _Head | None:
    if committed is not None:
        key = manifest_key(checkpoint)
        return unseal(committed.get(key), _Head, key)
    for store, listing in held.items():
        if 0 in listing.parts:
            key = part_key(checkpoint, 0, listing.parts[0])
            return unseal(store.get(key), _Head, key)
    return None


def _misfit(checkpoint: CheckpointId, head: _Head, listing: Listing) -> str | None:
    """What the listing says against a committed checkpoint, if anything."""
    count = len(head.parts)
    for rank, part in enumerate(head.parts):
        for key in (part_key(checkpoint, rank, count), image_key(checkpoint, rank, count)):
            if key.rpartition("/")[2] not in listing.sizes_bytes:
                return f"{key} is missing"
        found = listing.sizes_bytes[key.rpartition("/")[2]]
        if found != part.image_size_bytes:
            return f"{key} has {found} bytes, the manifest says {part.image_size_bytes}"
    return _misfit_of_kept(head, listing)


def _misfit_of_kept(head: _Head, listing: Listing) -> str | None:
    """What the listing says against the images of earlier checkpoints that it keeps."""
    found = dict.fromkeys(range(len(head.parts)), 0)
    for name, size_bytes in listing.sizes_bytes.items():
        kept = parse_kept_image_name(name)
        if kept is not None and kept[0] in found:
            found[kept[0]] += size_bytes
    for rank, part in enumerate(head.parts):
        if found[rank] != part.kept_size_bytes:
            return (
                f"the images that rank {rank} keeps have {found[rank]} bytes, the manifest says "
                f"{part.kept_size_bytes}"
            )
    return None
