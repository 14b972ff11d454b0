"""A run on ext4 on a disk whose power can be cut, and what each cut is asked.

`powered` lays a file system on a `power_disk` and mounts it; `cut_run` trains there while the power
is cut again and again; `problems_of` opens what one cut left, as a machine does that comes back: a
new mount, an empty RAM, new processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.run import create_run
from holdfast.host.wire.config import AgentConfig
from holdfast.local_agent.client import answers
from holdfast.local_agent.place import make_private
from holdfast.store.disk import DiskStore
from tests.hosts import Host, ending, host, wait_until

HERE = Path(__file__).parent
TRAINER = HERE / "power_trainer.py"
RUN_ID = "0123456789abcdef0123456789abcdef"
IMAGE_SIZE = "64M"
WAIT_SECS = 240.0
TRIES_MAX = 20


def why_not() -> str | None:
    """Why the power cannot be cut here, or None."""
    if os.geteuid() != 0:
        return "to mount file systems needs root"
    for tool in ("mkfs.ext4", "fsck.ext4", "losetup", "mount", "umount"):
        if shutil.which(tool) is None:
            return f"there is no {tool}"
    for device in ("/dev/fuse", "/dev/loop-control"):
        if not os.access(device, os.R_OK | os.W_OK):
            return f"there is no {device} that can be used"
    with tempfile.TemporaryDirectory() as folder:
        try:
            with powered(Path(folder), ""):
                return None
        except (OSError, PowerError) as error:
            return f"a disk of a test's own cannot be mounted: {error}"


class PowerError(Exception):
    """A tool that the test needs failed: which one, and its output."""


def tool(*command: str | Path, codes: tuple[int, ...] = (0,)) -> str:
    """Runs a system's tool."""
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=WAIT_SECS
    )
    if done.returncode not in codes:
        said = (done.stdout + done.stderr).strip()
        raise PowerError(f"{' '.join(map(str, command))}: exit code {done.returncode}: {said}")
    return done.stdout.strip()


# The disk, and what is mounted on it.


@contextlib.contextmanager
def loop_device(file: Path, *options: str) -> Iterator[str]:
    """A block device on a file."""
    device = tool("losetup", "--find", "--show", *options, file)
    try:
        yield device
    finally:
        tool("losetup", "--detach", device)


@contextlib.contextmanager
def mounted(device: str | Path, where: Path, options: str = "") -> Iterator[Path]:
    """Mount an ext4 file system; at the end its users are stopped first."""
    where.mkdir(exist_ok=True)
    tool("mount", "-t", "ext4", "-o", options or "defaults", device, where)
    try:
        yield where
    finally:
        _unmount(where)


def _unmount(where: Path) -> None:
    """Unmounts; a process that was just killed may hold the mount for a moment yet."""
    for _ in range(TRIES_MAX):
        try:
            tool("umount", where)
        except PowerError:
            time.sleep(0.1)
        else:
            return
    tool("umount", "--lazy", where)
    raise PowerError(f"{where} stays in use")


@dataclass
class PowerDisk:
    """A disk that is on; `run` lies on it."""

    process: subprocess.Popen[bytes]
    run: Path
    _said: bytes = b""

    def told(self, secs: float) -> dict[str, Any] | None:
        """The disk's next line, None where there is none within `secs`."""
        deadline = time.monotonic() + secs
        while b"\n" not in self._said:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self.process.stdout], [], [], left)[0]:
                return None
            more = os.read(self.process.stdout.fileno(), 65536)
            if not more:
                raise PowerError(f"the disk ended: {self.process.stderr.read()[-2000:]!r}")
            self._said += more
        line, _, self._said = self._said.partition(b"\n")
        return json.loads(line)

    def begin_cuts(self, seed: str, count: int, gap: int) -> None:
        """From here on the power is cut `count` times, each after 1 to `gap` writes and flushes."""
        told = json.dumps({"seed": seed, "cuts": count, "gap": gap}) + "\n"
        self.process.stdin.write(told.encode())
        self.process.stdin.flush()


