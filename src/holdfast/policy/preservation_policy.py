"""What to keep: the built-in policies, and what a policy of one's own has to be.

A policy looks at all checkpoints and says of each whether it stays. The built-in ones are plain
frozen data: equal, hashable, and sent to another process with `encode`; the leader's agent
evaluates them, and rank 0's trainer the user's own. `kept` is how a policy is asked: the newest
checkpoint stays whatever the policy says.

Asking a built-in policy again about what it kept keeps all of that. So it does not matter how often
the engine asks, or whether it was stopped between two deletions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple, Protocol, final

import msgspec
from msgspec.structs import force_setattr

from holdfast.policy import arguments, codec
from holdfast.policy.contexts import CheckpointInfo as CheckpointInfo
from holdfast.policy.contexts import PreservationContext as PreservationContext

_METHOD = "should_preserve"


class PreservationPolicy(Protocol):
    """Any object with this method is a policy."""

    def should_preserve(
        self, checkpoints: Sequence[CheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        """For each checkpoint, whether it stays.

        Args:
            checkpoints: those there are, in ascending step order.
            context: the time.

        Returns:
            As many bools as there are checkpoints, in the same order.
        """
        ...


class _Counted(codec.BuiltIn, frozen=True):
    """An `n`, apart from `BestN`'s other fields so that it is positional and they are not."""

    n: int

    def __post_init__(self) -> None:
        force_setattr(self, "n", arguments.positive_integer(type(self).__name__, "n", self.n))


