"""The pure functions of coordination, and the messages on the wire."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.coordination.effects import GivenUp
from holdfast.coordination.follower.election import leader_of, term_above
from holdfast.coordination.inputs import DurableListed, Listed
from holdfast.coordination.leader.checkpoint_table import CheckpointTable, Recycling
from holdfast.coordination.leader.replica_placement import (
    Ring,
    assign_pulls,
    failures_survived,
    successors_of,
)
from holdfast.coordination.leadership import limits_after
from holdfast.coordination.messages import (
    CheckpointStatus,
    Command,
    Held,
    HostState,
    Orders,
    Report,
    WriteOrder,
    decode_message,
    encode_message,
)
from holdfast.coordination.rank_runs import count_in, ranks_in, runs_of
from holdfast.coordination.settings import PAUSED_POLL_SECS_MAX, step_poll_secs
from holdfast.coordination.start.restart_point import (
    UNKNOWN_REASON,
    choose_checkpoint,
    given_up,
    listed_though_deleted,
)
from holdfast.errors import InvalidArgumentError
from holdfast.format.names import AttemptId, CheckpointId
from tests.attempts import attempt_id, checkpoint_id


@given(st.sets(st.integers(0, 300)))
def test_runs_are_their_ranks_and_do_not_touch(ranks: set[int]) -> None:
    runs = runs_of(ranks)
    assert ranks_in(runs) == sorted(ranks)
    assert count_in(runs) == len(ranks)
    for (first, count), (election, _) in itertools.pairwise(runs):
        assert first + count < election


def world_of(domain_count: int, size: int) -> dict[str, str]:
    return {f"h{d}.{i}": f"d{d}" for d in range(domain_count) for i in range(size)}


def no_offers(hosts: Iterable[str]) -> dict[str, set[int]]:
    return {host: set() for host in hosts}


@pytest.mark.parametrize("domain_count", [2, 3, 7])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("copies", [2, 3])
def test_pulls_bring_every_part_into_enough_domains_and_are_balanced(
    domain_count: int, size: int, copies: int
) -> None:
    domains = world_of(domain_count, size)
    holders = {rank: [host] for rank, host in enumerate(domains)}
    pulls = assign_pulls(holders, holders, copies, Ring(domains, no_offers(domains)))
    standing = {rank: {domains[hosts[0]]} for rank, hosts in holders.items()}
    for target, parts in pulls.items():
        for rank, source in parts:
            assert source in holders[rank]
            assert domains[target] not in standing[rank], "a second copy in one domain"
            standing[rank].add(domains[target])
    assert {len(found) for found in standing.values()} == {min(copies, domain_count)}
    assert {len(parts) for parts in pulls.values()} == {min(copies, domain_count) - 1}


def test_pulls_leave_out_hosts_that_are_gone_and_what_stands_already() -> None:
    domains = world_of(4, 1)
    del domains["h1.0"]
    holders = {0: ["h0.0"], 2: ["h2.0", "h3.0"]}
    pulls = assign_pulls(holders, holders, 2, Ring(domains, no_offers(domains)))
    assert pulls == {"h2.0": [(0, "h0.0")]}


def test_a_host_without_ranks_gives_copies_and_takes_none() -> None:
    domains = world_of(3, 1)
    pulls = assign_pulls({0: ["h0.0"]}, [0], 2, Ring(domains, no_offers(["h2.0"])))
    assert pulls == {"h2.0": [(0, "h0.0")]}


def test_a_host_that_makes_the_copy_itself_is_asked_before_the_next_in_the_ring() -> None:
    domains = world_of(4, 1)
    ring = Ring(domains, no_offers(domains) | {"h3.0": {0, 1}})
    assert ring.targets(0, ["h0.0"], 1) == ["h3.0"]
    assert ring.targets(0, ["h0.0"], 2) == ["h3.0", "h1.0"]
    assert ring.targets(2, ["h2.0"], 1) == ["h3.0"], "nobody makes it: the next one"
    assert ring.targets(2, ["h3.0"], 1) == ["h0.0"]


def test_an_offer_within_a_domain_that_has_the_part_is_passed_over() -> None:
    domains = {"a": "x", "b": "x", "c": "y"}
    ring = Ring(domains, {"a": (), "b": {0}, "c": ()})
    assert ring.targets(0, ["a"], 1) == ["c"]


@given(st.lists(st.sets(st.integers(0, 4)), min_size=1, max_size=5))
def test_failures_survived_is_exact(parts: list[set[int]]) -> None:
    survived = failures_survived([{str(d) for d in domains} for domains in parts])
    assert survived is not None

    def is_whole_after(lost: tuple[int, ...]) -> bool:
        return all(domains - set(lost) for domains in parts)

    for count in range(6):
        always = all(is_whole_after(lost) for lost in itertools.combinations(range(5), count))
        assert always == (count <= survived) or count > 5


def test_durable_parts_survive_every_loss() -> None:
    assert failures_survived([]) is None


def test_what_is_due_keeps_its_ram_on_a_host_that_was_silent_for_a_while() -> None:
    table = CheckpointTable(attempt_id(1), {})
    table.required, table.recycling, table.preserved = 1, Recycling.ALL, frozenset()
    table.domains["a"] = "a"
    older, newer = (
        Held(checkpoint_id(step), 1, is_due=True, own=((0, 1),), replicas=(), written=())
        for step in (10, 20)
    )
    held = {older.id: older, newer.id: newer}
    table.apply_report("a", {}, held)
    table.settle()
    table.apply_report("a", held, {})
    table.settle()
    table.apply_report("a", {}, held)
    table.settle()
    assert table.floor == newer.id
    assert not table.verdict(older.id).may_release
    assert table.pending()[0].id == older.id
    # Once that is reported, the RAM may be released.
    table.mark_failed(table.entries[older.id], "its host was silent for too long", 0.0)
    assert table.verdict(older.id).may_release


def test_the_second_successor_stands_in_another_domain() -> None:
    domains = {"a": "x", "b": "x", "c": "y", "d": "y", "e": "z"}
    assert successors_of("a", domains, 16) == ("a", "c", "e", "d", "b")
    assert successors_of("a", domains, 2) == ("a", "c")


@given(st.integers(0, 50), st.integers(0, 3))
def test_a_term_above_is_higher_and_its_hosts_own(term: int, index: int) -> None:
    successors = ("a", "b", "c", "d")
    above = term_above(successors, successors[index], term)
    assert term < above <= term + len(successors)
    assert leader_of(successors, above) == successors[index]


def state(*held: tuple[int, int, int, set[int]]) -> HostState:
    """(step, attempt, part count, ranks)."""
    return HostState(
        group="",
        domain="d",
        held=tuple(
            Held(checkpoint_id(step, attempt), count, False, runs_of(ranks), (), ())
            for step, attempt, count, ranks in held
        ),
    )


def listing(limits: dict[AttemptId, int], **more: object) -> DurableListed:
    fields: dict[str, object] = {"committed": frozenset(), "parts": {}, **more}
    return DurableListed(newest_attempt=max(limits), leader="a", limits=limits, **fields)  # type: ignore[arg-type]


def test_the_newest_whole_checkpoint_of_ram_peers_and_the_durable_tier_is_chosen() -> None:
    whole = checkpoint_id(30)
    durable = listing(
        {attempt_id(1): 10**15}, parts={whole: Listed(part_count=3, ranks=frozenset({2}))}
    )
    states = [state((30, 1, 3, {0}), (40, 1, 3, {0})), state((30, 1, 3, {1}), (40, 1, 3, {1}))]
    assert choose_checkpoint(states, durable) == whole
    assert choose_checkpoint(states[:1], durable) is None


def test_parts_of_two_part_counts_are_never_put_together() -> None:
    states = [state((30, 1, 2, {0})), state((30, 1, 3, {1, 2}))]
    assert choose_checkpoint(states, listing({attempt_id(1): 10**15})) is None


def test_what_lies_off_the_timeline_is_not_chosen() -> None:
    states = [state((70, 1, 1, {0}), (50, 1, 1, {0}))]
    limits = limits_after({attempt_id(1): 10**15}, attempt_id(2), checkpoint_id(50), 10**15)
    assert limits == {attempt_id(1): 50, attempt_id(2): 10**15}
    assert choose_checkpoint(states, listing(limits)) == checkpoint_id(50)


LOST = AttemptId(2, "10570000")
"""An attempt 2 that storage lost when it was put back; the run was trained on as another one."""


def held_by_a(*ids: CheckpointId, status: CheckpointStatus = CheckpointStatus.OPEN) -> HostState:
    """Return the state of a host whose RAM has these checkpoints of one part."""
    held = (Held(one, 1, False, ((0, 1),), (), (), status=status) for one in ids)
    return HostState(group="", domain="d", held=tuple(held))


def test_no_checkpoint_of_an_attempt_that_storage_lost_is_chosen_or_completed() -> None:
    limits = limits_after({attempt_id(1): 10**15}, attempt_id(2), checkpoint_id(50), 10**15)
    newest = checkpoint_id(60, 2)
    in_ram = held_by_a(CheckpointId(60, LOST), CheckpointId(90, LOST), CheckpointId(40, LOST))
    assert choose_checkpoint([in_ram], listing(limits, committed=frozenset({newest}))) == newest
    # The same step of both attempts: each has one half.
    halves = {
        CheckpointId(70, LOST): Listed(part_count=2, ranks=frozenset({0})),
        checkpoint_id(60, 2): Listed(part_count=2, ranks=frozenset({1})),
        checkpoint_id(70, 2): Listed(part_count=2, ranks=frozenset({1})),
    }
    committed = frozenset({checkpoint_id(50)})
    durable = listing(limits, committed=committed, parts=halves)
    assert choose_checkpoint([in_ram], durable) == checkpoint_id(50)


def test_a_checkpoint_that_is_reported_as_deleted_counts_once_it_is_listed_again() -> None:
    older, newest = checkpoint_id(40), checkpoint_id(50)
    limits = {attempt_id(1): 10**15}
    durable = listing(limits, committed=frozenset({older, newest}))
    reported = [HostState(group="", domain="d", deleted=(newest,))]
    assert choose_checkpoint(reported, durable) == older
    put_back = listed_though_deleted(reported, durable)
    assert choose_checkpoint(reported, durable, put_back) == newest
    # A delete in the remote tier comes last, and may not have come yet.
    remote = listing(limits, committed=frozenset({older, newest}), remote_only=frozenset({newest}))
    assert not listed_though_deleted(reported, remote)


@pytest.mark.parametrize("newest", [1, 2, 3])
def test_the_newest_complete_checkpoint_of_an_attempt_that_storage_lost_is_given_up(
    newest: int,
) -> None:
    # Storage was put back to attempt 1, and trained on by none or by two attempts since.
    limits = {attempt_id(number): 10 * number for number in range(1, newest + 1)}
    origin = checkpoint_id(10 * newest, newest)
    durable = listing(limits, committed=frozenset({origin}))
    complete = held_by_a(CheckpointId(80, LOST), status=CheckpointStatus.PROTECTED)
    whole = held_by_a(CheckpointId(70, LOST), CheckpointId(90, LOST))
    part = state((95, 2, 2, {0}))
    assert given_up([whole, complete], durable, origin, ()) == (
        GivenUp(CheckpointId(90, LOST), CheckpointStatus.COMPLETE, UNKNOWN_REASON),
    )
    (lost,) = given_up([complete, part], durable, origin, ())
    assert (lost.id, lost.status) == (CheckpointId(80, LOST), CheckpointStatus.PROTECTED)
    # What is no newer than the origin is no loss.
    assert given_up([whole, complete], durable, checkpoint_id(90, newest), ()) == ()
    deleted = msgspec.structs.replace(whole, deleted=(CheckpointId(90, LOST),))
    assert [one.id.step for one in given_up([deleted], durable, origin, ())] == [70]


def test_a_checkpoint_of_an_abandoned_attempt_is_not_given_up() -> None:
    # Attempt 3 went back to attempt 1, so attempt 2 is off the timeline; storage has its record.
    limits = limits_after({attempt_id(1): 10**15}, attempt_id(3), checkpoint_id(50), 10**15)
    in_ram = state((90, 2, 1, {0}), (80, 1, 1, {0}))
    assert given_up([in_ram], listing(limits), checkpoint_id(50), ()) == ()


def a_report(**changes: object) -> Report:
    report = Report(
        run="run",
        attempt=attempt_id(3),
        incarnation=1,
        seq=1,
        version=1,
        term=0,
        leader_incarnation=1,
        ack=0,
        published=5,
        is_hello=False,
        state=state((30, 1, 3, {0})),
    )
    return msgspec.structs.replace(report, **changes)


def test_messages_come_back_from_the_wire_as_they_were() -> None:
    report = a_report()
    assert decode_message(encode_message(report)) == report


def test_a_report_of_an_agent_that_does_not_know_what_saves_cost_is_read() -> None:
    data = msgspec.json.decode(encode_message(a_report(save_cost_secs=0.5)))
    assert data.pop("save_cost_secs") == 0.5
    assert decode_message(msgspec.json.encode(data)) == a_report()


BAD = {
    "no JSON": b"{",
    "another message": b'{"message":"Hello"}',
    "a step below zero": encode_message(a_report(state=state((-3, 1, 1, {0})))),
    "attempt zero": encode_message(a_report(state=state((3, 0, 1, {0})))),
    "a rank above the count": encode_message(a_report(state=state((3, 1, 2, {5})))),
    "a billion ranks": encode_message(
        Orders(
            run="run",
            attempt=attempt_id(3),
            group="g",
            term=0,
            incarnation=1,
            seq=1,
            version=1,
            ack=0,
            follower_incarnation=1,
            origin=None,
            rank_count=1,
            successors=("a",),
            command=Command(writes=(WriteOrder(checkpoint_id(1), ((0, 10**9),), 0),)),
        )
    ),
    "too long": b" " * (4 * 1024 * 1024 + 1),
    "a cost below zero": encode_message(a_report(save_cost_secs=-1.0)),
    "nested too deep": b'{"message":' + b"[" * 100_000,
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="read an agent's message"):
        decode_message(data)


def test_spoilt_messages_are_refused_or_are_messages() -> None:
    rng = random.Random(4)
    data = encode_message(a_report())
    refused = 0
    for _ in range(2000):
        spoilt = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            spoilt[rng.randrange(len(spoilt))] = rng.randrange(256)
        try:
            decode_message(bytes(spoilt))
        except InvalidArgumentError:
            refused += 1
    assert refused > 1000


def test_a_share_that_failed_after_a_leader_before_had_begun_it_anew_counts_as_failed() -> None:
    table = CheckpointTable(attempt_id(2), {})
    table.required, table.recycling, table.preserved = 1, Recycling.ALL, frozenset()
    table.domains["a"] = table.domains["b"] = "d"
    step = checkpoint_id(10)
    parts = {
        host: Held(step, 2, is_due=True, own=((rank, 1),), replicas=(), written=(), **failed)
        for rank, (host, failed) in enumerate(
            {
                "a": {"failure": "no answer"},
                "b": {"failure": "the disk is full", "round": 3},
            }.items()
        )
    }
    for host, held in parts.items():
        table.apply_report(host, {}, {step: held})
    table.settle()
    # The first one is tried again, as the second one was.
    assert table.entries[step].round == 3
    assert table.entries[step].failures == {"b": "the disk is full"}


@pytest.mark.parametrize("is_timeline_first", [False, True])
def test_ram_is_released_for_newer_checkpoints_as_ranks_and_timeline_become_known(
    is_timeline_first: bool,
) -> None:
    table = CheckpointTable(attempt_id(1), {})
    table.preserved, table.domains["a"] = frozenset(), "a"
    parts = {
        c: Held(c, 1, is_due=False, own=((0, 1),), replicas=(), written=())
        for c in map(checkpoint_id, (10, 20, 30))
    }
    table.apply_report("a", {}, parts)

    def released() -> list[int]:
        return [c.step for c in parts if table.verdict(c).may_release]

    assert released() == []
    if is_timeline_first:
        table.complete_timeline({})
        assert released() == []
        table.set_required(1, highest_step=15)
    else:
        table.set_required(1, highest_step=15)
        assert released() == [20]
        table.complete_timeline({})
    assert table.recycling is Recycling.ALL
    assert released() == [10, 20]


def test_a_successor_releases_committed_checkpoints_only_whatever_it_learns() -> None:
    table = CheckpointTable(attempt_id(1), {}, Recycling.COMMITTED)
    table.preserved, table.domains["a"] = frozenset(), "a"
    parts = {
        c: Held(c, 1, is_due=False, own=((0, 1),), replicas=(), written=())
        for c in map(checkpoint_id, (10, 20, 30))
    }
    table.apply_report("a", {}, parts)
    table.set_required(1, highest_step=15)
    table.complete_timeline({})
    table.list_durable([checkpoint_id(20), checkpoint_id(30)], {})
    assert [c.step for c in parts if table.verdict(c).may_release] == [20]


def test_an_idle_trainer_costs_a_reading_a_second_and_its_next_step_is_seen_soon() -> None:
    pauses = [0.0, 0.1, 1.0, 4.0, 16.0, 60.0, 3600.0]
    polls = [step_poll_secs(0.02, paused_secs) for paused_secs in pauses]
    assert polls == sorted(polls)
    assert (polls[0], polls[-1]) == (0.02, PAUSED_POLL_SECS_MAX)
    assert PAUSED_POLL_SECS_MAX >= 1.0
    assert all(poll <= max(0.02, paused / 30) for poll, paused in zip(polls, pauses, strict=True))
