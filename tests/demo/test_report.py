import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from holdfast.demo.failures import DemoFailureKind
from holdfast.demo.journal import Finished, Record, Step
from holdfast.demo.report import (
    compare,
    intervals_secs,
    make_report,
    percentile,
    read_commits,
    read_ram_troubles,
)
from holdfast.demo.table import describe_sources, print_report, verdict
from holdfast.observe.events.schema import CheckpointCommitted, CheckpointSealed, RamUnavailable
from tests.demo.made_up import (
    STEPS,
    finished,
    interrupted_run,
    run_that_loses_a_host,
    uninterrupted_run,
    uninterrupted_run_of_two_hosts,
)
from tests.observe.events.written import at, written


def test_each_failure_is_charged_what_it_cost() -> None:
    report = make_report(0, interrupted_run(), uninterrupted_run(), [])
    kill, terminate, agent = report.failures

    assert kill.kind is DemoFailureKind.KILL
    assert (kill.last_step, kill.next_step, kill.steps_lost) == (11, 8, 4)
    assert kill.recovery_secs == 4.0
    assert kill.restore_secs == 0.25
    assert kill.sources == {"ram": 1_000_000}

    assert (terminate.last_step, terminate.next_step, terminate.steps_lost) == (20, 21, 0)
    assert terminate.sources == {"ram": 1_000_000, "durable": 2_000_000}

    assert (agent.last_step, agent.next_step, agent.steps_lost) == (24, 25, 0)
    assert agent.recovery_secs == 0.75
    assert agent.sources is None


def test_steps_done_twice_count_twice_as_training_time() -> None:
    report = make_report(0, interrupted_run(), uninterrupted_run(), [])
    assert report.steps == STEPS
    assert report.save_calls_secs == pytest.approx(0.01 * (STEPS + 4))
    assert report.training_secs == pytest.approx(0.51 * (STEPS + 4))
    assert report.first_loss == 5.0


def test_intervals_are_taken_within_an_attempt() -> None:
    commits = [(1, 10.0), (1, 11.0), (2, 50.0), (1, 13.0), (2, 51.5)]
    assert intervals_secs(commits) == [1.0, 2.0, 1.5]


def test_percentiles_interpolate() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([0.0, 10.0], 95) == pytest.approx(9.5)
    assert percentile([], 50) is None


def test_commits_of_recoveries_are_left_out(tmp_path: Path) -> None:
    written(tmp_path, CheckpointCommitted(time=at(10), step=9, attempt=2))
    written(tmp_path, CheckpointCommitted(time=at(2), step=5, attempt=1, by="recovery"))
    written(tmp_path, CheckpointCommitted(time=at(5), step=4, attempt=1), host="b")
    written(tmp_path, CheckpointSealed(time=at(4), step=4, attempt=1, tier="ram"), host="b")
    assert read_commits(str(tmp_path)) == [(1, at(5).timestamp()), (2, at(10).timestamp())]


def test_each_reason_why_ram_was_not_used_is_read_once(tmp_path: Path) -> None:
    for host, reason in (("a", "full"), ("b", "full"), ("a", "gone")):
        written(tmp_path, RamUnavailable(reason=reason), host=host)
    assert read_ram_troubles(str(tmp_path)) == ["full", "gone"]


ByHost = list[list[Record]]


def _records(change: Callable[[Record], Record] = lambda record: record) -> ByHost:
    starts = interrupted_run().starts
    return [[change(record) for start in starts for record in start.by_host[0]]]


def _whole() -> ByHost:
    return [list(uninterrupted_run().starts[0].by_host[0])]


def _change_step(field: str, time: float) -> Callable[[Record], Record]:
    def change(record: Record) -> Record:
        if isinstance(record, Step) and record.time == time:
            return msgspec.structs.replace(record, **{field: "0x0.0p+0"})
        return record

    return change


def _change_end(field: str) -> Callable[[Record], Record]:
    def change(record: Record) -> Record:
        return finished(0.0, **{field: "x"}) if isinstance(record, Finished) else record

    return change


def test_equal_runs_are_identical() -> None:
    same = compare(_records(), _whole())
    assert same.holds
    assert (same.equal_losses, same.steps) == (STEPS, STEPS)
    assert verdict(same) == (
        "bit-identical: parameters yes, optimizer state yes, RNG yes, order of batches yes, "
        "losses yes"
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_change_end("params"), "parameters NO"),
        (_change_end("opt_state"), "optimizer state NO"),
        (_change_end("rng"), "RNG NO"),
        (_change_end("batches"), "order of batches NO"),
        # Step 10 was done twice: at 1014, which was lost, and at 1026.
        (_change_step("batch", 1014), "order of batches NO"),
        (_change_step("batch", 1026), "order of batches NO"),
        (_change_step("loss", 1014), "losses NO"),
        (_change_step("loss", 1026), "losses NO"),
    ],
)
def test_any_difference_is_found_and_told(change: Callable[[Record], Record], told: str) -> None:
    found = compare(_records(change), _whole())
    assert not found.holds
    assert verdict(found).count("NO") == 1
    assert told in verdict(found)


