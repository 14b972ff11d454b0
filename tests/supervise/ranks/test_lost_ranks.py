"""Ranks are lost, and the others go on in the same processes: real processes with gloo.

A job takes 5 s of a processor. `test_membership` and `test_launcher` have most cases cheaper.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.observe.reports.goodput import report_run
from holdfast.trainer.opening.run_access import events_of, read_only
from tests.hosts import Host, host
from tests.supervise.ranks.rank_plan import Fault, Outcome, run_job

pytestmark = pytest.mark.timeout(900)  # several jobs, on machines that may be busy


@pytest.fixture
def one_host() -> Iterator[Host]:
    with host() as made:
        yield made


def processes_of(outcome: Outcome) -> dict[int, set[int]]:
    """Return the processes that were each rank."""
    processes: dict[int, set[int]] = {}
    for line in outcome.of("resumed"):
        processes.setdefault(line["rank"], set()).add(line["pid"])
    return processes


def test_lost_ranks_cost_no_other_process_and_no_bit(one_host: Host, tmp_path: Path) -> None:
    undisturbed = run_job(one_host, directory=str(tmp_path / "a"), steps=14, spares=0)
    assert undisturbed.code == 0, undisturbed.notes
    disturbed = run_job(
        one_host,
        directory=str(tmp_path / "b"),
        steps=14,
        faults=(
            Fault(1, 2, 4, "forward"),
            Fault(2, 0, 5, "backward"),
            Fault(3, 1, 8, "optimizer"),
            Fault(3, 3, 8, "save"),
            Fault(4, 2, -1, "restore"),
            Fault(5, 3, 11, "save"),
        ),
    )
    assert disturbed.code == 0, disturbed.notes
    assert len(undisturbed.digests) == 1
    assert disturbed.digests == undisturbed.digests
    counts = {rank: len(pids) for rank, pids in processes_of(disturbed).items()}
    # Each fault replaces one process, and no other.
    assert counts == {0: 2, 1: 2, 2: 3, 3: 3}
    resumed = disturbed.of("resumed")
    # Nobody has resumed in the fourth generation.
    assert {line["generation"] for line in resumed} == {1, 2, 3, 5, 6}
    # Nothing is read from storage.
    assert {name for line in resumed for name in line["sources"] or ()} == {"ram"}
    assert {tuple(line["lost"]) for line in resumed if line["generation"] == 5} == {(2,)}


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp"])
def test_wrapped_models_are_formed_anew(kind: str, one_host: Host, tmp_path: Path) -> None:
    outcome = run_job(
        one_host,
        directory=str(tmp_path / "run"),
        steps=9,
        kind=kind,
        faults=(Fault(1, 1, 5, "forward"),),
    )
    assert outcome.code == 0, outcome.notes
    assert len(outcome.digests) == 1
    again = [line for line in outcome.of("resumed") if line["generation"] == 2]
    assert [line["rank"] for line in sorted(again, key=lambda line: line["rank"])] == [0, 1, 2, 3]
    assert len({line["step"] for line in again}) == 1


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.soak), "hsdp"])
def test_survivors_save_the_step_that_they_hold(kind: str, one_host: Host, tmp_path: Path) -> None:
    outcome = run_job(
        one_host,
        directory=str(tmp_path / "run"),
        steps=9,
        kind=kind,
        interval=100,
        keep_last=True,
        faults=(Fault(1, 1, 5, "forward"),),
    )
    assert outcome.code == 0, outcome.notes
    assert "3 ranks hold step 4 unchanged" in outcome.notes
    # The second generation has saved it; the third repeats no step.
    again = [line for line in outcome.of("resumed") if line["generation"] == 3]
    assert {(line["step"], *line["sources"]) for line in again} == {(5, "ram")}
    steps = [line["step"] for line in outcome.of("step") if line["rank"] == 0]
    assert steps == [*range(9)]
    (failure,) = report_run("run", events_of(read_only(tmp_path / "run")).read()).failures
    assert (failure.cause, failure.steps_lost, failure.source) == ("lost", 0, "ram")


@pytest.mark.soak
def test_a_stopped_survivor_is_ended_and_lost_too(one_host: Host, tmp_path: Path) -> None:
    outcome = run_job(
        one_host,
        directory=str(tmp_path / "run"),
        steps=9,
        leave_secs=15.0,
        faults=(Fault(1, 1, 5, "forward", "stop"), Fault(1, 3, 5, "forward")),
    )
    assert outcome.code == 0, outcome.notes
    assert "did not leave its generation" in outcome.notes
    again = [line for line in outcome.of("resumed") if line["generation"] == 2]
    assert {tuple(line["lost"]) for line in again} == {(1, 3)}
    assert len(outcome.digests) == 1


@pytest.mark.soak
def test_an_exception_of_the_program_ends_its_process_and_a_spare_repeats_the_step(
    one_host: Host, tmp_path: Path
) -> None:
    outcome = run_job(
        one_host,
        directory=str(tmp_path / "run"),
        steps=9,
        faults=(Fault(1, 1, 5, "forward", "raise"),),
    )
    assert outcome.code == 0, outcome.notes
    assert "ValueError: bad batch 5" in outcome.notes
    assert len(outcome.digests) == 1


@pytest.mark.soak
def test_fewer_ranks_go_on(one_host: Host, tmp_path: Path) -> None:
    outcome = run_job(
        one_host,
        directory=str(tmp_path / "run"),
        steps=9,
        kind="fsdp",
        spares=0,
        ranks_min=2,
        faults=(Fault(1, 0, 5, "forward"),),
    )
    assert outcome.code == 0, outcome.notes
    again = [line for line in outcome.of("resumed") if line["generation"] == 2]
    assert [
        (line["rank"], line["size"], line["lost"])
        for line in sorted(again, key=lambda line: line["rank"])
    ] == [(rank, 3, [0]) for rank in range(3)]
