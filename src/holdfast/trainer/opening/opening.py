"""Open a run: create or check its directory, and check that all ranks have opened the same run."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass

from msgspec import structs

from holdfast.clock import Clock
from holdfast.coordination.settings import LEASE_SECS
from holdfast.engine.lifecycle.attempts import newest_number, read_attempts
from holdfast.engine.lifecycle.identity import Finding, find, settle
from holdfast.engine.lifecycle.leases import Leases
from holdfast.engine.lifecycle.newest import newest_committed
from holdfast.engine.lifecycle.run import (
    create_run,
    mend_run,
    note_remote,
    noted_remote,
    read_run,
    read_run_record,
)
from holdfast.engine.tiers.shared_attempts import check_common, share_attempts
from holdfast.errors import (
    InvalidArgumentError,
    NotARunError,
    RunBusyError,
    StorageError,
    StorageRefusedError,
)
from holdfast.format.json_codec import decode
from holdfast.format.names import RUN_FILE, CheckpointId
from holdfast.format.records import RunRecord
from holdfast.format.sealed import seal
from holdfast.format.timeline import on_timeline
from holdfast.store.contract import REMOTE
from holdfast.store.durable import DurableStore
from holdfast.store.location import RunLocation, open_durable
from holdfast.trainer.opening.moved_runs import claim_ram, find_with_ram
from holdfast.trainer.ranks.rendezvous import Rendezvous, json_text
from holdfast.trainer.ranks.shared_root import Sighting, check_shared, look_for

log = logging.getLogger(__name__)

OPEN_SECS = 600.0
"""How long the processes wait for each other, since some may start later than others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """An open run. `group` is the random token that the processes of this start share.

    `remote` is its remote tier; None if it has none.
    """

    location: RunLocation
    run_id: str
    group: str
    durable: DurableStore
    remote: DurableStore | None = None


def open_run(
    place: object,
    rendezvous: Rendezvous,
    clock: Clock,
    remote_place: str | None = None,
    *,
    takeover: bool = False,
) -> OpenRun:
    """Open the run at `place` on all processes; rank 0 creates it if it is missing.

    Args:
        place: The path or the URL.
        rendezvous: The processes.
        clock: The time.
        remote_place: The path or URL of its remote tier; None: it has none.
        takeover: Use a remote tier also while another attempt is live there, and take a directory
            for the run where it cannot be decided whether it was moved or copied.

    Returns:
        The open run; `run_id` and `group` are the same on all processes.

    Raises:
        NotARunError, NewerFormatError, StorageError: The directory of some process, or the remote
            tier. All processes raise the error, which names it. Nothing was changed, except that
            rank 0 may have created a run that other hosts do not see.
        RunBusyError: Another attempt is live on the remote tier; or RAM of this host may belong to
            this directory, or to another one.
        InvalidArgumentError: As `RunLocation.parse`, and as `Rendezvous.decide`.
        ProcessLostError: As `Rendezvous.decide`.
    """
    with rendezvous.propagating_errors("open the run"):
        location = RunLocation.parse(place)
        durable = open_durable(location.text, clock)
        location.check_writable()
        location.make_folder()
        remote = _open_remote(remote_place, location, clock)

    def opened(remote_places: list[str]) -> str:
        _check_alike(location, remote_places)
        if remote is None:
            run_id = _open_or_create(durable, clock, takeover=takeover)
            _warn_if_remote_is_left_out(durable, location)
        else:
            run_id = _open_both(durable, remote, clock, takeover=takeover)
            note_remote(durable, remote.home.location_text)
        return f"{run_id} {clock.new_token()}"

    answer = rendezvous.decide("open the run", remote_place or "", opened, OPEN_SECS)
    run_id, _, group = answer.partition(" ")
    if rendezvous.count > 1:
        _find_on_all_hosts(run_id, durable, rendezvous, clock)
    return OpenRun(location=location, run_id=run_id, group=group, durable=durable, remote=remote)


def _warn_if_remote_is_left_out(durable: DurableStore, location: RunLocation) -> None:
    """Log the run's remote tier where the start does not use it; a bucket is not asked for it."""
    noted = None if location.is_url else noted_remote(durable)
    if noted is not None:
        log.warning(
            "open %s: the run has the remote tier %s, which this start does not use: it continues "
            "without the checkpoints that only that tier has, and later replaces them there",
            location,
            noted,
        )