def test_a_missing_step_is_a_difference() -> None:
    whole = _whole()
    without = [[r for r in whole[0] if not (isinstance(r, Step) and r.step == 29)]]
    for found in (compare(without, whole), compare(whole, without)):
        assert not found.holds
        assert (found.equal_losses, found.steps) == (STEPS - 1, STEPS)


def test_a_lost_host_is_charged_what_it_cost_all_hosts() -> None:
    report = make_report(0, run_that_loses_a_host(), uninterrupted_run_of_two_hosts(), [])
    assert report.hosts == 2
    (lost,) = report.failures
    assert (lost.kind, lost.host) == (DemoFailureKind.LOSE_HOST, "host-1")
    # The first host had finished step 11, the lost one had not.
    assert (lost.last_step, lost.next_step, lost.steps_lost) == (11, 9, 3)
    assert lost.recovery_secs == 4.0
    assert lost.restored_step == 8
    assert lost.sources == {"ram": 2_000_000, "peer": 4_000_000}
    assert report.identity.holds


@pytest.mark.parametrize("host", [0, 1])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_change_end("params"), "parameters NO"),
        (_change_end("batches"), "order of batches NO"),
        (_change_step("batch", 1026.25), "order of batches NO"),
        (_change_step("loss", 1026.25), "losses NO"),
    ],
)
def test_a_difference_on_any_host_is_found_and_told(
    change: Callable[[Record], Record], told: str, host: int
) -> None:
    run = run_that_loses_a_host()
    # Both hosts wrote a step at a quarter past: only the second one's records are of that time.
    records = [[r for start in run.starts for r in start.by_host[one]] for one in (0, 1)]
    records = records[::-1] if host == 0 else records
    records[host] = [change(record) for record in records[host]]
    whole = [list(h) for h in uninterrupted_run_of_two_hosts().starts[0].by_host]
    found = compare(records, whole)
    assert not found.holds
    assert verdict(found).count("NO") == 1
    assert told in verdict(found)


def test_hosts_that_differ_alike_in_both_runs_are_a_difference() -> None:
    whole = [list(h) for h in uninterrupted_run_of_two_hosts().starts[0].by_host]
    whole[1] = [
        _change_end("params")(record)
        if isinstance(record, Finished)
        else msgspec.structs.replace(record, loss="0x1.0p+0")
        if isinstance(record, Step)
        else record
        for record in whole[1]
    ]
    found = compare(whole, whole)
    assert not found.params
    assert found.equal_losses == 0


def test_sources_are_told_by_size() -> None:
    sources = {"ram": 1_000_000, "durable": 2_500_000}
    assert describe_sources(sources) == "disk 2.5 MB + RAM 1.0 MB"
    assert describe_sources(None) == "nowhere"


def test_the_table_fits_a_terminal_of_80_columns() -> None:
    report = make_report(0, interrupted_run(), uninterrupted_run(), [(1, 0.0), (1, 2.0)])
    report.failures[0].skipped.append("step 9, attempt 1: [a part] is missing")
    console = Console(file=io.StringIO(), width=80)
    print_report(replace(report, save_calls_secs=123.0, training_secs=4567.8), console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "trainer SIGKILL      11       4      4.00 s    0.25 s   RAM 1.0 MB" in text
    assert "trainer SIGTERM      20       0      4.00 s    0.25 s   disk 2.0 MB" in text
    assert "+ RAM 1.0 MB" in text
    assert "agent SIGKILL        24       0      0.75 s         –   the trainer continued" in text
    assert "123.00 s of 4567.8 s, 2.69%" in text
    assert "P50 2.00 s, P95 2.00 s" in text
    assert "[a part] is missing" in text


def test_the_table_names_the_lost_host_and_what_the_disk_was_not_asked_for() -> None:
    report = make_report(0, run_that_loses_a_host(), uninterrupted_run_of_two_hosts(), [])
    console = Console(file=io.StringIO(), width=80)
    print_report(report, console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "host-1 lost      11       3      4.00 s    0.25 s   peers 4.0 MB" in text
    assert "+ RAM 2.0 MB" in text
    assert "+ disk 0.0 MB" in text
