"""The placement of replicas, and the losses that they survive: pure functions.

A host whose trainers have the same bytes as the part's rank writes the replica by itself, and is
chosen first. For the other parts, the failure domains form a ring. A part is copied to the domains
that follow its holder's, and there to the host at the same index as the holder has in its own
domain. So all hosts send and receive about the same amount.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

Pulls = dict[str, list[tuple[int, str]]]
"""For each host, the (rank, source host) that it has to pull."""


class Ring:
    """The hosts that live, by failure domain.

    `domains` are the failure domains of all hosts. `takers` are the hosts that receive replicas,
    each with the ranks whose parts it copies from bytes of its own.
    """

    def __init__(self, domains: Mapping[str, str], takers: Mapping[str, Collection[int]]) -> None:
        by_domain: dict[str, list[str]] = {name: [] for name in domains.values()}
        for host in sorted(takers):
            by_domain[domains[host]].append(host)
        self._names = sorted(by_domain)
        self._by_domain = by_domain
        self._index = {name: i for i, name in enumerate(self._names)}
        self._place = {h: i for hosts in by_domain.values() for i, h in enumerate(hosts)}
        self._domains = domains
        self._offering: dict[int, list[str]] = {}
        for host in sorted(takers):
            for rank in takers[host]:
                self._offering.setdefault(rank, []).append(host)

    def domains_of(self, hosts: Sequence[str]) -> set[str]:
        """Return the failure domains of `hosts`."""
        return {self._domains[host] for host in hosts}

    def targets(self, rank: int, holders: Sequence[str], count: int) -> list[str]:
        """Return at most `count` hosts for a rank's part, in domains of none of `holders`.

        Hosts that write the replica themselves come first, then the next ones in the ring.
        """
        taken = self.domains_of(holders)
        first = holders[0]
        start = self._index[self._domains[first]]
        hosts_chosen: list[str] = []
        # Their bytes need no transfer, so these hosts come before the ring.
        for host in self._offering.get(rank, ()):
            if len(hosts_chosen) < count and self._domains[host] not in taken:
                taken.add(self._domains[host])
                hosts_chosen.append(host)
        # Start after the domain of the part's maker, so that each domain copies from the one before
        # it, and no domain receives the parts of all others.
        for offset in range(1, len(self._names)):
            if len(hosts_chosen) >= count:
                break
            name = self._names[(start + offset) % len(self._names)]
            hosts = self._by_domain[name]
            if hosts and name not in taken:
                hosts_chosen.append(hosts[self._place.get(first, 0) % len(hosts)])
        return hosts_chosen


def assign_pulls(
    holders: Mapping[int, Sequence[str]], ranks: Collection[int], copies: int, ring: Ring
) -> Pulls:
    """Return the pulls that bring the part of each of `ranks` to `copies` domains, if possible.

    Args:
        holders: for each rank, the hosts that have its part, the one that made it first.
        ranks: the ranks whose part is in too few domains.
        copies: the number of domains that should hold each part.
        ring: the hosts that live, the holders among them.
    """
    pulls: Pulls = {}
    for rank in sorted(ranks):
        sources = holders.get(rank, ())
        if not sources:
            continue
        domain_count = len(ring.domains_of(sources))
        for i, target in enumerate(ring.targets(rank, sources, copies - domain_count)):
            # Several targets pull from different holders, if there are several.
            pulls.setdefault(target, []).append((rank, sources[i % len(sources)]))
    return pulls


def failures_survived(domains_by_part: Iterable[Collection[str]]) -> int | None:
    """Return how many more failure domains a checkpoint can lose, in the worst case.

    Args:
        domains_by_part: for each part that is not durable, the domains that hold it.

    Returns:
        None if no loss of hosts can harm it; -1 if some part is held nowhere. The number is exact:
        with one more loss, the last copy of some part may be lost.
    """
    counts = [len(set(domains)) for domains in domains_by_part]
    return min(counts) - 1 if counts else None


def successors_of(leader: str, domains: Mapping[str, str], count: int) -> tuple[str, ...]:
    """Return the hosts that lead, in order: the leader, then hosts of the other domains in turn.

    A failure of the leader often affects its whole domain, so the next successor is in another one.

    Args:
        leader: the host of rank 0.
        domains: the domain of each host, in the order of the lowest rank on each host.
        count: the most hosts to return.
    """
    by_domain: dict[str, list[str]] = {}
    for host, domain in domains.items():
        if host != leader:
            by_domain.setdefault(domain, []).append(host)
    own = by_domain.pop(domains[leader], [])
    columns = list(by_domain.values())
    longest = max((len(column) for column in columns), default=0)
    # One host of each domain in turn; the leader's own domain last.
    rest = [column[i] for i in range(longest) for column in columns if i < len(column)]
    return (leader, *rest, *own)[:count]
