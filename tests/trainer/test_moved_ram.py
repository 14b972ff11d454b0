"""Whose RAM it is: a directory with another inode is the run, moved, or a copy of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.adapt.contract import OwnProcess
from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.identity import Finding
from holdfast.engine.lifecycle.run import read_run_record
from holdfast.environment import HOST_VARIABLE, RAM_VARIABLE
from holdfast.errors import AgentUnavailableError, RunBusyError
from holdfast.format.names import RUN_FILE
from holdfast.format.records import RunRecord
from holdfast.format.sealed import seal
from holdfast.host.process import main
from holdfast.host.tiers.ram_place import PLACE, note_place, noted_place
from holdfast.host.wire.config import AgentConfig
from holdfast.store.disk import DiskStore
from holdfast.trainer.opening.moved_runs import find_with_ram
from holdfast.trainer.opening.opening import open_run
from holdfast.trainer.ranks.rendezvous import Rendezvous
from tests.trust.in_process import RUN_ID, InProcessHost, in_process_host

CLOCK = SystemClock()
MOVED, COPY = Finding.MOVED, Finding.COPY


class Rig:
    """A run in `old/run` whose agent was killed: step 1 is durable, step 2 is in RAM alone."""

    def __init__(self, root: Path, host: InProcessHost) -> None:
        self.root, self.host, self.run = root, host, host.run
        host.start_agent()
        store = DiskStore(self.run, CLOCK)
        place = store.home.recorded_place()
        store.put(RUN_FILE, seal(RunRecord(run_id=RUN_ID, time=host.clock.now(), place=place)))
        self.trainer = host.attach()
        host.save(self.trainer, 1)
        host.settle()
        self.backup = self.copy("backup")
        host.save(self.trainer, 2, durable=False)
        host.settle()

    def killed(self) -> None:
        self.host.crash_agent()
        self.host.kill_trainer(self.trainer)

    def copy(self, name: str, source: Path | None = None) -> Path:
        return Path(shutil.copytree(source or self.run, self.root / name))

    def moved(self, name: str = "new") -> Path:
        """Moves the run as `mv` does to another file system."""
        new = self.copy(name)
        shutil.rmtree(self.run)
        return new


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setenv(RAM_VARIABLE, str(tmp_path / "ram"))
    monkeypatch.setenv(HOST_VARIABLE, "host-a")
    folder = tmp_path / "ram" / f"{RUN_ID}-host-a"
    with in_process_host(tmp_path, run=tmp_path / "old" / "run", folder=folder) as host:
        yield Rig(tmp_path, host)


def finding(place: Path, *, takeover: bool = False) -> Finding:
    store = DiskStore(place, CLOCK)
    return find_with_ram(store, read_run_record(store, ""), CLOCK, takeover=takeover)


def opened_id(place: Path, *, takeover: bool = False) -> str:
    rendezvous = Rendezvous(OwnProcess(), CLOCK)
    return open_run(place, rendezvous, CLOCK, takeover=takeover).run_id


def moved(rig: Rig) -> Path:
    rig.killed()
    return rig.moved()


def put_back(rig: Rig) -> Path:
    rig.killed()
    shutil.rmtree(rig.run)
    return Path(shutil.copytree(rig.backup, rig.run))


def moved_and_another_run_begun(rig: Rig) -> Path:
    rig.killed()
    new = rig.moved()
    opened_id(rig.run)
    return new


def moved_under_its_agent(rig: Rig) -> Path:
    new = rig.moved()
    watch = rig.host.agent.directory
    rig.host.call(watch.check_once())
    rig.killed()
    # So that only what the agent saw shows that it was moved.
    rig.run.parent.rmdir()
    return new


def copied(rig: Rig) -> Path:
    rig.killed()
    return rig.copy("new")


def copied_and_renamed(rig: Rig) -> Path:
    rig.killed()
    new = rig.copy("new")
    rig.run.rename(rig.run.with_name("renamed"))
    return new


def copied_and_renamed_far_under_its_agent(rig: Rig) -> Path:
    new = rig.copy("new")
    watch = rig.host.agent.directory
    rig.host.call(watch.check_once())
    rig.run.rename(rig.root / "far")
    rig.host.call(watch.check_once())
    rig.killed()
    return new


def without_what_is_in_ram(rig: Rig) -> Path:
    rig.killed()
    shutil.rmtree(rig.run)
    shutil.rmtree(rig.host.folder)
    return rig.backup


def ram_is_durable(rig: Rig) -> Path:
    for step in (3, 4):
        rig.host.save(rig.trainer, step)
        rig.host.settle()
    rig.killed()
    return rig.moved()


def ram_of_a_later_attempt(rig: Rig) -> Path:
    rig.host.kill_trainer(rig.trainer)
    rig.host.settle()
    rig.trainer = rig.host.attach()
    rig.host.agent.storage_worker.threads._reading.submit(int).result()
    rig.host.save(rig.trainer, 5, durable=False)
    rig.host.settle()
    rig.killed()
    shutil.rmtree(rig.run)
    return rig.backup


CASES: dict[Callable[[Rig], Path], Finding] = {
    moved: MOVED,
    put_back: MOVED,
    moved_and_another_run_begun: MOVED,
    moved_under_its_agent: MOVED,
    copied: COPY,
    copied_and_renamed: COPY,
    copied_and_renamed_far_under_its_agent: COPY,
    without_what_is_in_ram: COPY,
    ram_is_durable: COPY,
    ram_of_a_later_attempt: COPY,
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_whether_a_run_was_moved_shows_by_its_ram(rig: Rig, case: Callable[[Rig], Path]) -> None:
    place = case(rig)
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    assert finding(place) is CASES[case]
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before
    assert (opened_id(place) == RUN_ID) is (CASES[case] is MOVED)


def test_steps_in_ram_that_are_not_of_a_directory_are_named(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    place = ram_of_a_later_attempt(rig)
    opened_id(place)
    assert f"step 5 in this host's RAM ({rig.host.folder})" in caplog.text


def test_of_two_copies_of_a_run_that_was_moved_the_first_one_gets_the_ram(rig: Rig) -> None:
    rig.killed()
    second, third = rig.copy("second"), rig.copy("third")
    first = rig.moved("first")
    assert opened_id(first) == RUN_ID
    assert opened_id(second) != RUN_ID
    # Also once the first one is gone: its RAM is not that of a copy of the original.
    shutil.rmtree(first)
    assert opened_id(third) != RUN_ID


def test_a_start_that_ended_before_it_wrote_the_record_does_not_lose_the_ram(rig: Rig) -> None:
    rig.killed()
    new = rig.moved()
    before = (new / RUN_FILE).read_bytes()
    opened_id(new)
    (new / RUN_FILE).write_bytes(before)
    assert opened_id(new) == RUN_ID


@pytest.mark.parametrize("why", ["not mounted", "left of it", "not noted", "cannot be looked for"])
def test_where_it_cannot_be_decided_the_start_is_refused_and_names_the_steps(
    rig: Rig, why: str
) -> None:
    rig.killed()
    new = rig.copy("new")
    if why == "left of it":
        # The live agent has written there while the directory was being removed.
        for path in rig.run.iterdir():
            path.unlink() if path.is_file() else shutil.rmtree(path)
        (rig.run / "events").mkdir()
    else:
        shutil.rmtree(rig.run)
    place = noted_place(rig.host.folder)
    assert place is not None
    if why == "not mounted":
        inode = place.identity.partition(":")[2]
        note_place(rig.host.folder, type(place)(path=place.path, identity=f"1:{inode}"))
    elif why == "cannot be looked for":
        rig.run.parent.rmdir()
    elif why == "not noted":
        (rig.host.folder / PLACE).unlink()
    before = {path: path.read_bytes() for path in new.rglob("*") if path.is_file()}
    with pytest.raises(RunBusyError, match=rf"{why}.*step 2 of that run.*takeover=True"):
        opened_id(new)
    assert {path: path.read_bytes() for path in new.rglob("*") if path.is_file()} == before
    assert opened_id(new, takeover=True) == RUN_ID


def test_no_agent_of_a_run_starts_in_the_directory_of_another_one(tmp_path: Path) -> None:
    run, folder = tmp_path / "run", tmp_path / "agent"
    run.mkdir()
    folder.mkdir()
    DiskStore(run, CLOCK).put(RUN_FILE, seal(RunRecord(run_id=RUN_ID, time=CLOCK.now())))
    config = AgentConfig(run=str(run), run_id="f" * 32, host="h", folder=str(folder))
    with pytest.raises(AgentUnavailableError, match=f"expected run {'f' * 32}, found {RUN_ID}"):
        main(msgspec.json.encode(config).decode(), lambda code: None)
