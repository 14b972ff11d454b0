"""Evaluate save decision policies: `due` at one step, `split` by process, and as messages.

Every rank evaluates the policies that depend on the step alone, the leader's agent the other
built-in ones, and rank 0's trainer the user's own.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from holdfast.policy import arguments, codec
from holdfast.policy.contexts import CheckpointInfo, SaveContext
from holdfast.policy.save_decision_policy import (
    SHOULD_SAVE,
    AnySavePolicy,
    ContinuousCheckpointingPolicy,
    FixedIntervalPolicy,
    PreemptionCheckpointingPolicy,
    SaveDecisionPolicy,
    SpecificStepsPolicy,
)

SHARE_CHARS_MAX = 80
"""The length at which the text of a policy is cut, since all ranks exchange it."""


class SplitSavePolicy(NamedTuple):
    """A policy's shares, by evaluating process; the policy saves if any share does."""

    by_step: SaveDecisionPolicy | None
    by_agent: SaveDecisionPolicy | None
    by_user: SaveDecisionPolicy | None


_ByStep = FixedIntervalPolicy | SpecificStepsPolicy
_ByAgent = ContinuousCheckpointingPolicy | PreemptionCheckpointingPolicy


class _AnySaveMessage(codec.BuiltIn, frozen=True, tag="AnySavePolicy"):
    """An `AnySavePolicy` as decoded, with the types that a message can contain."""

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
    """Return whether `policy` saves `step`.

    Raises:
        InvalidArgumentError: `policy` is not a policy, or did not return a bool.
    """
    arguments.policy("due", "policy", policy, SHOULD_SAVE)
    answer = policy.should_save(step, previous_steps, context=context)
    return arguments.answer(policy, SHOULD_SAVE, answer)


def split(policy: SaveDecisionPolicy) -> SplitSavePolicy:
    """Return the shares of `policy`; a subclass of a built-in class is a user's own.

    Raises:
        InvalidArgumentError: `policy` has no method `should_save`.
    """
    arguments.policy("choose when to save", "save_decision_policy", policy, SHOULD_SAVE)
    members = _members(policy)
    step_kinds, agent_kinds = _ByStep.__args__, _ByAgent.__args__
    return SplitSavePolicy(
        by_step=_any_of([m for m in members if type(m) in step_kinds]),
        by_agent=_any_of([m for m in members if type(m) in agent_kinds]),
        by_user=_any_of([m for m in members if type(m) not in step_kinds + agent_kinds]),
    )


def has_budget(policy: SaveDecisionPolicy) -> bool:
    """Return whether `policy`, or a member of it, depends on the cost of checkpoints."""
    return any(
        isinstance(member, ContinuousCheckpointingPolicy) and member.needs_cost
        for member in _members(policy)
    )


def auto_member(policy: SaveDecisionPolicy | None) -> ContinuousCheckpointingPolicy | None:
    """Return the policy, or the member of it, whose interval is chosen for the best goodput."""
    for member in _members(policy) if policy is not None else ():
        if isinstance(member, ContinuousCheckpointingPolicy) and member.goodput is not None:
            return member
    return None


def encode(policy: SaveDecisionPolicy) -> bytes:
    """Return the JSON of a built-in policy.

    Raises:
        InvalidArgumentError: `policy`, or a member of it, is a user's own.
    """
    return codec.encode(policy, _members(policy), (*_ByStep.__args__, *_ByAgent.__args__))


def text_by_step(policy: SaveDecisionPolicy | None) -> str:
    """Return the share of `policy` that each rank evaluates, as short text; `none` without one.

    Equal shares have equal texts, and different ones different texts.
    """
    share = split(policy).by_step if policy is not None else None
    if share is None:
        return "none"
    text = " or ".join(sorted(repr(member) for member in _members(share)))
    if len(text) <= SHARE_CHARS_MAX:
        return text
    return f"{text[:SHARE_CHARS_MAX]}… ({hashlib.sha256(text.encode()).hexdigest()[:16]})"


def decode(data: bytes) -> SaveDecisionPolicy:
    """Return the policy that `encode` encoded as `data`, which may come from outside.

    Raises:
        InvalidArgumentError: `data` is not the JSON of a built-in policy.
    """
    message = codec.decode(data, _decoder())
    return AnySavePolicy(message.policies) if isinstance(message, _AnySaveMessage) else message


def _members(policy: SaveDecisionPolicy) -> Sequence[SaveDecisionPolicy]:
    return policy.policies if type(policy) is AnySavePolicy else (policy,)


def _any_of(policies: Sequence[SaveDecisionPolicy]) -> SaveDecisionPolicy | None:
    return AnySavePolicy(policies) if len(policies) > 1 else next(iter(policies), None)
