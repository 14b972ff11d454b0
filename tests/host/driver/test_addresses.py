"""Check the addresses of other hosts' agents: which are passed on, and which are accepted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import InvalidArgumentError
from holdfast.host.driver.peer_network import PeerNetwork
from holdfast.host.wire.control_block import INCARNATION
from holdfast.peers.address import PeerAddress, parse_address
from holdfast.peers.store import PeerStore
from holdfast.peers.wire import HOSTS_SIZE_MAX_BYTES, hosts_text, parse_hosts
from holdfast.trainer.opening.job_context import JobPeers
from tests.peers import reaching
from tests.trust.in_process import StepClock, in_process_host

OLD, NEW = PeerAddress("10.0.0.1", 4000, 1000), PeerAddress("10.0.0.1", 5000, 2000)


def test_an_address_tells_since_when() -> None:
    for address in (OLD, PeerAddress("::1", 4000, 7), PeerAddress("node-1", 80)):
        assert parse_address(str(address)) == address
    assert OLD.authority == "10.0.0.1:4000"


def test_hosts_are_told_on_and_those_that_started_last_first() -> None:
    few = {"host=a,b %": OLD, "host-b": PeerAddress("::1", 1, 3000)}
    assert parse_hosts(hosts_text(few)) == few
    assert parse_hosts(hosts_text({})) == {}
    many = {f"host-{i:04d}": PeerAddress("10.0.0.1", 4000, 10_000 + i) for i in range(1000)}
    text = hosts_text(many)
    assert len(text) <= HOSTS_SIZE_MAX_BYTES
    told = parse_hosts(text)
    assert len(told) > 50
    assert list(told) == [f"host-{999 - i:04d}" for i in range(len(told))]


@pytest.mark.parametrize("text", ["host-a", "host-a=", "host-a=10.0.0.1:4000,", "=x", "a=b:99999"])
def test_what_tells_of_no_addresses_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        parse_hosts(text)


@pytest.fixture
def network(tmp_path: Path) -> Iterator[PeerNetwork]:
    with in_process_host(tmp_path) as host:
        host.start_agent()
        yield host.agent.network


def test_what_others_say_of_a_host_counts_where_it_is_newer(network: PeerNetwork) -> None:
    known = network.peers.addresses
    network.update_addresses({"host-b": OLD})
    assert known() == {"host-b": OLD}
    network.update_addresses({"host-b": NEW})
    assert known() == {"host-b": NEW}
    # A trainer comes back with what was right when its job began.
    network.update_addresses({"host-b": OLD})
    assert known() == {"host-b": NEW}
    # A host's own report counts even if its clock was set back.
    network.reached("host-b", OLD)
    assert known() == {"host-b": OLD}
    network.update_addresses({"host-a": NEW})
    assert "host-a" not in known(), "this host is no peer of its own"


def test_a_later_agent_counts_as_later_also_where_the_clock_was_set_back(tmp_path: Path) -> None:
    clock = StepClock(secs=10_000.0)
    with in_process_host(tmp_path, clock=clock) as host:
        numbers = []
        for secs in (0.0, -9_000.0, 100.0):
            clock.secs += secs
            host.start_agent()
            numbers.append(host.agent.trainers.control.cells[INCARNATION])
            host.crash_agent()
    assert numbers == sorted(set(numbers))


def test_a_job_reads_from_where_its_hosts_are_reached_now() -> None:
    made: list[PeerStore] = []

    def store_at(address: PeerAddress) -> PeerStore:
        with reaching(address) as store:
            made.append(store)
        return store

    peers = JobPeers({"host-c": OLD, "host-b": OLD}, store_at)
    first = peers.ram_stores()
    assert not peers.update_addresses({"host-b": OLD, "host-of-another-job": NEW})
    assert peers.ram_stores() == first
    assert peers.update_addresses({"host-b": NEW, "host-c": PeerAddress("10.0.0.1", 3000, 500)})
    assert peers.ram_stores() == [first[0], made[-1]]
    assert made[-1].name == "peer 10.0.0.1:5000"
    peers.close()
