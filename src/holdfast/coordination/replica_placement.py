"""Who copies which part from whom, and how many losses that survives: pure functions.

A host whose trainers hold the same bytes as the part's rank makes the copy by itself: it comes
first. For what is left, hosts stand in a ring by failure domain. A part is copied to the domains
that come next after those in which it stands, and there to the host at the same place as the
holder's in its own domain, so that every host gives and takes about as much as any other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

Pulls = dict[str, list[tuple[int, str]]]
"""Host to the (rank, source host) that it is to pull."""


class Ring:
    """The hosts that live, by failure domain.

    Of them `takers` take copies; each comes with the ranks of whose parts it makes them itself.
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
        """The failure domains that these hosts are in."""
        return {self._domains[host] for host in hosts}

    def targets(self, rank: int, holders: Sequence[str], count: int) -> list[str]:
        """At most `count` hosts for a rank's part, in domains that none of `holders` is in.

        Those come first that make it themselves, then the next ones in the ring.
        """
        taken = self.domains_of(holders)
        first = holders[0]
        start = self._index[self._domains[first]]
        found: list[str] = []
        for host in self._offering.get(rank, ()):
            if len(found) < count and self._domains[host] not in taken:
                taken.add(self._domains[host])
                found.append(host)
        for offset in range(1, len(self._names)):
            if len(found) >= count:
                break
            name = self._names[(start + offset) % len(self._names)]
            hosts = self._by_domain[name]
            if hosts and name not in taken:
                found.append(hosts[self._place.get(first, 0) % len(hosts)])
        return found


def assign_pulls(
    holders: Mapping[int, Sequence[str]], ranks: Collection[int], copies: int, ring: Ring
) -> Pulls:
    """What each host has to pull so that each of `ranks` stands in `copies` domains, if it can.

    Args:
        holders: for each rank the hosts that have its part, the one that made it first.
        ranks: those that stand in too few domains.
        copies: in how many domains each part is to stand.
        ring: the hosts that live, the holders among them.
    """
    pulls: Pulls = {}
    for rank in sorted(ranks):
        sources = holders.get(rank, ())
        if not sources:
            continue
        domain_count = len(ring.domains_of(sources))
        for i, target in enumerate(ring.targets(rank, sources, copies - domain_count)):
            pulls.setdefault(target, []).append((rank, sources[i % len(sources)]))
    return pulls


def failures_survived(domains_by_part: Iterable[Collection[str]]) -> int | None:
    """How many more failure domains a checkpoint can lose, whichever they are.

    Args:
        domains_by_part: for each part that is not durable, the domains in which it stands.

    Returns:
        None where no loss of hosts can harm it, -1 where a part stands nowhere. Exactly that many
        are survived: one more, chosen badly, takes the last copy of some part.
    """
    counts = [len(set(domains)) for domains in domains_by_part]
    return min(counts) - 1 if counts else None


def successors_of(leader: str, domains: Mapping[str, str], count: int) -> tuple[str, ...]:
    """Who leads where the leader is silent: the leader, then hosts of other domains in turn.

    What takes a leader away often takes its whole domain, so the next one stands in another.

    Args:
        leader: the host of rank 0.
        domains: host to domain, in the order of the lowest rank on each host.
        count: at most so many.
    """
    by_domain: dict[str, list[str]] = {}
    for host, domain in domains.items():
        if host != leader:
            by_domain.setdefault(domain, []).append(host)
    own = by_domain.pop(domains[leader], [])
    columns = list(by_domain.values())
    longest = max((len(column) for column in columns), default=0)
    rest = [column[i] for i in range(longest) for column in columns if i < len(column)]
    return (leader, *rest, *own)[:count]
