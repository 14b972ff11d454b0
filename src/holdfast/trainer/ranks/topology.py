"""Find the hosts of a job: one decision collects the place of every rank and returns all hosts.

Assumes that processes with the same host name are on one host, share its agent and fail together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from holdfast.adapt.contract import Processes
from holdfast.coordination.rank_runs import Runs, count_in, ranks_in, runs_of
from holdfast.environment import HOST_VARIABLE
from holdfast.errors import InvalidArgumentError
from holdfast.format.json_codec import decode
from holdfast.local_agent.place import host_name
from holdfast.trainer.options import OnSaveFailure, Options, check_name
from holdfast.trainer.ranks.rendezvous import Rendezvous, json_text

HOST_SIZE_MAX_BYTES = 150
"""A file's name has at most 255 bytes; those of events and logs have parts besides the host."""
MEET_SECS = 600.0
"""How long the ranks wait for each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHost:
    """One host of a job.

    Attributes:
        name: The host's name.
        domain: Its failure domain.
        peer_address: The address at which its agent serves other hosts; None if it does not.
        ranks: Its ranks, as runs of consecutive numbers.
    """

    name: str
    domain: str
    peer_address: str | None
    ranks: Runs


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHosts:
    """All hosts of a job, ordered by their lowest ranks; the first one is the leader's."""

    hosts: tuple[JobHost, ...]

    @property
    def leader(self) -> str:
        """The name of rank 0's host, whose agent leads."""
        return self.hosts[0].name

    @property
    def count(self) -> int:
        """The number of hosts."""
        return len(self.hosts)

    def count_ranks(self, host: str) -> int:
        """Return the number of ranks on that host."""
        return sum(count_in(job_host.ranks) for job_host in self.hosts if job_host.name == host)

    def host_of_each(self) -> tuple[str, ...]:
        """Return the name of each rank's host, in the order of ranks."""
        hosts = {rank: host.name for host in self.hosts for rank in ranks_in(host.ranks)}
        return tuple(hosts[rank] for rank in sorted(hosts))

    def domains(self) -> list[str]:
        """Return the failure domain of each rank, in the order of ranks."""
        domains = {rank: host.domain for host in self.hosts for rank in ranks_in(host.ranks)}
        return [domains[rank] for rank in sorted(domains)]


class RankPlace(msgspec.Struct, frozen=True, array_like=True):
    """The place of one rank, and the options that all ranks must have alike.

    `failure_domain` is the user's option; None if it is not set. `step_policies` and
    `on_save_failure` are as in `Options`.
    """

    host: str
    failure_domain: str | None
    slice_index: int | None
    peer_address: str | None
    step_policies: str = ""
    on_save_failure: OnSaveFailure = "raise"


class _HostAnswer(msgspec.Struct, frozen=True, array_like=True):
    """One host in the answer. `domain` is None if it equals the name, to keep the answer short."""

    name: str
    domain: str | None
    peer_address: str | None
    ranks: Runs


def place_of(processes: Processes, options: Options, peer_address: str | None) -> RankPlace:
    """Return the place of this rank, and its options.

    Raises:
        InvalidArgumentError: The host's name is invalid.
    """
    return RankPlace(
        host=checked_host(host_name()),
        failure_domain=options.network.failure_domain,
        slice_index=processes.slice_index,
        peer_address=peer_address,
        step_policies=options.step_policies,
        on_save_failure=options.on_save_failure,
    )


def checked_host(name: str) -> str:
    """Return the name of this host, if files can be named after it.

    Raises:
        InvalidArgumentError: it cannot.
    """
    check_name(HOST_VARIABLE, name)
    if "/" in name or len(name.encode()) > HOST_SIZE_MAX_BYTES:
        raise InvalidArgumentError(
            f"{HOST_VARIABLE}: expected a name of at most {HOST_SIZE_MAX_BYTES} bytes without a "
            f"slash, since the run's events and logs are in files that are named after hosts, "
            f"found {name!r}"
        )
    return name


