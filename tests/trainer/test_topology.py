"""Each rank learns of all hosts of its job; what two ranks of one host contradict is told."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from holdfast import errors
from holdfast.adapt.contract import OwnProcess
from holdfast.coordination.rank_runs import runs_of
from holdfast.policy.preservation_policy import LatestN
from holdfast.policy.save_decision_policy import (
    AnySavePolicy,
    ContinuousCheckpointingPolicy,
    FixedIntervalPolicy,
    SpecificStepsPolicy,
)
from holdfast.trainer.options import HostNetwork, Options, RamTier
from holdfast.trainer.ranks.rendezvous import Rendezvous, json_text
from holdfast.trainer.ranks.topology import (
    JobHost,
    JobHosts,
    RankPlace,
    check_alike,
    hosts_of,
    meet,
    place_of,
)
from tests.hosts import host
from tests.ports import free_address
from tests.trainer.ranks import BriskClock, MemoryWords, RankOf, rank_of, ranks, together
from tests.trainer.test_restore_votes import line_of

MEETING = Path(__file__).with_name("meeting.py")
DEFAULT: dict[str, Any] = {"failure_domain": None, "slice_index": None, "peer_address": None}
DEFAULT |= {"step_policies": "", "on_save_failure": "raise"}


def place(name: str, **told: Any) -> RankPlace:
    return RankPlace(name, *(DEFAULT | told).values())


def found(*hosts: tuple[str, str, str | None, list[int]]) -> JobHosts:
    return JobHosts(
        hosts=tuple(
            JobHost(name=name, domain=domain, peer_address=peer, ranks=runs_of(ranks))
            for name, domain, peer, ranks in hosts
        )
    )


def test_hosts_come_in_the_order_of_their_lowest_ranks_and_rank_0_s_leads() -> None:
    places = [place("b"), place("a"), place("b"), place("c"), place("a")]
    hosts = hosts_of(places)
    assert hosts == found(("b", "b", None, [0, 2]), ("a", "a", None, [1, 4]), ("c", "c", None, [3]))
    assert (hosts.leader, hosts.count) == ("b", 3)


def test_each_rank_s_domain_is_its_host_s() -> None:
    places = [place("b"), place("a", failure_domain="rack"), place("b"), place("c")]
    assert hosts_of(places).domains() == ["b", "rack", "b", "c"]


@pytest.mark.parametrize(
    ("places", "domains"),
    [
        ([place("a"), place("b")], ["a", "b"]),
        ([place("a", slice_index=0), place("b", slice_index=3)], ["slice-0", "slice-3"]),
        ([place("a", slice_index=0), place("a", slice_index=0)], ["slice-0"]),
        # Parts of a host that are slices of their own still fail together.
        ([place("a", slice_index=0), place("a", slice_index=1)], ["a"]),
        ([place("a", slice_index=0), place("a")], ["a"]),
        # What the user says counts before the slice.
        ([place("a", failure_domain="rack", slice_index=0), place("b")], ["rack", "b"]),
        ([place("a", failure_domain="rack"), place("b", failure_domain="rack")], ["rack", "rack"]),
    ],
)
def test_a_host_s_domain_is_what_the_user_says_else_its_slice_else_itself(
    places: list[RankPlace], domains: list[str]
) -> None:
    assert [one.domain for one in hosts_of(places).hosts] == domains


def options(**told: Any) -> Options:
    default = {"save": FixedIntervalPolicy(3), "preservation": LatestN(1), "takeover": False}
    return Options(**({**default, "ram": RamTier()} | told))


class Own:
    """A policy of the user's own."""

    def __repr__(self) -> str:
        return "Own()"  # in a test's name, which is the same in all processes of pytest

    def should_save(self, step: int, previous: Any, *, context: Any) -> bool:
        return False


@pytest.mark.parametrize(
    "other",
    [
        {"save": FixedIntervalPolicy(4)},
        {"save": ContinuousCheckpointingPolicy()},
        {"save": Own()},
        {"save": SpecificStepsPolicy(range(100))},
        {"ram": None},
        {"ram": RamTier(save_decision_policy=FixedIntervalPolicy(1))},
        {"ram": RamTier(copies=1)},
    ],
    ids=str,
)
def test_ranks_that_would_save_different_steps_are_refused(other: dict[str, Any]) -> None:
    texts = [options().step_policies, options().step_policies, options(**other).step_policies]
    check_alike([place("a", step_policies=text) for text in texts[:2]])
    with pytest.raises(errors.InvalidArgumentError) as told:
        check_alike([place("a", step_policies=text) for text in texts])
    assert f"found {texts[0]} in rank 0 and {texts[2]} in rank 2" in str(told.value)


def test_ranks_that_take_a_failed_save_differently_are_refused() -> None:
    places = [place("a", on_save_failure=mode) for mode in ("warn", "warn", "raise")]
    check_alike(places[:2])
    with pytest.raises(errors.InvalidArgumentError) as refused:
        check_alike(places)
    assert "same on_save_failure" in str(refused.value)
    assert "found 'warn' in rank 0 and 'raise' in rank 2" in str(refused.value)


def test_what_only_rank_0_or_the_agent_decides_may_differ_between_ranks() -> None:
    steps = tuple(range(0, 1000, 3))
    same = [
        (
            AnySavePolicy([FixedIntervalPolicy(3), SpecificStepsPolicy(steps)]),
            AnySavePolicy([SpecificStepsPolicy(steps), FixedIntervalPolicy(3), Own()]),
        ),
        (Own(), ContinuousCheckpointingPolicy(minimum_interval_secs=3.0)),
    ]
    for one, other in same:
        assert options(save=one).step_policies == options(save=other).step_policies
    different = AnySavePolicy([FixedIntervalPolicy(3), SpecificStepsPolicy(steps[:-1])])
    assert options(save=different).step_policies != options(save=same[0][0]).step_policies


