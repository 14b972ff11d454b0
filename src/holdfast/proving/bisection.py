"""Find where a run of the past is not reproduced: replay it from its own checkpoints.

1. The program goes on from a checkpoint of the run, in a folder of its own, and saves each step.
   The run's later checkpoints are compared with it, up to the first one that differs.
2. From the last checkpoint that was equal it is replayed once more. If both replays agree, the run
   itself has gone wrong between the two checkpoints, or has been computed by another program. If
   they differ, the program is not deterministic, and the first step that differs is where.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from holdfast.comparison.contents import check_bytes
from holdfast.comparison.places import run_contents
from holdfast.proving.program import Execution, NotComparableError, ProgramRunner
from holdfast.proving.rewinds import check_forward
from holdfast.proving.verdict import SavedRun, Verdict, judge, read_run
from holdfast.quantities import counted
from holdfast.trainer.opening.proof import ProofOrder, folder_in
from holdfast.trainer.opening.run_access import read_only
from holdfast.trainer.run_copies import copy_run


class Outcome(Enum):
    """What the replays have shown."""

    REPRODUCED = "reproduced"
    NOT_REPRODUCED = "not reproduced"
    """Two replays agree with each other, and not with the run."""
    NOT_DETERMINISTIC = "not deterministic"
    """The replays differ from each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BisectRequest:
    """What is to be replayed.

    Attributes:
        directory: the run, spelt as the program names it.
        first: the step from whose checkpoint on; None: the oldest one.
        last: the step of the last checkpoint to compare; None: the newest one.
        every: the distance of the steps that the replays save.
        without: the names in the state that are not compared, with all below them.
    """

    directory: str
    first: int | None = None
    last: int | None = None
    every: int = 1
    without: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisection:
    """The result.

    Attributes:
        outcome: what the replays have shown.
        reproduced: the last step that was reproduced.
        step: the first step that was not; None: all were. Of a run it is that of a checkpoint, and
            what went wrong did so after `reproduced` and up to it.
        verdict: the comparison that has shown it.
        is_second_equal: whether the second replay agrees with the run, and the first does not.
    """

    outcome: Outcome
    reproduced: int
    step: int | None
    verdict: Verdict
    is_second_equal: bool = False

    @property
    def document(self) -> dict[str, object]:
        """The result as JSON shows it."""
        first = self.verdict.first
        return {
            "outcome": self.outcome.name.lower(),
            "reproduced": self.reproduced,
            "step": self.step,
            "second_replay_agrees_with_the_run": self.is_second_equal,
            "differences": [] if first is None else first.documents,
            "not_compared": list(self.verdict.left_out),
        }


