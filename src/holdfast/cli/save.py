"""Implement `holdfast save`: request a checkpoint from a live run, and wait for its commit."""

from __future__ import annotations

from pathlib import Path

import click

from holdfast.cli import output
from holdfast.cli.amounts import Amount
from holdfast.clock import Clock, SystemClock
from holdfast.engine.lifecycle.catalog import list_checkpoints
from holdfast.engine.reading.run import ReadableRun
from holdfast.errors import AgentUnavailableError, SaveFailedError, WaitTimeoutError
from holdfast.format.names import CheckpointId
from holdfast.host.wire import protocol
from holdfast.host.wire.agents_here import agent_folder, ask, status_of
from holdfast.local_agent.client import AgentGoneError
from holdfast.trainer.opening.run_access import read_only

POLL_SECS = 0.1
LOOK_SECS = 1.0
"""How often to list the run's directory."""
AGENT_SECS = 30.0
"""How long to wait for a new agent after the agent was lost."""


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path())
@click.option("--no-wait", is_flag=True, help="Return as soon as the run has accepted the request.")
@click.option(
    "--timeout",
    "timeout_secs",
    metavar="SECS",
    type=Amount(min=0),
    default=600.0,
    show_default=True,
    help="How long to wait for the commit.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def save(directory: str, no_wait: bool, timeout_secs: float, as_json: bool) -> None:
    """Request a checkpoint from the live run in DIR.

    Its trainers save at the next step that none of them has reached. The command waits until that
    checkpoint is committed to durable storage.
    """
    run = read_only(directory)
    request = _Request(run, agent_folder(run, "save"), SystemClock())
    target = request.target_step
    committed = None
    if not no_wait:
        with output.stderr().status(f"waiting for a checkpoint of step {target} or later"):
            committed = request.wait(timeout_secs)
    if as_json:
        output.print_json(
            {
                "run": str(run.location),
                "target_step": target,
                "committed": committed is not None,
                "step": committed.step if committed else None,
                "attempt": committed.attempt.number if committed else None,
            }
        )
    elif committed is not None:
        output.print_line(f"step {committed.step} (attempt {committed.attempt}) is committed")
    else:
        output.print_line(
            f"requested: the trainers save at step {target} or the first one after it"
        )


def _gone(run: ReadableRun, error: AgentGoneError) -> AgentUnavailableError:
    return AgentUnavailableError(f"save {run.location}: its agent has ended: {error}")


class _Request:
    """A request for a checkpoint of step `target` or later."""

    def __init__(self, run: ReadableRun, folder: Path, clock: Clock) -> None:
        self._run = run
        self._folder = folder
        self._clock = clock
        self._look_at = self._seen_at = clock.monotonic()
        try:
            self.attempt = status_of(folder).attempt
            answer = ask(
                folder, "request", protocol.RequestSave(reason="person"), protocol.Requested
            )
        except AgentGoneError as error:
            raise _gone(run, error) from error
        self.target_step = answer.target

    def wait(self, timeout_secs: float) -> CheckpointId:
        """Wait for a committed checkpoint of the target step or later, and return its id.

        Raises:
            SaveFailedError: It could not be made durable.
            AgentUnavailableError: The trainers or the agent have ended.
            WaitTimeoutError: The timeout has passed; the checkpoint may still be made.
        """
        deadline = self._clock.monotonic() + timeout_secs
        while True:
            status = self._status()
            committed = self._held_committed(status)
            # The agent drops checkpoints that newer ones replaced, so the directory is listed too.
            is_over = status is not None and not status.trainers and not status.pending
            if committed is None and (is_over or self._clock.monotonic() >= self._look_at):
                committed = self._committed()
                self._look_at = self._clock.monotonic() + LOOK_SECS
            if committed is not None:
                return committed
            if is_over:
                raise AgentUnavailableError(
                    f"save {self._run.location}: its trainers ended before they reached step "
                    f"{self.target_step}"
                )
            if self._clock.monotonic() >= deadline:
                raise WaitTimeoutError(
                    f"save {self._run.location}: no checkpoint of step {self.target_step} or "
                    f"later was committed within {timeout_secs:g} s; it may still be committed"
                )
            self._clock.sleep(POLL_SECS)

    def _status(self) -> protocol.AgentStatus | None:
        """Return the agent's status; None while a new agent may replace a lost one."""
        now = self._clock.monotonic()
        try:
            status = status_of(self._folder)
        except AgentGoneError as error:
            if now - self._seen_at > AGENT_SECS:
                raise _gone(self._run, error) from error
            return None
        self._seen_at = now
        return status

    def _held_committed(self, status: protocol.AgentStatus | None) -> CheckpointId | None:
        for held in status.held if status is not None else ():
            if held.step >= self.target_step and held.attempt >= self.attempt:
                if held.committed:
                    return held.id
                if held.failed is not None:
                    reason = f"save {self._run.location}: step {held.step}: {held.failed}"
                    raise SaveFailedError(held.step, reason)
        return None

    def _committed(self) -> CheckpointId | None:
        for checkpoint, listing in list_checkpoints(self._run.durable).items():
            is_new = checkpoint.attempt.number >= self.attempt
            if listing.is_committed and is_new and checkpoint.step >= self.target_step:
                return checkpoint
        return None
