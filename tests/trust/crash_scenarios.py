"""Run the scenarios of a crash: each drives an agent and trainers in this process.

The log is cut everywhere behind `START`; its marks record what was promised by then.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from holdfast.clock import Clock
from holdfast.format.names import RUN_FILE, CheckpointId, manifest_key
from holdfast.host.wire import protocol
from holdfast.host.wire.protocol import PartTier
from holdfast.store.disk import DiskStore
from holdfast.store.object_folder import make_folder
from tests.store.crash_states import CrashState, materialise
from tests.store.recording import Log, RecordingFileSystem
from tests.trust.crash_oracle import (
    Attempted,
    Attempting,
    Begun,
    Deleted,
    Deleting,
    Durable,
    Id,
    Sealed,
)
from tests.trust.in_process import InProcessHost, StepClock, Trainer

START = "start"
TOKENS_BETWEEN = 500_000


def named(one: CheckpointId) -> Id:
    """The oracle's name of a checkpoint."""
    return Id(one.step, one.attempt.number)


def places(root: Path) -> dict[str, Path]:
    """What is recorded: the disk that the run is on, and the tmpfs."""
    return {"disk": root / "disk", "ram": root / "shm"}


class PlacedHost(InProcessHost):
    """A host whose run lies deeper in its disk, as the user's folders do."""

    def __init__(self, root: Path, **options: object) -> None:
        disk, ram = places(root).values()
        super().__init__(root, run=disk / "runs" / "one", folder=ram / "agent", **options)

    def open_run(self) -> None:
        """Makes the run and the folders above it, in the way and the order of the manager."""
        if not (self.run / RUN_FILE).exists():
            make_folder(self.files, self.run, self.run.parent, durable=True)
            super().open_run()


class ThisProcess:
    """A trainer's process that is this one, and so lives."""

    pid = os.getpid()

    def kill(self) -> None:
        """It is not."""

    def wait(self) -> None:
        """It does not end."""


