"""Waits that signals end: which call a signal ends, also after a call whose end was cut off."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from types import FrameType
from typing import Any

import pytest

from holdfast import waits
from holdfast.clock import SystemClock
from holdfast.conditions import Condition
from holdfast.errors import WaitInterruptedError


@contextlib.contextmanager
def patient(name: str) -> Iterator[None]:
    """Enter the call inside of another generator, as the manager does."""
    with waits.ended_by_signals(name, lambda: "unfinished", 0.0):
        yield


def cut_off() -> KeyboardInterrupt:
    """Make a call whose end an interruption cuts off, and return the interruption."""

    def interrupt(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_name == "__exit__":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught, patient("first"):
        sys.setprofile(interrupt)
    sys.setprofile(None)
    return caught.value


def test_a_signal_ends_the_outermost_call_that_is_under_way() -> None:
    with patient("outer"):
        with patient("inner"):
            assert not waits.has_signal()
            waits.arrived(signal.SIGTERM)
            with pytest.raises(WaitInterruptedError, match="outer: ended by SIGTERM: unfinished"):
                waits.check()
        assert waits.is_ended()
    waits.check()


def test_a_call_whose_end_was_cut_off_ends_no_later_one() -> None:
    interruption = cut_off()
    waits.arrived(signal.SIGTERM)
    waits.check()
    assert not waits.has_signal()
    with patient("next"):
        waits.check()
        waits.arrived(signal.SIGINT)
        with pytest.raises(WaitInterruptedError, match="next: ended by SIGINT"):
            waits.check()
    assert isinstance(interruption, KeyboardInterrupt)


def test_ctrl_c_leaves_a_call_that_does_not_return_in_the_main_thread_and_in_its_pools() -> None:
    going_on, begun, is_slow = threading.Event(), threading.Semaphore(0), threading.Event()
    jobs, readers = list[Future[bool]](), list[threading.Thread]()

    def call() -> bool:
        begun.release()
        return going_on.wait(240)

    def read() -> bool:
        readers.append(threading.current_thread())
        return waits.interruptible(call, is_slow.set, 0.05)

    def press() -> None:
        for _ in range(3):
            begun.acquire()
        is_slow.wait()
        os.kill(os.getpid(), signal.SIGINT)

    def read_on_three_threads() -> None:
        with waits.thread_pool(2, "reading") as pool:
            jobs.extend(pool.submit(read) for _ in range(2))
            read()

    pressing = threading.Thread(target=press)
    pressing.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            read_on_three_threads()
        for job in jobs:
            with pytest.raises(WaitInterruptedError):
                job.result(0)
        # They do not hold up the end of the process.
        assert [t for t in readers if t.is_alive()] == [threading.main_thread()]
    finally:
        going_on.set()
        is_slow.set()
        pressing.join()


def test_a_signal_ends_requests_of_the_call_in_its_thread_and_in_its_pools() -> None:
    going_on, begun = threading.Event(), threading.Semaphore(0)
    errors: list[WaitInterruptedError] = []

    def request() -> bool:
        begun.release()
        return going_on.wait(240)

    def read() -> bool:
        return waits.interruptible(request, lambda: None, 60.0)

    def look() -> None:
        with patient("restore"), waits.thread_pool(2, "reading") as pool:
            jobs = [pool.submit(read), pool.submit(waits.sleep, SystemClock(), 60.0)]
            with pytest.raises(WaitInterruptedError):
                read()
            for job in jobs:
                with pytest.raises(WaitInterruptedError, match="restore: ended by") as caught:
                    job.result(30)
                errors.append(caught.value)

    # A thread of the program, and not the main one, in which Ctrl-C ends a request too.
    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(2):
            begun.acquire()
        waits.arrived(signal.SIGTERM)
        looking.join(30)
        assert len(errors) == 2
    finally:
        going_on.set()
        looking.join()


@pytest.mark.parametrize("form", ["of a condition", "of a future", "of a pool", "of a clock"])
def test_ctrl_c_that_another_thread_receives_ends_a_wait_of_the_main_thread(form: str) -> None:
    begun, has_ended = threading.Event(), threading.Event()
    changed = Condition()

    def of_a_condition() -> None:
        with changed:
            waits.wait_for(changed, has_ended.is_set, None)

    def of_a_pool() -> None:
        with waits.thread_pool(1, "reading") as pool:
            waits.results(pool, lambda _: waits.interruptible(has_ended.wait, print, 240), [0])

    forms: dict[str, Callable[[], object]] = {
        "of a condition": of_a_condition,
        "of a future": lambda: waits.result(Future[None](), 240),
        "of a pool": of_a_pool,
        "of a clock": lambda: waits.sleep(SystemClock(), 240),
    }

    def block() -> None:
        begun.set()
        forms[form]()

    def press() -> None:
        begun.wait()
        # Until the main thread has blocked, most of the time; it is interrupted in any case.
        time.sleep(0.5)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    pressing = threading.Thread(target=press)
    began = time.monotonic()
    pressing.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            block()
        assert time.monotonic() - began < 60
    finally:
        has_ended.set()
        pressing.join()


@pytest.mark.timeout(60)
def test_a_future_that_was_cancelled_before_it_began_is_done() -> None:
    cancelled, begun = Future[None](), Future[None]()
    cancelled.cancel()
    assert waits.await_all([cancelled])
    assert not waits.await_all([cancelled, begun], 0.01)
    with pytest.raises(CancelledError):
        waits.result(cancelled)
    with pytest.raises(TimeoutError):
        waits.result(begun, 0.01)


def test_of_results_that_one_call_lacks_no_further_call_is_made() -> None:
    made, going_on = list[int](), threading.Event()

    def call(number: int) -> None:
        made.append(number)
        if number == 1:
            raise OSError("of 1")
        if number == 2:
            going_on.wait(240)

    with waits.thread_pool(1, "reading") as pool:
        with pytest.raises(OSError, match="of 1"):
            waits.results(pool, call, range(1000))
        going_on.set()
    assert made in ([0, 1], [0, 1, 2])
    with waits.thread_pool(4, "reading") as pool:
        assert waits.results(pool, abs, range(-9, 0)) == [*range(9, 0, -1)]


def test_a_call_in_a_thread_of_the_program_is_made_there() -> None:
    makers = list[threading.Thread]()

    def call() -> None:
        makers.append(threading.current_thread())

    thread = threading.Thread(target=lambda: waits.interruptible(call, lambda: None, 60.0))
    thread.start()
    thread.join()
    waits.interruptible(call, lambda: None, 60.0)
    assert makers[0] is thread
    assert makers[1] is not threading.main_thread()
