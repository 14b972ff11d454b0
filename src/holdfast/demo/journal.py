"""Write, read and compare the journals of the demo's trainers: one JSON line for each event.

Invariant: a record is one `write` to a file opened for appending, so SIGKILL loses no record for
which `append` has returned, and all starts of a run append to one file.
"""

from __future__ import annotations

import io
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from holdfast.errors import HoldfastError


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """The trainer is ready; `first_step` is its first step.

    `restored_step` is that of the checkpoint that it resumed from, None for a new run, and
    `sources` the bytes read by the name of their tier.
    """

    pid: int
    first_step: int
    restored_step: int | None
    sources: dict[str, int]

    def __str__(self) -> str:
        if self.restored_step is None:
            return f"starts at step {self.first_step} (pid {self.pid})"
        return (
            f"resumes at step {self.first_step} (pid {self.pid}) from the checkpoint of step "
            f"{self.restored_step}, source: {', '.join(sorted(self.sources)) or 'no tier'}"
        )


class Step(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """A step is finished. `loss` is a float in hexadecimal, `batch` the digest of its batch."""

    step: int
    loss: str
    batch: str
    secs: float

    @property
    def loss_value(self) -> float:
        """The loss as a number."""
        return float.fromhex(self.loss)


class Preempted(msgspec.Struct, frozen=True, kw_only=True, tag="preempted"):
    """The trainer has ended by itself after this step, and all its saves are durable."""

    step: int


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """The last step is finished; digests of the results of the training.

    `batches` is a digest over the digests of all batches in their order.
    """

    params: str
    opt_state: str
    rng: str
    batches: str
    tokens_seen: int


Record: TypeAlias = Started | Step | Preempted | Finished

_DECODER = msgspec.json.Decoder(Record)


class Journal(io.FileIO):
    """The writing half of a journal. One thread appends."""

    def __init__(self, path: Path | str) -> None:
        super().__init__(path, "ab")

    def append(self, record: Record) -> None:
        """Append a record; once this returns, the record outlives this process.

        Raises:
            HoldfastError: The record was written only in part.
        """
        line = msgspec.json.encode(record) + b"\n"
        written = self.write(line)
        if written != len(line):
            raise HoldfastError(f"write a journal record: {written} of {len(line)} bytes written")


class Tail:
    """The reading half, which can follow a file while it is written. One thread reads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset_bytes = 0

    def read(self) -> list[Record]:
        """Return the records written since the last call; none while the file is missing.

        Raises:
            HoldfastError: A line is not a record.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset_bytes)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._offset_bytes += len(whole)
        try:
            return [_DECODER.decode(line) for line in whole.splitlines()]
        except msgspec.DecodeError as error:
            raise HoldfastError(
                f"read {self._path}: a line is not a journal record: {error}"
            ) from error


ByHost: TypeAlias = Sequence[Sequence[Record]]
"""The records of each host's trainers, over all starts."""

_EQUAL_ON_ALL_HOSTS = ("parameters", "optimizer state", "losses")


def compare(run: ByHost, other: ByHost) -> dict[str, bool]:
    """Return for each kind of result whether it is equal in every bit, on each host of both runs.

    A step that was done twice counts with both results. Hosts of one run that differ in a
    replicated result count as a difference too.
    """
    results, others = _results(run), _results(other)
    return {
        name: by_host == others[name]
        and (name not in _EQUAL_ON_ALL_HOSTS or len(set(by_host)) == 1)
        for name, by_host in results.items()
    }


def verdict(identity: dict[str, bool]) -> str:
    """Return the result of a comparison as a line."""
    return "bit-identical: " + ", ".join(
        f"{name} {'yes' if is_equal else 'NO'}" for name, is_equal in identity.items()
    )


def _results(run: ByHost) -> dict[str, list[Hashable]]:
    """Return for each kind of result that of each host."""
    ends = [next(r for r in records if isinstance(r, Finished)) for records in run]
    steps = [[r for r in records if isinstance(r, Step)] for records in run]
    return {
        "parameters": [end.params for end in ends],
        "optimizer state": [end.opt_state for end in ends],
        "RNG": [end.rng for end in ends],
        "order of batches": [
            (end.batches, end.tokens_seen, frozenset((step.step, step.batch) for step in by_host))
            for end, by_host in zip(ends, steps, strict=True)
        ],
        "losses": [frozenset((step.step, step.loss) for step in by_host) for by_host in steps],
    }