class RecordedHost(PlacedHost):
    """A host that marks in its log what it was asked and what it promised."""

    def __init__(
        self,
        root: Path,
        log: Log | None = None,
        clock: Clock | None = None,
        recording: type[RecordingFileSystem] = RecordingFileSystem,
    ) -> None:
        for place in places(root).values():
            place.mkdir(exist_ok=True, parents=True)
        self.recorder = recording(places(root), log=log)
        folder = root / "shm" / "agent"
        for made in (folder, folder / "ram"):
            if not made.exists():
                self.recorder.make_folder(made)
        super().__init__(root, files=self.recorder, clock=clock)
        self.mark = self.recorder.add_mark

    def start(self) -> None:
        """From here on the crash may come."""
        self.mark(START)

    def posted(self, notice: protocol.Notice) -> None:
        if notice.kind == "committed" and notice.id is not None:
            self.mark(Durable(named(notice.id)))

    def settle(self) -> None:
        """Let the agent notice ended processes, then act until it has nothing to do."""
        self.call(_turns())
        super().settle()

    def join_new(
        self, attempt: int, origin: Id | None = None, count: int = 1, *, takeover: bool = False
    ) -> Trainer:
        """A new group of trainers, which has to get this attempt from this origin."""
        self.mark(Attempting(attempt, origin))
        trainer = self.attach(count, takeover=takeover)
        place = trainer.place
        found = place.attempt.number, named(place.origin) if place.origin else None
        assert found == (attempt, origin), found
        self.mark(Attempted(attempt))
        return trainer

    def take(self, trainer: Trainer, step: int, *, due: bool = True) -> None:
        """Every rank seals its part in RAM."""
        one = Id(step, trainer.attempt.number)
        self.mark(Begun(one))
        self.save(trainer, step, durable=due)
        self.mark(Sealed(one, due))

    def take_durable(self, trainer: Trainer, step: int) -> None:
        """As `take`, and waits until it is durable."""
        self.take(trainer, step)
        self.settle()

    def take_half(self, trainer: Trainer, step: int) -> None:
        """Rank 0 alone seals its part."""
        one = CheckpointId(step, trainer.attempt)
        self.mark(Begun(named(one)))
        self.seal(trainer, one, 0)
        self.tell_sealed(trainer, one, 0)

    def write_direct(self, trainer: Trainer, step: int, rank: int) -> None:
        """One rank writes its part to the durable tier, as where there is no RAM."""
        one = CheckpointId(step, trainer.attempt)
        self.mark(Begun(named(one)))
        store = DiskStore(self.run, self.clock, self.files)
        self.write_part(store, *self.begin_part(store, trainer, one, rank))

    def go_back(self, trainer: Trainer, attempt: int, origin: Id | None) -> None:
        """The same processes begin a new attempt from `origin`."""
        self.mark(Attempting(attempt, origin))
        self.branch(trainer, self.real(*origin) if origin else None)
        assert trainer.attempt.number == attempt
        self.mark(Attempted(attempt))

    def remove(self, step: int) -> None:
        """Asks for a deletion, and waits for it."""
        found = self.look().find(step)
        one = named(found)
        self.mark(Deleting(one))
        self.delete(step)
        self.mark(Deleted(one))

    def lose_trainer(self, trainer: Trainer) -> None:
        """The trainer dies and the agent sees it."""
        self.kill_trainer(trainer)
        self.settle()

    def both_die(self, trainer: Trainer) -> None:
        """Agent and trainer die together; another agent starts."""
        self.crash_agent()
        self.kill_trainer(trainer)
        self.come_back()

    def come_back(self) -> None:
        """A new agent starts; what it offers then stays."""
        self.start_agent()
        for one in self.look().timeline:
            if self.is_committed(one):
                self.mark(Durable(named(one)))
        self.settle()

    def is_committed(self, one: CheckpointId) -> bool:
        """Return whether its manifest is on the disk."""
        return (self.run / manifest_key(one)).exists()

    def leave(self) -> None:
        """The agent goes: its folder is moved away whole, then removed."""
        assert self.service is not None
        self.settle()
        assert self.agent.is_all_durable
        self.crash_agent()
        away = self.folder.with_name(".agent.1")
        self.recorder.rename(self.folder, away)
        shutil.rmtree(away)


async def _turns() -> None:
    # The loop polls for ended processes on each turn.
    for _ in range(3):
        await asyncio.sleep(0)


def first_save(host: RecordedHost) -> None:
    host.start()
    host.start_agent()
    host.take_durable(host.join_new(1), 1)


def begun(host: RecordedHost, count: int = 1, saved: int = 1) -> Trainer:
    """A run with steps 1 … `saved` durable."""
    host.start_agent()
    trainer = host.join_new(1, count=count)
    for step in range(1, saved + 1):
        host.take_durable(trainer, step)
    return trainer


def next_save(host: RecordedHost) -> None:
    trainer = begun(host)
    host.start()
    host.take_durable(trainer, 2)


def save_of_two_ranks(host: RecordedHost) -> None:
    trainer = begun(host, count=2)
    host.start()
    host.take_durable(trainer, 2)


def two_saves_at_once(host: RecordedHost) -> None:
    trainer = begun(host)
    host.start()
    host.take(trainer, 2)
    host.take(trainer, 3)
    host.settle()


def preservation(host: RecordedHost) -> None:
    trainer = begun(host, saved=2)
    host.start()
    for step in (3, 4, 5):
        host.take_durable(trainer, step)


def ram_more_often(host: RecordedHost) -> None:
    trainer = begun(host)
    host.start()
    host.take(trainer, 2, due=False)
    host.take(trainer, 3, due=False)
    host.take_durable(trainer, 4)
    host.take(trainer, 5, due=False)
    host.lose_trainer(trainer)


def asked_delete(host: RecordedHost) -> None:
    trainer = begun(host, saved=2)
    host.start()
    host.remove(1)
    host.take_durable(trainer, 3)


