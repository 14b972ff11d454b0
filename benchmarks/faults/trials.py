"""Run a program under a fault, start it again, and judge what it said and what was restored."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.faults.acts import FAULTS, STATE_BYTES, Fault, NotTriedError, Trial, lose_ram
from benchmarks.faults.libraries import IN_BUCKETS, LAST
from tests.buckets.fault_proxy import FaultProxy, Request

ROOM_STATES = 5
"""The file system has room for so many states."""
PROGRAM_SECS = 120.0
FAILURE = re.compile(r"error|fail|cannot|could not|damage|corrupt|died|no space", re.IGNORECASE)
MESSAGE_CHARS = 300
BAD_REQUESTS = 20


class S3(NamedTuple):
    """A server behind a proxy, the variables of its clients, and the URL of its bucket."""

    proxy: FaultProxy
    variables: dict[str, str]
    url: str


@dataclass(frozen=True)
class Outcome:
    """What came of one trial.

    Attributes:
        save: How the program ended: "well", "error", "killed" or "hang".
        message: The line that says it, of an exception or of a log; empty: none.
        found: The step that the restart has, "wrong" for bytes of no step, "error", None for none.
        restart_message: The line in which the restart says it; empty: none.
    """

    save: str
    message: str
    found: int | str | None
    restart_message: str

    @property
    def verdict(self) -> str:
        """Return the words of the table."""
        if self.found == LAST:
            return "kept"
        saying = "said" if self.message or self.save == "error" else ""
        if self.save == "hang":
            saying = "**hangs**"
        if self.found == "wrong":
            return "; ".join(filter(None, (saying, "**wrong bytes**")))
        if self.found == "error":
            return "; ".join(filter(None, (saying, "no restore")))
        if self.restart_message and not saying:
            saying = "said"
        left = "all lost" if self.found is None else "step before"
        if not saying and self.save != "killed":
            saying = "**silent**"
        return "; ".join(filter(None, (saying, left)))

    def as_json(self) -> dict[str, Any]:
        """Return it with its verdict."""
        return {"verdict": self.verdict, **asdict(self)}


@contextlib.contextmanager
def file_system(size_bytes: int) -> Iterator[Path]:
    """A tmpfs of that size.

    Raises:
        NotTriedError: This user may not mount one.
    """
    folder = Path(tempfile.mkdtemp(prefix="holdfast-faults-"))
    mounted = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
    if subprocess.run(mounted, capture_output=True, check=False).returncode:
        folder.rmdir()
        raise NotTriedError("a file system of its own cannot be mounted")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()


def run(library: str, name: str, s3: S3) -> Outcome:
    """Return what came of the fault of that name with one library.

    Raises:
        NotTriedError: The fault cannot be had.
    """
    fault = FAULTS[name]
    ram = Path(tempfile.mkdtemp(prefix="holdfast-faults-", dir="/dev/shm"))
    try:
        if fault.in_bucket:
            return _run_in_bucket(library, fault, ram, s3)
        with file_system(ROOM_STATES * STATE_BYTES) as folder:
            return _run_at(library, fault, str(folder / "run"), ram, {})
    finally:
        shutil.rmtree(ram, ignore_errors=True)


def _run_in_bucket(library: str, fault: Fault, ram: Path, s3: S3) -> Outcome:
    if library not in IN_BUCKETS:
        raise NotTriedError("it writes to no S3")
    proxy = s3.proxy
    place = f"{s3.url}/{len(proxy.requests)}"
    left = [BAD_REQUESTS]

    def choose(request: Request) -> str | None:
        if request.method not in ("PUT", "POST") or not left[0]:
            return None
        left[0] -= 1
        return "slow down"

    def begin(trial: Trial) -> None:
        proxy.choose = choose

    try:
        return _run_at(library, Fault(before=begin), place, ram, s3.variables)
    finally:
        proxy.choose = lambda request: None


def _run_at(
    library: str, fault: Fault, place: str, ram: Path, variables: dict[str, str]
) -> Outcome:
    environment = os.environ | variables | {"HOLDFAST_RAM": str(ram), "HOLDFAST_HOST": "trial"}
    environment |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "benchmarks.faults.program", library, place]
    with tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [*command, "save"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
        )
        trial = Trial(Path(place), ram, process)
        try:
            save = _drive(trial, fault)
            err.seek(0)
            message = _failure_line(err.read())
            if fault.finished is not None:
                fault.finished(trial)
            found, restart_message = _restart(command, environment)
        finally:
            process.kill()
            process.communicate()
            lose_ram(trial)
    return Outcome(save, message, found, restart_message)


def _drive(trial: Trial, fault: Fault) -> str:
    """Lead the program through its save; return how it ended."""
    process = trial.process
    assert process.stdin is not None
    timer = threading.Timer(PROGRAM_SECS, process.kill)
    timer.start()
    try:
        _await(trial, "before")
        trial.sizes = {path: path.stat().st_size for path in trial.files()}
        if fault.before is not None:
            fault.before(trial)
        _tell(trial, "go")
        if fault.while_saving is not None:
            fault.while_saving(trial)
            process.wait()
            return "killed"
        if _await(trial, "after"):
            if fault.after is not None:
                fault.after(trial)
            _tell(trial, "exit" if fault.ends_without_wait else "go")
        code = process.wait()
    finally:
        is_late = not timer.is_alive()
        timer.cancel()
    return "hang" if is_late else "error" if code else "well"


def _await(trial: Trial, word: str) -> bool:
    """Read the program's output up to that line; return whether it came."""
    assert trial.process.stdout is not None
    return any(line.strip() == word for line in iter(trial.process.stdout.readline, ""))


def _tell(trial: Trial, word: str) -> None:
    assert trial.process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        trial.process.stdin.write(f"{word}\n")
        trial.process.stdin.flush()


def _failure_line(text: str) -> str:
    """Return the last line that tells of a failure; empty: there is none."""
    lines = [line.strip() for line in text.splitlines() if FAILURE.search(line)]
    if not lines:
        return ""
    # The places differ from run to run.
    line = re.sub(r"/\S*holdfast-faults-\w+", "PLACE", lines[-1])
    return line.replace(str(Path.home()), "~")[:MESSAGE_CHARS]


def _restart(command: list[str], environment: dict[str, str]) -> tuple[int | str | None, str]:
    try:
        done = subprocess.run(
            [*command, "restore"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PROGRAM_SECS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "error", "hang"
    if done.returncode:
        return "error", _failure_line(done.stderr) or done.stderr.strip().splitlines()[-1][
            :MESSAGE_CHARS
        ]
    return json.loads(done.stdout.splitlines()[-1])["found"], _failure_line(done.stderr)
