"""The status of a run's checkpoints: where they are held, and the losses that they survive."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.coordination.messages import CheckpointStatus, Held, TargetKind
from holdfast.coordination.rank_runs import runs_of
from holdfast.coordination.survivability import (
    KNOWN_MAX,
    HostSeen,
    Known,
    Lead,
    Outlook,
    check_lead,
    outlook,
    standings,
)
from tests.attempts import attempt_id, checkpoint_id
from tests.coordination.jobs import survives
from tests.coordination.test_cases import make, reached, running, until

DOMAINS = {"a": "rack-1", "b": "rack-1", "c": "rack-2"}


def known(step: int, *durable: int, is_committed: bool = False) -> Known:
    return Known(
        id=checkpoint_id(step),
        part_count=2,
        durable=runs_of(durable),
        is_committed=is_committed,
    )


def lead(*checkpoints: Known, committed: int | None = None) -> Lead:
    return Lead(
        attempt=attempt_id(1),
        term=0,
        rank_count=2,
        hosts=(),
        known=checkpoints,
        newest_committed=checkpoint_id(committed) if committed is not None else None,
    )


def held(step: int, *ranks: int, part_count: int = 2) -> Held:
    return Held(checkpoint_id(step), part_count, False, runs_of(ranks), (), ())


def found(lead: Lead, **holds: list[Held]) -> list[tuple[int, bool, bool, int, int | None]]:
    whole = standings(lead, holds, DOMAINS)
    return [(s.step, s.in_ram, s.durable, s.domains, s.survives) for s in whole]


def test_a_part_counts_once_for_each_failure_domain_that_holds_it() -> None:
    both = {"a": [held(5, 0, 1)], "b": [held(5, 0, 1)]}
    assert found(lead(known(5)), **both) == [(5, True, False, 1, 0)]
    assert found(lead(known(5)), **both, c=[held(5, 0, 1)]) == [(5, True, False, 2, 1)]
    # The part in the fewest domains determines the result.
    assert found(lead(known(5)), **both, c=[held(5, 1)]) == [(5, True, False, 1, 0)]


def test_what_no_answering_host_holds_is_not_whole() -> None:
    assert found(lead(known(5)), a=[held(5, 0)]) == []
    assert found(lead(known(5)), a=[held(5, 0, 1, part_count=3)]) == []


def test_durable_parts_are_at_no_risk_and_the_others_are() -> None:
    assert found(lead(known(5, 1)), a=[held(5, 0)]) == [(5, False, False, 0, 0)]
    assert found(lead(known(5, 0, 1)), a=[]) == [(5, False, False, 0, None)]
    whole = lead(known(5, 0, 1, is_committed=True), committed=5)
    assert found(whole, a=[held(5, 0, 1)]) == [(5, True, True, 1, None)]


def test_what_is_committed_counts_though_nobody_holds_it() -> None:
    assert found(lead(known(9), committed=5), a=[held(9, 0, 1)]) == [
        (9, True, False, 1, 0),
        (5, False, True, 0, None),
    ]


def test_what_the_leader_does_not_count_is_not_gone_on_from() -> None:
    assert found(lead(), a=[held(5, 0, 1)]) == []


def test_the_more_is_lost_the_older_is_what_the_run_goes_on_from() -> None:
    table = lead(known(9), known(7), known(5), committed=3)
    everywhere = [held(7, 0, 1), held(5, 0, 1)]
    holds = {"a": [held(9, 0, 1), *everywhere], "b": [], "c": everywhere}
    assert outlook(standings(table, holds, DOMAINS)) == (
        Outlook(lost_domains_max=0, step=9, attempt=1),
        # The one of step 5 survives no more losses than this one, and is older.
        Outlook(lost_domains_max=1, step=7, attempt=1),
        Outlook(lost_domains_max=None, step=3, attempt=1),
    )
    assert outlook([]) == ()


@pytest.mark.parametrize(("copies", "domain_size"), [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_a_copy_survives_as_many_losses_as_it_has_domains_beside_its_own(
    copies: int, domain_size: int
) -> None:
    world = make(4, copies=copies, domain_size=domain_size, ranks_a_host=2)
    job = running(world)
    assert survives(world, job.leader) is None
    world.wish(job.leader, TargetKind.RAM)
    until(world, lambda: reached(world, CheckpointStatus.PROTECTED))
    (checkpoint,) = {c for t in job.trainers for c in t.begun}
    assert survives(world, job.leader) == (checkpoint, copies - 1)
    job.kill()
    until(world, lambda: bool(world.storage.manifests))
    assert survives(world, job.leader) == (checkpoint, None)


def test_a_lost_host_is_not_counted_on_before_its_leader_knows() -> None:
    world = make(4, copies=2)
    job = running(world)
    world.wish(job.leader, TargetKind.RAM)
    until(world, lambda: reached(world, CheckpointStatus.PROTECTED))
    (checkpoint,) = {c for t in job.trainers for c in t.begun}
    assert survives(world, job.leader) == (checkpoint, 1)
    world.hosts["h0002"].crash()
    assert survives(world, job.leader) == (checkpoint, 0)


def test_more_than_any_leader_tells_is_refused() -> None:
    check_lead(lead(*(known(step) for step in range(KNOWN_MAX))))
    bad = [
        lead(*(known(step) for step in range(KNOWN_MAX + 1))),
        lead(msgspec.structs.replace(known(1), durable=((0, 3),))),
        msgspec.structs.replace(
            lead(), hosts=(HostSeen(host="a", domain="a", ranks=((0, 9),), silent_secs=None),)
        ),
    ]
    for one in bad:
        with pytest.raises(ValueError, match=r"at most|no ranks"):
            check_lead(one)
