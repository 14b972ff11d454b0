"""Check every state that a crash can leave: it holds what was acknowledged, and nothing else.

The operations of a store are recorded; from the record every crash is made
(`tests.store.crash_states`), and a new agent and a new trainer open the result. The expected
contents follow from the marks in the record (`crash_oracle`), not from Holdfast.
"""

from __future__ import annotations

import json
import os
import random
import stat
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from holdfast.adapt.contract import OwnProcess
from holdfast.engine.reading.sources import readable
from holdfast.errors import HoldfastError
from holdfast.format.names import AttemptId, CheckpointId, checkpoint_name
from holdfast.policy.preservation_policy import LatestN
from holdfast.store.disk import DiskStore
from holdfast.store.files.file_system import LocalFileSystem
from holdfast.trainer.opening.opening import open_run
from holdfast.trainer.ranks.rendezvous import Rendezvous
from tests.engine.making import memory_folder
from tests.hosts import events
from tests.manifests import manifests
from tests.store.crash_states import (
    CrashState,
    at_rest,
    deaths,
    materialise,
    power_losses,
)
from tests.store.recording import Log, Mark, RecordingFileSystem, Sync
from tests.trust.crash_oracle import KEPT_COUNT, Expectation, Id, Outcome, PowerLost, Seen, check
from tests.trust.crash_scenarios import (
    SCENARIOS,
    START,
    RecordedHost,
    ReopenedHost,
    Scenario,
    begun,
    coming_back,
    first_save,
    going_on,
    gone_on,
    named,
    next_save,
    overwrite,
    places,
    recorded,
)
from tests.trust.figures import tell
from tests.trust.in_process import InProcessHost, StepClock, read_checkpoint, right_array

SEED = 20260801
TOKENS_BEFORE = 1_000_000
# The images of two ranks that died before the older of two checkpoints was recycled: for each an
# image that both keep, and their own. They stay until the next attempt's first checkpoint, in a
# further slot, is complete; then the slots are free.
SLOTS_MAX = 2 * 3 + 1
TOLD_COUNT = 8
EVERY_STEP = 1000
# The share of the states that is opened: of one crash in the fast tests (the soak test opens all),
# of losses of power in recoveries, and of other crashes after a crash.
FAST_SHARE = 0.06
RECOVERY_SHARE = 0.3
SECOND_SHARE = 0.05
BAD_EVENTS = {"recovery_failed", "preservation_failed", "durable_unreadable", "failed"}


def reopened(state: CrashState, root: Path, kept_count: int = KEPT_COUNT) -> Outcome:
    """Opens a state as the next agent and trainer would, and saves one step more."""
    for place in places(root).values():
        place.mkdir()
    materialise(state.tree, places(root))
    host = ReopenedHost(root, clock=StepClock(secs=9000.0, tokens=TOKENS_BEFORE))
    host.preserve = LatestN(kept_count)
    try:
        before = seen(host)
        host.start_agent()
        newest = host.agent.run.events.attempt
        host.settle()
        adopted = seen(host)
        trainer = host.attach()
        origin = named(trainer.place.origin) if trainer.place.origin else None
        saved = host.save(trainer, origin.step + 1 if origin else 1)
        host.settle()
        after = seen(host)
        on_disk = host.is_all_committed()
        host.detach(trainer)
    finally:
        host.close()
    return Outcome(
        before=before,
        adopted=adopted,
        after=after,
        newest_attempt=newest,
        origin=origin,
        saved=named(saved),
        failed=tuple(failures(host.run, adopted)),
        left=(
            *(str(one).replace(f"{root}/", "") for one in left_over(root)),
            *(() if on_disk else ("not all is committed",)),
        ),
    )


def seen(host: InProcessHost) -> Seen:
    """What can be read, all of it compared with what was saved; the same bytes are read once."""
    view = host.look()
    found = readable(view.listings)
    for one in found:
        stored = one, host.stored_bytes(one)
        if stored not in READ_RIGHT:
            said, array = read_checkpoint(view.sources(one))
            assert said == one, f"{one} says that it is {said}"
            assert array.tobytes() == right_array(one).tobytes(), f"{one} holds other bits"
            READ_RIGHT.add(stored)
    return Seen(frozenset(map(named, found)), tuple(map(named, view.timeline)))


