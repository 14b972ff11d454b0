"""Launchers agree on the one that decides, as `leadership` promises, whatever the network does."""

from __future__ import annotations

import itertools
import os
import random

import pytest

from holdfast.supervise.ranks.leadership import Leadership, Vote
from holdfast.supervise.ranks.membership import Settings

SCHEDULES = int(os.environ.get("HOLDFAST_SCHEDULES", "300"))


class Network:
    """Launchers that hear each other or do not, one message after the other, in order."""

    def __init__(self, hosts: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.settings = Settings(ranks=hosts, spares=0, ranks_min=1, leave_secs=1.0, hosts=hosts)
        self.launchers = [Leadership(host) for host in range(hosts)]
        self.joined: list[set[int]] = [{host} for host in range(hosts)]
        self.links: set[frozenset[int]] = set()
        self.pending: dict[tuple[int, int], list[Vote | None]] = {}

    def has_quorum(self, host: int) -> bool:
        leads = self.launchers[host].follows == host
        return leads and self.settings.is_quorum(self.joined[host])

    def vote(self, host: int) -> Vote:
        return Vote(follows=self.launchers[host].follows, has_quorum=self.has_quorum(host))

    def send_vote(self, host: int) -> None:
        for other in range(len(self.launchers)):
            if frozenset((host, other)) in self.links:
                self.pending.setdefault((host, other), []).append(self.vote(host))

    def connect(self, link: frozenset[int]) -> None:
        self.links.add(link)
        for host, other in itertools.permutations(link):
            self.pending[host, other] = [self.vote(host)]

    def cut(self, link: frozenset[int]) -> None:
        """Cut a connection: each end notices it, at a time of its own."""
        self.links.discard(link)
        for host, other in itertools.permutations(link):
            self.pending[host, other] = [None]

    def deliver(self) -> None:
        """Let one message arrive."""
        waiting = sorted(ends for ends, messages in self.pending.items() if messages)
        if not waiting:
            return
        host, other = self.random.choice(waiting)
        vote = self.pending[host, other].pop(0)
        launcher, before = self.launchers[other], self.vote(other)
        self.joined[other].discard(host)
        if vote is None:
            launcher.lost(host)
        else:
            launcher.heard(host, vote)
            if vote.follows == other:
                self.joined[other].add(host)
        launcher.choose(has_quorum=self.has_quorum(other))
        if self.vote(other) != before:
            self.send_vote(other)

    def settle(self) -> None:
        for _ in range(100_000):
            if not any(self.pending.values()):
                return
            self.deliver()
        pytest.fail("the launchers do not agree")

    def change(self) -> None:
        hosts = range(len(self.launchers))
        link = frozenset(self.random.sample(hosts, 2))
        if link in self.links:
            self.cut(link)
        else:
            self.connect(link)

    def check_votes(self) -> None:
        """Check that at most one host is followed by a quorum."""
        followers = [
            {i for i, each in enumerate(self.launchers) if each.follows == host}
            for host in range(len(self.launchers))
        ]
        assert sum(self.settings.is_quorum(each) for each in followers) <= 1


@pytest.mark.parametrize("hosts", [2, 3, 4, 5, 7])
def test_launchers_that_hear_each_other_agree(hosts: int) -> None:
    for seed in range(SCHEDULES // 10):
        net = Network(hosts, seed)
        for _ in range(60):
            net.change()
            for _ in range(net.random.randrange(12)):
                net.deliver()
                net.check_votes()
        for link in itertools.combinations(range(hosts), 2):
            if frozenset(link) not in net.links:
                net.connect(frozenset(link))
        net.settle()
        assert len({launcher.follows for launcher in net.launchers}) == 1, f"seed {seed}"
        assert net.has_quorum(net.launchers[0].follows)


@pytest.mark.parametrize("hosts", [2, 3, 4, 5])
def test_only_the_side_with_a_quorum_has_a_leader_of_one(hosts: int) -> None:
    for seed in range(SCHEDULES // 10):
        net = Network(hosts, seed)
        for link in itertools.combinations(range(hosts), 2):
            net.connect(frozenset(link))
        net.settle()
        side = {host for host in range(hosts) if net.random.random() < 0.5}
        for link in itertools.product(side, set(range(hosts)) - side):
            net.cut(frozenset(link))
        net.settle()
        other = set(range(hosts)) - side
        (strong,) = [part for part in (side, other) if net.settings.is_quorum(part)]
        assert [host for host in range(hosts) if net.has_quorum(host)] == [
            net.launchers[min(strong)].follows
        ]
        assert {net.launchers[host].follows for host in strong} <= strong


def test_a_leader_stays_when_a_host_before_it_comes_back() -> None:
    net = Network(3, 1)
    net.connect(frozenset((1, 2)))
    net.settle()
    assert net.has_quorum(1)
    net.connect(frozenset((0, 1)))
    net.connect(frozenset((0, 2)))
    net.settle()
    assert [launcher.follows for launcher in net.launchers] == [1, 1, 1]