def bisect(request: BisectRequest, execution: Execution) -> Bisection:
    """Replay a run between two of its checkpoints.

    Raises:
        NotComparableError: the run has fewer than two checkpoints there, or went back between them;
            or the program does not go on from it, or hangs.
        CheckpointDamagedError: a checkpoint of the run is damaged.
        CommandNotRunError: the program cannot be started.
        HoldfastError: what was saved cannot be read.
    """
    steps, damaged = _steps(request)
    execution.note(f"reading {counted(len(steps), 'checkpoint')} of the run")
    for step in steps:
        check_bytes(run_contents(request.directory, step).without(request.without))
    check_forward(request.directory, steps, "the run")

    def replay(name: str, first: int, last: int) -> SavedRun:
        def begin(folder: Path) -> None:
            copy_run(request.directory, folder_in(folder, request.directory), [first])

        order = ProofOrder(every=request.every, last_step=last)
        runner = ProgramRunner(execution, order)
        execution.note(f"{name}: from step {first} to {last}")
        replayed = read_run(runner.run(name, begin=begin).folder, f"the {name}")
        if replayed.directory != str(
            folder_in(execution.root / name.replace(" ", "-"), request.directory)
        ):
            raise NotComparableError(
                f"{request.directory}: expected a program that opens this run, found that it opens "
                "another directory; name the run as the program does"
            )
        compared = [step for step in steps if first <= step <= last]
        check_forward(replayed.directory, compared, f"the {name}")
        return replayed

    original = SavedRun(directory=request.directory, steps=tuple(steps), saves={})
    one = replay("first replay", steps[0], steps[-1])
    verdict = judge(original, one, without=request.without)
    left_out = _uncompared_texts(request, steps, damaged, one)
    verdict = replace(verdict, left_out=(*verdict.left_out, *left_out))
    if verdict.is_equal:
        _check_reached(request, verdict, steps[-1])
        return Bisection(
            outcome=Outcome.REPRODUCED, reproduced=steps[-1], step=None, verdict=verdict
        )
    bad = verdict.steps[-1]
    good = max(step for step in steps if step < bad)
    other = replay("second replay", good, bad)
    between = judge(one, other, bad, request.without)
    if between.is_equal:
        return Bisection(outcome=Outcome.NOT_REPRODUCED, reproduced=good, step=bad, verdict=verdict)
    return Bisection(
        outcome=Outcome.NOT_DETERMINISTIC,
        reproduced=max((step for step in between.steps[:-1]), default=good),
        step=between.steps[-1],
        verdict=replace(between, left_out=(*between.left_out, *left_out)),
        is_second_equal=judge(original, other, bad, request.without).is_equal,
    )


def _steps(request: BisectRequest) -> tuple[list[int], list[int]]:
    """Return the steps of the run's checkpoints to compare, at least two, and the damaged ones.

    Raises:
        NotComparableError: there are fewer, or the run has no checkpoint of the first one.
    """
    first, last = request.first, request.last
    if first is not None and last is not None and first >= last:
        raise NotComparableError(f"expected --from before --to, found --from {first} --to {last}")
    run = read_only(request.directory)
    view = run.load_view()
    sound = view.sound()
    # A live run may have deleted some since.
    damaged = {*view.timeline}.difference(sound).intersection(run.load_view().timeline)
    saved = [checkpoint.step for checkpoint in sound]
    if first is not None and first not in saved:
        near = [*[s for s in saved if s < first][-1:], *[s for s in saved if s > first][:1]]
        raise NotComparableError(
            f"{request.directory}: expected a checkpoint of step {first} to replay from, found "
            f"{'a damaged one' if any(c.step == first for c in damaged) else 'none'}; the nearest "
            f"ones: {', '.join(map(str, near)) or 'none'}"
        )

    def is_within(step: int) -> bool:
        return (first is None or step >= first) and (last is None or step <= last)

    steps = [*filter(is_within, saved)]
    if len(steps) < 2:
        raise NotComparableError(
            f"{request.directory}: expected two checkpoints at least to replay between, found "
            f"those of steps {steps}; keep more with a preservation policy"
        )
    return steps, sorted(filter(is_within, (checkpoint.step for checkpoint in damaged)))


def _uncompared_texts(
    request: BisectRequest, steps: Sequence[int], damaged: Sequence[int], replayed: SavedRun
) -> list[str]:
    """Return in words the checkpoints of the run that are not compared, and why."""
    texts = []
    if damaged:
        texts.append(
            f"{_steps_text(damaged)}: files are missing or have another size; "
            f"`holdfast verify {request.directory}` lists them"
        )
    unsaved = [s for s in steps if s <= replayed.steps[-1] and s not in replayed.steps]
    if unsaved:
        texts.append(f"{_steps_text(unsaved)}: not saved by the replay")
    return texts


def _steps_text(steps: Sequence[int]) -> str:
    return f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"


def _check_reached(request: BisectRequest, verdict: Verdict, last: int) -> None:
    if verdict.steps[-1] != last:
        raise NotComparableError(
            f"{request.directory}: expected the program to reach step {last}, found step "
            f"{verdict.steps[-1]} as its last checkpoint; does it end earlier than the run has?"
        )
