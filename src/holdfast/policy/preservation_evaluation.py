"""Evaluate preservation policies: `kept`, `split` by process, and as messages.

The leader's agent evaluates the built-in policies, and rank 0's trainer the user's own. All are
evaluated through `kept`, which keeps the newest checkpoint in any case.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from holdfast.policy import arguments, codec
from holdfast.policy.contexts import CheckpointInfo, PreservationContext
from holdfast.policy.preservation_policy import (
    SHOULD_PRESERVE,
    AnyPreservationPolicy,
    BestN,
    CustomSteps,
    EveryNSeconds,
    EveryNSteps,
    LatestN,
    PreservationPolicy,
)


class SplitPreservationPolicy(NamedTuple):
    """A policy's shares, by evaluating process; a checkpoint is kept if any share keeps it."""

    by_agent: PreservationPolicy | None
    by_user: PreservationPolicy | None


_ByAgent = LatestN | EveryNSeconds | EveryNSteps | BestN | CustomSteps


class _AnyPreservationMessage(codec.BuiltIn, frozen=True, tag="AnyPreservationPolicy"):
    """An `AnyPreservationPolicy` as decoded, with the types that a message can contain."""

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
    """Evaluate `policy`: return for each checkpoint, in the given order, whether it is kept.

    The policy receives them in ascending order of step, then of time. The last of these is always
    kept.

    Raises:
        InvalidArgumentError: `policy` is not a policy, or did not return one bool per checkpoint.
            The caller must not delete anything then.
    """
    arguments.policy("kept", "policy", policy, SHOULD_PRESERVE)
    if not checkpoints:
        return ()
    ages = [(checkpoint.step, checkpoint.time) for checkpoint in checkpoints]
    order = sorted(range(len(ages)), key=ages.__getitem__)
    ordered = tuple(checkpoints[i] for i in order)
    answers = policy.should_preserve(ordered, context=context)
    answers = arguments.answers(policy, SHOULD_PRESERVE, answers, len(ordered))
    staying = {i for i, stays in zip(order, answers, strict=True) if stays} | {order[-1]}
    return tuple(i in staying for i in range(len(ages)))


def split(policy: PreservationPolicy) -> SplitPreservationPolicy:
    """Return the shares of `policy`; a subclass of a built-in class is a user's own.

    Raises:
        InvalidArgumentError: `policy` has no method `should_preserve`.
    """
    arguments.policy("choose what to keep", "preservation_policy", policy, SHOULD_PRESERVE)
    built_in = [m for m in _members(policy) if type(m) in _ByAgent.__args__]
    others = [m for m in _members(policy) if type(m) not in _ByAgent.__args__]
    return SplitPreservationPolicy(by_agent=_any_of(built_in), by_user=_any_of(others))


def encode(policy: PreservationPolicy) -> bytes:
    """Return the JSON of a built-in policy.

    Raises:
        InvalidArgumentError: `policy`, or a member of it, is a user's own.
    """
    return codec.encode(policy, _members(policy), _ByAgent.__args__)


def decode(data: bytes) -> PreservationPolicy:
    """Return the policy that `encode` encoded as `data`, which may come from outside.

    Raises:
        InvalidArgumentError: `data` is not the JSON of a built-in policy.
    """
    message = codec.decode(data, _decoder())
    return (
        AnyPreservationPolicy(message.policies)
        if isinstance(message, _AnyPreservationMessage)
        else message
    )


def _members(policy: PreservationPolicy) -> Sequence[PreservationPolicy]:
    return policy.policies if type(policy) is AnyPreservationPolicy else (policy,)


def _any_of(policies: Sequence[PreservationPolicy]) -> PreservationPolicy | None:
    return AnyPreservationPolicy(policies) if len(policies) > 1 else next(iter(policies), None)
