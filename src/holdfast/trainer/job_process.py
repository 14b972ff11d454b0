"""Describe this process as one of the training job's, before it has opened a run."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from holdfast import environment, launchers
from holdfast.adapt.contract import Framework
from holdfast.adapt.detect import find_framework
from holdfast.clock import Clock, SystemClock, process_age_secs
from holdfast.errors import HoldfastError
from holdfast.trainer.opening.agent_session import AgentSession
from holdfast.trainer.opening.proof import proof_link
from holdfast.trainer.options import ProcessHooks
from holdfast.trainer.process import terminal
from holdfast.trainer.process.end_report import supervisor_link
from holdfast.trainer.process.preemption import PreemptionSignals
from holdfast.trainer.ranks.rendezvous import Rendezvous

log = logging.getLogger(__name__)


@contextlib.contextmanager
def errors_sent(framework: str | Framework | None) -> Iterator[None]:
    """Send an error of the block to the job's other processes, whose opening waits for this one."""
    try:
        yield
    except HoldfastError as error:
        # Where the framework is what cannot be used, no other process is known.
        with contextlib.suppress(HoldfastError):
            rendezvous = Rendezvous(find_framework(framework).processes(), SystemClock())
            rendezvous.fail_next("open the run", error)
        raise


class JobProcess:
    """The framework of this process, its rank, its launcher, and its signals.

    The constructor replaces handlers of signals; see `PreemptionSignals`.

    Args:
        framework: The framework, or its name; None: the one that the program uses.
        hooks: What is installed in this process.

    Raises:
        InvalidArgumentError: The framework cannot be used, or the launcher started another number
            of processes than the framework has.
    """

    def __init__(self, framework: str | Framework | None, hooks: ProcessHooks) -> None:
        self.clock: Clock = SystemClock()
        self.age_secs, self.began_secs = process_age_secs(), self.clock.monotonic()
        self.link = supervisor_link()
        self.framework = find_framework(framework)
        self.processes = self.framework.processes()
        self.rank = self.processes.rank
        self.proof = proof_link(self.rank, self.clock)
        terminal.set_log(hooks.terminal_lines, self.rank, self.processes.count)
        if self.rank == 0:
            environment.warn_unknown()
        self.launch = launchers.launched()
        self.launch.check(self.rank, self.processes.count)
        for launcher in self.launch.launchers:
            if launcher.unreadable:
                log.warning(
                    "of %s: expected numbers, found %s; they are not used",
                    *(launcher.of.label, ", ".join(launcher.unreadable)),
                )
        self.rendezvous = Rendezvous(self.processes, self.clock, launch=self.launch)
        self.session: AgentSession | None = None
        """The session with the host's agent, once that was joined."""
        self.signals = PreemptionSignals(
            hooks.preemption_signals, self.launch.signals, self._publish_preemption, self.clock
        )

    def _publish_preemption(self) -> None:
        # A signal that arrives before is published when the handlers are installed.
        if self.session is not None:
            self.session.place.announce_preemption()

    def show(self, text: str) -> None:
        """Log a line about the whole job: rank 0's terminal shows it."""
        log.log(logging.INFO if self.rank == 0 else logging.DEBUG, "%s", text)

    def report_error(self, error: BaseException) -> None:
        """Report an exception that ends the training to `holdfast run`."""
        if self.link is not None:
            self.link.report_error(error, self.clock.monotonic())