READ_RIGHT: set[Hashable] = set()
"""Checkpoints, by all bytes that stand under their name in each tier, that were read right."""


def failures(run: Path, adopted: Seen) -> Iterator[str]:
    """Return the events that report a failure, without those of fenced data off the timeline."""
    for event in events(run, *BAD_EVENTS):
        one = Id(event.get("step", -1), event.get("attempt", 0))
        if one.step < 0 or one in adopted.timeline:
            yield str(event)


def left_over(root: Path) -> Iterator[str]:
    """Unfinished files, empty folders, halves of checkpoints, and more slots than are in use."""
    kept = named_images(root / "disk" / "runs" / "one")
    committed = manifests(root / "disk" / "runs" / "one")
    for top in (root / "disk" / "runs" / "one", root / "shm" / "agent" / "ram"):
        for folder, folders, names in os.walk(top):
            if not folders and not names:
                yield f"empty folder {folder}"
            yield from (f"{folder}/{name}" for name in names if name.startswith("."))
            if "attempts" in folder:
                yield from (
                    n for n in names if n[:9].isdigit() and f"{n[:9]}.copy.json" not in names
                )
            path = Path(folder)
            is_checkpoint = path.parent.name == "checkpoints" and path.name != "manifests"
            is_whole = path.name.partition("-")[0] in committed
            if top.name == "ram":
                is_whole = "part-00000-of-00001.json" in names
            if is_checkpoint and not is_whole and not kept.issuperset(full(folder, names)):
                yield f"half a checkpoint {folder}: {sorted(names)}"
    slots = list((root / "shm" / "agent" / "ram" / "slots").iterdir())
    if len(slots) > SLOTS_MAX:
        yield f"{len(slots)} slots"


def full(folder: str, names: Iterable[str]) -> set[str]:
    return {f"{folder}/{name}" for name in names}


def named_images(run: Path) -> set[str]:
    """Return the paths of the images that the manifests name in folders of earlier checkpoints."""
    found = set()
    for path in manifests(run).values():
        manifest = json.loads(path.read_text())
        for rank, part in enumerate(manifest["parts"]):
            image = f"image-{rank:05d}-of-{len(manifest['parts']):05d}.safetensors"
            for step, _ in part["origins"]:
                origin = checkpoint_name(CheckpointId(step, AttemptId(*manifest["attempt"])))
                found.add(str(run / "checkpoints" / origin / image))
    return found


@dataclass
class Tally:
    """States that were opened, each once; equal states share the outcome.

    `share` of the states are opened, drawn with the seed.
    """

    share: float
    outcomes: dict[Hashable, Outcome] = field(default_factory=dict)
    left_out: set[Hashable] = field(default_factory=set)
    crash_count: int = 0
    chance: random.Random = field(default_factory=lambda: random.Random(SEED))

    def try_all(self, log: Log, states: Iterable[CrashState], *, with_ram: bool) -> None:
        """Opens each state and holds it against the marks before it."""
        expected, done_count = Expectation(), -1
        checked: set[Hashable] = set()
        for state in states:
            if state.done_count != done_count:
                promised = expectation(log.marks(state.done_count))
                if promised != expected:
                    # A state that was opened before is compared with this outcome, too.
                    checked.clear()
                expected, done_count = promised, state.done_count
            self.crash_count += 1
            if state.key not in checked and self._is_drawn(state):
                checked.add(state.key)
                self._try(log, state, expected, with_ram=with_ram)

    def offset(self, every: int) -> int:
        """Which of the first so many is drawn."""
        return self.chance.randrange(every)

    def told(self, what: str) -> str:
        """How far it came."""
        return f"{what}: {len(self.outcomes)} states of {self.crash_count} crashes, seed {SEED}"

    def _is_drawn(self, state: CrashState) -> bool:
        if state.key in self.outcomes:
            return True
        if state.key in self.left_out or self.chance.random() >= self.share:
            self.left_out.add(state.key)
            return False
        return True

    def _try(self, log: Log, state: CrashState, expected: Expectation, *, with_ram: bool) -> None:
        try:
            if state.key not in self.outcomes:
                with memory_folder() as folder:
                    self.outcomes[state.key] = reopened(state, Path(folder))
            check(self.outcomes[state.key], expected, with_ram=with_ram)
        except (AssertionError, HoldfastError, OSError) as error:
            done = log.operations[max(0, state.done_count - TOLD_COUNT) : state.done_count]
            error.add_note(
                f"state: {state.description}, after {state.done_count} operations, the last:"
            )
            error.add_note("\n".join(map(str, done)))
            raise


