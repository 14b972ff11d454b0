"""When to save: the built-in policies, and what a policy of one's own has to be.

A policy is asked at a step and answers from what it is given alone. The built-in ones are plain
frozen data: equal, hashable, and sent to another process with `encode`. `split` says who evaluates
which share of a policy: every rank what depends on the step alone, the leader's agent the other
built-in ones, and rank 0's trainer the user's own.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol, final

import msgspec
from msgspec.structs import force_setattr

from holdfast.policy import arguments, codec
from holdfast.policy.contexts import CheckpointInfo as CheckpointInfo
from holdfast.policy.contexts import SaveContext as SaveContext

_METHOD = "should_save"


class SaveDecisionPolicy(Protocol):
    """Any object with this method is a policy."""

    def should_save(
        self, step: int, previous_steps: Sequence[CheckpointInfo], *, context: SaveContext
    ) -> bool:
        """Whether the result of `step` is to be saved.

        Args:
            step: the step that is asked about.
            previous_steps: the checkpoints of this timeline, in ascending step order.
            context: the time, and what the run is doing.
        """
        ...


@final
class ContinuousCheckpointingPolicy(codec.BuiltIn, frozen=True):
    """Saves again as soon as no save is in progress.

    The interval is counted from the time of the last checkpoint, the one of the highest step. Where
    that lies further ahead of now than the interval is long, the clock was set back and how much
    time passed is not known: then a save is due. So a wrong clock holds saves up for at most twice
    the interval.

    With a budget the checkpoints measure what they cost: how much longer the steps are while one is
    being saved in this tier. They are spaced so that this is at most the given share of the
    training time. After the first one the next waits until its cost is known, which takes a few
    steps.

    Args:
        minimum_interval_secs: the least time from one checkpoint to the next; None: no least time.
        max_overhead: the share of the training time that checkpoints may cost; 0.03 is 3 percent.
            None: whatever they cost.

    Raises:
        InvalidArgumentError: the interval is not a finite number above 0, or the budget is not a
            number above 0 and up to 1.
    """

    minimum_interval_secs: float | None = None
    max_overhead: float | None = None

    def __post_init__(self) -> None:
        if self.max_overhead is not None:
            share = arguments.share(type(self).__name__, "max_overhead", self.max_overhead)
            force_setattr(self, "max_overhead", share)
        if self.minimum_interval_secs is not None:
            secs = arguments.positive_secs(
                type(self).__name__, "minimum_interval_secs", self.minimum_interval_secs
            )
            force_setattr(self, "minimum_interval_secs", secs)

    def should_save(
        self, step: int, previous_steps: Sequence[CheckpointInfo], *, context: SaveContext
    ) -> bool:
        """Whether nothing is being saved and the interval has passed."""
        if context.is_saving_in_progress:
            return False
        interval_secs = self._interval_secs(context.save_cost_secs)
        if not previous_steps or interval_secs == 0:
            return True
        if interval_secs is None:
            return False
        last = max(previous_steps, key=lambda checkpoint: checkpoint.step)
        elapsed_secs = (context.now - last.time).total_seconds()
        is_clock_wrong = elapsed_secs < -interval_secs
        return is_clock_wrong or elapsed_secs >= interval_secs

    def _interval_secs(self, cost_secs: float | None) -> float | None:
        """The least time between two checkpoints; None where it is not known yet."""
        least_secs = self.minimum_interval_secs or 0.0
        if self.max_overhead is None:
            return least_secs
        return None if cost_secs is None else max(least_secs, cost_secs / self.max_overhead)


@final
class FixedIntervalPolicy(codec.BuiltIn, frozen=True):
    """Saves each step that is a multiple of `interval`, step 0 among them.

    Raises:
        InvalidArgumentError: the interval is not an integer above 0.
    """

    interval: int

    def __post_init__(self) -> None:
        count = arguments.positive_integer(type(self).__name__, "interval", self.interval)
        force_setattr(self, "interval", count)

    def should_save(
        self, step: int, previous_steps: Sequence[CheckpointInfo], *, context: SaveContext
    ) -> bool:
        """Whether `step` is a multiple of the interval."""
        return step % self.interval == 0


@final
class SpecificStepsPolicy(codec.BuiltIn, frozen=True):
    """Saves the steps that are listed.

    Args:
        steps: at least one; held as an ascending tuple without repetitions.

    Raises:
        InvalidArgumentError: a step is negative or no integer, or there is none.
    """

    steps: Collection[int]

    def __post_init__(self) -> None:
        steps = arguments.step_numbers(type(self).__name__, "steps", self.steps)
        force_setattr(self, "steps", steps)

    def should_save(
        self, step: int, previous_steps: Sequence[CheckpointInfo], *, context: SaveContext
    ) -> bool:
        """Whether `step` is listed."""
        return arguments.is_among(self.steps, step)


@final
class PreemptionCheckpointingPolicy(codec.BuiltIn, frozen=True):
    """Saves once the run is to be preempted, even while an earlier save is in progress."""

    def should_save(
        self, step: int, previous_steps: Sequence[CheckpointInfo], *, context: SaveContext
    ) -> bool:
        """Whether somebody told the run that it will have to stop soon."""
        return context.reached_preemption


@final
class AnySavePolicy(codec.BuiltIn, frozen=True):
    """Saves when at least one of several policies would.

    Args:
        policies: at least one, built-in or a user's own; held as a tuple, in which the members of
            an `AnySavePolicy` stand in its place.

    Raises:
        InvalidArgumentError: there is none, or one has no method `should_save`.
    """

    policies: Sequence[SaveDecisionPolicy]

    def __post_init__(self) -> None:
        arguments.policies(type(self).__name__, "policies", self.policies, _METHOD)
        force_setattr(self, "policies", tuple(m for p in self.policies for m in _members(p)))

    def should_save(
        self, step: int, previous_steps: Sequence[CheckpointInfo], *, context: SaveContext
    ) -> bool:
        """Whether one of the policies would save; the first that would ends the asking."""
        return any(_answer(policy, step, previous_steps, context) for policy in self.policies)


class SplitSavePolicy(NamedTuple):
    """A policy's shares, by who evaluates them; the policy is true when any share is."""

    by_step: SaveDecisionPolicy | None
    by_agent: SaveDecisionPolicy | None
    by_user: SaveDecisionPolicy | None


