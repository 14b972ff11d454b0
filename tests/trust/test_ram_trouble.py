"""Take RAM that is too small, fills up, is wiped, or is missing: no SIGBUS, and the disk works on.

Real processes, on a tmpfs of the test's own as the host's RAM. Whatever happens to it, the trainer
survives and trains on, checkpoints keep becoming durable, and each lost save is reported once.

If another process changes the RAM tier's files: they are checked right before each MiB is filled,
so that a file that was truncated, or has holes, is an error. A process that truncates one in the
moment in which a MiB is copied into it can still kill the trainer with a SIGBUS.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.host.wire.agents_here import living
from holdfast.host.wire.group_record import GroupRecord, read_record, write_record
from tests.attempts import attempt_id
from tests.hosts import Host, ending, events, host, is_running, wait_until
from tests.store.places import mounted
from tests.trust.cgroups import memory_cgroup
from tests.trust.failing_rig import (
    Trainer,
    check_restorable,
    committed,
    fill_up,
    told,
    trainer,
)
from tests.trust.figures import tell

MIB = 1 << 20


@contextlib.contextmanager
def ram_of(size_bytes: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A host whose RAM is a tmpfs of that size; this process is on it."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a tmpfs")
    with host() as made:
        # Where RAM has no room, agents have their folders here: a place that no other test has.
        disk = made.folder.with_name(f"{made.folder.name}-disk")
        disk.mkdir()
        made.variables["TMPDIR"] = str(disk)
        monkeypatch.setattr("tempfile.tempdir", str(disk))
        options = f"size={size_bytes},mode=700"
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(made.folder)]
        subprocess.run(command, check=True)
        monkeypatch.setenv("HOLDFAST_RAM", str(made.folder))
        monkeypatch.setenv("HOLDFAST_HOST", made.name)
        try:
            yield made
        finally:
            made.end()
            # A test may have unmounted it.
            subprocess.run(["umount", "-l", str(made.folder)], check=False, capture_output=True)
            shutil.rmtree(disk)


@pytest.fixture
def small_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    with ram_of(8 * MIB, monkeypatch) as made:
        yield made


# What happens to the RAM. Each gets the host, and is done while the trainer trains.


def agent_folder(one: Host) -> Path:
    (folder,) = [path for path in one.folder.iterdir() if path.is_dir()]
    return folder


def fill(one: Host) -> None:
    fill_up(one.folder)


def remove(path: Path) -> None:
    """Remove a file or a folder, with what processes rename and add there meanwhile."""
    while path.exists():
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def wipe_folder(one: Host) -> None:
    """All that the agent and the trainers share, with the socket and the lock."""
    for path in [*agent_folder(one).iterdir()]:
        remove(path)


def remove_folder(one: Host) -> None:
    remove(agent_folder(one))


def wipe_ram(one: Host) -> None:
    remove(agent_folder(one) / "ram")


def wipe_images(one: Host) -> None:
    remove(agent_folder(one) / "ram" / "checkpoints")


def slots(one: Host) -> list[Path]:
    with contextlib.suppress(FileNotFoundError):
        return list((agent_folder(one) / "ram" / "slots").iterdir())
    return []


def cut_slots(one: Host) -> None:
    for slot in slots(one):
        os.truncate(slot, 0)


def hollow_slots(one: Host) -> None:
    """Each slot has its size, and no memory; nor is there any to be had."""
    for slot in slots(one):
        size = slot.stat().st_size
        os.truncate(slot, 0)
        os.truncate(slot, size)
    fill_up(one.folder)


def unmount(one: Host) -> None:
    subprocess.run(["umount", "-l", str(one.folder)], check=True)


TROUBLES = [
    *(fill, wipe_folder, remove_folder, wipe_ram, wipe_images, cut_slots, hollow_slots, unmount)
]


def train_through(one: Host, folder: Path, trouble: Callable[[Host], None]) -> int:
    """Train, make the trouble, train on; return how many saves were reported as failed."""
    run = folder / "run"
    with trainer(one, run, folder / "until") as training:
        training.await_commit(run, -1)
        trouble(one)
        goes_on(training, run)
        # The agent that cannot be found any more has exited, and another one has started.
        wait_until(lambda: len(one.agent_processes()) == 1 and _count_agents(run) == 1)
        failures = ends_well(training, run)
    assert check_restorable(run) == committed(run)
    return failures


def _count_agents(run: Path) -> int:
    """How many agents of the run answer, wherever their folders are."""
    return sum(status.run == str(run) for status in living())


def goes_on(training: Trainer, run: Path) -> None:
    """It trains, and two checkpoints of later steps become durable."""
    first = training.now()
    training.go_on(20)
    training.await_commit(run, training.await_commit(run, first))


def ends_well(training: Trainer, run: Path) -> int:
    assert training.end() == 0, training.told()
    warnings = "".join(training.errors)
    assert warnings.count("no RAM for checkpoints") <= 1, warnings
    told_of = [step for step, _ in training.failures()]
    assert len(set(told_of)) == len(told_of)
    assert not set(told_of) & set(told(run, "committed")), "it was made all the same"
    return len(told_of)


@pytest.mark.parametrize("trouble", [wipe_folder, hollow_slots], ids=lambda one: one.__name__)
def test_ram_that_is_lost_between_two_saves_costs_no_more_than_what_stood_there(
    small_host: Host, tmp_path: Path, trouble: Callable[[Host], None]
) -> None:
    train_through(small_host, tmp_path, trouble)


@pytest.mark.soak
@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda one: one.__name__)
def test_no_trouble_with_ram_ends_the_training(
    small_host: Host, tmp_path: Path, trouble: Callable[[Host], None]
) -> None:
    failures = train_through(small_host, tmp_path, trouble)
    tell(
        f"RAM trouble, {trouble.__name__.replace('_', ' ')}",
        "no SIGBUS, the disk tier goes on",
        f"trained on and committed; {failures} saves told as failed",
    )


@pytest.mark.soak
def test_ram_that_is_too_small_from_the_start_is_said_once_and_the_disk_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with ram_of(MIB, monkeypatch) as one:
        with trainer(one, run, tmp_path / "until", size=500_000) as training:
            goes_on(training, run)
            assert ends_well(training, run) == 0
            assert "".join(training.errors).count("no RAM for checkpoints") == 1
        assert len(events(run, "ram_unavailable")) == 1
        check_restorable(run)


def test_a_group_that_finds_no_room_leaves_no_older_one(tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path / "ram", "size=64k") as folder:
        path = folder / "group.json"
        write_record(path, GroupRecord(group="first", attempt=attempt_id(1), count=1))
        found = read_record(path)
        assert found is not None
        assert found.attempt == attempt_id(1)
        fill_up(folder)
        write_record(path, GroupRecord(group="second", attempt=attempt_id(2), count=1))
        assert read_record(path) is None


@pytest.fixture
def one_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A host of the test's own, for this process as well."""
    with host() as made:
        monkeypatch.setenv("HOLDFAST_RAM", str(made.folder))
        monkeypatch.setenv("HOLDFAST_HOST", made.name)
        yield made


