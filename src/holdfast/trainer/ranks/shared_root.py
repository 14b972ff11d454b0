"""Check that all hosts of a job share one durable root; separate storage is a common mistake.

Invariant: the check creates nothing, so a host that does not share the root is unchanged.

Network storage may show a new file late, so each process retries for `SHOW_SECS` before it reports
the run as missing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast import waits
from holdfast.clock import Clock
from holdfast.engine.lifecycle.run import read_run
from holdfast.errors import HoldfastError, NewerFormatError, NotARunError, error_named
from holdfast.format.names import RUN_FILE
from holdfast.local_agent.place import host_name
from holdfast.store.durable import DurableStore
from holdfast.store.location import RunLocation
from holdfast.trainer.ranks.rendezvous import plain_text

SHOW_SECS = 10.0
POLL_SECS = 0.1
HOSTS_SHOWN_MAX = 5
"""How many hosts a message names."""


class Sighting(msgspec.Struct, frozen=True, array_like=True):
    """What one process has found at the run's path: the run's id, or the problem."""

    host: str
    path: str
    run_id: str | None
    problem: str = ""
    error: str = NotARunError.__name__


def look_for(run_id: str, durable: DurableStore, clock: Clock) -> Sighting:
    """Return what this process finds of the run, retrying for `SHOW_SECS` while it is missing."""
    deadline = clock.monotonic() + SHOW_SECS
    while True:
        is_over = clock.monotonic() >= deadline
        seen = _look(durable)
        if seen.run_id == run_id or is_over or seen.error == NewerFormatError.__name__:
            return seen
        waits.sleep(clock, POLL_SECS)


def check_shared(run_id: str, seen: Sequence[Sighting]) -> None:
    """Check that all processes see the run; `seen` is in the order of ranks.

    Raises:
        NotARunError: Some see no run, or another one. The message names their hosts and paths.
        HoldfastError: A process cannot read its path; the class is that of its error.
    """
    odd = {(view.host, view.path): view for view in seen if view.run_id != run_id}
    if not odd:
        return
    first = next(iter(odd.values()))
    shown = [
        f"on host {view.host} " + (view.problem or f"{view.path} is run {view.run_id}")
        for view in list(odd.values())[:HOSTS_SHOWN_MAX]
    ]
    more = len(odd) - len(shown)
    raise error_named(
        first.error,
        f"open {seen[0].path}: expected run {run_id} of host {seen[0].host} on all hosts of the "
        f"job, found {'; '.join(shown)}{f'; and {more} more' if more else ''}. Put the run on "
        "storage that all hosts share, and give its path on each of them",
    )


def _look(durable: DurableStore) -> Sighting:
    host, path = plain_text(host_name()), plain_text(durable.home.location_text)
    try:
        return Sighting(host, path, read_run(durable, path).run_id)
    except NotARunError as error:
        location = RunLocation(durable.home.location_text)
        if not location.is_url and not location.folder.exists():
            return Sighting(host, path, None, f"{path} does not exist")
        if location.is_url or not location.record.exists():
            return Sighting(host, path, None, f"{path} has no {RUN_FILE}")
        return Sighting(host, path, None, plain_text(str(error)))
    except HoldfastError as error:
        return Sighting(host, path, None, plain_text(str(error)), type(error).__name__)
