"""What an error says of the ranks that a wait misses: their hosts, their steps, who is silent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from holdfast.host.wire.control_block import step_cell
from holdfast.observe.run_status import HeldCheckpoint, JobHostStatus
from holdfast.trainer.ranks.rank_reports import RankReports
from tests.attempts import checkpoint_id
from tests.observe.live.test_snapshot import JOB, host
from tests.test_launchers import SLURM, launch
from tests.trust.in_process import in_process_host

NAMES = ("a", "b", "c")


def reports(*hosts: JobHostStatus, names: Sequence[str] = NAMES) -> RankReports:
    job = msgspec.structs.replace(JOB, hosts=tuple(hosts))
    return RankReports(3, hosts=tuple(names), ask=lambda: job)


def at(name: str, rank: int, step: int | None, *parts: int) -> JobHostStatus:
    held = HeldCheckpoint(step=8, attempt=1, own=parts, copies=())
    return msgspec.structs.replace(host(name, rank), steps=(step,), holds=(held,))


def silent(name: str, rank: int, secs: float) -> JobHostStatus:
    return msgspec.structs.replace(host(name, rank, "not reached"), silent_secs=secs)


def test_missing_ranks_are_described_beside_the_others() -> None:
    known = reports(at("a", 0, 120), silent("b", 1, 41.2), at("c", 2, None))
    assert known.named([1]) == "rank 1 (on b)"
    assert known.named([1, 2]) == "ranks 1-2 (on b, c)"
    assert known.described([1]) == (
        "missing: rank 1 (b: its agent does not answer (not reached), nothing heard for 41 s); "
        "the others: rank 0 (a: at step 120), rank 2 (c: before its first step)"
    )


def test_a_rank_whose_process_is_gone_from_a_host_that_answers_is_said_to_be() -> None:
    left = msgspec.structs.replace(host("b", 1), ranks=())
    text = reports(at("a", 0, 120), left).described([1, 2])
    assert "rank 1 (b: its process has left the run, or has not joined it)" in text
    assert "rank 2 (c)" in text


def test_of_many_ranks_a_few_are_described() -> None:
    many = RankReports(1000, hosts=tuple(f"h{n}" for n in range(1000)), ask=lambda: JOB)
    assert len(many.named(range(1, 999, 2))) < 200
    assert "and 494 more; the others" in many.described(range(1, 999, 2))


def test_before_the_ranks_have_met_a_launcher_knows_their_hosts() -> None:
    assert RankReports(2, launch(SLURM)).named([1]) == "rank 1 (on node09)"
    assert RankReports(2).named([1]) == "rank 1"
    assert RankReports(2).described([1]) == ""


def test_a_save_that_is_not_whole_names_the_ranks_whose_parts_are_missing() -> None:
    known = reports(at("a", 0, 9, 0), silent("b", 1, 41.2), at("c", 2, 7))
    text = known.parts_text(checkpoint_id(8))
    assert "these parts of step 8 in RAM: rank 1 (b: its agent does not answer" in text
    assert "rank 2 (c: at step 7)" in text
    assert "rank 0" not in text
    # It may be committed already, or the run may have no RAM tier.
    assert known.parts_text(checkpoint_id(9)) == ""
    whole = reports(at("a", 0, 9, 0, 1), at("c", 2, 7, 2))
    assert whole.parts_text(checkpoint_id(8)) == "all parts of step 8 are in RAM"


def test_an_agent_reports_the_step_of_each_of_its_ranks(tmp_path: Path) -> None:
    with in_process_host(tmp_path) as on:
        on.start_agent()
        trainer = on.attach(count=2)
        assert on.service is not None
        assert on.service.own_status().steps == (None, None)
        seats = {m.rank: m.seat for m in on.agent.trainers.present}
        on.agent.trainers.control.cells[step_cell(seats[1])] = 41
        assert on.service.own_status().ranks == (0, 1)
        assert on.service.own_status().steps == (None, 41)
        assert trainer.count == 2
