"""Register the open managers of this process, and close each of them.

Invariants:
- A process has one open manager for each run: opening the run again replaces the earlier one, even
  if that was dropped without `close`, or its `close` was interrupted. A refused opening replaces
  nothing.
- Nothing of a manager is active in a forked child: no signal handler, thread or exit hook; the
  child holds no slot, lock or socket of the manager. (A program can switch that off.)
- Every step of closing may be repeated, so that an interrupted `close` can be finished.

See docs/decisions/0022.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast import waits
from holdfast.errors import (
    FencedError,
    HoldfastError,
    InvalidArgumentError,
    StorageError,
    WaitInterruptedError,
)
from holdfast.store.location import RunLocation
from holdfast.trainer.opening.agent_session import AgentSession
from holdfast.trainer.opening.job_context import JobContext
from holdfast.trainer.options import ProcessHooks
from holdfast.trainer.process.forks import release_inherited
from holdfast.trainer.process.preemption import PreemptionSignals
from holdfast.trainer.save.progress import Progress
from holdfast.trainer.save.save_schedule import SaveSchedule
from holdfast.trainer.save.saver import Saver
from holdfast.trainer.save.user_policies import UserPolicyThread

EXIT_SECS = 60.0
"""How long the process's exit waits until accepted saves are sealed."""
REPLACE_SECS = 30.0
"""How long a replaced manager may take to seal its accepted saves, and then to close."""

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class HeldResources:
    """What a manager holds, in the order of acquisition; None: not acquired yet."""

    job: JobContext
    progress: Progress
    session: AgentSession
    saver: Saver | None = None
    signals: PreemptionSignals | None = None
    own: UserPolicyThread | None = None
    end_watch: Callable[[], None] | None = None
    """Ends the reports of compilations."""

    def release(self, saver_secs: float) -> None:
        """Detach from the agent and end all threads; saves that are not sealed are abandoned.

        Args:
            saver_secs: How long to wait for the saver's thread.
        """
        if self.end_watch is not None:
            self.end_watch()
        if self.saver is not None:
            self.saver.close(saver_secs)
        if self.signals is not None:
            self.signals.close()
        if self.own is not None:
            self.own.close()
        self.session.close()
        self.job.close()


class Calls:
    """Which calls of one manager are allowed: none after its end, and those of one thread only.

    A manager has no lock around its calls, so that a step that is not due costs nothing. The thread
    that calls first is the training thread; another thread may call once that one has ended. A call
    is checked only where it does more than read cells of the control block.

    Args:
        run: The run's path or URL, for messages.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._thread: threading.Thread | None = None
        self.is_closed = False
        self.error: HoldfastError | None = None
        """Why no call is allowed any more; its text is that of each refusal."""

    def check_call(self, name: str) -> None:
        """Check that the call `name` may be made now, on this thread.

        Raises:
            FencedError: The run was opened again in this process.
            InvalidArgumentError: This process was forked from the manager's, the manager is closed,
                or is used by another live thread.
        """
        if self.error is not None:
            raise type(self.error)(f"{name}: {self.error}")
        if self.is_closed:
            raise InvalidArgumentError(
                f"{name}: the manager of {self._run} is closed; create another one"
            )
        current, owner = threading.current_thread(), self._thread
        if owner is not None and owner is not current and owner.is_alive():
            raise InvalidArgumentError(
                f"{name}: called on thread {current.name!r}, but the manager of {self._run} "
                f"is used by thread {owner.name!r}; call all its methods on one thread"
            )
        self._thread = current


class Lifetime:
    """The open state of one manager. Each call of the manager calls `check_call` first.

    Args:
        run: The run's path or URL.
        held: What the manager holds, to be released.
        steps: The manager's steps; a manager that can no longer be used checks every one.
        process: What is installed in this process.
    """

    def __init__(
        self, run: str, held: HeldResources, steps: SaveSchedule, process: ProcessHooks
    ) -> None:
        self.run = run
        self._held = held
        self.has_fork_hooks = process.fork_hooks
        self.steps = steps
        self.is_inherited = False
        """Whether this is a forked child of the process that opened the manager."""
        self._calls = Calls(run)
        self.check_call = self._calls.check_call
        # A manager that is never closed still seals its accepted saves. The hook is registered
        # after those of the framework, so it runs before that shuts down its devices.
        self._at_exit = weakref.finalize(self, _seal_all, held.progress)
        atexit.register(self._at_exit)
        self.run_id = held.job.config.run_id
        _open[self.run_id] = self
        if process.fork_hooks:
            _register_fork_hooks()

    @property
    def is_closed(self) -> bool:
        """Whether `close` has completed."""
        return self._calls.is_closed

    def close(self, saver_secs: float) -> None:
        """Release everything the manager holds. After an exception the next call continues."""
        self._held.release(saver_secs)
        self._detach()
        self.steps.check_every_step()
        self._calls.is_closed = True

    @contextlib.contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Close the manager if the block, which finishes its construction, raises."""
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close, REPLACE_SECS)
            yield
            on_error.pop_all()

    def replace(self) -> None:
        """Close a manager whose run is opened again; its sealed parts stay and become durable."""
        if self.is_closed:
            return
        log.warning(
            "the run %s is opened again in this process: closing its earlier manager",
            self.run,
        )
        self.leave(
            FencedError(
                f"the run {self.run} was opened again in this process, "
                "which began a new attempt; use the newer manager"
            )
        )

    def deleted_reason(self, location: str) -> str | None:
        """Return why the manager has no run any more, with another run at `location`; None: it has.

        A directory that was moved away from there is used where it is now.
        """
        home = self._held.job.durable.home
        reason = home.unusable_reason()
        if _place(home.location_text) != _place(location):
            return None
        return reason or f"use {location}: expected run {self.run_id}, found another one"

    def leave(self, error: HoldfastError) -> None:
        """Seal the accepted saves in RAM and leave the agent, which makes them durable.

        Args:
            error: What later calls raise.
        """
        self._calls.error = error
        self.steps.check_every_step()
        progress = self._held.progress
        progress.wait(lambda sealed, finished: sealed, REPLACE_SECS)
        progress.stop_saving(error)
        self.close(REPLACE_SECS)

    def signals(self) -> tuple[signal.Signals, ...]:
        """Return the signals that the manager handles."""
        signals = self._held.signals
        return () if signals is None or self.is_closed else signals.handled

    def forked(self) -> None:
        """Release, in a forked child, what it inherited; the parent's manager is unaffected."""
        self.is_inherited = True
        self._calls.error = InvalidArgumentError(
            f"the manager of {self.run}: this process was forked from process "
            f"{os.getppid()}, to which the manager belongs; save and restore there"
        )
        self._detach()
        self.steps.check_every_step()
        held = self._held
        if held.end_watch is not None:
            held.end_watch()
        if held.signals is not None:
            held.signals.close()
        folder = Path(os.path.realpath(held.session.place.folder))
        release_inherited(folder, held.session.sockets())

    def _detach(self) -> None:
        if _open.get(self.run_id) is self:
            del _open[self.run_id]
        self._at_exit.detach()
        atexit.unregister(self._at_exit)


