"""Take part in `holdfast prove`, which runs a program in a folder of its own, and kills it.

`holdfast prove` names that folder in `HOLDFAST_PROOF`. Then every run that the program opens is in
the folder, whatever directory it names, and its remote tier is left out: no real run is touched.
The checkpoints of the proof's steps are saved and kept, whatever the policies say. What a program
computes does not depend on that. Without the variable nothing of this module runs.

The folder has the orders for this process, and what it reports: the runs that it has opened, its
step, the state of its random generators at each save, and where it has stopped for a signal.
See docs/decisions/0062.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from holdfast import waits
from holdfast.adapt.program_facts import ProgramFacts, epochs_of, program_facts, random_streams
from holdfast.clock import Clock
from holdfast.environment import PROOF_VARIABLE
from holdfast.errors import FencedError, InvalidArgumentError
from holdfast.format.json_codec import decode
from holdfast.local_agent.place import is_locked, replace_file
from holdfast.policy.preservation_policy import LatestN
from holdfast.policy.save_decision_policy import (
    AnySavePolicy,
    FixedIntervalPolicy,
    SaveDecisionPolicy,
    SpecificStepsPolicy,
)
from holdfast.store.location import RunLocation
from holdfast.trainer.options import Options

ORDER = "order.json"
STOPPED = "stopped.json"
STEP = "step-"
"""The files with the step of each rank, in `STEP_BYTES` bytes, the highest ones first."""
STEP_BYTES = 8
STOP_SECS = 600.0
"""How long a process waits for the signal at a step at which it was ordered to stop."""
EACH_STEP_MAX = 16
"""Up to this step each one is saved; later ones at eighths of their powers of two."""
STEP_BITS_MAX = 48
_read_outside: set[str] = set()
"""The runs of others that this process has read, where the proof has none of its own."""


class ProofOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a process has to do for a proof.

    Attributes:
        every: the distance of the saved steps; None: it grows with the step.
        stop_step: the first step before whose save the process stops; None: it does not.
        stop_rank: the rank that stops.
        last_step: the last step of the proof, before whose successor rank 0 stops too; None: the
            program ends by itself.
    """

    every: int | None = None
    stop_step: int | None = None
    stop_rank: int = 0
    last_step: int | None = None


class ProofStop(msgspec.Struct, frozen=True, kw_only=True):
    """A process that has stopped, and waits for a signal or until this report is removed."""

    step: int
    pid: int
    is_last: bool


class ProofOpening(msgspec.Struct, frozen=True, kw_only=True):
    """A run that the program has opened: the place that it names, and the one that it gets."""

    place: str
    directory: str
    rank: int
    pid: int


class ProofSave(msgspec.Struct, frozen=True, kw_only=True):
    """What a process knows at a save, besides the state.

    Attributes:
        step: the step.
        streams: the digest of the state of each random generator that programs share, by name.
        epochs: the epoch of each sampler that has one.
        facts: what is known of the program; None after the first save of a process.
    """

    step: int
    streams: dict[str, str]
    epochs: dict[str, int]
    facts: ProgramFacts | None = None


