"""Restore the newest readable checkpoint, or a given one, and the same one on all ranks.

In each round the ranks read what they need of the newest remaining checkpoint, and vote.

Invariants:
- A rank keeps a checkpoint only if all ranks could read it; otherwise all continue with an older
  one.
- An error that ends the restore of a rank before its vote ends the restore on all ranks.
- Before they read, the ranks agree on what they read together from a bucket: once in each round, on
  every rank, whether or not it has found a checkpoint.

See docs/decisions/0021.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import UnsetType

from holdfast.adapt.contract import Framework, Restoration, RestoreRequest
from holdfast.adapt.leaves import ProcessStates
from holdfast.adapt.pipelines import pipeline_difference
from holdfast.clock import Clock
from holdfast.engine.reading.exchange import Exchange
from holdfast.engine.reading.restore import Filling, RestoreTally
from holdfast.engine.reading.sources import CheckpointSources
from holdfast.engine.reading.spans import Wants
from holdfast.engine.reading.view import View, read_step
from holdfast.errors import (
    CheckpointDamagedError,
    ObjectNotFoundError,
    StepUncommittedError,
    StorageError,
    StructureMismatchError,
)
from holdfast.format.names import STEP_MAX, CheckpointId
from holdfast.format.paths import Path, path_name
from holdfast.format.renaming import NO_RENAMING, Renaming
from holdfast.format.values import decode_value
from holdfast.garbage import nothing_collected
from holdfast.quantities import counted

log = logging.getLogger(__name__)

# The errors of an unreadable checkpoint, for which an older one is tried. A state whose structure
# does not fit is not among them: no other checkpoint would fit it better.
BAD_COPY = (CheckpointDamagedError, StorageError, StepUncommittedError)

DELETED_MAX = 20
"""How often a reader begins again because the checkpoint that it read was deleted meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """A report of one restore.

    Attributes:
        step: The step that was restored.
        attempt: The attempt that saved it.
        sources: The bytes of arrays that were read, by tier (`ram`, `durable`).
        shared: How many of these bytes another process of the job had read from the bucket, and
            passed on through RAM.
        skipped: (step, attempt, reason) of each newer checkpoint that could not be restored.
        passed_over: Each bad copy, with the reason, for which another copy was read instead.
        left_out: The names of the objects whose states were saved but not requested.
        kept: The names of the leaves that were kept from `like`, because the checkpoint lacks them
            or has them in another shape or kind.
        seconds: The time from the call to the restored state.
    """

    step: int
    attempt: int
    sources: dict[str, int]
    skipped: tuple[tuple[int, int, str], ...]
    passed_over: tuple[str, ...]
    left_out: tuple[str, ...]
    kept: tuple[str, ...]
    seconds: float
    shared: int = 0


