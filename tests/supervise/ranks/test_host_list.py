"""The hosts of a job are listed, and a host finds itself in the list."""

from __future__ import annotations

import socket

import pytest

from holdfast.errors import InvalidArgumentError
from holdfast.supervise.ranks.host_list import PORT, listening_address, own_place, parse_hosts


def test_a_host_has_the_usual_port_unless_it_names_one() -> None:
    expected = (("node1", PORT), ("10.0.0.2", 4711), ("fe80::1", PORT), ("::2", 4712))
    assert parse_hosts("node1, 10.0.0.2:4711,[fe80::1],[::2]:4712", {}) == expected


def test_a_list_may_be_that_of_a_step_of_slurm() -> None:
    variables = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "n[1-2]"}
    assert parse_hosts("auto", variables) == (("n1", PORT), ("n2", PORT))


@pytest.mark.parametrize("text", ["", "a,,b", "a:0", "a:x", "a:70000", ":4711"])
def test_what_is_no_host_is_named(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="expected HOST or HOST:PORT, found"):
        parse_hosts(text, {})


def test_a_host_that_is_listed_twice_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match="each host once, found a twice"):
        parse_hosts("a,b,a", {})


def test_without_a_list_auto_says_what_is_missing() -> None:
    with pytest.raises(InvalidArgumentError, match="SLURM_STEP_NODELIST is not set"):
        parse_hosts("auto", {})


def test_a_host_finds_itself_by_its_interface_first() -> None:
    addresses = (("127.0.0.1", 1), ("127.0.0.2", 1))
    assert own_place(addresses, {"HOLDFAST_INTERFACE": "127.0.0.2"}) == 1
    assert own_place(addresses, {"HOLDFAST_INTERFACE": "lo"}) == 0


def test_a_host_finds_itself_by_its_name() -> None:
    addresses = (("127.0.0.1", 1), ("node-b", 1))
    assert own_place(addresses, {"HOLDFAST_HOST": "node-b"}) == 1
    assert own_place((("198.51.100.1", 1), (socket.gethostname(), 1)), {}) == 1


def test_a_host_finds_itself_by_an_address() -> None:
    assert own_place((("198.51.100.1", 1), ("127.0.0.1", 1)), {}) == 1


def test_two_places_on_one_host_are_named() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"127\.0\.0\.1:1, 127\.0\.0\.1:2 are all this host"
    ):
        own_place((("127.0.0.1", 1), ("127.0.0.1", 2)), {})


def test_a_host_that_is_not_listed_is_named() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"none of 198\.51\.100\.1, 198\.51\.100\.2 is this host"
    ):
        own_place((("198.51.100.1", 1), ("198.51.100.2", 1)), {"HOLDFAST_HOST": "node-c"})


def test_a_name_that_is_loopback_here_is_no_address_for_others() -> None:
    assert listening_address("127.0.0.1", {}) == "127.0.0.1"
    assert listening_address("localhost", {"HOLDFAST_INTERFACE": "eth0"}) == "eth0"
    with pytest.raises(InvalidArgumentError, match=r"localhost is .* other hosts cannot reach"):
        listening_address("localhost", {})