_ByStep = FixedIntervalPolicy | SpecificStepsPolicy
_ByAgent = ContinuousCheckpointingPolicy | PreemptionCheckpointingPolicy


class _AnySaveMessage(codec.BuiltIn, frozen=True, tag="AnySavePolicy"):
    """An `AnySavePolicy` as it arrives, with the types that a message can hold."""

    policies: tuple[_ByStep | _ByAgent, ...]


_Message = _ByStep | _ByAgent | _AnySaveMessage


@functools.cache
def _decoder() -> msgspec.json.Decoder[_Message]:
    """Return the decoder; made when first needed, which trainers never do."""
    return msgspec.json.Decoder(_Message)


def due(
    policy: SaveDecisionPolicy,
    step: int,
    previous_steps: Sequence[CheckpointInfo],
    *,
    context: SaveContext,
) -> bool:
    """Whether `policy` saves `step`.

    Raises:
        InvalidArgumentError: `policy` is none, or answers with something other than a bool.
    """
    arguments.policy("due", "policy", policy, _METHOD)
    return _answer(policy, step, previous_steps, context)


def split(policy: SaveDecisionPolicy) -> SplitSavePolicy:
    """The shares of `policy`; a subclass of a built-in class is a user's own.

    Raises:
        InvalidArgumentError: `policy` has no method `should_save`.
    """
    arguments.policy("split", "policy", policy, _METHOD)
    members = _members(policy)
    step_kinds, agent_kinds = _ByStep.__args__, _ByAgent.__args__
    return SplitSavePolicy(
        by_step=_any_of([m for m in members if type(m) in step_kinds]),
        by_agent=_any_of([m for m in members if type(m) in agent_kinds]),
        by_user=_any_of([m for m in members if type(m) not in step_kinds + agent_kinds]),
    )


def encode(policy: SaveDecisionPolicy) -> bytes:
    """The JSON of a built-in policy.

    Raises:
        InvalidArgumentError: `policy`, or a member of it, is a user's own.
    """
    return codec.encode(policy, _members(policy), (*_ByStep.__args__, *_ByAgent.__args__))


def decode(data: bytes) -> SaveDecisionPolicy:
    """The policy that `encode` made into `data`; `data` may come from outside.

    Raises:
        InvalidArgumentError: `data` is not the JSON of a built-in policy.
    """
    message = codec.decode(data, _decoder())
    return AnySavePolicy(message.policies) if isinstance(message, _AnySaveMessage) else message


def _answer(
    policy: SaveDecisionPolicy,
    step: int,
    previous_steps: Sequence[CheckpointInfo],
    context: SaveContext,
) -> bool:
    answer = policy.should_save(step, previous_steps, context=context)
    if isinstance(answer, bool):  # asked at every step of every rank, so the usual case is short
        return answer
    return arguments.verdict(f"{type(policy).__name__}.{_METHOD}", "its answer", answer)


def _members(policy: SaveDecisionPolicy) -> Sequence[SaveDecisionPolicy]:
    return policy.policies if type(policy) is AnySavePolicy else (policy,)


def _any_of(policies: Sequence[SaveDecisionPolicy]) -> SaveDecisionPolicy | None:
    return AnySavePolicy(policies) if len(policies) > 1 else next(iter(policies), None)
