"""Nothing leaks: a long run, and many attempts, hold no more than a short one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import Host, host
from tests.trust.figures import tell
from tests.trust.killing import end_of_agent
from tests.trust.leaking import KEPT_COUNT, Held, Sample, look, standing_trainer

FDS_MORE_MAX = 2
THREADS_MORE_MAX = 3
"""The agent's pools begin threads as they need them, up to a handful."""
RSS_MORE_MAX_BYTES = 4 * 1024 * 1024
FILES_MORE_MAX = 2
BYTES_MORE_MAX = 32 * 1024
EVENTS_PER_SAVE_MAX_BYTES = 1024
EVENTS_PER_ATTEMPT_MAX_BYTES = 8 * 1024
FILES_PER_ATTEMPT = 2
FILES_PER_CHECKPOINT = 3
_reached: dict[str, str] = {}


@pytest.fixture
def one_host() -> Iterator[Host]:
    """A host of the test's own."""
    with host() as made:
        yield made


def check_flat(first: Sample, last: Sample) -> None:
    """What is held at the last look is what was held at the first, after warming up."""
    where = f"\n{first}\n{last}"
    assert last.ram_files <= first.ram_files + FILES_MORE_MAX, where
    assert last.ram_bytes <= first.ram_bytes + BYTES_MORE_MAX, where
    assert last.checkpoint_files <= KEPT_COUNT * FILES_PER_CHECKPOINT, where
    per_file_bytes = last.checkpoint_bytes / last.checkpoint_files
    assert per_file_bytes <= first.checkpoint_bytes / first.checkpoint_files, where
    _check_process(first.agent, last.agent, f"agent: {where}")
    if first.trainer is not None and last.trainer is not None:
        _check_process(first.trainer, last.trainer, f"trainer: {where}")


def _check_process(first: Held, last: Held, where: str) -> None:
    assert last.fds <= first.fds + FDS_MORE_MAX, where
    assert last.threads <= first.threads + THREADS_MORE_MAX, where
    assert last.rss_bytes <= first.rss_bytes + RSS_MORE_MAX_BYTES, where


def more(first: Sample, last: Sample) -> str:
    """How much more was held at the last look, for the figure."""
    parts = [_more("agent", first.agent, last.agent)]
    if first.trainer is not None and last.trainer is not None:
        parts.append(_more("trainer", first.trainer, last.trainer))
    return "; ".join(parts)


def _more(name: str, first: Held, last: Held) -> str:
    rss = (last.rss_bytes - first.rss_bytes) / 1024
    fds, threads = last.fds - first.fds, last.threads - first.threads
    return f"{name} {fds:+d} descriptors, {threads:+d} threads, {rss:+.0f} KiB"


def check_saves(one_host: Host, run: Path, saves: int, warm: int, ram: bool) -> None:
    """Saves so often in one process, and looks every 100 saves."""
    samples: dict[int, Sample] = {}
    options = {"saves": saves, "sample": 100, "ram": ram}
    with standing_trainer(one_host, run, **options) as (process, lines):
        for line in lines:
            samples[line["saves"]] = look(one_host, run, process.pid)
            print(line["saves"], samples[line["saves"]])
    assert set(samples) == set(range(100, saves + 1, 100))
    first, last = samples[warm], samples[saves]
    check_flat(first, last)
    per_save_bytes = (last.event_bytes - first.event_bytes) / (saves - warm)
    assert per_save_bytes <= EVENTS_PER_SAVE_MAX_BYTES
    kind = "saves" if ram else "saves without RAM"
    _reached[kind] = (
        f"{saves} {kind}: {more(first, last)}, {per_save_bytes:.0f} bytes of events a save"
    )
    end_of_agent(one_host)


def check_attempts(one_host: Host, run: Path, processes: int, warm: int) -> None:
    """Two attempts a process; the first one ends well, the second one is killed.

    The agent is the same one throughout: it lingers after the death of a trainer.
    """
    samples: list[Sample] = []
    for number in range(processes):
        with standing_trainer(one_host, run, openings=2) as (process, lines):
            for line in lines:
                if line["opened"] == 2:
                    process.kill()
                    break
            process.wait(240)
        samples.append(look(one_host, run, None))
        print(number, samples[-1])
    first, last = samples[warm - 1], samples[-1]
    check_flat(first, last)
    assert last.attempt_files == 2 * processes * FILES_PER_ATTEMPT
    attempts = 2 * (processes - warm)
    per_attempt_bytes = (last.event_bytes - first.event_bytes) / attempts
    assert per_attempt_bytes <= EVENTS_PER_ATTEMPT_MAX_BYTES
    _reached["attempts"] = f"{2 * processes} attempts: {more(first, last)}"
    end_of_agent(one_host)


def check_openings(one_host: Host, run: Path, openings: int, warm: int) -> None:
    """One process opens the run again and again; the agent is the same one throughout."""
    samples: list[Sample] = []
    with standing_trainer(one_host, run, openings=openings) as (process, lines):
        for _ in lines:
            samples.append(look(one_host, run, process.pid))
            print(samples[-1])
    check_flat(samples[warm - 1], samples[-1])
    _reached["openings"] = (
        f"{openings} attempts of one process: {more(samples[warm - 1], samples[-1])}"
    )
    end_of_agent(one_host)


def test_two_hundred_saves_leave_nothing_behind(one_host: Host, tmp_path: Path) -> None:
    check_saves(one_host, tmp_path / "run", saves=200, warm=100, ram=True)


def test_six_attempts_leave_nothing_behind(one_host: Host, tmp_path: Path) -> None:
    check_attempts(one_host, tmp_path / "run", processes=3, warm=1)


def test_a_process_that_opens_a_run_again_and_again_leaves_nothing_behind(
    one_host: Host, tmp_path: Path
) -> None:
    check_openings(one_host, tmp_path / "run", openings=8, warm=3)


@pytest.mark.soak
@pytest.mark.parametrize(("ram", "saves"), [(True, 2000), (False, 800)])
def test_thousands_of_saves_leave_nothing_behind(
    one_host: Host, tmp_path: Path, ram: bool, saves: int
) -> None:
    check_saves(one_host, tmp_path / "run", saves=saves, warm=300, ram=ram)
    _tell()


@pytest.mark.soak
def test_fifty_attempts_leave_nothing_behind(one_host: Host, tmp_path: Path) -> None:
    check_attempts(one_host, tmp_path / "run", processes=25, warm=5)
    _tell()


@pytest.mark.soak
def test_fifty_attempts_of_one_process_leave_nothing_behind(one_host: Host, tmp_path: Path) -> None:
    check_openings(one_host, tmp_path / "run", openings=50, warm=10)
    _tell()


def _tell() -> None:
    tell(
        "leaks",
        "2,000 saves in one process, 50 attempts on one run: descriptors, threads, memory, tmpfs "
        "and disk flat after warming up; no process left",
        "; ".join(_reached.values()),
    )