RESERVING = """
import sys
from pathlib import Path
from holdfast.clock import SystemClock
from holdfast.errors import OutOfSpaceError
from holdfast.store.slots import SlotPool

print("ready", flush=True)
sys.stdin.readline()
pool = SlotPool(Path(sys.argv[1]), None, SystemClock())
names = []
try:
    for _ in range(100):
        names.append(pool.reserve(int(sys.argv[2]), names))
except OutOfSpaceError as error:
    print(len(names), error)
"""


def test_slots_are_never_reserved_past_the_memory_limit(one_host: Host) -> None:
    size = 4 * MIB
    with memory_cgroup() as group:
        command = [sys.executable, "-c", RESERVING, str(one_host.folder), str(size)]
        pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
        with ending(subprocess.Popen(command, text=True, **pipes)) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            group.add(process.pid)
            group.set_limit(group.usage_bytes() + 40 * MIB)
            out, _ = process.communicate("go\n", timeout=240)
        assert process.returncode == 0, f"it was killed: {process.returncode}"
        assert "the memory limit of this process's cgroup leaves" in out
        # A tenth is left, and no more than that and a slot.
        assert 8 <= int(out.split()[0]) <= 9
        assert group.kills() == 0


@pytest.mark.soak
def test_an_agent_that_is_killed_for_its_memory_is_followed_by_another(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with memory_cgroup() as group:
        with trainer(one_host, run, tmp_path / "until") as training:
            training.await_commit(run, -1)
            pid = one_host.agent().pid
            group.add(pid)
            group.set_limit(MIB)
            wait_until(lambda: not is_running(pid))
            goes_on(training, run)
            ends_well(training, run)
        assert group.kills() >= 1
        one_host.end()
    check_restorable(run)
