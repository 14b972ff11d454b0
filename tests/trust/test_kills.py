"""Kill processes at random moments: each time the run is back, with every sealed step.

What is restored is equal bit for bit. RAM belongs to the host and outlives its processes. So each
start has to find the newest step that was sealed, in RAM, whether the trainer died, or its agent,
or both.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hosts import Host, host, is_running, wait_until
from tests.trust.figures import tell
from tests.trust.killing import (
    Trainer,
    agent_folder,
    answering,
    end_well,
    kill_agent_once_it_has_its_place,
    latest_step,
    sealed,
    trainer,
)

SEED = 20261121
STEPPING = {"sleep": 0.003, "acknowledge": 25}
SMALL_KILOBYTES, LARGE_KILOBYTES = 200, 40_000
FAST_KILOBYTES = 8_000


@pytest.fixture
def one_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A host of the test's own, for this process as well."""
    with host() as made:
        monkeypatch.setenv("HOLDFAST_RAM", str(made.folder))
        monkeypatch.setenv("HOLDFAST_HOST", made.name)
        yield made


@dataclass
class Killing:
    """One run that is killed again and again; `floor` is the newest step that must not be lost."""

    host: Host
    run: Path
    chance: random.Random
    kilobytes: int
    floor: int = -1
    killed: int = 0
    inside: int = 0

    def trainer(self, **options: object) -> contextlib.AbstractContextManager[Trainer]:
        """The next start of the run."""
        return trainer(self.host, self.run, kilobytes=self.kilobytes, **options)

    def check_start(self, started: Trainer) -> dict:
        """The start went on from what was sealed, bit for bit, from RAM."""
        line = started.await_line("start")
        where = f"seed {SEED}, after kill {self.killed}: {line}"
        assert line["right"], where
        assert line["start"] > self.floor, f"{where}: step {self.floor} was sealed"
        assert set(line["sources"]) <= {"ram"}, where
        assert not line["skipped"], where
        assert not line["passed_over"], where
        return line

    def note(self, gone: Trainer) -> None:
        """Notes what a trainer that is gone leaves behind."""
        self.floor = max(self.floor, gone.acknowledged, sealed(self.run))

    def check_living(self, living: Trainer, old_agent: int) -> None:
        """Another agent came, what was sealed can be restored, and saving goes on."""
        folder = agent_folder(self.host)
        wait_until(lambda: answering(folder) not in (None, old_agent))
        found = latest_step(self.run)
        where = f"seed {SEED}, after kill {self.killed}: step {self.floor} was sealed"
        assert found >= self.floor, f"{where}, {found} is the newest"
        wait_until(lambda: sealed(self.run) > self.floor)
        assert living.process.poll() is None, living.told()
        self.floor = max(self.floor, sealed(self.run))


def kill_trainers(killing: Killing, count: int) -> None:
    for _ in range(count):
        with killing.trainer(**STEPPING) as victim:
            killing.check_start(victim)
            time.sleep(killing.chance.uniform(0, 0.4))
            victim.kill()
            killing.killed += 1
            killing.inside += 1
            killing.note(victim)


def kill_agents(killing: Killing, count: int) -> None:
    """The trainer lives on; now and then it is killed too, so that a start shows what is left."""
    target = killing.killed + count
    while killing.killed < target:
        with killing.trainer(**STEPPING) as living:
            killing.check_start(living)
            wait_until(lambda: sealed(killing.run) > killing.floor)
            for _ in range(min(6, target - killing.killed)):
                time.sleep(killing.chance.uniform(0, 0.4))
                killing.floor = max(killing.floor, sealed(killing.run))
                pid = killing.host.kill_agent()
                killing.killed += 1
                killing.inside += 1
                killing.check_living(living, pid)
            living.kill()
            killing.note(living)


def kill_both(killing: Killing, count: int) -> None:
    for _ in range(count):
        with killing.trainer(**STEPPING) as victim:
            killing.check_start(victim)
            time.sleep(killing.chance.uniform(0, 0.4))
            agent = killing.host.agent().pid
            first, second = killing.chance.sample([agent, victim.process.pid], 2)
            os.kill(first, signal.SIGKILL)
            time.sleep(killing.chance.choice([0, 0, killing.chance.uniform(0, 0.05)]))
            os.kill(second, signal.SIGKILL)
            victim.kill()
            wait_until(lambda pid=agent: not is_running(pid))
            killing.killed += 1
            killing.inside += 1
            killing.note(victim)


