"""Where a run's checkpoints are held now, and how many lost hosts each would survive.

The leader knows which checkpoints are on the timeline and which of their parts are durable. Parts
in RAM are counted only on hosts that answer now, so a lost host is not counted even while its
leader still waits for it. Pure functions, and the messages between hosts that they need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from holdfast.coordination.leader.replica_placement import failures_survived
from holdfast.coordination.messages import Count, Held, Name, Number, check_runs
from holdfast.coordination.rank_runs import Runs, ranks_in, runs_of
from holdfast.format.names import AttemptId, CheckpointId

if TYPE_CHECKING:
    # A trainer reads the state of its run, and has no leader.
    from holdfast.coordination.leader.leader import Leader

KNOWN_MAX = 64
"""The most checkpoints that a leader includes, the newest; there are rarely more."""


class HostSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One host, as its leader knows it; `silent_secs` since its last report, None before any."""

    host: Name
    domain: Name
    ranks: Runs
    silent_secs: float | None


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint on the timeline that some host holds or held; `durable` are ranks."""

    id: CheckpointId
    part_count: Count
    durable: Runs
    is_committed: bool


class Lead(msgspec.Struct, frozen=True, kw_only=True):
    """What a leader knows of hosts and checkpoints; `newest_committed` is on the timeline."""

    attempt: AttemptId
    term: Number
    rank_count: Count
    hosts: tuple[HostSeen, ...]
    known: tuple[Known, ...]
    newest_committed: CheckpointId | None


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Where one whole checkpoint is held.

    Attributes:
        attempt: the number of its attempt.
        in_ram: each of its parts is in the RAM of a host that answers.
        durable: it is committed.
        domains: the number of failure domains that hold each part in RAM; the minimum of all parts.
        survives: how many failure domains may still be lost; None: any number, it is durable.
    """

    step: int
    attempt: int
    in_ram: bool
    durable: bool
    domains: int
    survives: int | None


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """The run continues from this checkpoint if at most `lost_domains_max` more are lost.

    None: however many. Newer checkpoints, which survive fewer losses, are preferred.
    """

    lost_domains_max: int | None
    step: int
    attempt: int


def survey(leader: Leader, now_secs: float) -> Lead:
    """Return what a leader knows, for other hosts' status queries."""
    table = leader.table
    seen = []
    for view in leader.census.views.values():
        last_at_secs = view.last_report_at_secs
        seen.append(
            HostSeen(
                host=view.host,
                domain=table.domains.get(view.host, view.host),
                ranks=runs_of(view.known_ranks),
                silent_secs=max(0.0, now_secs - last_at_secs) if last_at_secs else None,
            )
        )
    # Dropped checkpoints and abandoned branches are no restart points.
    counting = [e for e in table if not e.dropped and table.on_timeline(e.id)]
    return Lead(
        attempt=leader.leadership.attempt,
        term=leader.term,
        rank_count=leader.leadership.rank_count,
        hosts=tuple(seen),
        known=tuple(
            Known(
                id=entry.id,
                part_count=entry.part_count,
                durable=runs_of(entry.durable),
                is_committed=entry.is_committed,
            )
            for entry in counting[-KNOWN_MAX:]
        ),
        newest_committed=table.newest_committed,
    )


def check_lead(lead: Lead) -> None:
    """Check what the types do not: the number of checkpoints, and that runs are valid.

    Raises:
        ValueError: there are too many checkpoints, or runs name impossible ranks.
    """
    if len(lead.known) > KNOWN_MAX:
        raise ValueError(f"{len(lead.known)} checkpoints, expected at most {KNOWN_MAX}")
    for checkpoint in lead.known:
        check_runs(checkpoint.durable, checkpoint.part_count)
    for seen in lead.hosts:
        check_runs(seen.ranks, lead.rank_count)


def standings(
    lead: Lead, held: Mapping[str, Sequence[Held]], domains: Mapping[str, str]
) -> list[Standing]:
    """Return the checkpoints that are whole now, the newest first.

    Args:
        lead: what the leader knows.
        held: the checkpoints that each host that answers holds.
        domains: the failure domain of each of these hosts.
    """
    rows = []
    for checkpoint in lead.known:
        parts = _domains_by_part(checkpoint, held, domains)
        durable = set(ranks_in(checkpoint.durable))
        is_durable = checkpoint.is_committed or len(durable) == checkpoint.part_count
        # Durable parts survive any loss of hosts, so only the others limit the number.
        at_risk = [] if is_durable else [p for rank, p in enumerate(parts) if rank not in durable]
        survives = failures_survived(at_risk)
        if survives is None or survives >= 0:
            least = min((len(part) for part in parts), default=0)
            rows.append(
                Standing(
                    step=checkpoint.id.step,
                    attempt=checkpoint.id.attempt.number,
                    in_ram=least > 0,
                    durable=checkpoint.is_committed,
                    domains=least,
                    survives=survives,
                )
            )
    newest = lead.newest_committed
    if newest is not None and newest not in {checkpoint.id for checkpoint in lead.known}:
        rows.append(
            Standing(
                step=newest.step,
                attempt=newest.attempt.number,
                in_ram=False,
                durable=True,
                domains=0,
                survives=None,
            )
        )
    return sorted(rows, key=lambda row: (row.attempt, row.step), reverse=True)


def outlook(whole: Sequence[Standing]) -> tuple[Outlook, ...]:
    """Return the checkpoint that a run continues from, for each number of lost domains.

    `whole` and the result are ordered from the newest to the oldest checkpoint.
    """
    outlooks: list[Outlook] = []
    for standing in whole:
        last = outlooks[-1].lost_domains_max if outlooks else -1
        if last is None:
            break
        if standing.survives is None or standing.survives > last:
            outlooks.append(
                Outlook(
                    lost_domains_max=standing.survives, step=standing.step, attempt=standing.attempt
                )
            )
    return tuple(outlooks)


def _domains_by_part(
    known: Known, held: Mapping[str, Sequence[Held]], domains: Mapping[str, str]
) -> list[set[str]]:
    """Return, for each part, the failure domains that hold it in RAM."""
    parts: list[set[str]] = [set() for _ in range(known.part_count)]
    for host, checkpoints in held.items():
        for checkpoint in checkpoints:
            # Parts of another plan of the same step do not count.
            if checkpoint.id == known.id and checkpoint.part_count == known.part_count:
                for rank in (*ranks_in(checkpoint.own), *ranks_in(checkpoint.replicas)):
                    parts[rank].add(domains[host])
    return parts
