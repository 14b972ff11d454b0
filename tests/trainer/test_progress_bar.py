"""A bar is shown for a restore and a close that take long, on a terminal that shows our lines."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from holdfast.trainer.process.progress_bar import BAR_CHARS, BarState, bar_line
from tests.hosts import Host

SCRIPT = """
import sys, time
import numpy as np
from holdfast import CheckpointManager, RamTier
from holdfast.engine.reading import restore
from holdfast.trainer.process import progress_bar
from holdfast.policy.save_decision_policy import FixedIntervalPolicy

run, after_secs, slow = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
progress_bar.AFTER_SECS, progress_bar.REDRAW_SECS = after_secs, 0.01
check_block = restore.check_block
def checked(*arguments):
    time.sleep(slow)
    check_block(*arguments)
restore.check_block = checked
state = {"w": np.arange(4_000_000.0)}
with CheckpointManager(
    run, framework="numpy", save_decision_policy=FixedIntervalPolicy(1), ram=RamTier(linger_secs=30)
) as manager:
    start, state = manager.resume(state)
    manager.save(start, state)
"""


def shown(one_host: Host, run: Path, *, after: float, slow: float, **variables: str) -> str:
    """What a terminal shows of the script's standard error."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(run), str(after), str(slow)],
        env=one_host.environment | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    )
    os.close(theirs)
    data = b""
    with contextlib.suppress(OSError):  # at the end of the process
        while piece := os.read(ours, 65536):
            data += piece
    os.close(ours)
    assert process.wait(240) == 0
    return data.decode()


def test_a_long_restore_and_a_long_close_have_a_bar_and_short_ones_none(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    first = shown(one_host, run, after=0.0, slow=0.0)
    assert "closing [" in first
    assert "of 1 checkpoint is durable" in first
    again = shown(one_host, run, after=0.0, slow=0.05)
    assert "restoring [" in again
    assert "of 32.0 MB" in again
    # The bar is gone before the line that says what was restored.
    assert "\r\x1b[Kholdfast: resumed from step 0" in again
    quick = shown(one_host, run, after=60.0, slow=0.0)
    assert "[" not in quick.replace("\x1b[", "")


def test_where_the_lines_are_off_or_there_is_no_terminal_there_is_no_bar(
    one_host: Host, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert shown(one_host, run, after=0.0, slow=0.0, HOLDFAST_LOG="warning") == ""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(run), "0", "0.02"],
        env=one_host.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "\x1b" not in done.stderr
    assert "█" not in done.stderr


def test_a_line_says_how_far_it_is() -> None:
    assert bar_line("closing", None) == "holdfast: closing…"
    half = bar_line("restoring", BarState(0.5, "1 of 2 GB"))
    assert half.count("█") == BAR_CHARS // 2
    assert half.endswith("]  50% 1 of 2 GB")
    assert "100%" in bar_line("x", BarState(7.0, ""))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_in_the_block_ends_the_bar(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.trainer.process import progress_bar, terminal

    monkeypatch.setattr(progress_bar, "_is_terminal", lambda: True)
    monkeypatch.setattr(terminal, "shows_lines", lambda level: True)
    monkeypatch.setattr(progress_bar, "AFTER_SECS", 0.0)

    def fail() -> None:
        with progress_bar.progress_bar("x", lambda: None, is_on=True):
            time.sleep(0.05)
            raise error

    with pytest.raises(error):
        fail()
    assert "holdfast-bar" not in {thread.name for thread in threading.enumerate()}
