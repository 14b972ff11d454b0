"""Trainings under Slurm that lose ranks, nodes and allocations: every step is done, bit for bit.

The job is that of examples/slurm: two nodes, a JAX process on each. All steps of each rank are
compared with those of a training that nothing has interrupted.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.engines.nodes import Node
from tests.engines.slurm import Slurm, slurm, why_not
from tests.hosts import ROOT, wait_until
from tests.network import INTERFACE

EXAMPLE = ROOT / "examples" / "slurm"
STEPS = 100
STEP_SECS = 0.15
LOST_STEPS_MAX = 3
"""What a kill may cost: the step that it cut off, and those whose parts were not complete."""
Step = tuple[str, ...]
"""A step, its loss, and the digest of the state after it."""
Steps = dict[int, list[Step]]
"""The steps of each rank."""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Start:
    """A start of one rank: its first step, and the bytes it read, by tier."""

    step: int
    sources: dict[str, int]


@dataclass
class Training:
    """A training of the example on a cluster. Its ranks append what they do to files."""

    cluster: Slurm
    run: Path

    def submit(self, *options: str, steps: int = STEPS, step_secs: float = STEP_SECS) -> int:
        """Submits its script; a second time, it goes on."""
        return self.cluster.submit(
            EXAMPLE / "train.sbatch", "--nodes=2", "--time=10",
            f"--output={self.run}.out", *options,
            RUN=str(self.run), STEPS=str(steps), STEP_SECS=str(step_secs),
            HOLDFAST_INTERFACE=INTERFACE, TRAIN=f"{sys.executable} {EXAMPLE / 'train.py'}",
            PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}", XLA_FLAGS="",
        )  # fmt: skip

    def lines(self, rank: int) -> list[list[str]]:
        """The words of each line of that rank."""
        file = Path(f"{self.run}.logs/{rank}")
        return [line.split() for line in file.read_text().splitlines()] if file.exists() else []

    def steps(self, rank: int) -> list[Step]:
        """The steps that the rank has done, each with its loss and the digest of its state."""
        return [tuple(line[1:]) for line in self.lines(rank) if line[0] == "step"]

    def starts(self, rank: int) -> list[Start]:
        """Where the rank has started."""
        starts = [line[1:] for line in self.lines(rank) if line[0] == "start"]
        pairs = [[source.partition("=")[::2] for source in start[1:]] for start in starts]
        return [
            Start(int(start[0]), {tier: int(size) for tier, size in sources})
            for start, sources in zip(starts, pairs, strict=True)
        ]

    def await_step(self, step: int, secs: float = 120.0) -> None:
        """Waits until both ranks have done a step."""
        ranks = (0, 1)
        self.wait_until(
            lambda: all(str(step) in {s[0] for s in self.steps(r)} for r in ranks), secs
        )

    def await_end(self, job: int) -> dict[str, str]:
        """The job's properties once it has ended well."""
        self.wait_until(lambda: self.cluster.job(job)["JobState"] in ENDED)
        properties = self.cluster.job(job)
        assert properties["JobState"] == "COMPLETED", f"{properties}\n{self.told()}"
        return properties

    def wait_until(self, is_true, secs: float = 180.0) -> None:
        """Waits for a condition; where it does not come true, all is told that was said."""
        try:
            wait_until(is_true, secs)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.told()}") from error

    def told(self) -> str:
        """What a failing test shows of it."""
        ends = [f"rank {rank}: {self.lines(rank)[-5:]}" for rank in (0, 1)]
        output = Path(f"{self.run}.out")
        text = output.read_text(errors="replace")[-6000:] if output.exists() else ""
        return "\n".join([*ends, text, self.cluster.logs()])


def program(node: Node) -> int:
    """The pid of the training on a node, as the test sees it."""
    (pid,) = (p.pid for p in node.processes() if p.cmdline()[1:] == [str(EXAMPLE / "train.py")])
    return pid


@pytest.fixture(scope="module", autouse=True)
def _slurm_can_be_had() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no Slurm: {reason}")