def proof_steps(every: int | None, last_step: int | None) -> SaveDecisionPolicy:
    """Return the policy that saves a proof's steps, by the step alone.

    Without `every` these are all up to `EACH_STEP_MAX`, and then eight between each power of two
    and the next, so that a training of a million steps has some 140.
    """
    ends = [SpecificStepsPolicy([last_step])] if last_step is not None else []
    if every is not None:
        return AnySavePolicy([FixedIntervalPolicy(every), *ends])
    steps = list(range(EACH_STEP_MAX))
    for bits in range(EACH_STEP_MAX.bit_length() - 1, STEP_BITS_MAX):
        steps += [(1 << bits) + part * ((1 << bits) // 8) for part in range(8)]
    return AnySavePolicy([SpecificStepsPolicy(steps), *ends])


def _folder_of(place: object) -> Path | None:
    folder = os.environ.get(PROOF_VARIABLE)
    return folder_in(Path(folder), place) if folder else None


def folder_in(folder: Path, place: object) -> Path:
    """Return where a run that the program opens at `place` is, in the folder of its own run."""
    location = RunLocation.parse(place)
    runs = Path(folder, "runs")
    if location.text.startswith(f"{runs}/"):
        return location.folder
    name = re.sub(r"[^A-Za-z0-9._-]", "_", location.text.rstrip("/").rpartition("/")[2])
    return runs / f"{name}-{xxhash.xxh3_64_hexdigest(location.text.encode())}"


def place_to_read(place: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return where to read a run: in a proof, what the program has written itself is there."""
    folder = _folder_of(place)
    return folder if folder is not None and folder.exists() else place


def note_read(place: str | os.PathLike[str]) -> None:
    """Note, in a proof, that the program has read the run at `place`, which is not the proof's."""
    if os.environ.get(PROOF_VARIABLE):
        _read_outside.add(RunLocation.parse(place).text)


def place_to_write(place: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return where to write what the program saves to `place`: in a proof, in its folder."""
    folder = _folder_of(place)
    if folder is None:
        return place
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder


class ProofLink:
    """This process's part in a proof. Owned by the training thread.

    Args:
        folder: the folder of the program's run.
        rank: the rank of this process.
        clock: the time.
    """

    def __init__(self, folder: Path, rank: int, clock: Clock) -> None:
        self._folder = folder
        self._rank = rank
        self._clock = clock
        self._order = _read_order(folder)
        self._has_facts = False

    def redirected(self, place: str | os.PathLike[str]) -> str | os.PathLike[str]:
        """Return the directory of the run that the program opens, and report it.

        Raises:
            InvalidArgumentError: the program has read the real run there before.
            FencedError: the proof has ended.
        """
        self._check_proof("open a run")
        text = RunLocation.parse(place).text
        if text in _read_outside:
            raise InvalidArgumentError(
                f"open a run in a proof: expected a program that opens its CheckpointManager on "
                f"{text} before it reads the run there, found one that has read it first: it saw "
                "the real run, which is none of the proof's; read from the manager, or prove it "
                "with a directory that has no run yet"
            )
        directory = place_to_write(place)
        # The program may be started again, by its own launcher, with other orders.
        self._order = _read_order(self._folder)
        opening = ProofOpening(
            place=text,
            directory=str(directory),
            rank=self._rank,
            pid=os.getpid(),
        )
        self._append("openings", opening)
        return directory

    def options(self, options: Options) -> Options:
        """Return the options of a manager with the policies of the proof."""
        return replace(
            options,
            save=proof_steps(self._order.every, self._order.last_step),
            preservation=LatestN(None),
            remote=None,
            saves_each_due=True,
        )

    def reached(self, step: int, settle: Callable[[], None]) -> None:
        """Report a step; stop before its save, if that is ordered, until a signal or the end.

        Args:
            step: The step.
            settle: Waits until the saves in progress have ended, before the program is ended: else
                those of the last steps would be lost with it.

        Raises:
            FencedError: the proof has ended.
        """
        self._check_proof(f"save step {step}")
        order = self._order
        with open(self._folder / f"{STEP}{self._rank}", "wb") as file:
            file.write(step.to_bytes(STEP_BYTES))
        is_last = order.last_step is not None and step > order.last_step and self._rank == 0
        is_stop = (
            order.stop_step is not None
            and step >= order.stop_step
            and self._rank == order.stop_rank
        )
        if not (is_last or is_stop):
            return
        if is_last:
            settle()
        self._order = msgspec.structs.replace(order, stop_step=None)
        path = self._folder / STOPPED
        stop = ProofStop(step=step, pid=os.getpid(), is_last=is_last)
        replace_file(path, msgspec.json.encode(stop))
        until_secs = self._clock.monotonic() + STOP_SECS
        while path.exists() and self._clock.monotonic() < until_secs:
            self._check_proof(f"save step {step}")
            waits.sleep(self._clock, 0.002)

    def _check_proof(self, action: str) -> None:
        # What goes on after a proof that was killed would train into its folder, unseen.
        if not is_locked(self._folder):
            raise FencedError(
                f"{action}: expected the `holdfast prove` or `bisect` that has started this "
                "program, found that it has ended; so this program ends too"
            )

    def saved(self, step: int, state: object) -> None:
        """Report the generators of this process at a save that was accepted."""
        facts = None if self._has_facts else program_facts(state)
        self._has_facts = True
        save = ProofSave(step=step, streams=random_streams(), epochs=epochs_of(), facts=facts)
        self._append("saves", save)

    def _append(self, kind: str, report: msgspec.Struct) -> None:
        # One write each, so that a process that is killed leaves whole lines.
        path = self._folder / f"{kind}-{self._rank}.jsonl"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(fd, msgspec.json.encode(report) + b"\n")
        finally:
            os.close(fd)


def proof_link(rank: int, clock: Clock) -> ProofLink | None:
    """Return this process's link to the proof that it is a part of; None: it is of none.

    Raises:
        InvalidArgumentError: the variable names no folder of a proof.
    """
    folder = os.environ.get(PROOF_VARIABLE)
    return ProofLink(Path(folder), rank, clock) if folder else None


def _read_order(folder: Path) -> ProofOrder:
    try:
        return decode((folder / ORDER).read_bytes(), ProofOrder)
    except (OSError, msgspec.DecodeError) as error:
        raise InvalidArgumentError(
            f"open a run: expected a folder of `holdfast prove` in {PROOF_VARIABLE}, found "
            f"{folder}: {error}; unset it"
        ) from error


def read_steps(folder: Path) -> dict[int, int]:
    """Return the last step of each rank that has made one."""
    bytes_of = {
        int(path.name.removeprefix(STEP)): path.read_bytes() for path in folder.glob(f"{STEP}*")
    }
    # A file may be read before it is written.
    return {rank: int.from_bytes(data) for rank, data in bytes_of.items() if data}


def read_openings(folder: Path) -> list[ProofOpening]:
    """Return the runs that the processes of a program have opened."""
    return [*_read(folder, "openings", ProofOpening)]


def read_saves(folder: Path) -> dict[int, list[ProofSave]]:
    """Return the reports of all saves by rank, in the order of time."""
    ranks = sorted(int(path.stem.rpartition("-")[2]) for path in folder.glob("saves-*.jsonl"))
    return {rank: [*_read(folder, f"saves-{rank}", ProofSave)] for rank in ranks}


def _read(folder: Path, kind: str, content: type[msgspec.Struct]) -> Iterator[Any]:
    for path in sorted(folder.glob(f"{kind}*.jsonl")):
        for line in path.read_bytes().splitlines():
            yield decode(line, content)