def delete_of_the_newest(host: RecordedHost) -> None:
    trainer = begun(host, count=2, saved=2)
    host.start()
    host.remove(2)
    host.remove(1)
    host.take_durable(trainer, 3)


def agent_crash_then_adoption(host: RecordedHost) -> None:
    trainer = begun(host)
    host.take(trainer, 2)
    host.crash_agent()
    host.start()
    host.start_agent()
    host.join(trainer, attempt=trainer.attempt)
    host.settle()
    host.take_durable(trainer, 3)


def both_die_then_a_new_attempt(host: RecordedHost) -> None:
    trainer = begun(host)
    host.take(trainer, 2)
    host.start()
    host.both_die(trainer)
    trainer = host.join_new(2, Id(2, 1))
    host.take_durable(trainer, 3)


def takeover(host: RecordedHost) -> None:
    trainer = begun(host)
    host.take(trainer, 2)
    host.start()
    other = host.join_new(2, Id(2, 1), takeover=True)
    host.settle()
    host.take_durable(other, 3)
    host.kill_trainer(trainer)


def branch_and_save_the_same_steps(host: RecordedHost) -> None:
    trainer = begun(host, saved=3)
    host.take(trainer, 4)
    host.start()
    host.go_back(trainer, 2, Id(2, 1))
    for step in (3, 4, 5):
        host.take_durable(trainer, step)


def branch_to_nothing(host: RecordedHost) -> None:
    trainer = begun(host, saved=2)
    host.start()
    host.go_back(trainer, 2, None)
    host.take_durable(trainer, 1)
    host.take_durable(trainer, 2)


def overwrite(host: RecordedHost) -> None:
    trainer = begun(host, saved=2)
    host.start()
    host.go_back(trainer, 2, Id(1, 1))
    host.take_durable(trainer, 2)


def straight_to_the_durable_tier(host: RecordedHost) -> None:
    trainer = begun(host, count=2)
    host.start()
    for step in (2, 3):
        for rank in range(2):
            host.write_direct(trainer, step, rank)
            host.tell_sealed(trainer, host.real(step, 1), rank, tier=PartTier.DURABLE)
        host.settle()


def recovery_finishes_a_commit(host: RecordedHost) -> None:
    trainer = begun(host, count=2)
    for rank in range(2):
        host.write_direct(trainer, 2, rank)
    host.start()
    host.both_die(trainer)
    host.take_durable(host.join_new(2, Id(2, 1)), 3)


def recovery_clears_half_a_save(host: RecordedHost) -> None:
    trainer = begun(host, count=2)
    host.start()
    host.write_direct(trainer, 2, 0)
    host.both_die(trainer)
    host.take_durable(host.join_new(2, Id(1, 1), count=2), 2)


def half_a_save_in_ram(host: RecordedHost) -> None:
    trainer = begun(host, count=2)
    host.start()
    host.take_half(trainer, 2)
    host.lose_trainer(trainer)
    trainer = host.join_new(2, Id(1, 1), count=2)
    host.take_half(trainer, 2)
    host.both_die(trainer)
    host.take_durable(host.join_new(3, Id(1, 1)), 2)


def agent_leaves(host: RecordedHost) -> None:
    trainer = begun(host)
    host.start()
    host.take(trainer, 2)
    host.detach(trainer)
    host.leave()


def branch_twice_without_a_save(host: RecordedHost) -> None:
    trainer = begun(host, saved=2)
    host.start()
    host.go_back(trainer, 2, Id(1, 1))
    host.go_back(trainer, 3, Id(2, 1))
    host.take_durable(trainer, 3)


def reused_images(host: RecordedHost) -> None:
    host.keeps = True
    trainer = begun(host, count=2)
    host.start()
    # What wrote the base is deleted with step 3.
    for step in (2, 3):
        host.take_durable(trainer, step)
    host.take(trainer, 4)
    host.both_die(trainer)
    trainer = host.join_new(2, Id(4, 1), count=2)
    for step in (5, 6):
        host.take_durable(trainer, step)


