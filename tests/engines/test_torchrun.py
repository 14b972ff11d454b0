"""Trainings under torchrun that lose ranks and nodes: every step is done, bit for bit.

The job is that of examples/torchrun: FSDP2 on two nodes, with a process on each, or on one. All
steps are compared with those of a training that nothing has interrupted.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.engines.nodes import Node, nodes, why_not
from tests.hosts import ROOT, is_running, wait_until
from tests.network import INTERFACE

EXAMPLE = ROOT / "examples" / "torchrun"
NAMES = ("node-a", "node-b")
STEPS, STEP_SECS = 60, 0.15
LOST_STEPS_MAX = 3
"""What a kill may cost: the step that it cut off, and those whose parts were not complete."""
WAIT_SECS = 240.0
PREEMPTED = 75
CLOSE_SECS = 30.0
"""How long a survivor may take to leave after a loss: 5 s of waiting, on a busy machine."""
ELASTIC = (
    "torchrun", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d",
    f"--rdzv-endpoint={NAMES[0]}:29400", "--rdzv-id=train",
)  # fmt: skip
INSIDE = (*ELASTIC, "--no-python", "holdfast", "run", "--", sys.executable, EXAMPLE / "train.py")

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Start:
    """A start of one rank: its first step, the number of ranks, and the tiers it read from."""

    step: int
    count: int
    tiers: frozenset[str]


@dataclass
class Training:
    """A training of the example on two nodes. Its ranks append what they do to files."""

    nodes: list[Node]
    work: Path
    node_range: str = "2"
    step_secs: float = STEP_SECS
    commands: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def run(self) -> Path:
        return self.work / "run"

    def start(self, node: Node, *command: str | Path, **variables: str) -> None:
        """Starts the example's script on a node, or another command."""
        self.commands[node.name] = node.start(
            *map(str, command or (EXAMPLE / "train.sh",)),
            RUN=str(self.run), STEPS=str(STEPS), STEP_SECS=str(self.step_secs), OMP_NUM_THREADS="1",
            TRAIN=str(EXAMPLE / "train.py"), NODES=self.node_range,
            RENDEZVOUS=f"{self.nodes[0].name}:29400", HOLDFAST_INTERFACE=INTERFACE,
            GLOO_SOCKET_IFNAME=INTERFACE, RES_OPTIONS="timeout:1 attempts:1", **variables,
            PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        )  # fmt: skip

    def start_all(self, *command: str | Path, **variables: str) -> None:
        for node in self.nodes:
            self.start(node, *command, **variables)

    def lines(self, rank: int) -> list[list[str]]:
        """The words of each line of that rank."""
        file = Path(f"{self.run}.logs/{rank}")
        return [line.split() for line in file.read_text().splitlines()] if file.exists() else []

    def steps(self, rank: int) -> list[tuple[str, ...]]:
        """The steps that the rank has done, each with its loss and the digest of the state."""
        return [tuple(line[1:]) for line in self.lines(rank) if line[0] == "step"]

    def starts(self, rank: int) -> list[Start]:
        """Where the rank has started."""
        starts = [line[1:] for line in self.lines(rank) if line[0] == "start"]
        return [
            Start(int(step), int(count), frozenset(s.partition("=")[0] for s in sources))
            for step, count, *sources in starts
        ]

    def await_step(self, step: int, *ranks: int) -> None:
        """Waits until these ranks, or both, have done a step."""
        self.wait_until(
            lambda: all(any(s[0] == str(step) for s in self.steps(r)) for r in ranks or (0, 1))
        )

    def await_ends(self, code: int = 0) -> None:
        """Waits until all commands have ended, with this code."""
        self.wait_until(lambda: all(c.poll() is not None for c in self.commands.values()))
        codes = {name: command.returncode for name, command in self.commands.items()}
        assert set(codes.values()) == {code}, f"{codes}\n{self.told()}"

    def wait_until(self, is_true, secs: float = WAIT_SECS) -> None:
        """Waits for a condition; where it does not come true, all is told that was said."""
        try:
            wait_until(is_true, secs)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.told()}") from error

    def output(self) -> str:
        """What the commands of the nodes have printed."""
        files = sorted((self.work / "logs").iterdir())
        return "\n".join(f"== {f.name}\n{f.read_text(errors='replace')}" for f in files)

    def told(self) -> str:
        """What a failing test shows of it."""
        ends = [f"rank {rank}: {self.lines(rank)[-5:]}" for rank in (0, 1)]
        return "\n".join([*ends, self.output()[-12000:]])

    def check_sources(self, start: int, *tiers: str) -> None:
        """Each rank has read from these tiers alone at a start, the first of which is 0."""
        assert [self.starts(rank)[start].tiers for rank in (0, 1)] == [
            frozenset([tier]) for tier in tiers
        ], self.told()

    def check(self, undisturbed: list[tuple[str, ...]], *, lost_max: int = LOST_STEPS_MAX) -> None:
        """Each step was done with the right bits, and at most so many of them twice."""
        for rank in (0, 1):
            assert set(self.steps(rank)) <= set(undisturbed), self.told()
        done = self.steps(0)
        assert set(done) == set(undisturbed), self.told()
        assert len(done) - len(undisturbed) <= lost_max, self.starts(0)
        assert self.lines(0)[-1] == ["finished", str(STEPS - 1)]


def program(node: Node, name: str = "train.py") -> psutil.Process:
    """The one Python process on a node that runs this program."""
    (process,) = (p for p in node.processes() if _program(p) == name)
    return process


def _program(process: psutil.Process) -> str:
    try:
        arguments = process.cmdline()
    except psutil.NoSuchProcess:
        return ""
    scripts = [a for a in arguments[1:] if not a.startswith("-")]
    return Path(scripts[0]).name if scripts and "python" in arguments[0] else ""


@pytest.fixture(scope="module", autouse=True)
def _nodes_can_be_had() -> None:
    reason = why_not()
    if reason is None and importlib.util.find_spec("torch") is None:
        reason = "PyTorch is not installed"
    if reason is not None:
        pytest.skip(f"no torchrun on nodes: {reason}")


@contextmanager
def trainings(node_range: str = "2", step_secs: float = STEP_SECS) -> Iterator[Training]:
    work = Path(tempfile.mkdtemp(prefix="holdfast-torchrun-", dir="/var/tmp"))
    try:
        with nodes(NAMES, work) as machines:
            yield Training(machines, work, node_range, step_secs)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@pytest.fixture
def training() -> Iterator[Training]:
    with trainings() as prepared:
        yield prepared


@pytest.fixture(scope="module")
def undisturbed() -> list[tuple[str, ...]]:
    """The steps of a training that nothing interrupts; both ranks report the same."""
    with trainings() as training:
        training.start_all()
        training.await_ends()
        assert training.starts(0) == training.starts(1) == [Start(0, 2, frozenset())]
        assert training.steps(0) == training.steps(1)
        return training.steps(0)


def test_a_killed_rank_is_restarted_by_torchrun_and_reads_ram(
    training: Training, undisturbed: list[tuple[str, ...]]
) -> None:
    training.start_all()
    training.await_step(20)
    program(training.nodes[1]).send_signal(signal.SIGKILL)
    training.await_ends()
    training.check_sources(1, "ram", "ram")
    assert "restart 1 of" not in training.output()
    training.check(undisturbed)


def test_a_lost_node_is_replaced_by_an_empty_one(
    training: Training, undisturbed: list[tuple[str, ...]]
) -> None:
    training.start_all()
    training.await_step(20)
    survivor, lost = training.nodes
    worker = program(survivor)
    lost.kill()
    # Its collective raises, and its manager is closed without the lost part.
    training.wait_until(lambda: not is_running(worker.pid), CLOSE_SECS)
    lost.boot()
    training.start(lost)
    training.await_ends()
    training.check_sources(1, "ram", "peer")
    training.check(undisturbed)


def test_a_training_goes_on_with_fewer_nodes_until_one_joins_again(
    undisturbed: list[tuple[str, ...]],
) -> None:
    # It is not finished when the second node has joined.
    with trainings("1:2", step_secs=1.5) as training:
        training.start_all()
        training.await_step(10)
        lost = training.nodes[1]
        lost.kill()
        training.wait_until(lambda: len(training.starts(0)) == 2)
        alone = training.starts(0)[1]
        assert (alone.count, alone.tiers) == (1, {"ram"})
        training.await_step(alone.step + 3, 0)
        lost.boot()
        training.start(lost)
        training.await_ends()
        # The process that was alone was stopped for the other one, as if preempted.
        *_, together = training.starts(0)
        assert ["preempted", str(together.step - 1)] in training.lines(0)
        assert together.count == 2
        training.check(undisturbed)


def test_a_preempted_training_ends_with_its_own_code_and_goes_on(
    training: Training, undisturbed: list[tuple[str, ...]]
) -> None:
    training.start_all()
    training.await_step(20)
    for node in training.nodes:
        program(node, "holdfast").send_signal(signal.SIGTERM)
    # torchrun ends with 1.
    training.await_ends(PREEMPTED)
    assert {tuple(training.lines(rank)[-1]) for rank in (0, 1)} == {
        ("preempted", training.steps(0)[-1][0])
    }
    training.start_all()
    training.await_ends()
    assert len(training.starts(0)) == 2
    training.check(undisturbed, lost_max=0)


def test_a_node_left_alone_ends_as_preempted_when_it_is_stopped(training: Training) -> None:
    training.start_all()
    training.await_step(20)
    survivor, lost = training.nodes
    worker = program(survivor)
    lost.kill()
    training.commands.pop(lost.name)
    training.wait_until(lambda: not is_running(worker.pid), CLOSE_SECS)
    program(survivor, "holdfast").send_signal(signal.SIGTERM)
    training.await_ends(PREEMPTED)


def test_the_node_of_the_rendezvous_is_replaced_where_holdfast_restarts_torchrun(
    training: Training, undisturbed: list[tuple[str, ...]]
) -> None:
    training.start_all()
    training.await_step(20)
    lost, survivor = training.nodes
    launcher = program(survivor, "torchrun")
    lost.kill()
    training.wait_until(lambda: not is_running(launcher.pid))
    lost.boot()
    training.start(lost)
    training.await_ends()
    assert "restart 1 of 100" in training.output()
    training.check_sources(1, "peer", "ram")
    training.check(undisturbed)


def test_holdfast_inside_of_torchrun_leaves_restarts_to_torchrun(
    training: Training, undisturbed: list[tuple[str, ...]]
) -> None:
    training.start_all(*INSIDE, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    training.await_step(20)
    program(training.nodes[1]).send_signal(signal.SIGKILL)
    training.wait_until(lambda: len(training.starts(1)) == 2)
    training.await_step(40)
    for node in training.nodes:
        program(node, "torchrun").send_signal(signal.SIGTERM)
    training.await_ends(1)
    training.start_all(*INSIDE, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    training.await_ends()
    training.check_sources(1, "ram", "ram")
    assert len(training.starts(0)) == 3
    training.check(undisturbed)


def test_a_killed_torchrun_is_restarted_by_holdfast_around_it(
    training: Training, undisturbed: list[tuple[str, ...]]
) -> None:
    training.start_all()
    training.await_step(20)
    worker = program(training.nodes[1])
    program(training.nodes[1], "torchrun").send_signal(signal.SIGKILL)
    training.wait_until(lambda: not is_running(worker.pid))
    training.await_ends()
    training.check_sources(1, "ram", "ram")
    training.check(undisturbed)


def test_a_restart_that_may_hang_is_named_before_it_and_when_it_waits(
    training: Training,
) -> None:
    # The one that is there first reads the addresses of before.
    late = 'test "$TORCHELASTIC_RESTART_COUNT" = 0 || sleep 30; exec python "$TRAIN"'
    early_node, late_node = training.nodes
    around = ("holdfast", "run", "--", *ELASTIC)
    training.start(early_node, *around, EXAMPLE / "train.py")
    training.start(late_node, *around, "--no-python", "bash", "-c", late)
    training.await_step(5)
    assert training.output().count("its restart may hang") == 1
    program(late_node).send_signal(signal.SIGKILL)
    training.wait_until(lambda: "none has opened a run" in training.output())
    for node in training.nodes:
        program(node, "holdfast").send_signal(signal.SIGTERM)
    training.wait_until(lambda: all(c.poll() is not None for c in training.commands.values()))