@contextlib.contextmanager
def powered(folder: Path, options: str) -> Iterator[PowerDisk]:
    """A new disk with a new ext4, mounted with `options`; all of it is gone on leaving."""
    image, file, cuts = folder / "new.img", folder / "disk", folder / "cuts"
    cuts.mkdir()
    file.touch()
    with image.open("wb") as new:
        new.truncate(int(IMAGE_SIZE[:-1]) * 1024 * 1024)
    made = "lazy_itable_init=0,lazy_journal_init=0,nodiscard"
    tool("mkfs.ext4", "-q", "-b", "4096", "-J", "size=4", "-E", made, image)
    with _disk_process(image, file, cuts) as process:
        disk = PowerDisk(process, folder / "mounted" / "run")
        if disk.told(WAIT_SECS) is None:
            raise PowerError("the disk does not come up")
        with (
            _unmounted(file),
            loop_device(file, "--sector-size", "4096") as device,
            mounted(device, folder / "mounted", options),
        ):
            cache = Path("/sys/block") / Path(device).name / "queue" / "write_cache"
            if cache.read_text().strip() != "write back":
                raise PowerError(f"{device} takes no flushes: its cache is {cache.read_text()!r}")
            yield disk


@contextlib.contextmanager
def _disk_process(*arguments: Path) -> Iterator[subprocess.Popen[bytes]]:
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, HERE / "power_disk.py", *arguments]
    with ending(subprocess.Popen([str(word) for word in command], **pipes)) as process:
        try:
            yield process
        finally:
            process.communicate(timeout=WAIT_SECS)


@contextlib.contextmanager
def _unmounted(file: Path) -> Iterator[None]:
    try:
        yield
    finally:
        _unmount(file)


# The run on it.


@dataclass(frozen=True)
class Cut:
    """One cut: the path of its image, its time, and the disk's report of it."""

    image: Path
    time: float
    kept: str
    cached: int
    lost: int
    request: int


@dataclass(frozen=True)
class Setting:
    """How a run is made: ext4's mount options, whether it has a RAM tier, what is not synced."""

    options: str
    ram: bool = True
    not_synced: str = ""


@dataclass(frozen=True)
class Actions:
    """The actions that the trainer reported; see `power_trainer`."""

    begun: list[dict[str, Any]]
    acknowledged: list[dict[str, Any]]

    def at(self, cut: Cut) -> tuple[list[dict[str, Any]], int]:
        """Return the actions that may be the last to survive `cut`, and the last acknowledged."""
        sure = max(
            (a["acknowledged"] for a in self.acknowledged if a["time"] < cut.time), default=0
        )
        nothing = {"action": 0, "newest": None, "second": None}
        actions = [nothing, *(d for d in self.begun if d["begun"] < cut.time)]
        return [action for action in actions if action["action"] >= sure], sure


def cut_run(
    folder: Path, setting: Setting, seed: str, count: int, gap: int
) -> tuple[list[Cut], Actions]:
    """Trains, and cuts the power `count` times; the training itself does not notice."""
    journal = folder / "journal"
    told = json.dumps({"seed": seed, "ram": setting.ram})
    with powered(folder, setting.options) as disk, host() as one:
        if setting.not_synced:
            _start_agent(one, disk.run, setting.not_synced)
        disk.begin_cuts(seed, count, gap)
        trainer = one.start(TRAINER, "train", disk.run, journal, told, stem="jax", XLA_FLAGS="")
        cuts = []
        deadline = time.monotonic() + WAIT_SECS
        while len(cuts) < count:
            assert trainer.poll() is None, trainer.communicate()[1]
            assert time.monotonic() < deadline, f"{len(cuts)} of {count} cuts in {WAIT_SECS} s"
            line = disk.told(1.0)
            if line is not None:
                cuts.append(Cut(**line | {"image": Path(line["image"])}))
    return cuts, _read(journal)


