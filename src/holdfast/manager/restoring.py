"""Restoring: the newest good checkpoint, or a given one, on all ranks the same.

Each round the ranks take the newest checkpoint that is left, read what they need of it, and vote.
Only when all could read it does any of them keep it; else all go on to an older one. What ends the
restore of a rank that has not voted ends it on all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.adapt.contract import Framework, Restoration, RestoreRequest
from holdfast.clock import Clock
from holdfast.engine.reading.restore import RestoreTally, fill_targets
from holdfast.engine.reading.sources import CheckpointSources
from holdfast.engine.reading.view import View
from holdfast.errors import (
    CheckpointDamagedError,
    ObjectNotFoundError,
    StepUncommittedError,
    StorageError,
    StructureMismatchError,
)
from holdfast.format.names import STEP_MAX, CheckpointId
from holdfast.format.paths import Path, path_name
from holdfast.format.values import decode_value

log = logging.getLogger(__name__)

# What says that this checkpoint cannot be had, as against a state that does not fit it.
BAD_COPY = (CheckpointDamagedError, StorageError, StepUncommittedError)

DELETED_MAX = 20
"""How often a reader begins again because the checkpoint that it read was deleted meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What a restore did.

    Attributes:
        step: the step that was restored.
        attempt: the attempt that had saved it.
        sources: bytes of arrays that were read, by tier (`ram`, `durable`).
        skipped: (step, attempt, reason) of each newer checkpoint that could not be restored.
        passed_over: each copy that was bad, and why, where another copy served.
        left_out: the names of the objects whose states were saved, and not asked for.
        kept: the names of the leaves that were kept from `like`, for want of a saved value.
        seconds: from the call to the state.
    """

    step: int
    attempt: int
    sources: dict[str, int]
    skipped: tuple[tuple[int, int, str], ...]
    passed_over: tuple[str, ...]
    left_out: tuple[str, ...]
    kept: tuple[str, ...]
    seconds: float


def event_of(report: RestoreReport) -> dict[str, Any]:
    """What the run's events tell of a restore."""
    return {
        "step": report.step,
        "attempt": report.attempt,
        "sources": report.sources,
        "skipped": report.skipped,
        "passed_over": report.passed_over,
        "secs": report.seconds,
    }


@dataclass(slots=True)
class Rounds:
    """How the ranks agree: `vote` gives (good, the step below which to go on).

    `meet` waits for all ranks. Each has sealed what it saved when it comes, so that what the ranks
    see after it is whole: an older checkpoint may be given up on one host before another host is
    looked at, but by then the newer one is complete there.

    An error that leaves a block of `telling` is told to the other ranks instead of a vote.

    `is_outside` is set for a reader that is no process of the run's job: it neither borrows memory
    that the run writes to again, nor has states of objects of its own.
    """

    vote: Callable[[bool, CheckpointId | None], tuple[bool, int]]
    rank: int
    count: int
    telling: Callable[[], AbstractContextManager[object]] = nullcontext
    meet: Callable[[], None] = lambda: None
    is_outside: bool = False


def outside_rounds() -> Rounds:
    """Return the rounds of one reader that agrees with no other process."""
    return Rounds(
        vote=lambda good, found: (good, found.step if found is not None else -1),
        rank=0,
        count=1,
        is_outside=True,
    )


@dataclass(slots=True)
class RestoredState:
    """A state that was restored, and how."""

    state: object
    report: RestoreReport
    id: CheckpointId


@dataclass(slots=True)
class _Try:
    id: CheckpointId
    error: Exception | None = None
    restoration: Restoration | None = None
    sources: CheckpointSources | None = None
    tally: RestoreTally = field(default_factory=RestoreTally)


def restore_newest(
    look: Callable[[], View],
    framework: Framework,
    request: RestoreRequest,
    rounds: Rounds,
    clock: Clock,
) -> RestoredState | None:
    """Return the newest checkpoint that every rank can read; None where nothing was ever saved.

    Raises:
        StructureMismatchError: `like` does not fit the newest good one, here or on another rank.
        CheckpointDamagedError: there are checkpoints, and none of them can be read.
        ProcessLostError: another rank has ended.
    """
    started = clock.monotonic()
    rounds.meet()
    limit = STEP_MAX + 1
    skipped: list[tuple[int, int, str]] = []
    while True:
        with rounds.telling():
            tried = _try_newest(look, limit, framework, request, rounds)
        if tried is not None and tried.error is not None:
            skipped.append((tried.id.step, tried.id.attempt, str(tried.error)))
            log.warning("step %d cannot be restored, trying an older one: %s", *skipped[-1][::2])
        good, limit = rounds.vote(
            tried is None or tried.error is None, tried.id if tried is not None else None
        )
        if good and tried is not None:
            return _finish(tried, rounds, skipped, clock.monotonic() - started)
        if tried is None:
            if skipped:
                raise CheckpointDamagedError(
                    "restore: none of the checkpoints can be read: "
                    + "; ".join(f"step {step}: {reason}" for step, _, reason in skipped)
                )
            if good:
                return None