def kill_restoring_trainers(killing: Killing, count: int) -> None:
    """Kill trainers in the middle of a restore: those that have not printed that they restored."""
    secs = 0.0
    target = killing.killed + count
    while killing.killed < target:
        with killing.trainer(sleep=0.01) as seals:
            line = killing.check_start(seals)
            secs = line["secs"] if line["sources"] else secs
            wait_until(lambda: sealed(killing.run) > killing.floor)
            seals.kill()
            killing.note(seals)
        for _ in range(min(5, target - killing.killed)):
            with killing.trainer() as victim:
                victim.await_line("restoring")
                time.sleep(killing.chance.uniform(0, secs or 0.05))
                victim.kill()
                killing.killed += 1
                killing.inside += not victim.said("restored")
                killing.note(victim)


def kill_adopting_agents(killing: Killing, count: int) -> None:
    """Each agent that comes is killed within its first moments, up to three in a row."""
    target = killing.killed + count
    while killing.killed < target:
        with killing.trainer(**STEPPING) as living:
            killing.check_start(living)
            wait_until(lambda: sealed(killing.run) > killing.floor)
            folder = agent_folder(killing.host)
            for _ in range(min(2, target - killing.killed)):
                killing.floor = max(killing.floor, sealed(killing.run))
                pid = killing.host.kill_agent()
                for _ in range(min(killing.chance.randint(1, 3), target - killing.killed)):
                    pid, is_inside = kill_agent_once_it_has_its_place(
                        folder, killing.chance.uniform(0, 0.04)
                    )
                    killing.killed += 1
                    killing.inside += is_inside
                killing.check_living(living, pid)
            living.kill()
            killing.note(living)


VICTIMS = {
    "trainer": kill_trainers,
    "agent": kill_agents,
    "both": kill_both,
    "restoring trainer": kill_restoring_trainers,
    "adopting agent": kill_adopting_agents,
}
_reached: dict[str, tuple[int, int]] = {}


@pytest.fixture
def killing(request: pytest.FixtureRequest, one_host: Host, tmp_path: Path) -> Iterator[Killing]:
    """Yield a run whose processes are killed, with the seed of the test's name; report it."""
    name = request.node.name
    kilobytes = FAST_KILOBYTES
    if "victims" in request.fixturenames:
        # What copies and reads much is there long enough to be hit.
        is_long = "restoring" in name or "adopting" in name
        kilobytes = LARGE_KILOBYTES if is_long else SMALL_KILOBYTES
    made = Killing(one_host, tmp_path / "run", random.Random(f"{SEED} {name}"), kilobytes)
    yield made
    print(f"seed {SEED}: {name}, {made.killed} kills, {made.inside} inside")


def test_a_run_killed_at_random_moments_goes_on_from_what_was_sealed(killing: Killing) -> None:
    for kill in VICTIMS.values():
        kill(killing, 1)
    assert killing.killed == len(VICTIMS)
    end_well(killing.host, killing.run, kilobytes=killing.kilobytes)


@pytest.mark.soak
@pytest.mark.parametrize("victims", VICTIMS)
def test_sixty_kills_lose_nothing(killing: Killing, victims: str) -> None:
    VICTIMS[victims](killing, 60)
    end_well(killing.host, killing.run, kilobytes=killing.kilobytes)
    if victims in ("restoring trainer", "adopting agent"):
        # The moments are drawn so that most of them fall where they should.
        assert killing.inside >= 20
    _reached[victims] = (killing.killed, killing.inside)
    kills = sum(killed for killed, _ in _reached.values())
    inside = ", ".join(f"{name} {inside}" for name, (_, inside) in _reached.items())
    tell(
        "SIGKILL",
        "300 kills, 0 broken, 0 sealed steps lost",
        f"{kills} kills, 0 broken, 0 sealed steps lost (of 60 each fell inside: {inside})",
    )
