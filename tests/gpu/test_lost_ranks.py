"""Ranks are lost that compute on a GPU, and NCCL is aborted on the others.

All ranks share one GPU: NCCL takes them for hosts of their own, and sends by sockets.
`tests/supervise/ranks` has more cases, with gloo.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from tests.hosts import Host
from tests.supervise.ranks.rank_plan import Fault, Outcome, run_job

WIDTH = 512


def check_processes(outcome: Outcome, counts: dict[int, int]) -> None:
    """Check how many processes were each rank."""
    processes: dict[int, set[int]] = {}
    for line in outcome.of("resumed"):
        processes.setdefault(line["rank"], set()).add(line["pid"])
    assert {rank: len(pids) for rank, pids in processes.items()} == counts, outcome.notes


def recovery_secs(outcome: Outcome) -> list[float]:
    """How long it took from each fault until all ranks have taken part in a step."""
    found = []
    for fault in outcome.of("fault"):
        after = [line for line in outcome.of("step") if line["secs"] > fault["secs"]]
        again = {line["generation"] for line in after if line["pid"] != fault["pid"]}
        newest = min(again - {min(again)}, default=max(again))
        firsts = {
            line["rank"]: line["secs"] for line in reversed(after) if line["generation"] == newest
        }
        found.append(max(firsts.values()) - fault["secs"])
    return found


@pytest.mark.parametrize("kind", ["plain", "ddp", "hsdp"])
def test_lost_ranks_cost_no_other_process_and_no_bit(
    kind: str, one_host: Host, tmp_path: Path
) -> None:
    common = {"steps": 12, "kind": kind, "width": WIDTH, "is_on_gpu": True}
    undisturbed = run_job(one_host, directory=str(tmp_path / "a"), spares=0, **common)
    assert undisturbed.code == 0, undisturbed.notes
    disturbed = run_job(
        one_host,
        directory=str(tmp_path / "b"),
        faults=(Fault(1, 2, 4, "forward"), Fault(2, 0, 7, "optimizer")),
        **common,
    )
    assert disturbed.code == 0, disturbed.notes
    assert len(undisturbed.digests) == len(disturbed.digests) == 1
    if kind == "plain":
        assert disturbed.digests == undisturbed.digests
    check_processes(disturbed, {0: 2, 1: 1, 2: 2, 3: 1})
    assert {name for line in disturbed.of("resumed") for name in line["sources"] or ()} == {"ram"}
    print(f"recovered after {statistics.median(recovery_secs(disturbed)):.2f} s")


def torn(one_host: Host, tmp_path: Path, *, notes_aborts: bool) -> Outcome:
    """Lose a rank whose sum the others wait for, with their step and save queued behind it."""
    return run_job(
        one_host,
        directory=str(tmp_path / "run"),
        steps=9,
        width=WIDTH,
        interval=1,
        keep_last=True,
        is_on_gpu=True,
        notes_aborts=notes_aborts,
        faults=(Fault(1, 1, 5, "forward"),),
    )


def test_what_an_abort_has_torn_is_not_saved_as_a_step(one_host: Host, tmp_path: Path) -> None:
    undisturbed = run_job(
        one_host,
        directory=str(tmp_path / "a"),
        steps=9,
        width=WIDTH,
        interval=1,
        spares=0,
        is_on_gpu=True,
    )
    disturbed = torn(one_host, tmp_path, notes_aborts=True)
    assert disturbed.code == 0, disturbed.notes
    assert disturbed.digests == undisturbed.digests, disturbed.notes
    check_processes(disturbed, {0: 1, 1: 2, 2: 1, 3: 1})


def test_without_the_note_of_an_abort_it_would_be(one_host: Host, tmp_path: Path) -> None:
    """Shows that the test above can fail: the survivors take what was torn for step 5."""
    disturbed = torn(one_host, tmp_path, notes_aborts=False)
    assert "ranks hold step 5 unchanged" in disturbed.notes, disturbed.notes
