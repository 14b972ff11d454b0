"""Find where the training of a run went back to a checkpoint with `manager.rewind`.

To which checkpoint it goes back, and so which samples it leaves out, depends on the checkpoints
that it has: a replay, which saves other steps, may go back to another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from holdfast.observe.events.schema import StateRestored
from holdfast.proving.program import NotComparableError
from holdfast.trainer.opening.run_access import events_of, read_only


def check_forward(directory: str, steps: Sequence[int], of: str) -> None:
    """Check that a training did not go back between the first and the last of `steps`.

    Args:
        directory: the run.
        steps: the steps that are compared, ascending, at least one.
        of: what is looked at, in words.

    Raises:
        NotComparableError: it went back; the message has the ranges that can be compared.
        HoldfastError: the run cannot be read.
    """
    run = read_only(directory)
    limits = {attempt.number: step for attempt, step in run.load_view().limits.items()}
    events = (event for event in events_of(run).read() if isinstance(event, StateRestored))
    crossed = [s for s in rewound_to(events, limits) if steps[0] <= s < steps[-1]]
    if crossed:
        raise NotComparableError(
            f"expected a training that goes forward from step {steps[0]} to {steps[-1]}, "
            f"found that {of} went back to step {crossed[-1]} with manager.rewind, which depends "
            f"on the steps that it has saved; {_advice(steps, crossed)}"
        )


def rewound_to(events: Iterable[StateRestored], limits: Mapping[int, int]) -> list[int]:
    """Return the steps to which the training of the timeline went back, ascending.

    Args:
        events: the restores of the run.
        limits: by number the attempts of its timeline, each with the last of its steps that counts.
    """
    return sorted(
        {
            event.step
            for event in events
            if event.by == "rewind" and event.step < limits.get(event.run_attempt, -1)
        }
    )


def _advice(steps: Sequence[int], crossed: Sequence[int]) -> str:
    before = [step for step in steps if step <= crossed[0]]
    after = [step for step in steps if step > crossed[-1]]
    ranges = [f"--to {before[-1]}"] * (len(before) > 1) + [f"--from {after[0]}"] * (len(after) > 1)
    if not ranges:
        return "there are fewer than two checkpoints before it, and after it"
    return f"compare what is before or after it, with {' or '.join(ranges)}"
