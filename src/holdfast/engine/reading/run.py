"""One run as a reader sees it: its durable tier, and this host's RAM tier where there is one.

It is the one read model of a run, for the public read-only handle and for the command line. It
writes nothing and takes no lock of the run. How the RAM tier of a host is found is the caller's
knowledge: `find_ram` is called for each listing, because an agent may start or end in between.

See docs/decisions/0023.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.engine.lifecycle.attempts import newest_tier
from holdfast.engine.lifecycle.newest import list_newest
from holdfast.engine.lifecycle.run import noted_remote
from holdfast.engine.reading.sources import CheckpointSources
from holdfast.engine.reading.view import (
    View,
    find_newest_sound,
    newest_view_of,
    read_step,
    view_of,
)
from holdfast.errors import (
    CheckpointDamagedError,
    InvalidArgumentError,
    StepNotFoundError,
    StorageError,
)
from holdfast.store.contract import ReadableStore
from holdfast.store.durable import DurableStore
from holdfast.store.location import RunLocation
from holdfast.store.ram import RamStore


def _no_ram() -> RamStore | None:
    return None


def _no_remote() -> DurableStore | None:
    return None


class PutBack(NamedTuple):
    """An agent's newest checkpoint is missing from the run's directory.

    Attributes:
        step: the step from which the next start continues; None: it begins anew.
        text: what differs, and that step.
    """

    step: int | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadableRun:
    """A run that is read.

    A directory that is a copy of a run, and was not opened yet, has the original's `run_id`. The
    agents and the RAM of that id are not its own.

    `find_remote` returns the remote tier of the run, where it was trained with one. A reader of
    checkpoints reads the tier that it has opened, and the remote tier for a step that is missing or
    damaged there.
    """

    location: RunLocation
    run_id: str
    durable: DurableStore
    find_ram: Callable[[], RamStore | None] = _no_ram
    find_remote: Callable[[], DurableStore | None] = _no_remote
    is_copy: bool = False

    @property
    def agents_id(self) -> str:
        """The id that its own agents go by; empty where it can have none yet."""
        return "" if self.is_copy else self.run_id

    @property
    def stores(self) -> list[ReadableStore]:
        """The tiers as they are now, the nearest first."""
        ram = self.find_ram()
        return [ram, self.durable] if ram is not None else [self.durable]

    def load_view(self) -> View:
        """Return what the tiers hold now, the remote tier left out.

        Raises:
            CheckpointDamagedError: an attempt's record is damaged, so the timeline is unknown.
            StorageError: a tier cannot be listed.
        """
        return view_of(self.stores, self.durable)

    def look_for(self, step: int) -> Callable[[], View]:
        """Return a function that lists the tiers for a reader of `step`, for `read_step`.

        The remote tier is listed too where the other tiers lack the step; and from the second call
        on, as the copies in the other tiers may be damaged.
        """
        is_first = True

        def look() -> View:
            nonlocal is_first
            view = self.load_view()
            is_here = any(checkpoint.step == step for checkpoint in view.timeline)
            if is_first and is_here:
                is_first = False
                return view
            return self._with_remote(view, step, is_here)

        return look

    def find_sources(self, step: int) -> CheckpointSources:
        """Return the copies of the checkpoint of `step`, in the remote tier where it is needed.

        Raises:
            StepNotFoundError, StepUncommittedError, CheckpointDamagedError: the step.
            StorageError: a tier cannot be listed.
            InvalidArgumentError: the remote tier is in a bucket, and this host cannot open it.
        """
        return read_step(self.look_for(step), step, View.sources)

    def _with_remote(self, view: View, step: int, is_here: bool) -> View:
        """Return the view with the remote tier; `view` itself where it cannot be read or is none.

        Raises:
            StepNotFoundError: a remote tier that may have the step is left out.
            CheckpointDamagedError, StorageError, InvalidArgumentError: it cannot be read, and the
                step is not in `view` (`is_here`).
        """
        try:
            remote = self.find_remote()
            if remote is not None:
                return view_of([*self.stores, remote], newest_tier([self.durable, remote]))
        except (CheckpointDamagedError, StorageError, InvalidArgumentError) as error:
            if is_here:
                # The error of the copy that is here is raised.
                return view
            raise type(error)(
                f"find step {step}: {self.location} lacks it, and its remote tier cannot be read: "
                f"{error}"
            ) from error
        place = noted_remote(self.durable) if not (is_here or self.is_copy) else None
        if place is not None:
            try:
                view.find(step)
            except StepNotFoundError as error:
                raise StepNotFoundError(
                    f"{error}; its remote tier {place}, which may have it, is left out (the log "
                    "has the reason)"
                ) from error
        return view

    def find_put_back(self, step: int, attempt: int, *, is_durable: bool) -> PutBack | None:
        """Return what a start decides if the directory was put back below an agent's checkpoint.

        Args:
            step: the newest checkpoint that an agent of the run reports.
            attempt: the number of its attempt.
            is_durable: the agent reports it as committed.

        Returns:
            None if the directory has the attempt, and with `is_durable` the step or a newer one.

        Raises:
            CheckpointDamagedError, StorageError: as `load_view`.
            InvalidArgumentError: the remote tier is in a bucket, and this host cannot open it.
        """
        newest = list_newest(self.durable)
        is_missing = is_durable and all(c.step < step for c in newest.committed_ids)
        if attempt in newest.numbers and not is_missing:
            return None
        checkpoint = find_newest_sound(self._load_restart_view)
        origin = "anew"
        if checkpoint is not None:
            origin = f"from step {checkpoint.step} of attempt {checkpoint.attempt.number}"
        return PutBack(
            checkpoint.step if checkpoint is not None else None,
            f"an agent reports step {step} of attempt {attempt}"
            f"{' as durable' if is_durable else ''}, and {self.location} does not have it: it was "
            f"put back to an earlier state. The next start continues {origin}",
        )

    def _load_restart_view(self) -> View:
        """Return the checkpoints from which a start here can continue; of a remote tier too."""
        remote = self.find_remote()
        if remote is None:
            return self.load_newest_view()
        return view_of([*self.stores, remote], newest_tier([self.durable, remote]))

    def load_newest_view(self) -> View:
        """Return the newest checkpoints that the tiers hold now, with few requests.

        Raises:
            CheckpointDamagedError, StorageError: as `load_view`.
        """
        return newest_view_of(self.stores, self.durable)