def _check_alike(location: RunLocation, remote_places: list[str]) -> None:
    """Check that all processes have given the same remote tier."""
    first = remote_places[0]
    rank = next((r for r, place in enumerate(remote_places) if place != first), None)
    if rank is not None:
        raise InvalidArgumentError(
            f"open {location}: expected the same remote tier in all processes, found "
            f"{first or 'none'} in rank 0 and {remote_places[rank] or 'none'} in rank {rank}"
        )


def _open_remote(place: str | None, location: RunLocation, clock: Clock) -> DurableStore | None:
    """Return the store of the remote tier; no object is read or written yet."""
    if place is None:
        return None
    if location.overlaps(RunLocation(place)):
        raise InvalidArgumentError(
            f"open {location}: expected a remote tier at another place, not in it and not around "
            f"it, found {place}"
        )
    RunLocation(place).check_writable()
    return open_durable(place, clock, tier=REMOTE)


@dataclass(frozen=True, slots=True)
class _Found:
    """A run that is in a place: its record, and the relation of the place to that."""

    record: RunRecord
    finding: Finding


def _open_both(durable: DurableStore, remote: DurableStore, clock: Clock, *, takeover: bool) -> str:
    """Open or create a run with two durable tiers, which are one run with the same attempts.

    Nothing is written before all checks have passed. Of two starts that create it at once, with
    one remote tier, both take the remote tier's id.
    """
    here = _find(durable, clock)
    with _naming_remote(durable):
        there = _find(remote, clock)
    here, there = _recognised(here, there)
    if here is not None and here.finding is Finding.DISPLACED:
        here = _Found(here.record, find_with_ram(durable, here.record, clock, takeover=takeover))
    _check_tiers(durable, remote, here, there, takeover=takeover)
    _prepare_missing(durable, remote, here, there, clock)
    record = _settled(durable, here, clock) if here is not None else None
    with _naming_remote(durable):
        if there is None:
            remote_record = _create_like(remote, record, clock)
        else:
            remote_record = settle(remote, there.record, there.finding, clock)
    record = record or _create_like(durable, remote_record, clock)
    if record.run_id != remote_record.run_id:
        # Race: another start has created one of the two.
        raise _not_its_remote(durable, remote, record, remote_record)
    if remote_record.place is None:
        # It is reconstructed. The agent mends that of the directory.
        for key in mend_run(remote, remote.home.recorded_place()):
            log.info("%s: wrote %s anew", remote.home.location_text, key)
    is_behind = 0 < newest_number(durable) < newest_number(remote)
    last = newest_committed(durable, read_attempts(durable)) if is_behind else None
    share_attempts(durable, remote)
    if last is not None:
        _warn_if_abandoned(durable, remote, last)
    return record.run_id


def _recognised(here: _Found | None, there: _Found | None) -> tuple[_Found | None, _Found | None]:
    """Recognise a tier that was moved, or restored from a backup, by the other one.

    Two directories never train at once with one remote tier, since it numbers their attempts. If
    both tiers are displaced, they may be copies of both.
    """
    if here is None or there is None or here.record.run_id != there.record.run_id:
        return here, there
    in_place = (Finding.SAME, Finding.MOVED)
    if here.finding is Finding.DISPLACED and there.finding in in_place:
        return _Found(here.record, Finding.MOVED), there
    if there.finding is Finding.DISPLACED and here.finding in in_place:
        return here, _Found(there.record, Finding.MOVED)
    return here, there


def _check_tiers(
    durable: DurableStore,
    remote: DurableStore,
    here: _Found | None,
    there: _Found | None,
    *,
    takeover: bool,
) -> None:
    """Check that both places can be the tiers of one run. Read-only."""
    _check_apart(durable, remote)
    if here is None or there is None:
        return
    if here.record.run_id != there.record.run_id:
        raise _not_its_remote(durable, remote, here.record, there.record)
    for store, tier, what in ((durable, here, "directory"), (remote, there, "remote tier")):
        if tier.finding in (Finding.COPY, Finding.DISPLACED):
            where = store.home.location_text
            original = tier.record.place.path if tier.record.place is not None else "unknown"
            raise NotARunError(
                f"use {remote.home.location_text} as the remote tier of "
                f"{durable.home.location_text}: expected the {what} of run {tier.record.run_id}, "
                f"found a copy of it at {where}; the original was at {original}. "
                "Open the original; or open the copy with a new remote tier or without one, and it "
                "continues as a run of its own"
            )
    check_common(durable, remote)
    newest_here, newest_there = newest_number(durable), newest_number(remote)
    if 0 < newest_there < newest_here and not takeover:
        _check_not_live(remote, there.record.run_id, newest_there)


