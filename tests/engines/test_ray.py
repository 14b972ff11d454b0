"""Trainings under Ray that lose workers and nodes: every step is done, bit for bit.

The program is examples/ray/train.py, two workers on two of three nodes. All steps of each rank are
compared with those of a training that nothing has interrupted.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import holdfast
from tests.engines.ray_cluster import Cluster, ray_cluster, why_not
from tests.hosts import ROOT, wait_until

EXAMPLE = ROOT / "examples" / "ray" / "train.py"
ALONE = Path(__file__).with_name("ray_jax.py")
STEPS = 80
STEP_SECS = 0.2
LOST_STEPS_MAX = 3
"""What a kill may cost: the step that it cut off, and those whose parts were not complete."""
DRAIN_SECS = 10

REASON = why_not()
pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(900),
    pytest.mark.skipif(REASON is not None, reason=f"no Ray: {REASON}"),
    # Ray's own, in this process: of its sockets and of what it imports.
    pytest.mark.filterwarnings("default"),
]


@dataclass
class Training:
    """A training of the example. Its ranks append what they do to files."""

    cluster: Cluster
    run: Path
    driver: subprocess.Popen[str] | None = None

    def start(self, *options: str, steps: int = STEPS, step_secs: float = STEP_SECS) -> Training:
        self.driver = self.cluster.start(
            EXAMPLE, self.run, "--steps", steps, "--step-secs", step_secs, *options
        )
        return self

    def lines(self, rank: int) -> list[list[str]]:
        """The words of each line of that rank."""
        file = Path(f"{self.run}.logs/{rank}")
        return [line.split() for line in file.read_text().splitlines()] if file.exists() else []

    def steps(self, rank: int) -> list[tuple[str, ...]]:
        """The steps that the rank has done, each with its loss and the digest of its state."""
        return [tuple(line[1:]) for line in self.lines(rank) if line[0] == "step"]

    def starts(self, rank: int) -> list[tuple[int, int, set[str]]]:
        """Each start of the rank: its step, its process, and the tiers that it has read."""
        starts = [line[1:] for line in self.lines(rank) if line[0] == "start"]
        return [(int(start[0]), int(start[1]), set(start[2:])) for start in starts]

    def preempted(self, rank: int) -> list[int]:
        """The steps at which the rank was preempted."""
        return [int(line[1]) for line in self.lines(rank) if line[0] == "preempted"]

    def await_step(self, step: int, secs: float = 240.0) -> None:
        """Waits until both ranks have done a step."""
        self.wait_until(
            lambda: all(str(step) in {done[0] for done in self.steps(r)} for r in (0, 1)), secs
        )

    def await_end(self, secs: float = 400.0) -> list[tuple[str, int]]:
        """Waits until the program has ended well, and returns the runs and steps that it names."""
        self.wait_until(lambda: self.driver.poll() is not None, secs)
        output = self.cluster.output()
        assert self.driver.returncode == 0, output[-6000:]
        results = [line.split() for line in output.splitlines() if line.startswith("result ")]
        return [(result[1], int(result[2])) for result in results]

    def wait_until(self, is_true, secs: float) -> None:
        try:
            wait_until(lambda: is_true() or self.has_failed(), secs)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.cluster.output()[-6000:]}") from error
        assert is_true(), self.cluster.output()[-6000:]

    def has_failed(self) -> bool:
        return bool(self.driver.poll())

    def agrees_with(self, undisturbed: dict[int, list[tuple[str, ...]]], lost: int) -> None:
        """Checks that every step is done as undisturbed, and how many are done twice."""
        for rank in (0, 1):
            steps = self.steps(rank)
            assert set(steps) == set(undisturbed[rank])
            assert len(steps) - len(undisturbed[rank]) <= lost, self.starts(rank)


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    """A cluster whose nodes no test ends."""
    with ray_cluster() as cluster:
        yield cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with ray_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(shared: Cluster) -> dict[int, list[tuple[str, ...]]]:
    """The steps of each rank in a training that nothing interrupts."""
    training = Training(shared, shared.work / "undisturbed").start(step_secs=0.0)
    training.await_end()
    assert [start[0] for start in training.starts(0)] == [0], shared.output()[-6000:]
    return {rank: training.steps(rank) for rank in (0, 1)}


def test_rays_checkpoint_names_the_last_step_and_holds_none(
    shared: Cluster, undisturbed: dict[int, list[tuple[str, ...]]]
) -> None:
    run = shared.work / "undisturbed"
    (named,) = (line for line in shared.output().splitlines() if line.startswith("result "))
    assert named.split()[1:] == [str(run), str(STEPS - 1)]
    with holdfast.open_run(run) as opened:
        weights = opened.restore(STEPS - 1, only="model", framework="numpy")["model"]
    assert {array.dtype for array in weights.values()} == {np.dtype(np.float32)}
    files = [file for file in Path(f"{run}.ray").glob("checkpoint_*/*") if file.is_file()]
    assert [file.name for file in files if file.name != ".metadata.json"] == ["holdfast.json"]
    # A program that is started again finds all done.
    again = Training(shared, run).start(step_secs=0.0)
    again.await_end()
    assert [start[0] for start in again.starts(0)] == [0, STEPS]


def test_a_killed_worker_costs_no_step_that_was_saved(
    shared: Cluster, undisturbed: dict[int, list[tuple[str, ...]]]
) -> None:
    training = Training(shared, shared.work / "worker").start()
    training.await_step(15)
    os.kill(training.starts(1)[0][1], signal.SIGKILL)
    training.await_end()
    # Ray starts both workers anew, on any of the nodes.
    sources = {tier for rank in (0, 1) for tier in training.starts(rank)[1][2]}
    assert sources <= {"ram", "peer"}
    training.agrees_with(undisturbed, LOST_STEPS_MAX)


def test_a_lost_node_is_replaced_and_its_state_read_from_a_peer(
    cluster: Cluster, undisturbed: dict[int, list[tuple[str, ...]]]
) -> None:
    training = Training(cluster, cluster.work / "run").start()
    training.await_step(15)
    # The head has the driver and Ray's own service.
    places = {rank: cluster.node_of(training.starts(rank)[0][1]) for rank in (0, 1)}
    cluster.kill(next(node for node in places.values() if node is not cluster.nodes[0]))
    training.await_end()
    sources = {tier for rank in (0, 1) for tier in training.starts(rank)[1][2]}
    assert "peer" in sources
    assert sources <= {"ram", "peer"}
    training.agrees_with(undisturbed, LOST_STEPS_MAX)


@pytest.mark.parametrize("is_reclaimed_early", [False, True])
def test_a_drained_node_makes_all_ranks_save_one_step_and_the_training_goes_on(
    cluster: Cluster,
    undisturbed: dict[int, list[tuple[str, ...]]],
    *,
    is_reclaimed_early: bool,
) -> None:
    training = Training(cluster, cluster.work / "run").start(step_secs=0.5)
    training.await_step(5)
    places = {rank: cluster.node_of(training.starts(rank)[0][1]) for rank in (0, 1)}
    drained = next(node for node in places.values() if node is not cluster.nodes[0])
    cluster.drain(drained, DRAIN_SECS)
    if is_reclaimed_early:
        training.wait_until(lambda: training.preempted(0), 60.0)
        # Nothing of the run is in the RAM of this process's host.
        with holdfast.open_run(training.run) as run:
            run.wait_for_step(training.preempted(0)[0] - 1, timeout_secs=60.0)
        cluster.kill(drained)
    training.await_end()
    (step,) = training.preempted(0)
    assert training.preempted(1) == [step]
    for rank in (0, 1):
        (_, _, _), (start, pid, sources) = training.starts(rank)
        assert start > step
        assert pid != training.starts(rank)[0][1]
        assert sources <= {"ram", "peer"}
    training.agrees_with(undisturbed, LOST_STEPS_MAX)


def test_a_killed_trial_of_tune_continues_from_its_own_run(shared: Cluster) -> None:
    training = Training(shared, shared.work / "tune").start("--tune", step_secs=0.3)

    def trials() -> list[Training]:
        logs = shared.work.glob("tune-*.logs")
        return [Training(shared, log.with_suffix(""), training.driver) for log in sorted(logs)]

    training.wait_until(
        lambda: len(trials()) == 2 and all(len(t.steps(0)) > 10 for t in trials()), 240.0
    )
    killed, other = trials()
    os.kill(killed.starts(0)[0][1], signal.SIGKILL)
    named = dict(training.await_end())
    assert [named[str(trial.run)] for trial in (killed, other)] == [STEPS - 1] * 2
    (_, _, _), (start, _, sources) = killed.starts(0)
    assert start > 10 - LOST_STEPS_MAX
    assert sources <= {"ram", "durable"}
    assert len(other.starts(0)) == 1
    for trial in (killed, other):
        assert {int(step[0]) for step in trial.steps(0)} == set(range(STEPS))
    assert len(killed.steps(0)) - STEPS <= LOST_STEPS_MAX


def test_workers_of_a_jax_trainer_that_are_each_alone_are_refused_but_for_one(
    shared: Cluster,
) -> None:
    run = shared.work / "jax"
    training = Training(shared, run, shared.start(ALONE, run))
    training.await_end()
    ends = sorted(file.read_text() for file in Path(f"{run}.ends").iterdir())
    refused, opened = ends
    assert opened == "opened 0 of 1"
    assert refused.startswith("RunBusyError ")
    assert "started by Ray" in refused
    assert "jax.distributed.initialize()" in refused


def test_a_checkpoint_of_another_program_is_named(tmp_path: Path) -> None:
    import ray.train

    from holdfast.interop.ray import POINTER, RunStep, checkpoint_of, step_of

    with checkpoint_of(tmp_path / "run", 7) as checkpoint:
        assert step_of(checkpoint) == RunStep(directory=str(tmp_path / "run"), step=7)
    with checkpoint_of("s3://bucket/run", 7) as checkpoint:
        assert step_of(checkpoint).directory == "s3://bucket/run"
    other = ray.train.Checkpoint.from_directory(tmp_path)
    with pytest.raises(holdfast.errors.NotARunError, match=POINTER):
        step_of(other)
    (tmp_path / POINTER).write_text("[]")
    with pytest.raises(holdfast.errors.InvalidArgumentError, match="a directory and a step"):
        step_of(other)