def reused_images_of_what_ram_alone_had(host: RecordedHost) -> None:
    host.keeps = True
    trainer = begun(host)
    host.go_back(trainer, 2, Id(1, 1))
    host.start()
    host.take(trainer, 2, due=False)
    host.take(trainer, 3, due=False)
    host.take_durable(trainer, 4)
    host.take_durable(trainer, 5)


def reused_images_straight_to_the_durable_tier(host: RecordedHost) -> None:
    host.keeps = True
    trainer = begun(host)
    host.start()
    for step in (2, 3, 4, 5):
        host.write_direct(trainer, step, 0)
        host.tell_sealed(trainer, host.real(step, 1), tier=PartTier.DURABLE)
        host.settle()


def reused_images_whose_origin_is_deleted(host: RecordedHost) -> None:
    host.keeps = True
    trainer = begun(host, saved=2)
    host.start()
    # The image stays in the folder of step 1: steps 2 and 3 need it.
    host.remove(1)
    host.take_durable(trainer, 3)
    # The newest one, and then the last one that needs the image.
    host.remove(3)
    host.remove(2)
    host.take_durable(trainer, 4)


def reused_images_of_a_branch_that_is_left(host: RecordedHost) -> None:
    host.keeps = True
    trainer = begun(host, saved=3)
    host.start()
    host.take(trainer, 4)
    host.go_back(trainer, 2, Id(2, 1))
    for step in (3, 4, 5):
        host.take_durable(trainer, step)


Scenario = Callable[[RecordedHost], None]

SCENARIOS: list[Scenario] = [
    first_save,
    next_save,
    save_of_two_ranks,
    two_saves_at_once,
    preservation,
    ram_more_often,
    asked_delete,
    delete_of_the_newest,
    agent_crash_then_adoption,
    both_die_then_a_new_attempt,
    takeover,
    branch_and_save_the_same_steps,
    branch_to_nothing,
    branch_twice_without_a_save,
    overwrite,
    straight_to_the_durable_tier,
    recovery_finishes_a_commit,
    recovery_clears_half_a_save,
    half_a_save_in_ram,
    agent_leaves,
    reused_images,
    reused_images_of_what_ram_alone_had,
    reused_images_straight_to_the_durable_tier,
    reused_images_whose_origin_is_deleted,
    reused_images_of_a_branch_that_is_left,
]


def coming_back(host: RecordedHost) -> None:
    """After a crash: another agent starts."""
    host.come_back()


def going_on(host: RecordedHost) -> None:
    """After a crash: another agent, another attempt, and one step more is made durable."""
    host.come_back()
    on = host.look().timeline
    origin = named(on[-1]) if on else None
    trainer = host.join_new(host.agent.run.events.attempt + 1, origin)
    host.take_durable(trainer, origin.step + 1 if origin else 1)


def recorded(
    scenario: Scenario, root: Path, recording: type[RecordingFileSystem] = RecordingFileSystem
) -> Log:
    """The log of a scenario that is played in `root`."""
    return _played(scenario, RecordedHost(root, recording=recording))


def gone_on(state: CrashState, log: Log, root: Path, scenario: Scenario) -> Log:
    """The log of `scenario`, played in `root` from `state` on, which `log` led to."""
    for place in places(root).values():
        place.mkdir()
    materialise(state.tree, places(root))
    return _played(scenario, RecordedHost(root, log, StepClock(5000.0, TOKENS_BETWEEN)))


def _played(scenario: Scenario, host: RecordedHost) -> Log:
    try:
        scenario(host)
    finally:
        host.close()
    return host.recorder.log


class ReopenedHost(PlacedHost):
    """A host after the crash: not recorded, and its trainers are this process."""

    def start_process(self) -> subprocess.Popen[bytes]:
        return ThisProcess()  # type: ignore[return-value]

    def is_all_committed(self) -> bool:
        """Whether all that the timeline offers is durable."""
        timeline = self.look().timeline
        return all((self.run / manifest_key(c)).exists() for c in timeline)