def _check_apart(durable: DurableStore, remote: DurableStore) -> None:
    here, there = durable.home.location_text, remote.home.location_text
    # Links in the paths of directories that are missing yet.
    is_same_path = os.path.realpath(here) == os.path.realpath(there)
    if is_same_path or durable.home.is_at(there):
        raise InvalidArgumentError(
            f"open {here}: expected a remote tier at another place, found {there}, which leads to "
            "the same one"
        )


def _prepare_missing(
    durable: DurableStore,
    remote: DurableStore,
    here: _Found | None,
    there: _Found | None,
    clock: Clock,
) -> None:
    """Prepare the places that have no run yet, after all checks."""
    if here is None:
        _prepare_new(durable, clock)
    if there is None:
        place = remote.home.location_text
        if here is not None and noted_remote(durable) == place:
            log.warning(
                "%s: its remote tier %s has no run any more, and is made anew: it gets the "
                "checkpoints that are saved from now on",
                durable.home.location_text,
                place,
            )
        with _naming_remote(durable):
            _prepare_new(remote, clock)
    # The paths may lead through mounts to one place that was missing.
    _check_apart(durable, remote)


def _not_its_remote(
    durable: DurableStore, remote: DurableStore, here: RunRecord, there: RunRecord
) -> NotARunError:
    advice = "choose a new remote tier, or the run's own directory"
    if here.copied_from == there.run_id:
        advice = (
            "the directory was opened as a copy of that run, and is a run of its own since: choose "
            "a new remote tier for it. To continue the other run, open an empty directory with "
            "this remote tier"
        )
    return NotARunError(
        f"use {remote.home.location_text} as the remote tier of {durable.home.location_text}: "
        f"expected run {here.run_id}, found run {there.run_id}; {advice}"
    )


@contextlib.contextmanager
def _naming_remote(durable: DurableStore) -> Iterator[None]:
    """Say in a `StorageError` of the remote tier what to do about it."""
    try:
        yield
    except StorageError as error:
        raise type(error)(
            f"open the remote tier of {durable.home.location_text}: {error}; without it no start "
            "can know whether another one has begun. To train without it for now, open the run "
            "without remote="
        ) from error


def _warn_if_abandoned(durable: DurableStore, remote: DurableStore, last: CheckpointId) -> None:
    """Warn if attempts that began in the remote tier alone abandon `last`, the newest one here."""
    attempts = read_attempts(durable)
    if not on_timeline([last], attempts):
        newest = attempts[max(attempts)]
        log.warning(
            "%s: step %d of attempt %s, the newest one here, is abandoned: attempt %s of host %s "
            "took the run over in %s, and did not continue from it. This start continues from that "
            "attempt; `holdfast ls` shows the abandoned steps",
            durable.home.location_text,
            last.step,
            last.attempt,
            newest.attempt,
            newest.host,
            remote.home.location_text,
        )


def _check_not_live(remote: DurableStore, run_id: str, newest: int) -> None:
    """Check that `newest` is not live on a remote tier that lacks attempts of this directory."""
    seen = Leases(remote.fleeting, run_id).read(newest)
    if seen is not None and seen.age_secs < LEASE_SECS and not seen.is_storing:
        raise RunBusyError(
            f"open {remote.home.location_text}: attempt {newest} is live on {seen.holder}; stop it "
            "first, or open with takeover=True to fence it"
        )


def _find_on_all_hosts(
    run_id: str, durable: DurableStore, rendezvous: Rendezvous, clock: Clock
) -> None:
    def judge(values: list[str]) -> str:
        check_shared(run_id, [decode(value, Sighting) for value in values])
        return ""

    with rendezvous.propagating_errors("find the run"):
        seen = json_text(look_for(run_id, durable, clock))
    rendezvous.decide("find the run", seen, judge, OPEN_SECS)


def _open_or_create(durable: DurableStore, clock: Clock, *, takeover: bool) -> str:
    place = _find(durable, clock)
    if place is None:
        _prepare_new(durable, clock)
        return _create_like(durable, None, clock).run_id
    if place.finding is Finding.DISPLACED:
        finding = find_with_ram(durable, place.record, clock, takeover=takeover)
        place = _Found(place.record, finding)
        remote = noted_remote(durable) if finding is Finding.COPY else None
        if remote is not None:
            log.warning(
                "%s is opened without remote=, so it is taken for a copy of run %s, and not for "
                "the run itself: its remote tier %s continues that run, with remote= and an empty "
                "directory",
                durable.home.location_text,
                place.record.run_id,
                remote,
            )
    return _settled(durable, place, clock).run_id


