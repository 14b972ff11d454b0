"""Whether all hosts of a job see one durable root: storage of its own on each is a common mistake.

Who looks makes nothing: a host that does not share the root is left as it was. Storage of a network
may show a new file late, so each process looks again for `SHOW_SECS` before it counts as missing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.agent.agent_directory import host_name
from holdfast.clock import Clock
from holdfast.engine.lifecycle.run import read_run
from holdfast.errors import HoldfastError, NewerFormatError, NotARunError, error_named
from holdfast.format.names import RUN_FILE
from holdfast.job.rendezvous import plain_text
from holdfast.store.disk import DiskStore

SHOW_SECS = 10.0
POLL_SECS = 0.1
HOSTS_TOLD_MAX = 5


class Sighting(msgspec.Struct, frozen=True, array_like=True):
    """What one process sees where the run should be: its id, or what is wrong there."""

    host: str
    path: str
    run_id: str | None
    problem: str = ""
    error: str = NotARunError.__name__


def look_for(run_id: str, durable: DiskStore, clock: Clock) -> Sighting:
    """What this process sees of the run; waits a while for what is not there yet."""
    deadline = clock.monotonic() + SHOW_SECS
    while True:
        is_over = clock.monotonic() >= deadline
        seen = _look(durable)
        if seen.run_id == run_id or is_over or seen.error == NewerFormatError.__name__:
            return seen
        clock.sleep(POLL_SECS)


def check_shared(run_id: str, seen: Sequence[Sighting]) -> None:
    """Checks that all processes see the run; `seen` is in the order of ranks.

    Raises:
        NotARunError: some see none, or another one; their hosts and paths are told.
        HoldfastError: a process cannot look, as the class of its error.
    """
    odd = {(one.host, one.path): one for one in seen if one.run_id != run_id}
    if not odd:
        return
    first = next(iter(odd.values()))
    told = [
        f"on host {one.host} " + (one.problem or f"{one.path} is run {one.run_id}")
        for one in list(odd.values())[:HOSTS_TOLD_MAX]
    ]
    more = len(odd) - len(told)
    raise error_named(
        first.error,
        f"open {seen[0].path}: expected run {run_id} of host {seen[0].host} on all hosts of the "
        f"job, found {'; '.join(told)}{f'; and {more} more' if more else ''}. Put the run on "
        "storage that all hosts share, and give its path on each of them",
    )


def _look(durable: DiskStore) -> Sighting:
    host, path = plain_text(host_name()), plain_text(str(durable.root))
    try:
        return Sighting(host, path, read_run(durable, path).run_id)
    except NotARunError as error:
        if not durable.root.exists():
            return Sighting(host, path, None, f"there is no {path}")
        if not (durable.root / RUN_FILE).exists():
            return Sighting(host, path, None, f"{path} has no {RUN_FILE}")
        return Sighting(host, path, None, plain_text(str(error)))
    except HoldfastError as error:
        return Sighting(host, path, None, plain_text(str(error)), type(error).__name__)
