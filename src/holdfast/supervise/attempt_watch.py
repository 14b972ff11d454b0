"""Watch one start of the command: its checkpoints, and the evidence of its end.

The agents' status has the checkpoints; it is read while the command runs, because an agent may end
with its trainers. Owned by the supervisor's thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from pathlib import Path

from holdfast.host.wire.protocol import AgentStatus
from holdfast.supervise.ends import Evidence
from holdfast.trainer.process.end_report import (
    TrainerOpened,
    reported_ends,
    reported_errors,
    reported_openings,
)


class CheckpointProgress:
    """Whether the starts of the command have made new checkpoints."""

    def __init__(self) -> None:
        self._newest: dict[str, tuple[int, int]] = {}
        """Of each run, the attempt and the step of its newest complete checkpoint."""
        self._before: dict[str, int] = {}
        """Of each run, the step of the newest one at the end before."""
        self._first_attempts: dict[str, int] = {}
        """Of each run, the first attempt of the present start."""
        self._has_opened = False

    def note(self, opened: Iterable[TrainerOpened], statuses: Iterable[AgentStatus]) -> None:
        """Take the managers that this start has opened, and what agents know now."""
        for report in opened:
            self._has_opened = True
            first = self._first_attempts.get(report.run_id, report.attempt)
            self._first_attempts[report.run_id] = min(first, report.attempt)
        for status in statuses:
            for held in status.held:
                if held.complete:
                    newest = held.attempt, held.step
                    self._newest[status.run_id] = max(
                        newest, self._newest.get(status.run_id, newest)
                    )

    def take(self) -> bool | None:
        """Return whether this start has made a newer checkpoint, and begin with the next one.

        Returns:
            None if no start of the command has opened a run so far.
        """
        has_progress = any(
            attempt >= self._first_attempts[run_id] and step != self._before.get(run_id)
            for run_id, (attempt, step) in self._newest.items()
            if run_id in self._first_attempts
        )
        self._before = {run_id: step for run_id, (_, step) in self._newest.items()}
        self._first_attempts.clear()
        return has_progress if self._has_opened else None


class AttemptWatch:
    """One start of the command.

    Args:
        folder: The folder of its trainers' reports.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._oom_kills = oom_kills()

    def evidence(self, code: int, received: Collection[int], pid: int) -> Evidence:
        """Return what is known of its end, without other hosts.

        Args:
            code: The exit code.
            received: The signals that were forwarded.
            pid: The command's own process.
        """
        # A launcher may have started its trainers again, and a program may have opened its manager
        # again after an exception: what was before is no cause.
        openings = sorted(reported_openings(self._folder), key=lambda own: own.time_secs)
        newest = {(own.run_id, own.rank): own for own in openings}
        since_secs = {own.pid: own.time_secs for own in newest.values()}
        replaced = {own.pid for own in openings} - since_secs.keys()
        ends = [end for end in reported_ends(self._folder) if end.pid not in replaced]
        errors = [
            error
            for error in reported_errors(self._folder)
            if error.pid not in replaced and error.time_secs >= since_secs.get(error.pid, 0.0)
        ]
        ended = {end.pid for end in ends} | {error.pid for error in errors} | {pid}
        lost = [(own.rank, own.pid) for own in newest.values() if own.pid not in ended]
        return Evidence(
            code=code,
            received=tuple(received),
            ends=ends,
            errors=errors,
            lost_ranks=sorted(lost),
            oom_kills=max(0, oom_kills() - self._oom_kills),
        )


def oom_kills() -> int:
    """Return how many processes of this process's cgroup the kernel has killed so far for memory.

    0 where it does not count them.
    """
    return sum(map(_count_in, _counter_files()))


def _counter_files() -> Iterable[Path]:
    """Yield the files with the count, of cgroups of version 1 or 2."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, place = line.split(":", 2)
            if not controllers:
                yield Path(f"/sys/fs/cgroup{place}/memory.events")
            elif "memory" in controllers.split(","):
                # In a container, its own cgroup may be mounted as the root.
                own = Path(f"/sys/fs/cgroup/memory{place}/memory.oom_control")
                yield own if own.exists() else Path("/sys/fs/cgroup/memory/memory.oom_control")


def _count_in(path: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0