def _find(durable: DurableStore, clock: Clock) -> _Found | None:
    """Return the run in a place; None if the place is free for a new one. Read-only.

    Raises:
        NotARunError: The place has something else, or an unfinished copy.
    """
    location = RunLocation(durable.home.location_text)
    try:
        record = read_run(durable, location.text)
    except NotARunError:
        if durable.is_unused():
            return None
        # Another start may have created the run since it was read.
        try:
            record = read_run(durable, location.text)
        except NotARunError as error:
            if durable.has_object(RUN_FILE):
                raise
            raise _used(durable) from error
    if record.is_unfinished_copy:
        place = durable.home.location_text
        raise NotARunError(
            f"open {place}: expected a run, found the unfinished copy of run {record.run_id}, "
            f"which lacks checkpoints; finish it (`holdfast copy RUN {place}`), or delete it. To "
            f"train from what it has, copy that to a new place (`holdfast copy {place} NEW`)"
        )
    return _Found(record, find(durable, record, clock))


def _settled(durable: DurableStore, place: _Found, clock: Clock) -> RunRecord:
    """Return the directory's record as `settle` does; a run that was moved keeps its RAM."""
    if place.finding is Finding.MOVED:
        claim_ram(durable, place.record, clock)
    return settle(durable, place.record, place.finding, clock)


def open_copy(place: object, record: RunRecord, clock: Clock) -> DurableStore:
    """Open or create the place that a run is copied to; the copy has the run's own `record`.

    Until `end_copy` it is marked as unfinished, and not opened for training; later it is
    recognised as a copy there and becomes a run of its own.

    Raises:
        NotARunError: The place has something else, or the copy was opened for training.
        StorageError, InvalidArgumentError: The place.
    """
    location = RunLocation.parse(place)
    durable = open_durable(location.text, clock)
    location.check_writable()
    location.make_folder()
    if durable.is_unused():
        _prepare_new(durable, clock)
    elif not durable.has_object(RUN_FILE):
        raise _used(durable)
    begun = structs.replace(record, is_unfinished_copy=True)
    durable.put_if_absent(RUN_FILE, seal(begun))
    present = read_run_record(durable, location.text)
    if present == record:
        # Race: a start that reads the record just before settles it with an id that `copies/` has,
        # and so settles it again once this copy has ended.
        durable.put(RUN_FILE, seal(begun))
    elif present != begun:
        what = f"run {present.run_id}"
        if present.run_id == record.run_id:
            what = "that run itself, as its remote tier is"
        raise NotARunError(
            f"copy to {location}: expected a new place, or an unfinished copy of run "
            f"{record.run_id}, found {what}; choose a new place"
        )
    return durable


def end_copy(durable: DurableStore, record: RunRecord) -> None:
    """Mark a copy as finished."""
    durable.put(RUN_FILE, seal(record))


def _used(durable: DurableStore) -> NotARunError:
    kind, content = ("prefix", "objects") if durable.is_remote else ("directory", "files")
    return NotARunError(
        f"open {durable.home.location_text}: expected a run or an empty {kind}, found {content} "
        f"but no {RUN_FILE}; choose a new {kind}, or the run's own"
    )


def _create_like(durable: DurableStore, other: RunRecord | None, clock: Clock) -> RunRecord:
    """Create a run: that of another tier's record, or a new one."""
    home = durable.home
    run_id, time = (other.run_id, other.time) if other else (clock.new_token(), clock.now())
    record = create_run(durable, home.location_text, run_id, time, home.recorded_place())
    return settle(durable, record, find(durable, record, clock), clock)


def _prepare_new(durable: DurableStore, clock: Clock) -> None:
    """Prepare a place for a new run; warn if it is inside another one.

    An outer place that may not be read counts as none.
    """
    durable.prepare_place()
    location = RunLocation(durable.home.location_text)
    for outer in location.outer():
        with contextlib.suppress(StorageRefusedError):
            if open_durable(outer.text, clock).has_object(RUN_FILE):
                log.warning(
                    "the new run %s is inside another run, %s: what removes or copies that one "
                    "also removes or copies this one; give each run a place of its own",
                    location,
                    outer,
                )
                return
