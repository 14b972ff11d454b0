"""Notice that a rank has ended while the others wait for it in a decision.

The agent of a rank's host reports its end, and JAX ends a job that has lost a process. Neither
happens in a PyTorch job that loses a host with its agent. So each other rank puts a numbered entry
into the key-value service every `BEAT_SECS`, and rank 0 looks for it as often. A rank is lost if
its next entry was missing `MISSED_MAX` times in a row: a rank 0 that was suspended itself finds the
entries of that time first. The error of rank 0 ends the decision for all ranks. Rank 0 sends none:
if it ends with its host, the service ends too, or torchrun, which holds it, ends the other ranks.

Invariants:
- A rank without an entry may begin later, and the decision's timeout counts; but if for the same
  time nothing is heard of its host either, it is lost too.
- Rank 0 removes the entries that it has seen, and each rank at its end those that are left of it.

Assumes that no rank is kept from running Python for `BEAT_SECS * MISSED_MAX`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from holdfast.adapt.contract import KeyValues
from holdfast.coordination.rank_runs import ranks_text
from holdfast.errors import HoldfastError, ProcessLostError

BEAT_SECS = 10.0
MISSED_MAX = 10
"""Together 100 s, after which JAX ends a job too."""
END_SECS = 5.0
"""How long the end of the thread is waited for; a call of a service that is gone takes longer."""


@dataclass(slots=True)
class Heartbeats:
    """The heartbeats of one wait. `_beat` is run by one thread, `lost` is called by another.

    Args:
        entries: The job's key-value service.
        folder: The prefix of the entries, which no other wait of the job uses.
        rank: This rank.
        count: The number of ranks.
        named: Returns ranks as text for users.
        quiet_ranks: Returns the ranks on hosts of which nothing is heard.
    """

    entries: KeyValues
    folder: str
    rank: int
    count: int
    named: Callable[[Collection[int]], str] = ranks_text
    quiet_ranks: Callable[[], Collection[int]] = frozenset
    beat_secs: float = BEAT_SECS
    _next: dict[int, int] = field(default_factory=dict)
    _missed: dict[int, int] = field(default_factory=dict)

    @contextlib.contextmanager
    def running(self) -> Iterator[Callable[[], HoldfastError | None]]:
        """Send heartbeats within the block.

        Yields:
            A call that returns the error of the ranks whose heartbeats ended; None without one.
        """
        ended = threading.Event()
        thread = threading.Thread(
            target=self._beat, args=(ended,), name="holdfast-heartbeats", daemon=True
        )
        thread.start()
        try:
            yield self.lost
        finally:
            ended.set()
            thread.join(END_SECS)

    def lost(self) -> ProcessLostError | None:
        """Return the error that names the ranks whose heartbeats ended; None without one."""
        lost = [rank for rank, missed in self._missed.copy().items() if missed >= MISSED_MAX]
        if not lost:
            return None
        return ProcessLostError(
            f"wait for the other processes: {self.named(lost)} of {self.count} sent no heartbeat "
            f"for {self.beat_secs * MISSED_MAX:g} s; see their logs, stop this process and restart "
            "the job"
        )

    def _beat(self, ended: threading.Event) -> None:
        own = 0
        # If the service has ended, the calls of the waiting thread raise it.
        with contextlib.suppress(ProcessLostError):
            while True:
                if self.rank == 0:
                    self._look()
                else:
                    self.entries.put_if_absent(f"{self.folder}/{self.rank}/{own}", "alive")
                    own += 1
                if ended.wait(self.beat_secs):
                    break
            if own:
                self.entries.delete(f"{self.folder}/{self.rank}", [str(n) for n in range(own)])

    def _look(self) -> None:
        has_all_begun = all(self._next.get(rank) for rank in range(1, self.count))
        quiet = frozenset() if has_all_begun else self.quiet_ranks()
        for rank in range(1, self.count):
            number = first = self._next.get(rank, 0)
            while self.entries.get(f"{self.folder}/{rank}/{number}") is not None:
                self.entries.delete(f"{self.folder}/{rank}", [str(number)])
                number += 1
            self._next[rank] = number
            if number > first:
                self._missed[rank] = 0
            elif number or rank in quiet:
                self._missed[rank] = self._missed.get(rank, 0) + 1
            else:
                self._missed.pop(rank, None)