def meet(rendezvous: Rendezvous, place: RankPlace) -> JobHosts:
    """Exchange the places of all ranks and return their hosts. Every rank must call it.

    Raises:
        InvalidArgumentError: Two ranks of one host contradict each other, or two ranks would save
            different steps, or take a failed save differently.
        ProcessLostError: As `Rendezvous.decide`.
    """
    answer = rendezvous.decide("meet the hosts", json_text(place), _judged, MEET_SECS)
    answers = decode(answer, tuple[_HostAnswer, ...])
    return JobHosts(
        hosts=tuple(
            JobHost(
                name=host.name,
                domain=host.domain or host.name,
                peer_address=host.peer_address,
                ranks=host.ranks,
            )
            for host in answers
        )
    )


def hosts_of(places: Sequence[RankPlace]) -> JobHosts:
    """Return the hosts of the ranks at `places`, which is in the order of ranks.

    Raises:
        InvalidArgumentError: Two ranks of one host contradict each other.
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
    """Return the user's option; else the slice, if the whole host is in one; else the host."""
    first = places[ranks[0]]
    for rank in ranks:
        domain = places[rank].failure_domain
        if domain != first.failure_domain:
            raise InvalidArgumentError(
                f"meet the hosts: rank {ranks[0]} has HostNetwork(failure_domain="
                f"{first.failure_domain!r}) and rank {rank} has {domain!r}, but both are on host "
                f"{host}, which fails as a whole; set the same for both, or a different "
                f"{HOST_VARIABLE} for each if they are on different hosts"
            )
    if first.failure_domain is not None:
        return first.failure_domain
    slices = {places[rank].slice_index for rank in ranks}
    number = slices.pop()
    return host if slices or number is None else f"slice-{number}"


def _peer_address(host: str, places: Sequence[RankPlace], ranks: list[int]) -> str | None:
    """Return the address that the host's ranks report; None if no rank knows it."""
    knowing = [rank for rank in ranks if places[rank].peer_address is not None]
    if not knowing:
        return None
    first = places[knowing[0]].peer_address
    for rank in knowing:
        if places[rank].peer_address != first:
            raise InvalidArgumentError(
                f"meet the hosts: rank {knowing[0]} has its agent at {first} and rank {rank} at "
                f"{places[rank].peer_address}, but both have the host name {host}; different hosts "
                f"need different names: set {HOST_VARIABLE}"
            )
    return first


def check_alike(places: Sequence[RankPlace]) -> None:
    """Check that all ranks save the same steps, which each of them decides by itself.

    A step that only some ranks save never becomes a checkpoint. A save that fails has failed on all
    ranks: if it raised on some of them, the others would wait for these in their next step.

    Raises:
        InvalidArgumentError: They do not, or a failed save would raise on some of them only.
    """
    first = places[0]
    for rank, place in enumerate(places):
        if place.step_policies != first.step_policies:
            raise InvalidArgumentError(
                "meet the hosts: expected the same policies in all processes, because each of them "
                f"decides by these at which steps it saves, found {first.step_policies} in rank 0 "
                f"and {place.step_policies} in rank {rank}"
            )
        if place.on_save_failure != first.on_save_failure:
            raise InvalidArgumentError(
                "meet the hosts: expected the same on_save_failure in all processes, because a "
                "failed save that raises ends some of them, for which the others would wait, found "
                f"{first.on_save_failure!r} in rank 0 and {place.on_save_failure!r} in rank {rank}"
            )


def _judged(values: list[str]) -> str:
    places = [decode(value, RankPlace) for value in values]
    check_alike(places)
    job = hosts_of(places)
    answers = [
        _HostAnswer(
            host.name,
            None if host.domain == host.name else host.domain,
            host.peer_address,
            host.ranks,
        )
        for host in job.hosts
    ]
    return msgspec.json.encode(answers).decode()
