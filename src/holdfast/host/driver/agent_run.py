"""Hold the run that an agent works on: its durable tiers and its events.

Other threads use the stores. All else is owned by the agent's event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast.clock import Clock
from holdfast.engine.lifecycle.run import check_run
from holdfast.engine.tiers.remote_checkpoints import RemoteCheckpoints
from holdfast.host.wire.config import AgentConfig
from holdfast.observe.events.schema import Event
from holdfast.observe.events.uploaded_segments import SegmentUploads, uploads_for
from holdfast.observe.events.writer import EventWriter
from holdfast.policy import preservation_policy, save_decision_policy
from holdfast.policy.vouching import VouchedStep, preserving
from holdfast.store.contract import REMOTE
from holdfast.store.durable import DurableStore
from holdfast.store.files.file_system import FileSystem
from holdfast.store.location import open_durable

REMOTE_ADVICE = "training goes on in the directory; the next start needs another remote tier"


@dataclass(slots=True, kw_only=True)
class RemoteTarget:
    """The run's remote tier, and the uploads of events to it.

    The policies are set on rank 0's host, once its attempt has begun.
    """

    place: str
    store: DurableStore
    checkpoints: RemoteCheckpoints
    uploads: SegmentUploads
    save: save_decision_policy.SaveDecisionPolicy | None = None
    preserve: preservation_policy.PreservationPolicy | None = None
    is_guarded: bool = False
    """Whether the training may go back to checkpoints that are vouched for."""
    vouched: int | None = None
    """The step up to which they are, as reported last; None: not yet."""

    @property
    def preserve_now(self) -> preservation_policy.PreservationPolicy | None:
        """The policy, with what it keeps for the training to go back; None: nothing is removed."""
        if self.preserve is None or not self.is_guarded:
            return self.preserve
        if self.vouched is None:
            return None
        return preserving(self.preserve, VouchedStep(self.vouched))


@dataclass(slots=True)
class AgentRun:
    """The run of one agent. `remote` is None if the run has no remote tier."""

    config: AgentConfig
    clock: Clock
    files: FileSystem
    durable: DurableStore
    events: EventWriter
    remote: RemoteTarget | None = None

    @property
    def path(self) -> str:
        """The path where the run was found last, or its URL."""
        return self.durable.home.location_text

    @property
    def folder(self) -> Path:
        """The agent's own folder."""
        return Path(self.config.folder)

    def use_remote(self, place: str | None) -> None:
        """Use the remote tier at `place` from now on; None: the run has none.

        Raises:
            InvalidArgumentError: it is a URL, and obstore is not installed or not configured.
        """
        if self.remote is not None and self.remote.place != place:
            self.events.end_uploads(self.remote.uploads)
            self.remote = None
        if place is not None and self.remote is None:
            store = open_durable(place, self.clock, self.files, tier=REMOTE)
            uploads = SegmentUploads(
                self.durable.home,
                store,
                self.config.host,
                self.clock,
                lambda: check_run(store, place, self.config.run_id, REMOTE_ADVICE),
            )
            self.events.begin_uploads(uploads)
            checkpoints = RemoteCheckpoints(self.durable, store)
            self.remote = RemoteTarget(
                place=place, store=store, checkpoints=checkpoints, uploads=uploads
            )

    def reopen_remote(self) -> None:
        """Open the remote tier anew: its path leads to another directory than at first."""
        before = self.remote
        assert before is not None
        self.use_remote(None)
        self.use_remote(before.place)
        assert self.remote is not None
        self.remote.save, self.remote.preserve = before.save, before.preserve
        self.remote.is_guarded, self.remote.vouched = before.is_guarded, before.vouched


def open_run(
    config: AgentConfig, clock: Clock, files: FileSystem, on_event: Callable[[Event], None]
) -> AgentRun:
    """Open the run of an agent that has its place; `on_event` receives the events it writes."""
    durable = open_durable(config.run, clock, files)
    uploads = uploads_for(durable, config.host, clock)
    events = EventWriter(durable.home, config.host, clock, on_event, uploads)
    return AgentRun(config, clock, files, durable, events)