def _try_newest(
    look: Callable[[], View],
    limit: int,
    framework: Framework,
    request: RestoreRequest,
    rounds: Rounds,
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
        tried = _try(view, left[-1], framework, request, rounds)
        if tried.error is None:
            return tried
    return tried


def restore_step(
    look: Callable[[], View],
    step: int,
    framework: Framework,
    request: RestoreRequest,
    rounds: Rounds,
    clock: Clock,
) -> RestoredState:
    """Return the checkpoint of `step`.

    Raises:
        StepNotFoundError, StepUncommittedError, CheckpointDamagedError, StructureMismatchError: on
            this rank, or on another one.
        ProcessLostError: another rank has ended.
    """
    started = clock.monotonic()
    rounds.meet()
    with rounds.telling():
        view = look()
        tried = _try(view, view.find(step), framework, request, rounds)
        if tried.error is not None and rounds.is_outside:
            # A live run may have deleted it meanwhile: then this raises StepNotFoundError.
            look().find(step)
    good, _ = rounds.vote(tried.error is None, tried.id)
    if tried.error is not None:
        raise tried.error
    if not good:
        raise CheckpointDamagedError(f"restore step {step}: another process could not read it")
    return _finish(tried, rounds, [], clock.monotonic() - started)


def _try(
    view: View,
    checkpoint: CheckpointId,
    framework: Framework,
    request: RestoreRequest,
    rounds: Rounds,
) -> _Try:
    tried = _Try(checkpoint)
    try:
        tried.sources = view.sources(checkpoint)
        tried.restoration = framework.restoration(tried.sources.spec, request)
        if rounds.is_outside and request.like is None and len(tried.sources.parts) > 1:
            tried.restoration.process_values = ()
        _check_processes(tried.sources, tried.restoration.process_values, rounds)
        targets = tried.restoration.targets
        if rounds.is_outside:
            # A slot that this process borrows would be missing to the live run's next save.
            targets = [replace(target, take=None) for target in targets]
        tried.tally = fill_targets(tried.sources, targets)
        tried.restoration.convert()
    except ObjectNotFoundError as error:
        tried.error = CheckpointDamagedError(f"restore {checkpoint}: {error}")
    except BAD_COPY as error:
        tried.error = error
    return tried


def _check_processes(sources: CheckpointSources, paths: Sequence[Path], rounds: Rounds) -> None:
    """Checks that each process here has its own state of the objects at `paths`."""
    if paths and len(sources.parts) != rounds.count:
        step = sources.id.step
        raise StructureMismatchError(
            f"restore step {step}: {len(paths)} objects with a state "
            f"({', '.join(map(path_name, paths[:5]))}) were saved by {len(sources.parts)} "
            f"processes, this job has {rounds.count}. Restore a state without these objects, and "
            f"divide among them the states that process_values({step}) gives"
        )


def _finish(
    tried: _Try, rounds: Rounds, skipped: list[tuple[int, int, str]], seconds: float
) -> RestoredState:
    assert tried.sources is not None
    assert tried.restoration is not None
    process_values: dict[Path, object] = {}
    if tried.restoration.process_values:
        part = tried.sources.parts[rounds.rank][0].part
        process_values = {value.path: decode_value(value.value) for value in part.values}
    report = RestoreReport(
        step=tried.id.step,
        attempt=tried.id.attempt,
        sources=dict(tried.tally.bytes_by_tier),
        skipped=tuple(skipped),
        passed_over=tuple(tried.tally.passed_over),
        left_out=_left_out(tried.sources, tried.restoration.process_values, rounds),
        kept=tuple(map(path_name, tried.restoration.kept)),
        seconds=round(seconds, 4),
    )
    return RestoredState(tried.restoration.finish(process_values), report, tried.id)


def _left_out(sources: CheckpointSources, taken: Sequence[Path], rounds: Rounds) -> tuple[str, ...]:
    names = tuple(path_name(p) for p in sources.spec.process_values if p not in set(taken))
    if names and len(sources.parts) == rounds.count:
        # Where their number differs nothing else can be done; here it may have been forgotten.
        log.warning(
            "step %d is restored without the states of %s, which the state given leaves out; "
            "process_values(%d) gives them",
            sources.id.step,
            ", ".join(names[:5]),
            sources.id.step,
        )
    return names