@pytest.mark.parametrize("other", ["rack-2", None])
def test_two_domains_of_one_host_are_told_with_both_ranks(other: str | None) -> None:
    places = [place("b"), place("a", failure_domain="rack-1"), place("a", failure_domain=other)]
    with pytest.raises(errors.InvalidArgumentError) as told:
        hosts_of(places)
    assert f"rank 1 has HostNetwork(failure_domain='rack-1') and rank 2 has {other!r}" in str(
        told.value
    )
    assert "on host a" in str(told.value)


def test_a_host_s_peer_address_is_the_one_that_any_of_its_ranks_knows() -> None:
    places = [place("a"), place("a", peer_address="10.0.0.1:7"), place("b")]
    assert hosts_of(places) == found(("a", "a", "10.0.0.1:7", [0, 1]), ("b", "b", None, [2]))


def test_two_hosts_of_one_name_are_told_by_their_agents_addresses() -> None:
    places = [place("a", peer_address="10.0.0.1:7"), place("a", peer_address="10.0.0.2:7")]
    with pytest.raises(errors.InvalidArgumentError, match=r"10.0.0.1:7.*10.0.0.2:7.*HOLDFAST_HOST"):
        hosts_of(places)


def test_every_rank_learns_the_same() -> None:
    places = [
        place("b", failure_domain="räck", peer_address="10.0.0.2:7"),
        place("a", peer_address="10.0.0.1:7"),
        place("a"),
    ]
    job = ranks(MemoryWords(), 3)
    told = together([lambda one=one: meet(one, places[one.rank]) for one in job])
    assert told == [hosts_of(places)] * 3
    assert told[0] == found(("b", "räck", "10.0.0.2:7", [0]), ("a", "a", "10.0.0.1:7", [1, 2]))


def test_a_process_alone_is_its_own_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOST", "here")
    alone = Rendezvous(OwnProcess(), BriskClock())
    for domain, name in (("rack", "rack"), (None, "here")):
        where = place_of(OwnProcess(), options(network=HostNetwork(failure_domain=domain)), None)
        assert meet(alone, where) == found(("here", name, None, [0]))


def test_a_rank_s_slice_is_told_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOST", "here")
    where = place_of(RankOf(1, 4, MemoryWords(), slice_index=2), options(), "10.0.0.1:7")
    policies = options().step_policies
    assert where == place("here", slice_index=2, peer_address="10.0.0.1:7", step_policies=policies)


NO_NAMES = ["", "x" * 256, "a\nb", "a\x00", "\x7f", "\x85", "\udcff", 3, ["a"]]


@pytest.mark.parametrize("name", NO_NAMES, ids=ascii)
def test_a_failure_domain_is_a_name(name: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=r"HostNetwork\(failure_domain="):
        HostNetwork(failure_domain=name)


@pytest.mark.parametrize("name", ["rack 7/ß", "x" * 255])
def test_a_name_may_be_long_and_of_any_language(name: str) -> None:
    assert HostNetwork(failure_domain=name).failure_domain == name


@pytest.mark.parametrize("name", ["a\nb", "rack/7", "x" * 250], ids=["line", "slash", "long"])
def test_a_host_s_name_is_checked_too(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("HOLDFAST_HOST", name)
    with pytest.raises(errors.InvalidArgumentError, match="HOLDFAST_HOST"):
        place_of(OwnProcess(), options(), None)


def test_a_thousand_hosts_of_four_ranks_are_told_in_little() -> None:
    words = MemoryWords()
    first = rank_of(words, 0, 4096)
    places = [
        place(f"host-{rank // 4:04d}", peer_address=f"10.0.{rank // 4}:7") for rank in range(4096)
    ]
    for rank in range(1, 4096):
        said = {"name": "meet the hosts", "value": json_text(places[rank])}
        words.words[f"holdfast/0/values/{rank}"] = json.dumps(said)
    assert meet(first, places[0]) == hosts_of(places)
    assert hosts_of(places).count == 1024
    assert len(words.words["holdfast/0/answer"]) < 50_000


def job_of(key: str, *told: tuple[str, str, str]) -> list[dict[str, Any]]:
    """What the processes of a job say with `key`; each has (host, domain, peer address)."""
    address = free_address()
    with contextlib.ExitStack() as ends:
        made = {name: ends.enter_context(host(name)) for name, _, _ in told}
        job = [
            made[name].start(MEETING, address, len(told), rank, domain, peer, stem="jax")
            for rank, (name, domain, peer) in enumerate(told)
        ]
        return [line_of(process, key) for process in job]


def test_processes_of_two_hosts_meet_through_jax() -> None:
    said = job_of("leader", ("b", "rack", "10.0.0.2:7"), ("a", "", "10.0.0.1:7"), ("b", "rack", ""))
    expected = found(("b", "rack", "10.0.0.2:7", [0, 2]), ("a", "a", "10.0.0.1:7", [1]))
    expected_said = json.loads(json.dumps({"leader": "b"} | asdict(expected)))
    assert said == [expected_said] * 3


@pytest.mark.soak
def test_processes_of_one_host_that_name_two_domains_are_told_through_jax() -> None:
    said = job_of("error", ("a", "rack-1", ""), ("a", "rack-2", ""))
    assert [each["error"] for each in said] == ["InvalidArgumentError"] * 2
    assert all("='rack-1') and rank 1 has 'rack-2'" in each["message"] for each in said)