def _place(run: str) -> str:
    """Return what is equal for two names of one place."""
    return run if RunLocation(run).is_url else os.path.realpath(run)


def replace_open(run_id: str, location: str) -> None:
    """Close this process's earlier manager of a run that has passed the checks of its opening.

    A manager whose run was deleted, so that another one is at `location`, is closed too.
    """
    for lifetime in list(_open.values()):
        if lifetime.run_id == run_id:
            lifetime.replace()
        elif (reason := lifetime.deleted_reason(location)) is not None:
            lifetime.leave(StorageError(reason))


_open: dict[str, Lifetime] = {}
"""The managers that are not closed, by the ids of their runs; also those that the program refers
to no more, whose threads go on."""
_outliving = threading.local()
"""`is_on`: managers outlive the exceptions of this thread."""


@contextlib.contextmanager
def outliving_errors() -> Iterator[None]:
    """Leave managers open within the block whose `with` statements end by an exception.

    The block's thread then closes them by `leave_all`.
    """
    _outliving.is_on = True
    try:
        yield
    finally:
        _outliving.is_on = False


def outlives_errors() -> bool:
    """Return whether this thread is in a block of `outliving_errors`."""
    return getattr(_outliving, "is_on", False)


def last_step_of_open() -> int | None:
    """Return the last step that was passed to an open manager of this process; None: none."""
    steps = [lifetime.steps.last for lifetime in _open.values() if not lifetime.is_closed]
    return max((step for step in steps if step >= 0), default=None)


def leave_all() -> None:
    """Seal what the open managers of this process have accepted, and leave their agents."""
    for lifetime in list(_open.values()):
        if not lifetime.is_closed:
            lifetime.leave(
                FencedError(
                    f"the run {lifetime.run} was left after an error of its generation; use the "
                    "manager of the next one"
                )
            )


def _seal_all(progress: Progress) -> None:
    try:
        with waits.ended_by_signals("exit", lambda: "not all accepted saves are sealed"):
            progress.wait(lambda sealed, finished: sealed, EXIT_SECS)
    except WaitInterruptedError as error:
        log.warning("%s", error)


_forking = threading.local()
"""`mask`: the signals that the forking thread had blocked. The child inherits its values."""


def _hooked() -> list[Lifetime]:
    """Return the open managers that act at a fork."""
    every = list(_open.values())
    return [lifetime for lifetime in every if lifetime.has_fork_hooks and not lifetime.is_closed]


def _before_fork() -> None:
    # A signal that arrives before the child has restored its handlers stays pending. Otherwise it
    # would run the trainer's handler, or be lost while that is replaced.
    signals = {number for lifetime in _hooked() for number in lifetime.signals()}
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)


def _after_fork_in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _after_fork_in_child() -> None:
    for lifetime in _hooked():
        lifetime.forked()
    # The parent's managers are not the child's to close, where it opens one of their runs.
    _open.clear()
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


@functools.cache
def _register_fork_hooks() -> None:
    """Register the hooks, once; they cannot be removed."""
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )
