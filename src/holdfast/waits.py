"""Let a signal end the waits of a call, which otherwise last until their condition or timeout.

A call that may wait enters `ended_by_signals`. The program's signal handler reports a signal with
`arrived`, and the loops of all waits in the call, at any depth, call `check`, which raises once the
call's patience has passed. The handler itself raises nothing, since that could leave a call between
any two of its operations.

Invariants:
- A signal ends the waits of a call only if the call was under way when it arrived.
- Of nested calls on one thread the outermost counts.
- On a thread without such a call nothing here has an effect. An exception that is raised between
  two operations (Ctrl-C) may cut off a call's end: a call counts as long as its frame is running.

Assumes that no wait on such a thread lasts much longer than `POLL_SECS` without `check`.

Python's signal handlers run in the main thread alone, between two operations. A signal that another
thread receives, or that arrives just before the main thread blocks, ends no wait there, so that the
waits of the main thread have slices of `POLL_SECS` too, whether or not such a call is under way.

Some calls of other libraries notice no signal before they return, such as a request to a service
that does not answer. `interruptible` makes them on a thread of its own, so that a Ctrl-C, and a
signal that ends the waits of the call, end the wait for them in the main thread, and with it in the
threads of a `thread_pool`.
"""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from inspect import CO_GENERATOR
from types import FrameType
from typing import Any, TypeVar

from holdfast.clock import Clock, SystemClock
from holdfast.conditions import Condition
from holdfast.errors import WaitInterruptedError

PATIENCE_SECS = 1.0
"""How much longer the waits of most calls last after a signal, for what is about to end."""
POLL_SECS = 0.25

_CONTEXTLIB = vars(contextlib)

A = TypeVar("A")
T = TypeVar("T")


@dataclass(slots=True)
class _Call:
    """A call, which is under way in its `with` block unless that is inside of another such block.

    No generator: `save` makes one for each step that may be due.
    """

    name: str
    state: Callable[[], str]
    patience_secs: float
    frame: FrameType | None = None
    by: signal.Signals | None = None
    ends_at_secs: float = math.inf

    def __enter__(self) -> None:
        if _current() is None:
            self.frame = _entering_frame()
            _calls[threading.get_ident()] = self

    def __exit__(self, *error: object) -> None:
        thread = threading.get_ident()
        if _calls.get(thread) is self:
            del _calls[thread]


_calls: dict[int, _Call] = {}
"""The outermost call of each thread. Written by that thread; `arrived` changes the calls in it."""
_pool = threading.local()
"""What the threads of a pool have from the thread that made it: `is_left`, of the main thread's,
whether its block was left at an interruption, and `call`, the call that is under way there."""


def arrived(number: signal.Signals, *, at_once: bool = False) -> None:
    """End the waits of all calls that are under way; called by a signal handler.

    Args:
        number: The signal.
        at_once: Without the calls' patience, because it is not the first signal.
    """
    now_secs = SystemClock.monotonic()
    for call in list(_calls.values()):
        call.by = call.by or number
        patience_secs = 0.0 if at_once else call.patience_secs
        call.ends_at_secs = min(call.ends_at_secs, now_secs + patience_secs)


def ended_by_signals(
    name: str, state: Callable[[], str], patience_secs: float = PATIENCE_SECS
) -> AbstractContextManager[None]:
    """Let signals end the waits in the block, unless it is inside of another such block.

    Args:
        name: The call, for messages.
        state: Returns what has not ended, and what that means, for messages.
        patience_secs: How much longer the waits last after a signal.
    """
    return _Call(name, state, patience_secs)


def _entering_frame() -> FrameType:
    """Return the frame whose `with` statement enters: generators between are suspended in it."""
    frame = sys._getframe(2)
    while (outer := frame.f_back) is not None and (
        frame.f_code.co_flags & CO_GENERATOR or frame.f_globals is _CONTEXTLIB
    ):
        frame = outer
    return frame


def _current() -> _Call | None:
    """Return the call that is under way on this thread, or on the one that made its pool.

    A call whose end was cut off is forgotten.
    """
    thread = threading.get_ident()
    call = _calls.get(thread)
    if call is None:
        return getattr(_pool, "call", None)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame is call.frame:
            return call
        frame = frame.f_back
    del _calls[thread]
    return None


def has_signal() -> bool:
    """Return whether a signal has arrived during the call that is under way on this thread."""
    call = _current()
    return call is not None and call.by is not None


def is_ended() -> bool:
    """Return whether `check` would raise."""
    call = _current()
    return call is not None and SystemClock.monotonic() >= call.ends_at_secs


def check() -> None:
    """End the waits of this thread's call if a signal has arrived and its patience has passed.

    Raises:
        WaitInterruptedError: It has.
    """
    call = _current()
    if call is not None and SystemClock.monotonic() >= call.ends_at_secs:
        assert call.by is not None
        raise WaitInterruptedError(f"{call.name}: ended by {call.by.name}: {call.state()}")


def slice_secs(secs: float) -> float:
    """Return how long to wait at most, of `secs` seconds, until signals are looked for again."""
    is_main = threading.current_thread() is threading.main_thread()
    return min(secs, POLL_SECS) if is_main or _current() is not None else secs


def wait_for(changed: Condition, is_over: Callable[[], bool], secs: float | None) -> bool:
    """Wait on a condition variable, whose lock is held; return whether `is_over` came true.

    Args:
        changed: The condition variable.
        is_over: What to wait for.
        secs: The timeout; None: none.

    Raises:
        WaitInterruptedError: As `check`.
    """
    until_secs = math.inf if secs is None else SystemClock.monotonic() + secs
    while True:
        left_secs = until_secs - SystemClock.monotonic()
        part_secs = slice_secs(left_secs)
        if changed.wait_for(is_over, None if part_secs == math.inf else part_secs):
            return True
        if part_secs >= left_secs:
            return False
        check()


def await_all(futures: Collection[Future[Any]], secs: float = math.inf) -> bool:
    """Wait until all futures are done, for at most `secs`, and return whether they are.

    Raises:
        WaitInterruptedError: As `check`.
    """
    until_secs = SystemClock.monotonic() + secs
    # `wait` alone never counts a future as done that was cancelled before it began.
    while waiting := [future for future in futures if not future.done()]:
        left_secs = until_secs - SystemClock.monotonic()
        if left_secs <= 0:
            return False
        part_secs = slice_secs(left_secs)
        if wait(waiting, None if part_secs == math.inf else part_secs).not_done:
            check()
    return True


def result(future: Future[T], secs: float = math.inf) -> T:
    """Return the result of a future, which is awaited for at most `secs`.

    Raises:
        TimeoutError: It has none yet.
        WaitInterruptedError: As `check`.
    """
    if not await_all([future], secs):
        raise TimeoutError
    return future.result()


def results(
    pool: ThreadPoolExecutor, call: Callable[[A], T], arguments: Iterable[A]
) -> Sequence[T]:
    """Return the result of the call for each of its arguments, which the pool makes.

    If one raises, or the wait for it ends, those that have not begun are not made.

    Raises:
        WaitInterruptedError: As `check`.
    """
    jobs = [pool.submit(call, argument) for argument in arguments]
    try:
        return [result(job) for job in jobs]
    finally:
        for job in jobs:
            job.cancel()


def sleep(clock: Clock, secs: float) -> None:
    """Sleep for `secs` seconds.

    Raises:
        WaitInterruptedError: As `check`.
    """
    while secs > 0:
        check()
        part_secs = slice_secs(secs)
        clock.sleep(part_secs)
        secs -= part_secs


def begin_call(call: Callable[[], T]) -> Future[T]:
    """Begin a call on a thread of its own, which does not delay the end of the process.

    It cannot be cancelled.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        # Once the caller is gone, nothing takes the result.
        with contextlib.suppress(RuntimeError):
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    threading.Thread(target=work, name="holdfast-call", daemon=True).start()
    return future


@contextlib.contextmanager
def thread_pool(count: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool whose threads end with the block, also those in an `interruptible` call.

    What ends the waits of the call that is under way on this thread ends those of the pool.

    Args:
        count: How many threads it has at most.
        name: What the names of its threads begin with.
    """
    is_main = threading.current_thread() is threading.main_thread()
    is_left = threading.Event() if is_main else getattr(_pool, "is_left", None)
    call = _current()

    def enter() -> None:
        _pool.is_left, _pool.call = is_left, call

    with ThreadPoolExecutor(count, name, initializer=enter) as pool:
        try:
            yield pool
        except (KeyboardInterrupt, SystemExit):
            if is_left is not None:
                is_left.set()
                pool.shutdown(wait=False, cancel_futures=True)
            raise


def interruptible(call: Callable[[], T], on_slow: Callable[[], None], slow_secs: float) -> T:
    """Return the result of a call that notices no signal, where an interruption must end it.

    That is in the main thread, in those of its `thread_pool`s, and where a call that a signal ends
    is under way. There the call is made on another thread, which an interruption leaves behind: the
    call must change nothing of its caller's then.

    Args:
        call: The call.
        on_slow: Called in the main thread once it has lasted for `slow_secs`.
        slow_secs: See there.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed, in the main thread.
        WaitInterruptedError: As `check`; or the block of this thread's pool was left by an
            interruption.
    """
    is_left: threading.Event | None = getattr(_pool, "is_left", None)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main and is_left is None and _current() is None:
        return call()
    future = begin_call(call)
    slow_at_secs = SystemClock.monotonic() + slow_secs
    while not wait([future], POLL_SECS)[0]:
        if is_left is not None and is_left.is_set():
            raise WaitInterruptedError("a request was abandoned after an interruption")
        check()
        if is_main and SystemClock.monotonic() >= slow_at_secs:
            slow_at_secs = math.inf
            on_slow()
    return future.result()
