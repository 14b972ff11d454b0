"""Hosts of a training are lost or cut off, and the others go on: real processes with gloo.

Each host is a machine of the test's own, with its processes, RAM and network. `test_launchers` and
`test_membership` have most cases cheaper.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.engines.nodes import Node, nodes, why_not
from tests.hosts import ROOT, events, wait_until
from tests.network import INTERFACE
from tests.supervise.ranks.rank_plan import RIG, Plan

pytestmark = [
    pytest.mark.timeout(900),  # trainings on several hosts, on machines that may be busy
    pytest.mark.skipif(why_not() is not None, reason=f"no machines: {why_not()}"),
]
PORT = 29_517
NAMES = ("node-a", "node-b", "node-c")
WAIT_SECS = 300.0


class Training:
    """A training on three machines."""

    def __init__(self, machines: list[Node], work: Path, **plan: Any) -> None:
        self.machines, self.work = machines, work
        self.run = work / plan.pop("name", "run")
        addresses = tuple((machine.address, PORT) for machine in machines)
        whole = Plan(addresses=addresses, directory=str(self.run), **plan)
        self.plan = msgspec.json.encode(whole).decode()
        self.launchers = {host: self.start(host) for host in range(len(machines))}

    def start(self, host: int) -> Any:
        return self.machines[host].start(
            sys.executable,
            str(RIG),
            self.plan,
            str(host),
            PYTHONPATH=str(ROOT),
            PYTHONFAULTHANDLER="1",
            GLOO_SOCKET_IFNAME=INTERFACE,
            HOLDFAST_INTERFACE=INTERFACE,
            HOLDFAST_HOST=NAMES[host],
            HOLDFAST_RAM="/dev/shm/holdfast",
        )

    def notes(self) -> str:
        """What the machines have printed beside that."""
        logs = sorted((self.work / "logs").iterdir())
        lines = [f"{log.stem}: {line}" for log in logs for line in log.read_text().splitlines()]
        return "\n".join(line for line in lines if '{"event"' not in line)

    def lines(self) -> list[dict[str, Any]]:
        """All that ranks have printed, with their host."""
        found = []
        for host, name in enumerate(NAMES):
            for log in (self.work / "logs").glob(f"{name}-*"):
                whole = [line for line in log.read_text().splitlines(True) if line.endswith("\n")]
                found += [
                    json.loads(line) | {"host": host} for line in whole if line.startswith("{")
                ]
        return found

    def of(self, event: str, generation: int) -> list[dict[str, Any]]:
        found = self.lines()
        return [e for e in found if e["event"] == event and e.get("generation") == generation]

    def wait_until(self, is_true: Callable[[], bool]) -> None:
        try:
            wait_until(is_true, WAIT_SECS)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.notes()[-6000:]}") from error

    @property
    def generation(self) -> int:
        """The newest generation of which a rank has made a step.

        On a busy machine a host may be silent for so long that it is replaced before it is lost.
        """
        return max(each["generation"] for each in self.lines() if each["event"] == "step")

    def wait_for_steps(self, generation: int, count: int) -> None:
        """Wait until the ranks of a generation, or of a later one, have made so many steps."""
        self.wait_until(
            lambda: self.generation >= generation and len(self.of("step", self.generation)) >= count
        )

    def wait_for_protection(self) -> None:
        """Wait until the others have what each host has of a step after the first."""
        self.wait_until(lambda: any(e["step"] > 0 for e in events(self.run, "protected")))

    def lose(self, host: int) -> None:
        self.machines[host].kill()
        del self.launchers[host]

    def await_ends(self) -> None:
        """Wait for the machines that are left; all have to end well."""
        self.wait_until(lambda: all(each.poll() is not None for each in self.launchers.values()))
        codes = {host: launcher.wait() for host, launcher in self.launchers.items()}
        assert set(codes.values()) == {0}, f"{codes}\n{self.notes()[-6000:]}"

    @property
    def digests(self) -> set[str]:
        return {line["digest"] for line in self.lines() if line["event"] == "survived"}


@pytest.fixture
def trainings() -> Iterator[Callable[..., Training]]:
    work = Path(tempfile.mkdtemp(prefix="holdfast-ranks-", dir="/var/tmp"))
    try:
        with nodes(NAMES, work) as machines:
            yield lambda **plan: Training(machines, work, **plan)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_spare_host_goes_on_with_the_ranks_of_a_lost_one(
    lost: int, trainings: Callable[..., Training]
) -> None:
    training = trainings(steps=60, spares=0, spare_hosts=1, pause_secs=0.1)
    training.wait_for_protection()
    first, lost_secs = training.generation, time.monotonic()
    training.lose(lost)
    training.wait_for_steps(first + 1, 4)
    next_step = min(training.of("step", training.generation), key=lambda each: each["secs"])
    training.await_ends()
    before = {each["rank"]: each for each in training.of("resumed", first)}
    again = {each["rank"]: each for each in training.of("resumed", training.generation)}
    kept = [rank for rank, each in before.items() if each["host"] != lost]
    assert len(kept) == 2, f"{before}\n{training.notes()[-6000:]}"
    assert [again[rank]["pid"] for rank in kept] == [before[rank]["pid"] for rank in kept]
    # What others had at the loss is not lost, wherever it is read from.
    assert min(each["step"] for each in again.values()) > 0
    print(f"host {lost} lost: the next step after {next_step['secs'] - lost_secs:.1f} s")
    assert len(training.digests) == 1


@pytest.mark.soak
def test_the_bits_are_those_of_an_undisturbed_training(
    trainings: Callable[..., Training],
) -> None:
    undisturbed = trainings(name="undisturbed", steps=60, spares=0, spare_hosts=1)
    undisturbed.await_ends()
    expected = undisturbed.digests
    # So seldom that the next save has not begun when the host is lost.
    training = trainings(steps=60, spares=0, spare_hosts=1, pause_secs=0.1, interval=20)
    training.wait_for_protection()
    training.lose(0)
    training.await_ends()
    # The neighbour's RAM has what the lost host's had.
    again = training.of("resumed", training.generation)
    assert {name for each in again for name in each["sources"] or ("none",)} <= {"ram", "peer"}
    assert len(expected) == 1
    assert training.digests == expected


@pytest.mark.soak
def test_the_side_without_a_majority_stops(trainings: Callable[..., Training]) -> None:
    training = trainings(ranks=6, ranks_min=4, steps=60, spares=0, pause_secs=0.1)
    training.wait_for_protection()
    # It has led.
    training.machines[0].cut()
    training.wait_for_steps(2, 12)
    assert {each["host"] for each in training.of("step", 2)} == {1, 2}
    assert {each["size"] for each in training.of("resumed", 2)} == {4}
    training.machines[0].heal()
    training.await_ends()
    # Its ranks have made no step that the others have not seen.
    last = {h: max(e["step"] for e in training.of("step", 1) if e["host"] == h) for h in range(3)}
    assert max(last.values()) - min(last.values()) <= 1
    assert {each["host"] for each in training.of("returned", 2)} == {1, 2}
    assert len(training.digests) == 1
