"""The agent works on one directory: no trainer of another one is admitted; it leaves with it."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from holdfast.engine.lifecycle.catalog import list_checkpoints
from holdfast.errors import AgentUnavailableError, RunBusyError, StorageError
from holdfast.format.names import RUN_FILE
from holdfast.format.records import RunRecord
from holdfast.format.sealed import seal
from holdfast.host.tiers.directory_watch import UNREACHABLE_SECS, DirectoryWatch
from holdfast.host.tiers.ram_place import noted_place
from holdfast.host.wire.agent_directory import GROUP
from holdfast.host.wire.config import LINGER_SECS
from holdfast.host.wire.group_record import read_record
from holdfast.host.wire.protocol import Attach, TierPolicies
from holdfast.policy.preservation_policy import LatestN
from holdfast.store.run_directory import RunDirectory
from tests.manifests import manifests
from tests.store.places import mounted
from tests.trust.in_process import InProcessHost, in_process_host


def request(path: Path, directory: str) -> Attach:
    return Attach(
        group="another",
        rank=0,
        count=1,
        attempt=None,
        takeover=False,
        durable=TierPolicies(save=None, preserve=None),
        ram=None,
        ram_limit_bytes=None,
        linger_secs=0.0,
        run=str(path),
        directory=directory,
    )


def look(host: InProcessHost) -> DirectoryWatch:
    """Lets the agent look at its directory once; its watch."""
    assert host.service is not None
    watch = host.agent.directory
    host.call(watch.check_once())
    return watch


def test_a_trainer_of_another_directory_is_refused_by_name(tmp_path: Path) -> None:
    with in_process_host(tmp_path) as host:
        host.start_agent()
        trainer = host.attach()
        other = Path(shutil.copytree(host.run, tmp_path / "other"))
        with pytest.raises(
            RunBusyError, match=rf"open {other}: .* live .* at {host.run} \(process"
        ):
            host.call(host.service.attach(request(other, RunDirectory(other).identity_text), 1))
        assert [member.pid for member in host.agent.trainers.group.present] == [trainer.process.pid]


def test_a_lingering_agent_says_to_a_trainer_of_another_directory_when_it_leaves(
    tmp_path: Path,
) -> None:
    with in_process_host(tmp_path) as host:
        host.start_agent()
        trainer = host.attach()
        host.save(trainer, 1)
        host.kill_trainer(trainer)
        host.settle()
        other = Path(shutil.copytree(host.run, tmp_path / "other"))
        with pytest.raises(AgentUnavailableError, match=r"has no trainer, and leaves .* in \d+"):
            host.call(host.service.attach(request(other, RunDirectory(other).identity_text), 1))


def test_a_directory_is_the_same_by_its_path_where_its_device_has_another_number(
    tmp_path: Path,
) -> None:
    with in_process_host(tmp_path) as host:
        host.start_agent()
        process = host.start_process()
        try:
            host.call_and_wait(host.service.attach(request(host.run, "1:1"), process.pid))
            assert host.agent.trainers.group.present
        finally:
            process.kill()
            process.wait()


def lost(host: InProcessHost) -> str:
    """Lets the agent see that its directory is gone, and leave; what it tells its trainers."""
    assert look(host).is_lost
    notices = host.call(host.agent.trainers.notices.after(0))
    assert notices.notices[-1].kind == "lost"
    host.clock.sleep(1.1)
    assert host.service is not None
    assert host.agent.leaves_in_secs() == 0.0
    return notices.notices[-1].reason


def test_an_agent_leaves_once_its_directory_was_deleted(tmp_path: Path) -> None:
    with in_process_host(tmp_path) as host:
        host.start_agent()
        trainer = host.attach()
        host.save(trainer, 1)
        host.settle()
        host.kill_trainer(trainer)
        host.settle()
        assert not look(host).is_lost
        word = RunDirectory(host.run).identity_text
        shutil.rmtree(host.run)
        with pytest.raises(StorageError, match=f"{host.run}: it was deleted"):
            host.call(host.service.attach(request(host.run, word), 1))
        text = lost(host)
        assert f"{host.run}: it was deleted" in text
        assert "RAM" not in text
        assert host.agent.is_all_durable


@pytest.mark.parametrize("is_durable", [False, True])
def test_what_may_be_in_ram_alone_stays_there_when_the_directory_is_gone(
    tmp_path: Path, is_durable: bool
) -> None:
    with in_process_host(tmp_path) as host:
        host.ram_preserve = LatestN(2)
        host.start_agent()
        trainer = host.attach()
        host.save(trainer, 1)
        host.settle()
        # With trainers attached also a durable one: a move may have passed the place of its commit.
        host.save(trainer, 2, durable=is_durable)
        host.settle()
        assert len(manifests(host.run)) == 1 + is_durable
        shutil.rmtree(host.run)
        assert f"RAM ({host.folder}) keeps step 2, " in lost(host)
        assert host.service is not None
        assert not host.agent.is_all_durable
        host.crash_agent()
        ram, _ = host.stores()
        assert [c.step for c, listing in list_checkpoints(ram).items() if listing.parts] == [2]
        assert len(list((host.folder / "ram" / "slots").iterdir())) == 1
        place = noted_place(host.folder)
        assert place is not None
        assert (place.path, place.is_gone) == (str(host.run), True)
        # The trainer lives. It belongs to no agent any more, so that another start can take over.
        record = read_record(host.folder / GROUP)
        assert record is not None
        assert [member.is_alive for member in record.members] == [False]


@pytest.mark.parametrize("has_earlier", [False, True])
def test_what_is_saved_until_the_trainers_read_that_the_directory_is_gone_stays_too(
    tmp_path: Path, has_earlier: bool
) -> None:
    with in_process_host(tmp_path) as host:
        host.ram_preserve = LatestN(1)
        host.start_agent()
        trainer = host.attach()
        if has_earlier:
            host.save(trainer, 1)
        host.settle()
        shutil.rmtree(host.run)
        assert look(host).is_lost
        # It takes the place of step 1.
        host.save(trainer, 2, durable=False)
        host.settle()
        agent = host.agent
        host.crash_agent()
        assert not agent.is_all_durable
        ram, _ = host.stores()
        assert [c.step for c, listing in list_checkpoints(ram).items() if listing.parts] == [2]
        place = noted_place(host.folder)
        assert place is not None
        assert place.is_gone


def test_an_agent_that_leaves_an_unmounted_directory_keeps_what_ram_alone_has(
    tmp_path: Path,
) -> None:
    with in_process_host(tmp_path, run=tmp_path / "run") as host:
        with mounted("tmpfs", host.run):
            host.start_agent()
            trainer = host.attach()
            host.save(trainer, 1, durable=False)
            host.settle()
        host.kill_trainer(trainer)
        for _ in range(3):
            host.call(asyncio.sleep(0.05))
            look(host)
            host.clock.sleep(UNREACHABLE_SECS)
        assert "keeps step 1, " in lost(host)
        assert host.service is not None
        assert not host.agent.is_all_durable
        place = noted_place(host.folder)
        assert place is not None
        assert not place.is_gone


def test_the_place_beside_the_ram_follows_a_directory_that_is_renamed(tmp_path: Path) -> None:
    with in_process_host(tmp_path) as host:
        host.start_agent()
        host.attach()
        host.settle()
        look(host)
        host.run.rename(tmp_path / "renamed")
        look(host)
        place = noted_place(host.folder)
        assert place is not None
        assert place.path == str(tmp_path / "renamed")


def test_an_agent_whose_directory_was_replaced_makes_way_for_another_one(tmp_path: Path) -> None:
    with in_process_host(tmp_path) as host:
        host.start_agent()
        shutil.move(host.run, tmp_path / "gone")
        shutil.copytree(tmp_path / "gone", host.run)
        shutil.rmtree(tmp_path / "gone")
        # It answers nothing any more: the caller finds it gone, and starts the next one.
        attaching = host.service.attach(request(host.run, RunDirectory(host.run).identity_text), 1)
        with pytest.raises(TimeoutError):
            host.call(asyncio.wait_for(attaching, 0.5))
        assert host.agent.directory.is_lost


def test_an_agent_that_leaves_admits_no_trainer(tmp_path: Path) -> None:
    with in_process_host(tmp_path) as host:
        host.start_agent()
        assert host.service is not None
        host.clock.sleep(LINGER_SECS + 1)
        assert host.agent.leaves_in_secs() == 0.0
        host.call(host.agent.act_until_exit())
        before = sorted((host.run / "attempts").glob("*"))
        attaching = host.service.attach(request(host.run, RunDirectory(host.run).identity_text), 1)
        # The caller finds no agent once this one has left, and starts the next one.
        with pytest.raises(TimeoutError):
            host.call(asyncio.wait_for(attaching, 0.5))
        assert not host.agent.sessions.is_starting
        # Nor has it begun an attempt, which the next one would take over.
        assert sorted((host.run / "attempts").glob("*")) == before


def test_an_unmounted_directory_is_given_up_late_and_not_while_a_trainer_lives(
    tmp_path: Path,
) -> None:
    with in_process_host(tmp_path, run=tmp_path / "run") as host:
        with mounted("tmpfs", host.run):
            host.start_agent()
            trainer = host.attach()
        for _ in range(3):
            assert not look(host).is_lost
            host.clock.sleep(UNREACHABLE_SECS)
        host.kill_trainer(trainer)
        host.call(asyncio.sleep(0.05))
        assert look(host).is_lost


def test_nothing_is_committed_or_begun_where_the_record_names_another_run(tmp_path: Path) -> None:
    with in_process_host(tmp_path) as host:
        host.start_agent()
        trainer = host.attach()
        host.save(trainer, 1)
        data = seal(RunRecord(run_id="another", time=host.clock.now()))
        host.agent.run.durable.put(RUN_FILE, data)
        host.settle()
        assert not manifests(host.run)
        with pytest.raises(StorageError, match=r"expected run .*, found run another"):
            host.attach(takeover=True)
        assert sorted(p.name for p in (host.run / "attempts").iterdir()) == [
            "000000001.copy.json",
            "000000001.json",
        ]
