"""Give the agents of a job the token by which they know each other.

A run in a directory has the token in a file there. The hosts of a run in a bucket share no
directory, and the token is never in the bucket: one rank makes it, the job's key-value service
carries it to the others, and each host keeps it in a file that only its user can read.

Invariant: no agent starts on a host before the token's file is complete there.
"""

from __future__ import annotations

import os

from holdfast.clock import Clock
from holdfast.errors import AgentUnavailableError
from holdfast.host.wire.launch import find_agent
from holdfast.local_agent.place import host_name
from holdfast.peers.config import make_token, read_token, replace_token
from holdfast.store.location import RunLocation
from holdfast.trainer.ranks.rendezvous import Rendezvous
from holdfast.trainer.ranks.topology import MEET_SECS


def share_token(location: RunLocation, run_id: str, rendezvous: Rendezvous, clock: Clock) -> str:
    """Make the token's file on all hosts of the job, and return its path. Every rank must call it.

    Raises:
        AgentUnavailableError: An agent of this host has the token of other hosts.
        StorageError: The file cannot be read or written.
        ProcessLostError: As `Rendezvous.decide`.
    """
    # The run's id is in the name, so that a copied run directory gets a token of its own.
    path = str(location.token(run_id))
    if location.is_url:
        _spread(path, run_id, location, rendezvous, clock)
        return path

    def tokened(_: list[str]) -> str:
        make_token(path, clock.new_token())
        return ""

    rendezvous.decide("make the agents' token", "", tokened, MEET_SECS)
    return path


def _spread(
    path: str, run_id: str, location: RunLocation, rendezvous: Rendezvous, clock: Clock
) -> None:
    """Write one token on all hosts: that of the lowest rank whose host has one, or a new one."""
    with rendezvous.propagating_errors("read the agents' token"):
        own = _read(path)
    token = rendezvous.decide(
        "share the agents' token",
        own,
        lambda tokens: next(filter(None, tokens), "") or clock.new_token(),
        MEET_SECS,
    )
    with rendezvous.propagating_errors("write the agents' token"):
        # Looked for before the file is read: an agent of another rank's start has the new token.
        agent = find_agent(run_id, host_name())
        if _read(path) == token:
            return
        if agent is not None and own:
            raise AgentUnavailableError(
                f"join the agent of {location} on host {host_name()}: expected one that knows the "
                "other hosts of this job, found one of an earlier job without them; run "
                f"`holdfast stop {location}` on this host"
            )
        replace_token(path, token)


def _read(path: str) -> str:
    return read_token(path) if os.path.lexists(path) else ""
