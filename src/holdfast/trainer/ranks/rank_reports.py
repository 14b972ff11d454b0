"""Describe the job's ranks in the errors of waits: their hosts, how far they are, who is silent.

A wait for other ranks that has passed its deadline names the ranks that it misses. Their hosts are
known once the ranks have met, and before that from a launcher that starts one rank on each host.
The steps are those that the agents of all hosts report when they are asked, at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from holdfast.coordination.rank_runs import ranks_text
from holdfast.format.names import CheckpointId
from holdfast.host.wire.protocol import QuietHosts
from holdfast.launchers import NO_LAUNCH, Launch
from holdfast.observe.run_status import JobHostStatus, JobStatus

RANKS_SHOWN_MAX = 5
"""How many ranks a message describes one by one."""
ASK_SECS = 4.0
"""How long the agents are asked: more than they wait for each other, less than the time by which
the ranks' deadlines differ."""


def _no_answer() -> None:
    return None


@dataclass(slots=True)
class RankReports:
    """What is known of the job's ranks. Owned by the training thread; any calls `quiet_ranks`.

    Attributes:
        count: The number of ranks.
        launch: What has started this process.
        hosts: The host of each rank; empty until the ranks have met.
        ask: Asks the agents of all hosts; returns None if they do not answer.
        ask_quiet: Asks this host's agent for the hosts of which nothing is heard; likewise.
    """

    count: int
    launch: Launch = NO_LAUNCH
    hosts: tuple[str, ...] = ()
    ask: Callable[[], JobStatus | None] = _no_answer
    ask_quiet: Callable[[], QuietHosts | None] = _no_answer

    def host_of(self, rank: int) -> str:
        """Return the host of a rank; empty if it is not known."""
        return self.hosts[rank] if self.hosts else self.launch.host_of(rank, self.count)

    def quiet_ranks(self) -> set[int]:
        """Return the ranks on hosts of which this host's agent hears nothing."""
        quiet = self.ask_quiet() if self.hosts else None
        if quiet is None:
            return set()
        return {rank for rank, host in enumerate(self.hosts) if host in quiet.hosts}

    def named(self, ranks: Collection[int]) -> str:
        """Return ranks and their hosts as text: `ranks 1, 3 (on b, d)`."""
        hosts = list(dict.fromkeys(filter(None, map(self.host_of, sorted(ranks)))))
        more = f" and {len(hosts) - RANKS_SHOWN_MAX} more" * (len(hosts) > RANKS_SHOWN_MAX)
        place = f" (on {', '.join(hosts[:RANKS_SHOWN_MAX])}{more})" if hosts else ""
        return f"{ranks_text(ranks)}{place}"

    def described(self, missing: Collection[int]) -> str:
        """Return how far the missing ranks and the others are; empty if no agent answers."""
        job = self.ask()
        if job is None:
            return ""
        others = [rank for rank in range(self.count) if rank not in missing]
        words = [f"missing: {self._places(job, sorted(missing))}"]
        if others:
            words.append(f"the others: {self._places(job, others)}")
        return "; ".join(words)

    def parts_text(self, checkpoint: CheckpointId) -> str:
        """Return whose parts of a checkpoint no host that answers has in RAM; empty if unknown."""
        job = self.ask() if self.count > 1 else None
        if job is None:
            return ""
        there = {
            rank
            for host in job.hosts
            for held in host.holds
            if (held.step, held.attempt) == (checkpoint.step, checkpoint.attempt.number)
            for rank in (*held.own, *held.copies)
        }
        if not there:
            return ""
        missing = [rank for rank in range(self.count) if rank not in there]
        if not missing:
            return f"all parts of step {checkpoint.step} are in RAM"
        return (
            f"no host that answers has these parts of step {checkpoint.step} in RAM: "
            f"{self._places(job, missing)}"
        )

    def _places(self, job: JobStatus, ranks: Collection[int]) -> str:
        texts = [self._place(job, rank) for rank in list(ranks)[:RANKS_SHOWN_MAX]]
        more = len(ranks) - RANKS_SHOWN_MAX
        return ", ".join(texts) + (f" and {more} more" if more > 0 else "")

    def _place(self, job: JobStatus, rank: int) -> str:
        """Return a rank with its host, its step, and what is wrong there."""
        name = self.host_of(rank)
        host = next((host for host in job.hosts if rank in host.ranks or host.host == name), None)
        words = [name or (host.host if host is not None else "on an unknown host")]
        if host is not None and host.problem:
            words.append(_silence(host))
        elif host is not None and rank not in host.ranks:
            words.append("its process has left the run, or has not joined it")
        elif host is not None:
            steps = dict(zip(host.ranks, host.steps, strict=False))
            step = steps.get(rank)
            words.append("before its first step" if step is None else f"at step {step}")
        return f"rank {rank} ({': '.join(words)})"


def _silence(host: JobHostStatus) -> str:
    since = f", nothing heard for {host.silent_secs:.0f} s" if host.silent_secs else ""
    return f"its agent does not answer ({host.problem}){since}"
