"""Share one Holdfast manager among the managers of this process that write to one run.

Invariants:
- A run is opened for writing by the first save, so that programs that only read disturb no job.
- The checkpoints in `doomed` are removed once a later one is durable, and no others.
- Runs that the program leaves open are closed at its exit.
- The processes of a job open a run together, and the error of one ends the openings of all.
- The failure of a save whose managers were dropped meanwhile is logged, and no other raises it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

import jax

import holdfast
from holdfast.errors import (
    HoldfastError,
    SaveFailedError,
    StepNotFoundError,
    StepOrderError,
    StepUncommittedError,
    WaitTimeoutError,
)
from holdfast.interop.orbax.records import RECORD
from holdfast.policy.contexts import CheckpointInfo, PreservationContext
from holdfast.policy.save_decision_policy import SpecificStepsPolicy

T = TypeVar("T")
log = logging.getLogger(__name__)

FOLDER = "holdfast"
"""The folder of the run in the directory that a program gives, beside what else is there."""
NEVER = 10**15
"""A step that no training reaches: saves are requested one by one."""


class _AllButDoomed:
    """A preservation policy that keeps what no manager has given up."""

    def __init__(self, doomed: set[int]) -> None:
        self._doomed = doomed

    def should_preserve(
        self, checkpoints: Sequence[CheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        """Return False for the steps given up."""
        return [checkpoint.step not in self._doomed for checkpoint in checkpoints]


class SharedRun:
    """A run that this process writes to. Owned by the training thread.

    Args:
        directory: The run's directory.
        options: Further arguments of `holdfast.CheckpointManager`.
    """

    def __init__(self, directory: Path, options: Mapping[str, Any]) -> None:
        self.doomed: set[int] = set()
        self.users: WeakSet[Any] = WeakSet()
        self.pending: set[int] = set()
        self._abandoned: set[int] = set()
        """The steps that were saved by managers that were dropped before they ended."""
        self._failure: SaveFailedError | None = None
        self._directory = directory
        policies: dict[str, Any] = {
            "save_decision_policy": SpecificStepsPolicy([NEVER]),
            "preservation_policy": _AllButDoomed(self.doomed),
        }
        self.manager = holdfast.CheckpointManager(directory, **(policies | dict(options)))
        steps = self.manager.all_steps()
        self._newest = max(steps, default=-1)
        """The newest step that was saved."""
        self._offered = self._newest
        """The newest step that `holdfast.CheckpointManager.save` was called with."""

    def save(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, float] | None,
        *,
        is_due: bool,
        overwrites: bool = False,
    ) -> bool:
        """Save `state` if it is due here, or if Holdfast needs a checkpoint, as for a preemption.

        With `overwrites`, a checkpoint of `step` is replaced once the new one is committed.

        Raises:
            StepOrderError: A step that is due is before the last one.
            HoldfastError: As `holdfast.CheckpointManager.save`.
        """
        self.raise_failure()
        if step <= self._offered:
            if not is_due:
                return False
            if step < self._newest:
                raise StepOrderError(
                    f"save step {step}: expected a step after {self._newest}, the run's last one, "
                    "because checkpoints of a run are in the order of training; delete the later "
                    "ones and restart, or save to another directory"
                )
            if self._newest < step < self._offered:
                # The program has gone back, and no later step was saved since.
                newest = self._newest if self._newest >= 0 else None
                self.manager.resume({RECORD: ""}, step=newest, only=RECORD)
                self._offered = self._newest
        if step > self._offered or overwrites:
            save = functools.partial(self.manager.save, force=is_due)
            taken = self._reported(lambda: save(step, state, metrics=metrics))
            self._offered = step
        else:
            finish = self.manager.finish
            taken = self._reported(lambda: finish(step, state, metrics=metrics))
        if taken:
            self._newest = step
            self.doomed.discard(step)
            self.pending.add(step)
        return taken

    def _reported(self, call: Callable[[], T]) -> T:
        """Return what a call returns that may raise the failure of an earlier save.

        One of abandoned steps alone is logged, and the call, which has done nothing, made again.
        """
        while True:
            try:
                return call()
            except SaveFailedError as error:
                if not error.steps or not self._abandoned.issuperset(error.steps):
                    raise
                self._abandoned.difference_update(error.steps)
                log.warning("a save failed whose manager was dropped before it ended: %s", error)

    def add(self, user: object) -> None:
        """Note that `user` needs the run."""
        if not self.users:
            self._abandoned |= self.pending
            self._failure = None
        self.users.add(user)

    def raise_failure(self) -> None:
        """Raise the failure of an earlier save that no call has raised."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def is_saving(self) -> bool:
        """Return whether a save is not durable yet."""
        if not self.pending:
            return False
        try:
            self._reported(lambda: self.manager.wait_until_finished(timeout_secs=0))
        except WaitTimeoutError:
            return True
        except SaveFailedError as error:
            self._failure = error
        self.pending.clear()
        return False

    def wait(self, timeout_secs: float | None) -> None:
        """Wait until all saves are durable.

        Raises:
            SaveFailedError: Some failed.
            WaitTimeoutError: The timeout has passed.
        """
        try:
            self._reported(lambda: self.manager.wait_until_finished(timeout_secs))
        except SaveFailedError:
            self.pending.clear()
            raise
        self.pending.clear()
        self.raise_failure()

    def settle_saves(self) -> None:
        """Wait until all saves have ended; the next call that reports failures raises theirs."""
        try:
            self._reported(self.manager.wait_until_finished)
        except SaveFailedError as error:
            self._failure = error
        self.pending.clear()

    def delete(self, step: int) -> None:
        """Remove the checkpoint of `step`; each process of a job asks for it."""
        try:
            self.manager.delete(step)
        except (StepNotFoundError, StepUncommittedError):
            if jax.process_count() == 1:
                raise
            # Another process was first.
        if step == self._newest:
            self._newest = max(self.manager.all_steps(), default=-1)

    def release(self, user: object) -> None:
        """Note that `user` needs the run no more; the last one closes it."""
        self.users.discard(user)
        if not self.users:
            _open.pop(_key(self._directory), None)
            self.manager.close()


_open: dict[str, SharedRun] = {}


def acquire(directory: Path, user: object, options: Callable[[], Mapping[str, Any]]) -> SharedRun:
    """Return the run of `directory`, open for writing, and note that `user` needs it."""
    key = _key(directory)
    if key not in _open:
        _open[key] = SharedRun(directory, options())
    shared = _open[key]
    shared.add(user)
    return shared


@contextlib.contextmanager
def opening(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Send an error of the block to the other processes of a job, which then open the run.

    They wait in that for this process, which does not get there.
    """
    try:
        yield
    except Exception as error:
        places = (Path(directory), Path(directory) / FOLDER)
        if jax.process_count() > 1 and not any(map(opened, places)):
            with contextlib.suppress(type(error)):
                holdfast.CheckpointManager(_Refusing(error))
        raise


class _Refusing:
    """A place whose opening fails with the error of an earlier check, on all processes."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __fspath__(self) -> str:
        raise self._error


def opened(directory: Path) -> SharedRun | None:
    """Return the run of `directory` if this process writes to it."""
    return _open.get(_key(directory))


def _key(directory: Path) -> str:
    return os.path.realpath(directory)


def _close_all() -> None:
    for shared in list(_open.values()):
        try:
            shared.manager.close()
        except HoldfastError as error:
            # The process ends; nothing is left that could handle it.
            print(f"holdfast: {error}")
    _open.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_open.clear)
