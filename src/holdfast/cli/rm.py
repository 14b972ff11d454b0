"""Implement `holdfast rm`: remove checkpoints from every tier, also of a live run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict

import click

from holdfast.cli import output
from holdfast.cli.output import counted, secs_text, size_text
from holdfast.clock import SystemClock
from holdfast.coordination.settings import LEASE_SECS
from holdfast.engine.lifecycle.attempts import newest_number, newest_tier
from holdfast.engine.lifecycle.catalog import Listing, list_checkpoints
from holdfast.engine.lifecycle.commit import remove
from holdfast.engine.lifecycle.leases import Leases
from holdfast.engine.lifecycle.references import remove_durable
from holdfast.engine.reading.run import ReadableRun
from holdfast.engine.reading.view import view_of
from holdfast.errors import (
    AgentUnavailableError,
    RunBusyError,
    StepNotFoundError,
    StepUncommittedError,
)
from holdfast.format.names import CheckpointId
from holdfast.host.wire import protocol
from holdfast.host.wire.agents_here import ask, status_of
from holdfast.host.wire.launch import find_live_agent
from holdfast.local_agent.client import AgentGoneError, AgentSilentError
from holdfast.local_agent.place import host_name
from holdfast.observe.events.schema import CheckpointDeleted
from holdfast.observe.events.uploaded_segments import uploads_for
from holdfast.observe.events.writer import EventWriter
from holdfast.store.contract import ReadableStore
from holdfast.store.durable import DurableStore
from holdfast.store.location import RunLocation
from holdfast.trainer.opening.run_access import read_only

DELETE_SECS = 900.0
"""How long the agent may take: it removes a step that it is uploading once it is uploaded."""


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path())
@click.argument("steps", metavar="STEP...", type=click.IntRange(min=0), nargs=-1, required=True)
@click.option(
    "--attempt",
    metavar="N",
    type=click.IntRange(min=1),
    help="Remove the steps of attempt N, such as those of an abandoned branch.",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def rm(
    directory: str,
    steps: tuple[int, ...],
    attempt: int | None,
    yes: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove the checkpoints of STEP... from the run in DIR, in memory and its remote tier too.

    Beside a live run its agent removes them, so call this on a host of the run.
    """
    run = read_only(directory)
    remote = run.find_remote()
    stores = [*run.stores, *([remote] if remote is not None else [])]
    timeline = newest_tier([run.durable, *([remote] if remote is not None else [])])
    try:
        checkpoints = [
            checkpoint
            for step in dict.fromkeys(steps)
            for checkpoint in _find(run, stores, timeline, step, attempt)
        ]
    except (StepNotFoundError, StepUncommittedError) as error:
        raise type(error)(f"{error}; nothing was removed") from error
    listings = [(store.tier, list_checkpoints(store)) for store in stores]
    rows = [_row(checkpoint, listings) for checkpoint in checkpoints]
    for row in rows if not as_json else ():
        where = f"{size_text(row['written_bytes'])} in {', '.join(row['tiers'])}"
        shown = where if row["tiers"] else "removed meanwhile"
        output.print_line(f"step {row['step']} (attempt {row['attempt']}): {shown}")
    if not dry_run:
        output.confirm(f"Remove {counted(len(checkpoints), 'checkpoint')}?", is_answered=yes)
        _remove(run, remote, checkpoints)
    if as_json:
        output.print_json({"run": str(run.location), "removed": not dry_run, "checkpoints": rows})
    elif not dry_run:
        output.print_line(f"removed {counted(len(checkpoints), 'checkpoint')}")


class _Row(TypedDict):
    """A checkpoint to remove: the bytes written for it, and its tiers, as `holdfast ls` shows."""

    step: int
    attempt: int
    written_bytes: int
    tiers: list[str]


def _row(
    found: CheckpointId, listings: Iterable[tuple[str, Mapping[CheckpointId, Listing]]]
) -> _Row:
    held = [(tier, listed[found]) for tier, listed in listings if found in listed]
    written_bytes = max((listing.written_bytes for _, listing in held), default=0)
    tiers = [tier for tier, _ in held]
    return _Row(
        step=found.step, attempt=found.attempt.number, written_bytes=written_bytes, tiers=tiers
    )


