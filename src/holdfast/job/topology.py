"""The hosts of a job: every rank tells its own, and each learns of all of them by one decision.

Two processes with one host name are on one host, share its agent, and fail together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from holdfast.adapt.contract import Processes
from holdfast.agent.agent_directory import HOST_VARIABLE, host_name
from holdfast.coordination.rank_runs import Runs, count_in, ranks_in, runs_of
from holdfast.errors import InvalidArgumentError
from holdfast.format.json_codec import decode
from holdfast.job.options import RamTier, check_name
from holdfast.job.rendezvous import Rendezvous, json_text

MEET_SECS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHost:
    """One host, and its ranks in runs.

    `peer_address` is where its agent serves its peers, None where it does not.
    """

    name: str
    domain: str
    peer_address: str | None
    ranks: Runs


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHosts:
    """All hosts of a job, in the order of their lowest ranks; the first one is the leader's."""

    hosts: tuple[JobHost, ...]

    @property
    def leader(self) -> str:
        """The name of rank 0's host, whose agent leads."""
        return self.hosts[0].name

    @property
    def count(self) -> int:
        """How many hosts there are."""
        return len(self.hosts)

    def count_ranks(self, host: str) -> int:
        """How many ranks are on that host."""
        return sum(count_in(one.ranks) for one in self.hosts if one.name == host)

    def domains(self) -> list[str]:
        """The failure domain of each rank."""
        found = {rank: host.domain for host in self.hosts for rank in ranks_in(host.ranks)}
        return [found[rank] for rank in sorted(found)]


class RankPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where one rank is. `failure_domain` is what the user says, None where that is nothing."""

    host: str
    failure_domain: str | None
    slice_index: int | None
    peer_address: str | None


class _Told(msgspec.Struct, frozen=True, array_like=True):
    """One host, as the answer tells of it; a domain that is the host is not repeated."""

    name: str
    domain: str | None
    peer_address: str | None
    ranks: Runs


def place_of(processes: Processes, ram: RamTier | None, peer_address: str | None) -> RankPlace:
    """Where this rank is.

    Raises:
        InvalidArgumentError: the host's name cannot be one.
    """
    return RankPlace(
        host=check_name(HOST_VARIABLE, host_name()),
        failure_domain=ram.failure_domain if ram is not None else None,
        slice_index=processes.slice_index,
        peer_address=peer_address,
    )


def meet(rendezvous: Rendezvous, place: RankPlace) -> JobHosts:
    """The hosts of all ranks; every rank has to call it, with its own place.

    Raises:
        InvalidArgumentError: two ranks of one host contradict each other.
        ProcessLostError: as `Rendezvous.decide`.
    """
    answer = rendezvous.decide("meet the hosts", json_text(place), _judged, MEET_SECS)
    told = decode(answer, tuple[_Told, ...])
    return JobHosts(
        hosts=tuple(
            JobHost(
                name=one.name,
                domain=one.domain or one.name,
                peer_address=one.peer_address,
                ranks=one.ranks,
            )
            for one in told
        )
    )


def hosts_of(places: Sequence[RankPlace]) -> JobHosts:
    """The hosts of ranks that are in these places; `places` is in the order of ranks.

    Raises:
        InvalidArgumentError: two ranks of one host contradict each other.
    """
    by_host: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        by_host.setdefault(place.host, []).append(rank)
    return JobHosts(
        hosts=tuple(
            JobHost(
                name=name,
                domain=_domain(name, places, ranks),
                peer_address=_peer_address(name, places, ranks),
                ranks=runs_of(ranks),
            )
            for name, ranks in by_host.items()
        )
    )


def _domain(host: str, places: Sequence[RankPlace], ranks: list[int]) -> str:
    """What the user says; else the slice, where all of the host is in one; else the host."""
    first = places[ranks[0]]
    for rank in ranks:
        found = places[rank].failure_domain
        if found != first.failure_domain:
            raise InvalidArgumentError(
                f"meet the hosts: rank {ranks[0]} says RamTier(failure_domain="
                f"{first.failure_domain!r}) and rank {rank} says {found!r}, and both are on host "
                f"{host}, which fails as a whole; give both the same, or a {HOST_VARIABLE} each "
                "where they are on different hosts"
            )
    if first.failure_domain is not None:
        return first.failure_domain
    slices = {places[rank].slice_index for rank in ranks}
    number = slices.pop()
    return host if slices or number is None else f"slice-{number}"


def _peer_address(host: str, places: Sequence[RankPlace], ranks: list[int]) -> str | None:
    """The one that is told; a rank may not know of it."""
    told = [rank for rank in ranks if places[rank].peer_address is not None]
    if not told:
        return None
    first = places[told[0]].peer_address
    for rank in told:
        if places[rank].peer_address != first:
            raise InvalidArgumentError(
                f"meet the hosts: rank {told[0]} has its agent at {first} and rank {rank} at "
                f"{places[rank].peer_address}, and both call their host {host}; different hosts "
                f"need different names, so set {HOST_VARIABLE}"
            )
    return first


def _judged(values: list[str]) -> str:
    found = hosts_of([decode(value, RankPlace) for value in values])
    told = [
        _Told(
            one.name,
            None if one.domain == one.name else one.domain,
            one.peer_address,
            one.ranks,
        )
        for one in found.hosts
    ]
    return msgspec.json.encode(told).decode()