class Rounds(Protocol):
    """How a rank agrees with the others: a `LoneReader` with none, `Votes` with those of a job.

    Attributes:
        rank: This rank.
        count: The number of ranks.
        is_outside: Whether this reader is no process of the run's job. It then neither borrows
            memory that the run writes to again, nor has states of objects of its own.
    """

    @property
    def rank(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def is_outside(self) -> bool: ...

    def meet(self) -> None:
        """Wait for all ranks, each of which has sealed its saves before it calls this.

        So every host's newest checkpoint is complete afterwards. Without it, a rank could list a
        host after the older checkpoint was released there and before the newer one was complete.
        """
        ...

    def propagating_errors(self) -> AbstractContextManager[object]:
        """Send an error that leaves the block to the other ranks, in place of a vote."""
        ...

    def join(self, checkpoint: CheckpointId | None, wants: Wants) -> Exchange | None:
        """Agree with the other ranks on what they read together; None: nothing.

        Args:
            checkpoint: The checkpoint that this rank tries.
            wants: What it reads of that at a service. Later calls in a round return None.
        """
        ...

    def vote(self, good: bool, checkpoint: CheckpointId | None) -> tuple[bool, int]:
        """Vote on the checkpoint that this rank has tried.

        Returns:
            Whether all ranks could read the same one, and the step below which to continue if not.
        """
        ...

    def end_round(self) -> None:
        """End the round, after the vote."""
        ...


@dataclass(frozen=True, slots=True)
class LoneReader:
    """The rounds of a reader that agrees with no other process."""

    rank: int = 0
    count: int = 1
    is_outside: bool = True

    def meet(self) -> None:
        """Return at once."""

    def propagating_errors(self) -> AbstractContextManager[object]:
        """Return a context that does nothing."""
        return nullcontext()

    def join(self, checkpoint: CheckpointId | None, wants: Wants) -> Exchange | None:
        """Return None: nothing is read together."""
        return None

    def vote(self, good: bool, checkpoint: CheckpointId | None) -> tuple[bool, int]:
        """Return this reader's own vote as that of all."""
        return good, checkpoint.step if checkpoint is not None else -1

    def end_round(self) -> None:
        """Do nothing."""


@dataclass(slots=True)
class RestoredState:
    """A restored state, its checkpoint and the report."""

    state: object
    report: RestoreReport
    id: CheckpointId
    is_newest: bool
    """Whether it was the newest one of the timeline when it was restored."""


@dataclass(slots=True)
class _Try:
    id: CheckpointId
    is_newest: bool
    error: Exception | None = None
    restoration: Restoration | None = None
    sources: CheckpointSources | None = None
    renaming: Renaming = NO_RENAMING
    filling: Filling | None = None
    tally: RestoreTally = field(default_factory=RestoreTally)


OnBegun = Callable[[RestoreTally], None]
"""Receives the tally of each checkpoint that is tried, before its first byte is read."""


def no_watch(tally: RestoreTally) -> None:
    """Ignore what a restore has read so far."""


@dataclass(frozen=True, slots=True)
class Restorer:
    """Restore states for one reader, or for one rank together with the others; change nothing.

    Attributes:
        framework: Makes the states.
        rounds: How this rank agrees with the others, each of which makes the same calls.
        clock: The time.
    """

    framework: Framework
    rounds: Rounds
    clock: Clock

    def newest(
        self,
        look: Callable[[], View],
        request: RestoreRequest,
        on_begun: OnBegun = no_watch,
        *,
        step_max: int = STEP_MAX,
    ) -> RestoredState | None:
        """Restore the newest checkpoint that every rank can read.

        Args:
            look: Lists the checkpoints.
            request: What of it to restore.
            on_begun: Receives the tally of each try.
            step_max: The last step whose checkpoint is tried.

        Returns:
            The restored state; None if the run has no such checkpoint.

        Raises:
            StructureMismatchError: `like` does not fit the newest readable checkpoint, on this rank
                or on another one.
            CheckpointDamagedError: There are checkpoints, but none can be read.
            ProcessLostError: Another rank has ended.
        """
        started_secs, rounds = self.clock.monotonic(), self.rounds
        rounds.meet()
        limit = step_max + 1
        skipped: list[tuple[int, int, str]] = []
        while True:
            with self._round():
                with rounds.propagating_errors():
                    tried = self._try_newest(look, limit, request, on_begun)
                    rounds.join(None, {})
                if tried is not None and tried.error is not None:
                    reason = str(tried.error)
                    skipped.append((tried.id.step, tried.id.attempt.number, reason))
                    text = "step %d cannot be restored, trying an older one: %s"
                    log.warning(text, tried.id.step, reason)
                good, limit = rounds.vote(
                    tried is None or tried.error is None, tried.id if tried is not None else None
                )
            if good and tried is not None:
                return self._finish(tried, skipped, self.clock.monotonic() - started_secs)
            if tried is None:
                if skipped:
                    raise CheckpointDamagedError(
                        f"{request.call}: none of the checkpoints can be read: "
                        + "; ".join(f"step {step}: {reason}" for step, _, reason in skipped)
                    )
                if good:
                    return None

    def step(
        self,
        look: Callable[[], View],
        step: int,
        request: RestoreRequest,
        on_begun: OnBegun = no_watch,
    ) -> RestoredState:
        """Restore the checkpoint of `step`; see `newest`.

        Raises:
            StepNotFoundError, StepUncommittedError, CheckpointDamagedError, StructureMismatchError:
                On this rank, or on another one.
            ProcessLostError: Another rank has ended.
        """

        def read(view: View, checkpoint: CheckpointId) -> _Try:
            tried = self._try(view, checkpoint, request, on_begun)
            if tried.error is not None and rounds.is_outside:
                # A live run may have deleted it meanwhile, so it is looked for again.
                raise tried.error
            return tried

        started_secs, rounds = self.clock.monotonic(), self.rounds
        rounds.meet()
        with self._round():
            with rounds.propagating_errors():
                tried = read_step(look, step, read)
            good, _ = rounds.vote(tried.error is None, tried.id)
        if tried.error is not None:
            raise tried.error
        if not good:
            raise CheckpointDamagedError(
                f"{request.call} step {step}: another process could not read it"
            )
        return self._finish(tried, [], self.clock.monotonic() - started_secs)

    @contextmanager
    def _round(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.rounds.end_round()

    def _try_newest(
        self, look: Callable[[], View], limit: int, request: RestoreRequest, on_begun: OnBegun
    ) -> _Try | None:
        """Try the newest checkpoint below step `limit`; return None where there is none.

        A live run may delete a checkpoint while it is read here. It has a newer one by then, so the
        run is listed again; the number of times is bounded, for a run that deletes faster than this
        process reads.
        """
        tried = None
        for _ in range(DELETED_MAX):
            view = look()
            left = [c for c in view.timeline if c.step < limit]
            if not left:
                return None
            if tried is not None and left[-1] == tried.id:
                return tried
            tried = self._try(view, left[-1], request, on_begun)
            if tried.error is None:
                return tried
        return tried

    def _try(
        self, view: View, checkpoint: CheckpointId, request: RestoreRequest, on_begun: OnBegun
    ) -> _Try:
        tried = _Try(checkpoint, is_newest=view.timeline[-1] == checkpoint)
        with _unreadable_noted(tried), nothing_collected():
            self._plan(tried, view, request)
        # The errors of other ranks leave this call; they are no reason to try an older checkpoint.
        wants = tried.filling.wants if tried.filling is not None else {}
        exchange = self.rounds.join(checkpoint, wants)
        if tried.filling is None or tried.restoration is None:
            return tried
        with _unreadable_noted(tried):
            tried.tally = tried.filling.run(on_begun, exchange)
            tried.restoration.convert_dtypes()
        tried.filling = None
        return tried

    def _plan(self, tried: _Try, view: View, request: RestoreRequest) -> None:
        """Find a checkpoint's copies, compare it with what is asked for, and plan its reading."""
        is_outside = self.rounds.is_outside
        tried.sources = view.sources(tried.id)
        spec = request.renaming.spec(tried.sources.spec, request.call)
        tried.renaming = request.renaming
        tried.restoration = self.framework.restoration(spec, request)
        if is_outside and request.like is None and len(tried.sources.parts) > 1:
            tried.restoration.process_values = ()
        if len(tried.sources.parts) != self.rounds.count:
            partial = request.partial
            _keep_objects(
                tried.restoration, filter(partial.covers, tried.restoration.process_values)
            )
        else:
            _check_pipelines(tried, self.rounds.rank, request)
        _check_processes(tried.sources, tried.restoration, self.rounds.count, request.call)
        targets = tried.restoration.targets
        if is_outside:
            # A slot that this process borrows would be missing to the live run's next save.
            targets = [target._replace(take=None) for target in targets]
        tried.filling = Filling(tried.sources, targets)

    def _finish(
        self, tried: _Try, skipped: list[tuple[int, int, str]], seconds: float
    ) -> RestoredState:
        assert tried.sources is not None
        assert tried.restoration is not None
        process_values = self._process_values(tried)
        if tried.tally.passed_over:
            log.warning(
                "step %d was read without %d copies that could not be used; the first: %s",
                tried.id.step,
                len(tried.tally.passed_over),
                tried.tally.passed_over[0],
            )
        report = RestoreReport(
            step=tried.id.step,
            attempt=tried.id.attempt.number,
            sources=dict(tried.tally.bytes_by_tier),
            skipped=tuple(skipped),
            passed_over=tuple(tried.tally.passed_over),
            left_out=_left_out(tried),
            kept=tuple(map(path_name, tried.restoration.kept)),
            seconds=round(seconds, 4),
            shared=tried.tally.shared_bytes,
        )
        with nothing_collected():
            state = tried.restoration.finish(process_values)
        return RestoredState(state, report, tried.id, tried.is_newest)

    def _process_values(self, tried: _Try) -> dict[Path, object]:
        """Return the states of a tried checkpoint's objects, as `Restoration.finish` takes them."""
        assert tried.sources is not None
        assert tried.restoration is not None
        rank, count, parts = self.rounds.rank, self.rounds.count, tried.sources.parts
        is_divided = len(parts) != count
        states: dict[Path, list[object]] = {path: [] for path in tried.restoration.process_values}
        if not states:
            return {}
        for copies in parts if is_divided else [parts[rank]]:
            for value in copies[0].part.values:
                path = tried.renaming.path(value.path)
                if path in states:
                    states[path].append(decode_value(value.value))
        if is_divided:
            return {
                path: ProcessStates(states=of_ranks, rank=rank, count=count)
                for path, of_ranks in states.items()
            }
        return {path: state for path, (state,) in states.items()}


@contextmanager
def _unreadable_noted(tried: _Try) -> Iterator[None]:
    """Note an error of an unreadable checkpoint, and end the block."""
    try:
        yield
    except ObjectNotFoundError as error:
        tried.error = CheckpointDamagedError(f"restore {tried.id}: {error}")
    except BAD_COPY as error:
        tried.error = error


def _keep_objects(restoration: Restoration, paths: Iterable[Path]) -> None:
    """Keep objects as they were given, whose saved states do not fit."""
    kept = [*paths]
    taken = [path for path in restoration.process_values if path not in kept]
    restoration.process_values = taken
    restoration.kept = [*restoration.kept, *kept]


def _check_pipelines(tried: _Try, rank: int, request: RestoreRequest) -> None:
    """Check that iterators read what those read whose positions are saved, or keep them.

    Raises:
        StructureMismatchError: one reads something else, and `request.partial` does not name it.
    """
    assert tried.sources is not None
    assert tried.restoration is not None
    given = tried.restoration.pipelines
    differing: dict[Path, str] = {}
    for value in tried.sources.parts[rank][0].part.values if given else ():
        path, saved = tried.renaming.path(value.path), value.pipeline
        if path in given and not isinstance(saved, UnsetType):
            difference = pipeline_difference(given[path], saved)
            if difference is not None:
                differing[path] = f"{path_name(path)}: {difference}"
    bad = [text for path, text in differing.items() if not request.partial.covers(path)]
    if bad:
        step = tried.id.step
        raise StructureMismatchError(
            f"{request.call} step {step}: iterators read another pipeline than the one that was "
            "saved (expected is that of the iterator given, found is what was saved):\n  "
            + "\n  ".join(bad)
            + "\nMake the pipeline that was saved; or name the iterator in partial=..., which then "
            f"begins where it is. process_values({step}) has the saved position"
        )
    if differing:
        log.info("kept iterators of another pipeline: %s", "; ".join(differing.values()))
        _keep_objects(tried.restoration, differing)


def _check_processes(
    sources: CheckpointSources, restoration: Restoration, process_count: int, call: str
) -> None:
    """Check that the checkpoint has one state of each object that divides none for each process."""
    divided = {*restoration.divided}
    paths = [path for path in restoration.process_values if path not in divided]
    if paths and len(sources.parts) != process_count:
        step = sources.id.step
        raise StructureMismatchError(
            f"{call} step {step}: expected {counted(process_count, 'state')} of each "
            f"object ({', '.join(map(path_name, paths[:5]))}), one for each process of this job, "
            f"found {len(sources.parts)}. Restore a state without these objects, with their names "
            "as partial=..., and divide among them the states that "
            f"process_values({step}) returns; or give the objects a method set_states, as "
            "holdfast.torch.RandomState(per_rank=True) has one"
        )


def _left_out(tried: _Try) -> tuple[str, ...]:
    """Return the names of the objects that were saved and not requested, as they were saved."""
    assert tried.sources is not None
    assert tried.restoration is not None
    taken = set(tried.restoration.process_values)
    saved = tried.sources.spec.process_values
    return tuple(path_name(path) for path in saved if tried.renaming.path(path) not in taken)
