"""`Run`: reads a run's checkpoints beside whatever works on the run.

Invariants:
- Nothing of the run is written, and no lock of it is taken. No agent is started.
- Memory of a live run is copied, never borrowed, so that the run can write to it again.
- A checkpoint that is deleted while it is read is not an error, unless its step was asked for.

See docs/decisions/0023.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from holdfast.adapt.contract import ArraysOf
from holdfast.adapt.detect import find_framework
from holdfast.clock import Clock, SystemClock
from holdfast.engine.reading.metadata import CheckpointMetadata, metadata_of, process_values_of
from holdfast.engine.reading.sources import CheckpointSources
from holdfast.engine.reading.view import (
    find_newest_sound,
    find_sound,
    newest_first,
)
from holdfast.errors import InvalidArgumentError, WaitTimeoutError
from holdfast.trainer import arguments
from holdfast.trainer.opening.run_access import read_only
from holdfast.trainer.restore.restoring import (
    LoneReader,
    Restorer,
    RestoreReport,
)

POLL_SECS_MIN = 0.05
POLL_SECS_MAX = 2.0
POLL_SHARE = 0.1
"""The part of the time waited so far after which `wait_for_step` looks again."""


def open_run(directory: str | os.PathLike[str]) -> Run:
    """Open the run in `directory` for reading; it may be live, also on other hosts.

    Raises:
        NotARunError, NewerFormatError, StorageError: the directory.
        InvalidArgumentError: it is not a path.
    """
    return Run(directory)


class Run:
    """A run that is read: its durable checkpoints, and those in this host's RAM.

    It needs no framework: without `like` and `framework` arrays come as NumPy arrays, those of
    bfloat16 and the like with the dtypes of the package ml_dtypes. Checkpoints in the RAM of other
    hosts are not seen. Of a run with a remote tier, a step that is missing or damaged in the
    directory is read from there; `latest_step` and `all_steps` look at the directory alone. Threads
    may share it.

    Args:
        directory: the run's path or URL.

    Raises:
        NotARunError, NewerFormatError, StorageError, InvalidArgumentError: as `open_run`.
    """

    last_restore: RestoreReport | None
    """What the last restore did, None before the first one."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._clock: Clock = SystemClock()
        self._run = read_only(directory)
        self._is_closed = False
        self.last_restore = None
        self._seen_step: int | None = None

    def __repr__(self) -> str:
        step = self._seen_step
        return f"Run({self.directory!r}, {step=}{', closed' if self._is_closed else ''})"

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def directory(self) -> str:
        """The run's absolute path, where it was found last, or its URL."""
        return self._run.durable.home.location_text

    @property
    def run_id(self) -> str:
        """The run's id. A copy of a run that was not opened yet has the original's."""
        return self._run.run_id

    def latest_step(self) -> int | None:
        """Return the newest step that can be restored now; None where there is none.

        Raises:
            StorageError: the run cannot be listed.
            CheckpointDamagedError: an attempt's record is damaged, so the timeline is unknown.
        """
        self._check_open("latest_step")
        newest = find_newest_sound(self._run.load_newest_view)
        # Without one, there may still be older ones.
        newest = newest or find_newest_sound(self._run.load_view)
        self._seen_step = newest.step if newest is not None else None
        return self._seen_step

    def all_steps(self) -> list[int]:
        """Return all steps that can be restored now, ascending.

        Raises:
            StorageError, CheckpointDamagedError: as `latest_step`.
        """
        self._check_open("all_steps")
        return [checkpoint.step for checkpoint in find_sound(self._run.load_view)]

    def metadata(self, step: int | None = None) -> CheckpointMetadata:
        """Return the metadata of the checkpoint of `step`: arrays, values, metrics, sizes.

        Args:
            step: None: the newest that can be restored; see `latest_step`.

        Raises:
            StepNotFoundError: there is no checkpoint of `step`, or nothing was saved yet.
            StepUncommittedError, CheckpointDamagedError: the step.
        """
        self._check_open("metadata")
        step = self.latest_step() if step is None else step
        if step is None:
            arguments.raise_nothing_saved(self.directory, "metadata")
        return metadata_of(self._sources(step))

    def process_values(self, step: int) -> dict[str, list[Any]]:
        """Return the states of iterators and the like in the checkpoint of `step`.

        Returns:
            By name (`data`, `loaders/train`) the states as they were saved, one for each process
            that saved, in the order of their ranks.

        Raises:
            StepNotFoundError, StepUncommittedError, CheckpointDamagedError: the step.
        """
        self._check_open("process_values")
        return process_values_of(self._sources(step))

    def restore(
        self,
        step: int | None = None,
        *,
        like: Any = None,
        only: str | Sequence[str] | None = None,
        partial: str | Sequence[str] | None = None,
        cast: bool = False,
        rename: Mapping[str, str] | Callable[[str], str] | None = None,
        framework: str | None = None,
    ) -> Any:
        """Read the state of `step`, else of the newest checkpoint that can be restored.

        Args:
            step: None: the newest; older ones are tried where it is damaged.
            like: arrays, ShapeDtypeStructs and values that give structure and sharding; None:
                nested dicts of NumPy arrays. Without it the states of objects such as iterators
                are included where one process saved, and else left out; see `process_values`.
            only: path prefixes (`params`, `opt/0/mu`), as `metadata` and `holdfast show` print
                them. Just these arrays and values are read. Without `like` the result holds what
                is at and below them, in nested dicts; leaves of `like` elsewhere come back as they
                are.
            partial: path prefixes where `like` may have leaves that the checkpoint lacks or has in
                another shape, which come back as they are, and the checkpoint leaves that `like`
                lacks, which are ignored, states of objects among them; `.` is the whole tree.
            cast: convert arrays to the dtypes of `like`: floating-point among each other, integers
                among each other.
            rename: new names for what was saved, before anything else: a dict from beginnings of
                names to what replaces them (`{"model/module.": "model/"}`), or a function of the
                name. `only` and `partial` mean the new names; what no rule renames keeps its name.
            framework: `jax`, `torch` or `numpy`: whose arrays the result has where there is no
                `like`, whichever wrote them. With `like`, whose `like` is; None: find it.

        Returns:
            The state. Its arrays are the caller's own.

        Raises:
            StepNotFoundError: there is no checkpoint of `step`, or it was deleted meanwhile; or
                nothing was saved yet.
            StepUncommittedError, CheckpointDamagedError: the step.
            StructureMismatchError: `like` is not what was saved, or nothing is at a prefix of
                `only`; the message lists all differences by path.
            UnsupportedLeafError: `framework` has no dtype of an array.
            InvalidArgumentError: there is no such framework; or `rename` gives two leaves one name.
            StorageError: the run cannot be read.
        """
        self._check_open("restore")
        kind = ArraysOf.NUMPY if framework is None else ArraysOf.FRAMEWORK
        request = arguments.check_request(like, only, partial, cast, rename, kind)
        restorer = Restorer(find_framework(framework), LoneReader(), self._clock)
        if step is not None:
            number = arguments.check_step(step)
            restored = restorer.step(self._run.look_for(number), number, request)
        else:
            look = newest_first(self._run.load_newest_view, self._run.load_view)
            newest = restorer.newest(look, request)
            if newest is None:
                arguments.raise_nothing_saved(self.directory)
            restored = newest
        self.last_restore = restored.report
        self._seen_step = restored.report.step
        return restored.state

    def wait_for_step(self, after: int | None = None, timeout_secs: float | None = None) -> int:
        """Wait for a checkpoint newer than step `after`; return the newest step by then.

        For a job that evaluates each checkpoint: it looks at the run again after a tenth of the
        time waited, at least 20 times a second at first, and every 2 s later.

        Args:
            after: None: any checkpoint will do.
            timeout_secs: None: wait without a bound.

        Raises:
            WaitTimeoutError: there was none in that time.
            StorageError, CheckpointDamagedError: as `latest_step`.
        """
        self._check_open("wait_for_step")
        bound_secs = arguments.check_timeout(timeout_secs)
        floor = -1 if after is None else arguments.check_step(after)
        started = self._clock.monotonic()
        while True:
            newest = self.latest_step()
            if newest is not None and newest > floor:
                return newest
            waited_secs = self._clock.monotonic() - started
            pause_secs = min(max(waited_secs * POLL_SHARE, POLL_SECS_MIN), POLL_SECS_MAX)
            if bound_secs is not None:
                if waited_secs >= bound_secs:
                    expected = "a step" if after is None else f"a step after {after}"
                    raise WaitTimeoutError(
                        f"wait for {expected} in {self.directory}: after {bound_secs:g} s the "
                        f"newest one is {newest}"
                    )
                pause_secs = min(pause_secs, bound_secs - waited_secs)
            self._clock.sleep(pause_secs)

    def close(self) -> None:
        """Make further calls fail; may be repeated. Restored states stay as they are."""
        self._is_closed = True

    def _sources(self, step: int) -> CheckpointSources:
        return self._run.find_sources(arguments.check_step(step))

    def _check_open(self, call: str) -> None:
        if self._is_closed:
            raise InvalidArgumentError(f"{call}: this Run of {self.directory} is closed")
