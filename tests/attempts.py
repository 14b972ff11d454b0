"""Ids of attempts and checkpoints for tests: the token of attempt N is N, in eight digits."""

from __future__ import annotations

from pathlib import Path

from holdfast.format.names import AttemptId, CheckpointId


def attempt_id(number: int) -> AttemptId:
    """Return the attempt with that number, with a token that follows from it."""
    return AttemptId(number, f"{number:08x}")


def checkpoint_id(step: int, number: int = 1) -> CheckpointId:
    """Return the checkpoint of a step in the attempt with that number."""
    return CheckpointId(step, attempt_id(number))


def folder_of(run: Path, step: int, number: int = 1) -> Path:
    """Return the folder of a checkpoint of a real run, whose attempts have random tokens."""
    (folder,) = (run / "checkpoints").glob(f"{step:09d}.{number}-*")
    return folder