@final
class LatestN(codec.BuiltIn, frozen=True):
    """Keeps the `n` checkpoints of the highest steps; with None, all checkpoints.

    Raises:
        InvalidArgumentError: `n` is neither None nor an integer above 0.
    """

    n: int | None

    def __post_init__(self) -> None:
        if self.n is not None:
            force_setattr(self, "n", arguments.positive_integer(type(self).__name__, "n", self.n))

    def should_preserve(
        self, checkpoints: Sequence[CheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        """True for the last `n`."""
        count = len(checkpoints)
        return [self.n is None or i >= count - self.n for i in range(count)]


@final
class EveryNSeconds(codec.BuiltIn, frozen=True):
    """Keeps the first checkpoint, then each that is at least `secs` after the last kept one.

    Where the clock was set back, a checkpoint that is at least `secs` before the last kept one
    counts too, so that a wrong clock does not suspend the policy until it is overtaken.

    Raises:
        InvalidArgumentError: `secs` is not a finite number above 0.
    """

    secs: float

    def __post_init__(self) -> None:
        force_setattr(self, "secs", arguments.positive_secs(type(self).__name__, "secs", self.secs))

    def should_preserve(
        self, checkpoints: Sequence[CheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        """True for each that is far enough from the one before that is kept."""
        answers = []
        last = None
        for time in (checkpoint.time for checkpoint in checkpoints):
            answers.append(last is None or abs((time - last).total_seconds()) >= self.secs)
            last = time if answers[-1] else last
        return answers


@final
class EveryNSteps(_Counted, frozen=True):
    """Keeps each checkpoint whose step is a multiple of `n`, step 0 among them.

    Raises:
        InvalidArgumentError: `n` is not an integer above 0.
    """

    def should_preserve(
        self, checkpoints: Sequence[CheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        """True for multiples of `n`."""
        return [checkpoint.step % self.n == 0 for checkpoint in checkpoints]


@final
class BestN(_Counted, frozen=True, kw_only=True):
    """Keeps the `n` checkpoints with the best values of a metric.

    Every number, infinities among them, ranks above NaN, and NaN above a checkpoint that has no
    such metric. Of equal values the one of the later step ranks higher. Checkpoints that rank low
    stay as long as there are no `n` better ones.

    Args:
        n: how many to keep.
        metric: the name under which `save` was given the value.
        mode: whether the least (`"min"`) or the greatest (`"max"`) value is best.

    Raises:
        InvalidArgumentError: `n` is not an integer above 0, `metric` is no name, or `mode` is
            neither of the two.
    """

    metric: str
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.text(type(self).__name__, "metric", self.metric)
        if self.mode not in ("min", "max"):
            raise arguments.refusal(type(self).__name__, "mode", "'min' or 'max'", self.mode)

    def should_preserve(
        self, checkpoints: Sequence[CheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        """True for the `n` best."""
        ranks = [(*self._rank(checkpoint), i) for i, checkpoint in enumerate(checkpoints)]
        best = set(sorted(ranks, reverse=True)[: self.n])
        return [rank in best for rank in ranks]

    def _rank(self, checkpoint: CheckpointInfo) -> tuple[int, float]:
        """The greater, the better."""
        value = (checkpoint.metrics or {}).get(self.metric)
        if value is None:
            return 0, 0.0
        if math.isnan(value):  # compares as false with everything, so that it never enters a sort
            return 1, 0.0
        return 2, -value if self.mode == "min" else value


@final
class CustomSteps(codec.BuiltIn, frozen=True):
    """Keeps the steps that are listed.

    Args:
        steps: at least one; held as an ascending tuple without repetitions.

    Raises:
        InvalidArgumentError: a step is negative or no integer, or there is none.
    """

    steps: Collection[int]

    def __post_init__(self) -> None:
        steps = arguments.step_numbers(type(self).__name__, "steps", self.steps)
        force_setattr(self, "steps", steps)

    def should_preserve(
        self, checkpoints: Sequence[CheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        """True for the steps that are listed."""
        return [arguments.is_among(self.steps, checkpoint.step) for checkpoint in checkpoints]


@final
class AnyPreservationPolicy(codec.BuiltIn, frozen=True):
    """Keeps what at least one of several policies keeps.

    Args:
        policies: at least one, built-in or a user's own; held as a tuple, in which the members of
            an `AnyPreservationPolicy` stand in its place.

    Raises:
        InvalidArgumentError: there is none, or one has no method `should_preserve`.
    """

    policies: Sequence[PreservationPolicy]

    def __post_init__(self) -> None:
        arguments.policies(type(self).__name__, "policies", self.policies, _METHOD)
        force_setattr(self, "policies", tuple(m for p in self.policies for m in _members(p)))

    def should_preserve(
        self, checkpoints: Sequence[CheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        """True for what one of the policies keeps."""
        answers = [_answers(policy, checkpoints, context) for policy in self.policies]
        return [any(column) for column in zip(*answers, strict=True)]


class SplitPreservationPolicy(NamedTuple):
    """A policy's shares, by who evaluates them; a checkpoint stays when any share keeps it."""

    by_agent: PreservationPolicy | None
    by_user: PreservationPolicy | None


_ByAgent = LatestN | EveryNSeconds | EveryNSteps | BestN | CustomSteps


class _AnyPreservationMessage(codec.BuiltIn, frozen=True, tag="AnyPreservationPolicy"):
    """An `AnyPreservationPolicy` as it arrives, with the types that a message can hold."""

    policies: tuple[_ByAgent, ...]


_Message = _ByAgent | _AnyPreservationMessage


@functools.cache
def _decoder() -> msgspec.json.Decoder[_Message]:
    """Return the decoder; made when first needed, which trainers never do."""
    return msgspec.json.Decoder(_Message)


def kept(
    policy: PreservationPolicy,
    checkpoints: Sequence[CheckpointInfo],
    *,
    context: PreservationContext,
) -> tuple[bool, ...]:
    """For each checkpoint, in the order given, whether it stays.

    The policy sees them in ascending order of step, then of time. The last of them stays whatever
    it says.

    Raises:
        InvalidArgumentError: `policy` is none, or does not answer with a bool for each checkpoint.
            Nothing is to be deleted then.
    """
    arguments.policy("kept", "policy", policy, _METHOD)
    if not checkpoints:
        return ()
    ages = [(checkpoint.step, checkpoint.time) for checkpoint in checkpoints]
    order = sorted(range(len(ages)), key=ages.__getitem__)
    answers = _answers(policy, [checkpoints[i] for i in order], context)
    staying = {i for i, stays in zip(order, answers, strict=True) if stays} | {order[-1]}
    return tuple(i in staying for i in range(len(ages)))


def split(policy: PreservationPolicy) -> SplitPreservationPolicy:
    """The shares of `policy`; a subclass of a built-in class is a user's own.

    Raises:
        InvalidArgumentError: `policy` has no method `should_preserve`.
    """
    arguments.policy("split", "policy", policy, _METHOD)
    built_in = [m for m in _members(policy) if type(m) in _ByAgent.__args__]
    others = [m for m in _members(policy) if type(m) not in _ByAgent.__args__]
    return SplitPreservationPolicy(by_agent=_any_of(built_in), by_user=_any_of(others))


def encode(policy: PreservationPolicy) -> bytes:
    """The JSON of a built-in policy.

    Raises:
        InvalidArgumentError: `policy`, or a member of it, is a user's own.
    """
    return codec.encode(policy, _members(policy), _ByAgent.__args__)


def decode(data: bytes) -> PreservationPolicy:
    """The policy that `encode` made into `data`; `data` may come from outside.

    Raises:
        InvalidArgumentError: `data` is not the JSON of a built-in policy.
    """
    message = codec.decode(data, _decoder())
    return (
        AnyPreservationPolicy(message.policies)
        if isinstance(message, _AnyPreservationMessage)
        else message
    )


def _answers(
    policy: PreservationPolicy, checkpoints: Sequence[CheckpointInfo], context: PreservationContext
) -> tuple[bool, ...]:
    answers = policy.should_preserve(tuple(checkpoints), context=context)
    owner = f"{type(policy).__name__}.{_METHOD}"
    return arguments.verdicts(owner, "its answer", answers, len(checkpoints))


def _members(policy: PreservationPolicy) -> Sequence[PreservationPolicy]:
    return policy.policies if type(policy) is AnyPreservationPolicy else (policy,)


def _any_of(policies: Sequence[PreservationPolicy]) -> PreservationPolicy | None:
    return AnyPreservationPolicy(policies) if len(policies) > 1 else next(iter(policies), None)
