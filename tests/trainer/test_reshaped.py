"""Another number of processes, another mesh: the same bits. JAX's own processes on the CPU.

JAX's CPU devices have no `slice_index`, so `HostNetwork(failure_domain=...)` names slices, as on
hosts whose slices the framework does not tell.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.host.leaving import CLOSED_SECS
from tests.hosts import Host, wait_until
from tests.trainer.job import check_went_on, has_copies, lose, run_job, some_hosts, sources

SHAPES = Path(__file__).with_name("shapes.py")
OPTIONS = {"script": SHAPES, "device_count": 2}

# Each start reads what the one before has saved: (layout, on which of the hosts).
STARTS = [
    ("data parallel", slice(2, 3)),
    ("data parallel", slice(0, 2)),
    ("mixed", slice(0, 2)),
    ("replicated over slices", slice(0, 2)),
    ("fully sharded", slice(0, 3)),
    ("columns", slice(0, 1)),
]


@pytest.mark.soak
def test_one_process_and_several_read_each_others_layouts_bit_for_bit(
    three_hosts: list[Host], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for step, (layout, which) in enumerate(STARTS):
        hosts = three_hosts[which]
        check_went_on(run_job(hosts, run, **OPTIONS, layout=layout), step - 1)
        for one in three_hosts[2:] if len(hosts) == 1 else ():
            # An agent that was started for one host serves no others.
            lose(one)


@pytest.mark.soak
def test_six_processes_and_two_read_what_four_have_saved(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with some_hosts(6) as hosts:
        run_job(hosts[:4], run, **OPTIONS, layout="mixed")
        check_went_on(run_job(hosts, run, **OPTIONS, layout="columns"), 0)
        check_went_on(run_job(hosts[4:], run, **OPTIONS, layout="replicated over slices"), 1)


SLOW_AGENT = """
import sys, time
if "holdfast.host" in sys.orig_argv:
    time.sleep({secs})
"""


@pytest.mark.soak
def test_agents_of_the_job_before_stay_until_the_agent_of_a_new_host_has_started(
    three_hosts: list[Host], tmp_path: Path
) -> None:
    # Two ranks find an agent that leaves soon after the job before; the third rank's starts late.
    # If the first two were replaced meanwhile, nobody would have the address of the new ones.
    run = tmp_path / "run"
    run_job(three_hosts[:2], run, **OPTIONS, layout="data parallel")
    late = tmp_path / "late"
    late.mkdir()
    (late / "sitecustomize.py").write_text(SLOW_AGENT.format(secs=2 * CLOSED_SECS))
    path = os.environ.get("PYTHONPATH", "")
    three_hosts[2].variables["PYTHONPATH"] = f"{late}:{path}" if path else str(late)
    check_went_on(run_job(three_hosts, run, **OPTIONS, layout="fully sharded"), 0)


@pytest.mark.soak
def test_one_slice_goes_on_in_ram_where_the_other_one_is_lost(
    four_hosts: list[Host], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    domains = ["slice-0", "slice-0", "slice-1", "slice-1"]
    layout = "replicated over slices"
    run_job(four_hosts, run, **OPTIONS, layout=layout, domains=domains, dies=True)
    wait_until(lambda: has_copies(four_hosts, 0))
    lose(*four_hosts[2:])
    left = run_job(four_hosts[:2], run, **OPTIONS, layout="fully sharded", domains=domains[:2])
    check_went_on(left, 0)
    assert set(sources(run)) <= {"ram", "peer"}