def expectation(marks: Iterable[object]) -> Expectation:
    """What these marks promise."""
    expected = Expectation()
    for mark in marks:
        expected.take(mark)
    return expected


def try_crashes(
    tally: Tally, scenario: Scenario, recording: type[RecordingFileSystem] = RecordingFileSystem
) -> None:
    """Every crash of one scenario."""
    with memory_folder() as folder:
        log = recorded(scenario, Path(folder), recording)
    try_both(tally, log, start_of(log))


def try_both(tally: Tally, log: Log, first: int) -> None:
    """Both kinds of crash, from `first` on."""
    tally.try_all(log, deaths(log, first), with_ram=True)
    tally.try_all(log, power_losses(log, ["disk"], first, seed=SEED), with_ram=False)


def try_second_crashes(tally: Tally, scenario: Scenario, every: int) -> None:
    """Every crash of the recovery from every so many-th crash of a scenario.

    What was not synced when the processes died still is not; it is lost with the power later.
    """
    with memory_folder() as folder:
        log = recorded(scenario, Path(folder))
    first = start_of(log)
    died = [state for state in deaths(log, first) if state.description == "killed"]
    for state in died[tally.offset(every) :: every]:
        with memory_folder() as folder:
            longer = gone_on(state, log.prefix(state.done_count), Path(folder), going_on)
        try_both(tally, longer, state.done_count)
    lost = list({s.key: s for s in power_losses(log, ["disk"], first, seed=SEED)}.values())
    for state in lost[tally.offset(every) :: every]:
        rest = at_rest(state, log)
        rest.operations.append(Mark(PowerLost()))
        with memory_folder() as folder:
            longer = gone_on(state, rest, Path(folder), going_on)
        try_both(tally, longer, len(rest))


def start_of(log: Log) -> int:
    """Where the crash may come."""
    return log.operations.index(Mark(START))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_every_crash_leaves_what_was_acknowledged(scenario: Scenario) -> None:
    tally = Tally(FAST_SHARE)
    try_crashes(tally, scenario)
    print(tally.told(scenario.__name__))


def deaths_before_a_sync(log: Log) -> Iterator[CrashState]:
    """The deaths that leave most unsynced."""
    for state in deaths(log, start_of(log)):
        following = log.operations[state.done_count : state.done_count + 1]
        if state.description == "killed" and following and isinstance(following[0], Sync):
            yield state


def try_recoveries(tally: Tally, scenario: Scenario) -> None:
    """Every loss of power in a recovery from the deaths of a scenario that left most unsynced."""
    with memory_folder() as folder:
        log = recorded(scenario, Path(folder))
    for state in deaths_before_a_sync(log):
        with memory_folder() as folder:
            longer = gone_on(state, log.prefix(state.done_count), Path(folder), coming_back)
        losses = power_losses(longer, ["disk"], state.done_count, seed=SEED)
        tally.try_all(longer, losses, with_ram=False)


@pytest.mark.parametrize("scenario", [next_save, overwrite], ids=lambda s: s.__name__)
def test_power_that_is_lost_in_a_recovery_from_deaths_loses_nothing(scenario: Scenario) -> None:
    tally = Tally(FAST_SHARE)
    try_recoveries(tally, scenario)
    print(tally.told(f"{scenario.__name__}, recovery"))


def test_what_was_unsynced_when_processes_died_is_not_lost_with_the_power_later() -> None:
    with memory_folder() as folder:
        log = recorded(first_save, Path(folder))
    tally = Tally(1.0)
    for state in deaths_before_a_sync(log):
        with memory_folder() as folder:
            longer = gone_on(state, log.prefix(state.done_count), Path(folder), going_on)
        tally.try_all(longer, power_losses(longer, ["disk"], len(longer)), with_ram=False)
    print(tally.told("killed, went on, and lost power at the end"))


def test_a_crash_after_a_crash_leaves_what_was_acknowledged() -> None:
    tally = Tally(SECOND_SHARE)
    try_second_crashes(tally, next_save, every=12)
    print(tally.told("next_save, again"))


