"""Report workers that torchrun has started again and that do not get as far as opening a run.

They may hang in `init_process_group`, before anything of Holdfast runs in them: see
`holdfast.torchrun_store`. `holdfast run` is around them, or each of them is around a worker. See
docs/decisions/0058.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import psutil

from holdfast import torchrun_store
from holdfast.clock import Clock
from holdfast.host.wire.agents_here import living

LOOK_SECS = 5.0
"""How often to look at the command's processes."""
WAITING_SECS = 15.0
"""The age of a worker from which on its run should be open; gloo gives up after 20 s."""


class RestartedWorkers:
    """The workers among the processes of a command.

    Args:
        clock: The clock.
        note: Shows one line to the user.
    """

    def __init__(self, clock: Clock, note: Callable[[str], None]) -> None:
        self._clock = clock
        self._note = note
        self._look_at = clock.monotonic() + LOOK_SECS
        self._has_noted = False

    def look(self, pid: int) -> None:
        """Report, once, that workers which process `pid` has started again have opened no run."""
        if self._has_noted or self._clock.monotonic() < self._look_at:
            return
        self._look_at = self._clock.monotonic() + LOOK_SECS
        workers = _restarted(pid)
        now = self._clock.now().timestamp()
        if not any(now - worker.create_time() > WAITING_SECS for worker in workers):
            return
        trainers = {trainer.pid for status in living() for trainer in status.trainers}
        self._has_noted = True
        if trainers.isdisjoint(worker.pid for worker in workers):
            self._note(
                f"holdfast run: torchrun has restarted its processes {WAITING_SECS:.0f} s ago, and "
                f"none has opened a run: {torchrun_store.CAUSE}; {torchrun_store.ADVICE}"
            )


def _restarted(pid: int) -> list[psutil.Process]:
    """Return the process and its descendants that are restarted workers with a shared store."""
    workers = []
    with contextlib.suppress(psutil.Error):
        command = psutil.Process(pid)
        for process in (command, *command.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                environ = process.environ()
                if torchrun_store.is_shared(environ) and torchrun_store.is_restarted(environ):
                    process.create_time()
                    workers.append(process)
    return workers