@pytest.fixture
def cluster() -> Iterator[Slurm]:
    with slurm() as running:
        yield running


@pytest.fixture
def training(cluster: Slurm) -> Training:
    return Training(cluster, cluster.work / "run")


@pytest.fixture(scope="module")
def undisturbed() -> Steps:
    """The steps of each rank in a training that nothing interrupts."""
    with slurm() as cluster:
        training = Training(cluster, cluster.work / "run")
        training.await_end(training.submit())
        return {rank: training.steps(rank) for rank in (0, 1)}


def second_starts(training: Training) -> list[set[str]]:
    """From which tiers each rank has read at its second start, of two."""
    for rank in (0, 1):
        first, _ = training.starts(rank)
        assert first == Start(0, {})
    return [set(training.starts(rank)[1].sources) for rank in (0, 1)]


def is_ours(process: psutil.Process) -> bool:
    """Whether it is of a training: a trainer, an agent, `holdfast run`."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return "python" in process.name() or "holdfast" in process.name()
    return False


def files_in_ram(cluster: Slurm) -> str:
    """The files that the nodes have in RAM."""
    return "".join(node.run("find", "/dev/shm", "-type", "f") for node in cluster.nodes)


def told_to_leave(training: Training) -> str:
    """The step after which both ranks left, which is the same."""
    (step,) = {
        line[1] for rank in (0, 1) for line in training.lines(rank) if line[0] == "preempted"
    }
    return step


def check(training: Training, undisturbed: Steps, *, lost_max: int) -> None:
    """Each rank has done each step with the right bits, and at most so many of them twice."""
    for rank, expected in undisturbed.items():
        done = training.steps(rank)
        assert sorted(set(done)) == sorted(expected), training.told()
        assert len(done) - len(expected) <= lost_max, training.starts(rank)
        assert training.lines(rank)[-1] == ["finished", str(STEPS - 1)]
    # A finished training leaves no memory in use.
    assert files_in_ram(training.cluster) == ""


@pytest.mark.engines
def test_a_finished_training_leaves_no_memory_in_use(training: Training) -> None:
    job = training.submit(steps=5)
    training.await_end(job)
    for rank in (0, 1):
        assert [step for step, *_ in training.steps(rank)] == list("01234")
    assert files_in_ram(training.cluster) == ""


@pytest.mark.engines
def test_a_killed_rank_is_restarted_from_ram_within_the_job(
    training: Training, undisturbed: Steps
) -> None:
    job = training.submit()
    training.await_step(30)
    os.kill(program(training.cluster.nodes[1]), signal.SIGKILL)
    assert training.await_end(job)["Restarts"] == "0"
    assert second_starts(training) == [{"ram"}, {"ram"}]
    check(training, undisturbed, lost_max=LOST_STEPS_MAX)


@pytest.mark.engines
def test_a_requeued_job_goes_on_after_its_last_step(training: Training, undisturbed: Steps) -> None:
    job = training.submit()
    training.await_step(30)
    training.cluster.control_job("requeue", str(job))
    training.cluster.start_now(job)
    assert training.await_end(job)["Restarts"] == "1"
    assert second_starts(training) == [{"ram"}, {"ram"}]
    check(training, undisturbed, lost_max=0)


@pytest.mark.engines
def test_a_job_killed_with_its_agents_is_followed_by_one_that_adopts_their_ram(
    training: Training, undisturbed: Steps
) -> None:
    cluster = training.cluster
    job = training.submit()
    training.await_step(30)
    cluster.control.run("scancel", "--signal=KILL", str(job), variables=cluster.variables)
    cluster.await_state(job, *ENDED)
    training.wait_until(cluster.are_idle)
    assert [p.cmdline() for node in cluster.nodes for p in node.processes() if is_ours(p)] == []
    training.await_end(training.submit())
    assert second_starts(training) == [{"ram"}, {"ram"}]
    check(training, undisturbed, lost_max=LOST_STEPS_MAX)


@pytest.mark.engines
def test_a_lost_node_and_its_ram_are_replaced_from_the_other_node(
    training: Training, undisturbed: Steps
) -> None:
    cluster = training.cluster
    job = training.submit()
    training.await_step(30)
    lost = cluster.nodes[1]
    lost.kill()
    cluster.await_state(job, "PENDING")
    lost.boot()
    cluster.start_daemon(lost)
    training.wait_until(cluster.are_idle)
    cluster.start_now(job)
    assert training.await_end(job)["Restarts"] == "1"
    assert second_starts(training) == [{"ram"}, {"peer"}]
    check(training, undisturbed, lost_max=LOST_STEPS_MAX)


@pytest.mark.engines
def test_a_preempted_job_comes_back_and_goes_on(training: Training, undisturbed: Steps) -> None:
    cluster = training.cluster
    job = training.submit()
    training.await_step(30)
    urgent = cluster.submit(
        EXAMPLE / "urgent.sbatch",
        "--partition=high",
        "--nodes=2",
        "--exclusive",
        "--output=/dev/null",
    )
    cluster.await_state(urgent, "COMPLETED")
    # Both ranks have left by themselves.
    assert told_to_leave(training) == training.steps(0)[-1][0]
    cluster.start_now(job)
    assert training.await_end(job)["Restarts"] == "1"
    assert second_starts(training) == [{"ram"}, {"ram"}]
    check(training, undisturbed, lost_max=0)


@pytest.mark.engines
@pytest.mark.parametrize("notice", ["TERM", "USR1"])
def test_a_job_at_its_time_limit_comes_back_and_goes_on(
    training: Training, undisturbed: Steps, notice: str
) -> None:
    # Slurm looks at time limits every half a minute: it warns up to 30 s before it was asked to.
    job = training.submit("--time=1", f"--signal={notice}@10", step_secs=0.5)
    training.await_step(1)
    training.wait_until(lambda: training.cluster.job(job)["JobState"] in ("PENDING", *ENDED))
    assert told_to_leave(training) == training.steps(0)[-1][0]
    training.cluster.control_job("update", f"JobId={job}", "TimeLimit=10")
    training.cluster.start_now(job)
    assert training.await_end(job)["Restarts"] == "1"
    assert second_starts(training) == [{"ram"}, {"ram"}]
    check(training, undisturbed, lost_max=0)


@pytest.mark.engines
def test_a_second_job_on_the_run_is_refused_until_the_first_has_ended(
    training: Training, undisturbed: Steps
) -> None:
    first = training.submit(step_secs=0.4)
    training.await_step(5)
    output = training.cluster.work / "second.out"
    second = training.submit(f"--output={output}")
    training.await_end(first)
    training.await_end(second)
    assert "RunBusyError" in output.read_text()
    assert [training.starts(rank)[1].step for rank in (0, 1)] == [STEPS, STEPS]
    check(training, undisturbed, lost_max=0)


@pytest.mark.engines
def test_memory_of_the_job_s_own_is_no_memory_of_the_requeued_job(
    undisturbed: Steps,
) -> None:
    with slurm(has_private_memory=True) as cluster:
        training = Training(cluster, cluster.work / "run")
        job = training.submit()
        training.await_step(30)
        cluster.control_job("requeue", str(job))
        cluster.start_now(job)
        training.await_end(job)
        assert second_starts(training) == [{"durable"}, {"durable"}]
        check(training, undisturbed, lost_max=0)


@pytest.mark.engines
def test_doctor_tells_of_memory_that_ends_with_the_job() -> None:
    with slurm(has_private_memory=True) as cluster:
        doctor = [sys.executable, "-m", "holdfast", "doctor", "--json"]
        text = cluster.control.run("srun", *doctor, variables=cluster.variables)
    checks = [c for c in json.loads(text)["checks"] if c["subject"].startswith("RAM tier")]
    assert [c["severity"] for c in checks] == ["note", "ok"]
    assert "job_container/tmpfs" in checks[0]["found"]
