"""The checkpoint at a URL of a bucket, where no rename can put a directory in its place.

The prefix is a run. Each save is an attempt of it, which continues from the checkpoint before and
saves its step again, so that the commit replaces it for every reader.

Invariants:
- Until the commit, readers get the checkpoint before. It is removed after the commit; what a killed
  save left, which no reader sees, too.
- Of several saves at once the one that began last continues; the others fail, and remove nothing of
  it. Their numbers are given out by the bucket, which creates an object only once.
- Nothing is removed from a run that others have trained: only attempts of saves have the token of
  `SAVED`.

See docs/decisions/0068.
"""

from __future__ import annotations

import logging
import os

from holdfast.building.directory import SAVED
from holdfast.clock import SystemClock
from holdfast.engine.lifecycle.attempts import (
    AttemptStart,
    begin_attempt,
    newest_attempt,
    newest_number,
    read_attempts,
)
from holdfast.engine.lifecycle.catalog import list_checkpoints
from holdfast.engine.lifecycle.commit import check_not_fenced, commit, remove
from holdfast.engine.lifecycle.run import create_run, read_run
from holdfast.errors import InvalidArgumentError, NotARunError, StorageError
from holdfast.format.names import AttemptId, CheckpointId
from holdfast.format.timeline import on_timeline
from holdfast.local_agent.place import host_name
from holdfast.store.location import open_durable

TRIES_MAX = 20
"""How often a save begins, while others begin at the same URL."""

log = logging.getLogger(__name__)


class NewPrefix:
    """The next checkpoint at a URL, from its beginning to its commit.

    Args:
        url: A checked URL of a bucket and a prefix in it.

    Raises:
        InvalidArgumentError: Something else is at the URL, or obstore is not installed.
        StorageError: The bucket cannot be read or written, or other saves begin all the time.
    """

    def __init__(self, url: str) -> None:
        self._clock = SystemClock()
        self.where = url
        self.store = open_durable(url, self._clock)
        if self.store.is_unused():
            self.store.prepare_place()
            token, time = self._clock.new_token(), self._clock.now()
            self.run_id = create_run(self.store, url, token, time).run_id
        else:
            self.run_id = self._checked_run()
        self.id = self._begun()
        self._is_open = True

    def _checked_run(self) -> str:
        try:
            run_id = read_run(self.store, self.where).run_id
        except NotARunError as error:
            raise InvalidArgumentError(
                f"save to {self.where}: expected nothing or what an earlier save made, found "
                "objects of others, which are not overwritten; give a new URL"
            ) from error
        attempts = {checkpoint.attempt for checkpoint in list_checkpoints(self.store)}
        attempts.add(newest_attempt(self.store))
        if any(attempt and attempt.token != SAVED.attempt.token for attempt in attempts):
            raise InvalidArgumentError(
                f"save to {self.where}: expected nothing or what an earlier save made, found the "
                "run of a CheckpointManager, which is not overwritten; give a new URL"
            )
        return run_id

    def _committed(self) -> list[CheckpointId]:
        return [c for c, listing in list_checkpoints(self.store).items() if listing.is_committed]

    def _begun(self) -> CheckpointId:
        """Begin an attempt that continues from the newest checkpoint."""
        for _ in range(TRIES_MAX):
            committed = self._committed()
            before = on_timeline(committed, read_attempts(self.store))
            attempt = AttemptId(newest_number(self.store) + 1, SAVED.attempt.token)
            start = AttemptStart(
                run_id=self.run_id,
                origin=before[-1] if before else None,
                host=host_name(),
                pid=os.getpid(),
                time=self._clock.now(),
            )
            record = begin_attempt(self.store, attempt, start)
            # Race: an earlier save that commits after the first listing, and before the attempt,
            # removes what this one continues from.
            if record is not None and self._committed() == committed:
                return CheckpointId(SAVED.step, attempt)
        raise StorageError(
            f"save to {self.where}: other saves began {TRIES_MAX} times meanwhile; save one after "
            "another, or each to a URL of its own"
        )

    def commit(self, part_count: int) -> None:
        """Commit the checkpoint, then remove the one before.

        Raises:
            FencedError: Another save began after this one; this one is not to be seen.
            ObjectNotFoundError, CheckpointDamagedError, StorageError: It is not committed.
        """
        check_not_fenced(self.store, self.id)
        commit(self.store, self.id, part_count)
        # Race: a save that began since the first check continues from the checkpoint before.
        check_not_fenced(self.store, self.id)
        self._is_open = False
        try:
            for checkpoint, listing in list_checkpoints(self.store).items():
                if checkpoint < self.id:
                    remove(self.store, checkpoint, listing)
        except StorageError as error:
            log.warning("%s was saved; what it replaces is removed later: %s", self.where, error)

    def close(self) -> None:
        """Remove what was written, unless it is committed. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            for checkpoint, listing in list_checkpoints(self.store).items():
                if checkpoint == self.id:
                    remove(self.store, checkpoint, listing)
        except StorageError as error:
            log.warning("%s: a save that failed is removed by the next one: %s", self.where, error)
