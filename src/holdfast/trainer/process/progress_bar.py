"""Show a bar in the terminal while the training thread waits for longer than two seconds.

It is drawn only where Holdfast's own lines are shown at level `info`: on a terminal, of a program
without logging of its own. It leaves no trace once the wait has ended.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from holdfast.engine.reading.restore import RestoreTally
from holdfast.quantities import size_text
from holdfast.trainer.process import terminal
from holdfast.trainer.save.progress import Progress

AFTER_SECS = 2.0
REDRAW_SECS = 0.2
BAR_CHARS = 30
CLEAR = "\r\x1b[K"


class BarState(NamedTuple):
    """How far something is: a share from 0 to 1, and words."""

    share: float
    text: str


@contextlib.contextmanager
def progress_bar(
    title: str, state: Callable[[], BarState | None], *, is_on: bool
) -> Iterator[None]:
    """Show a bar while the block runs, once it has run for `AFTER_SECS`.

    Args:
        title: What is being done.
        state: Returns how far it is; None: not known yet. Called on another thread.
        is_on: Whether this process shows it; one of a job is enough.
    """
    if not (is_on and terminal.shows_lines(logging.INFO) and _is_terminal()):
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(
        target=_draw, args=(title, state, ended), name="holdfast-bar", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _draw(title: str, state: Callable[[], BarState | None], ended: threading.Event) -> None:
    if ended.wait(AFTER_SECS):
        return
    # A closed terminal ends the bar and not the training.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        while True:
            sys.stderr.write(CLEAR + bar_line(title, state()))
            sys.stderr.flush()
            if ended.wait(REDRAW_SECS):
                break
        sys.stderr.write(CLEAR)
        sys.stderr.flush()


def bar_line(title: str, state: BarState | None) -> str:
    """Return the line of a bar."""
    if state is None:
        return f"holdfast: {title}…"
    share = min(1.0, max(0.0, state.share))
    full = round(BAR_CHARS * share)
    return f"holdfast: {title} [{'█' * full}{'·' * (BAR_CHARS - full)}] {share:4.0%} {state.text}"


def closing_state(progress: Progress) -> Callable[[], BarState | None]:
    """Return a function that returns how many of the saves in progress now have ended."""
    whole = len(progress.steps())

    def state() -> BarState | None:
        left = len(progress.steps())
        what = "checkpoint is" if whole == 1 else "checkpoints are"
        return BarState(1 - left / max(1, whole), f"{whole - left} of {whole} {what} durable")

    return state


def restoring_state(tallies: Sequence[RestoreTally]) -> BarState | None:
    """Return how far the newest try of a restore is; None before it reads."""
    if not tallies or not tallies[-1].wanted_bytes:
        return None
    tally = tallies[-1]
    with tally.lock:
        read_bytes = sum(tally.bytes_by_tier.values())
    text = f"{size_text(read_bytes)} of {size_text(tally.wanted_bytes)}"
    return BarState(read_bytes / tally.wanted_bytes, text)


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False