@pytest.mark.parametrize("deleted", [1, 2, 3])
def test_a_step_that_is_listed_after_an_interrupted_delete_outlasts_the_next_save(
    deleted: int,
) -> None:
    """The policy keeps every step, so nothing but the delete may remove one."""

    def scenario(host: RecordedHost) -> None:
        host.preserve = LatestN(EVERY_STEP)
        begun(host, count=2, saved=3)
        host.start()
        host.remove(deleted)

    with memory_folder() as folder:
        log = recorded(scenario, Path(folder))
    states = [*deaths(log, start_of(log)), *power_losses(log, ["disk"], start_of(log), seed=SEED)]
    others = {step for step in (1, 2, 3) if step != deleted}
    for state in {state.key: state for state in states}.values():
        with memory_folder() as folder:
            outcome = reopened(state, Path(folder), EVERY_STEP)
        adopted = outcome.adopted.timeline
        done = "\n".join(map(str, log.operations[max(0, state.done_count - TOLD_COUNT) :]))
        assert {one.step for one in adopted} - {deleted} == others, done
        assert outcome.after.timeline == (*adopted, outcome.saved), (state.description, done)


@pytest.mark.soak
def test_no_crash_of_all_scenarios_breaks_a_promise() -> None:
    states = crashes = 0
    for scenario in SCENARIOS:
        one, recovery, again = Tally(1.0), Tally(RECOVERY_SHARE), Tally(SECOND_SHARE)
        try_crashes(one, scenario)
        try_recoveries(recovery, scenario)
        try_second_crashes(again, scenario, every=8)
        for tally, what in ((one, ""), (recovery, ", recovery"), (again, ", again")):
            print(tally.told(f"{scenario.__name__}{what}"), flush=True)
            states += len(tally.outcomes)
            crashes += tally.crash_count
    assert len(SCENARIOS) >= 12
    assert states > 2000
    tell(
        "crash states",
        "every state of at least 12 scenarios, over 2,000 states, 0 broken promises",
        f"{len(SCENARIOS)} scenarios, {states:,} states of {crashes:,} crashes, 0 broken promises",
    )


class ForgetsFileSyncs(RecordingFileSystem):
    """Syncs no file."""

    def sync(self, fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            super().sync(fd)


class ForgetsFolderSyncs(RecordingFileSystem):
    """Syncs no folder."""

    def sync(self, fd: int) -> None:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            super().sync(fd)


@pytest.mark.parametrize("recording", [ForgetsFileSyncs, ForgetsFolderSyncs])
def test_a_store_that_forgets_a_sync_is_found_out(recording: type[RecordingFileSystem]) -> None:
    with pytest.raises((AssertionError, HoldfastError)):
        try_crashes(Tally(1.0), next_save, recording)


def test_the_death_of_all_processes_alone_needs_no_sync() -> None:
    with memory_folder() as folder:
        log = recorded(next_save, Path(folder), ForgetsFolderSyncs)
    Tally(FAST_SHARE).try_all(log, deaths(log, start_of(log)), with_ram=True)


def test_a_run_whose_making_was_cut_off_is_opened() -> None:
    with memory_folder() as folder:
        log = recorded(first_save, Path(folder))
    states = [*deaths(log), *power_losses(log, ["disk"])]
    for state in {s.key: s for s in states}.values():
        with memory_folder() as folder:
            for place in places(Path(folder)).values():
                place.mkdir()
            materialise(state.tree, places(Path(folder)))
            clock = StepClock(tokens=1000)
            directory = Path(folder) / "disk" / "runs" / "one"
            open_run(directory, Rendezvous(OwnProcess(), clock), clock)


class Meanwhile(LocalFileSystem):
    """Lets another process be faster each time just before a name is shown."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def link(self, source: Path, target: Path) -> None:
        self._act()
        super().link(source, target)


def test_a_put_if_absent_that_was_taken_for_interrupted_finds_the_other_object(
    tmp_path: Path,
) -> None:
    other = DiskStore(tmp_path, StepClock())

    def be_faster() -> None:
        other.put("a", b"1")
        other.discard_unfinished("a")

    store = DiskStore(tmp_path, StepClock(tokens=1000), Meanwhile(be_faster))
    assert store.put_if_absent("a", b"2") is False
    assert store.get("a") == b"1"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