def _find(
    run: ReadableRun,
    stores: Sequence[ReadableStore],
    timeline: DurableStore,
    step: int,
    attempt: int | None,
) -> list[CheckpointId]:
    """Return the checkpoints of a step in any tier: of that attempt, or the one on the timeline.

    Of a run that was put back to an earlier state, two attempts may have one number.

    Raises:
        StepNotFoundError, StepUncommittedError: There is none.
    """
    if attempt is None:
        return [view_of(stores, timeline).find(step)]
    saved = {c for store in stores for c in list_checkpoints(store) if c.step == step}
    chosen = sorted(c for c in saved if c.attempt.number == attempt)
    if not chosen:
        there = sorted({c.attempt.number for c in saved})
        raise StepNotFoundError(
            f"remove step {step} of attempt {attempt} from {run.location}: there is none; the "
            + (f"step is there of attempts {there}" if there else "step is there of no attempt")
        )
    return chosen


def _remove(run: ReadableRun, remote: DurableStore | None, wanted: list[CheckpointId]) -> None:
    """Remove checkpoints through the run's agent here, or, of a run that is not live, directly.

    Raises:
        RunBusyError: The run is live on another host, or here with this place as its remote tier.
        AgentUnavailableError: Its agent here does not answer; only the agent may remove then.
    """
    if _remove_by_agent(run, wanted):
        return
    run.location.check_writable()
    for store in (run.durable, remote) if remote is not None else (run.durable,):
        _check_not_live(run, store)
    # Of a run in a bucket: this host may have no files of it yet.
    run.location.make_folder()
    clock = SystemClock()
    uploads = uploads_for(run.durable, host_name(), clock)
    writer = EventWriter(run.durable.home, host_name(), clock, uploads=uploads)
    with contextlib.closing(writer) as events:
        for checkpoint in wanted:
            _remove_from_stores(run, remote, checkpoint)
            events.attempt = number = checkpoint.attempt.number
            events.write(CheckpointDeleted(step=checkpoint.step, attempt=number, reason="asked"))


def _remove_by_agent(run: ReadableRun, wanted: list[CheckpointId]) -> bool:
    """Remove checkpoints through the run's agent here; return False if there is none (any more)."""
    try:
        folder = find_live_agent(run.agents_id, host_name()) if run.agents_id else None
        if folder is None:
            return False
        _check_not_its_remote_tier(run, status_of(folder))
        request = protocol.Delete(ids=tuple(wanted), by_user=True)
        with output.stderr().status("waiting for the agent, which ends what it is writing"):
            ask(folder, "delete", request, protocol.Empty, DELETE_SECS)
    except AgentSilentError as error:
        raise AgentUnavailableError(f"remove checkpoints of {run.location}: {error}") from error
    except AgentGoneError:
        # It was leaving. What it has removed may be removed again.
        return False
    return True


def _check_not_its_remote_tier(run: ReadableRun, agent: protocol.AgentStatus) -> None:
    """Check that the run's agent does not serve another place, with this one as the remote tier.

    It would remove from both, and the command announced what is in one. Where the agent's directory
    is no longer at its path, it was renamed, maybe to this one.
    """
    place = RunLocation(agent.run)
    is_other = not run.durable.home.is_at(agent.run) and (place.is_url or place.folder.exists())
    if agent.remote is not None and is_other:
        raise RunBusyError(
            f"remove checkpoints of {run.location}: the run is live on this host at {agent.run}, "
            f"with this as its remote tier; `holdfast rm {agent.run} STEP` removes them from both "
            "tiers, or stop the run first"
        )


def _check_not_live(run: ReadableRun, store: DurableStore) -> None:
    newest = newest_number(store)
    seen = Leases(store.fleeting, run.run_id).read(newest) if newest else None
    if seen is not None and seen.age_secs < LEASE_SECS and not seen.is_storing:
        raise RunBusyError(
            f"remove checkpoints of {run.location}: attempt {newest} is live on host {seen.host}; "
            "call this there, or stop it first. If it was killed, this works in "
            f"{secs_text(LEASE_SECS - seen.age_secs)}"
        )


def _remove_from_stores(run: ReadableRun, remote: DurableStore | None, found: CheckpointId) -> None:
    # The run's own storage last: with the manifest gone, what is left could not be found.
    ram = run.find_ram()
    in_ram = list_checkpoints(ram).get(found) if ram is not None else None
    if ram is not None and in_ram is not None:
        remove(ram, found, in_ram)
    for store in (remote, run.durable):
        if store is not None:
            # Spares the images that other checkpoints reuse.
            remove_durable(store, list_checkpoints(store), [found])