def _read(journal: Path) -> Actions:
    lines = []
    for line in journal.read_text().splitlines() if journal.exists() else []:
        # The trainer was killed: its last line may be cut short.
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(line))
    return Actions(
        begun=[line for line in lines if "action" in line],
        acknowledged=[line for line in lines if "acknowledged" in line],
    )


def _start_agent(one: Host, run: Path, not_synced: str) -> None:
    """An agent that does not sync all; the trainer finds it there and starts none."""
    run.mkdir()
    clock = SystemClock()
    create_run(DiskStore(run, clock), str(run), RUN_ID, clock.now())
    folder = one.folder / f"{RUN_ID}-{one.name}"
    make_private(folder)
    config = AgentConfig(run=str(run), run_id=RUN_ID, host=one.name, folder=str(folder))
    one.start(HERE / "power_agent.py", not_synced, msgspec.json.encode(config).decode())
    wait_until(lambda: answers(folder))


# What comes back.


def problems_of(cut: Cut, actions: Actions, setting: Setting, folder: Path) -> list[str]:
    """All that is not as promised in what `cut` left; its image is removed."""
    folder.mkdir()
    try:
        return list(_problems(cut, actions, setting, folder))
    except PowerError as error:
        return [str(error)]
    finally:
        cut.image.unlink()


def _problems(cut: Cut, actions: Actions, setting: Setting, folder: Path) -> Iterator[str]:
    options = setting.options
    with loop_device(cut.image, "--sector-size", "4096") as device:
        with mounted(device, folder / "mounted", options):
            pass  # the journal is replayed
        tool("fsck.ext4", "-fn", device)
        with mounted(device, folder / "mounted", options) as root, host() as again:
            run = root / "run"
            possible, sure = actions.at(cut)
            if sure:
                yield from _verified(again, run)
            trainer = again.start(
                *(TRAINER, "check", run, json.dumps({"ram": setting.ram})),
                stem="jax",
                XLA_FLAGS="",
            )
            out, err = trainer.communicate(timeout=WAIT_SECS)
            if trainer.returncode != 0:
                yield f"the run does not come back: {err[-3000:]}"
                return
            found = json.loads(out.splitlines()[-1])
            yield from _amiss(found, possible, sure)
            for action in actions.begun[:sure]:
                back = [save for save in action["gone"] if save in found["saves"]]
                if back:
                    yield f"{back} came back; {action} was acknowledged"
            yield from _verified(again, run)


def _verified(again: Host, run: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "holdfast", "verify", str(run), "--json"]
    done = subprocess.run(
        command, env=again.environment, capture_output=True, text=True, timeout=WAIT_SECS
    )
    if done.returncode != 0:
        yield f"verify, exit code {done.returncode}: {done.stdout[-3000:]}{done.stderr[-3000:]}"


def _amiss(found: dict[str, Any], possible: list[dict[str, Any]], sure: int) -> Iterator[str]:
    """What a trainer found that it should not have; see `power_trainer` for `found`."""
    if found["wrong"]:
        yield f"steps {found['wrong']} have wrong bits"
    if found["told"]:
        yield f"something was bad: {found['told']}"
    if not any(_fits(found, action, possible, sure) for action in possible):
        yield f"found {found}, expected what one of these left: {possible}; {sure} was acknowledged"


def _fits(
    found: dict[str, Any], action: dict[str, Any], possible: list[dict[str, Any]], sure: int
) -> bool:
    """Return whether `action` left what was found; its second save must exist if it was sure."""
    if found["newest"] != action["newest"]:
        return False
    second = action["second"]
    first = possible[0]
    was_sure = sure > 0 and second in (first["newest"], first["second"])
    return second is None or not was_sure or second in found["saves"]
