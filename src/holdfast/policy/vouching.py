"""Keep the checkpoints to which a training may have to go back.

Something vouches for the checkpoints up to one step, which only grows while the training goes on:
a guard of the loss, or the comparison of replicas. Each of them limits how often the training goes
back without coming further.

See docs/decisions/0061.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from holdfast.policy.contexts import CheckpointInfo, PreservationContext
from holdfast.policy.preservation_evaluation import kept
from holdfast.policy.preservation_policy import AnyPreservationPolicy, PreservationPolicy


class RewindLimit:
    """How often a training may go back to checkpoints that are vouched for, until it is refused.

    Args:
        most: How often without coming further.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._furthest, self._count = -1, 0

    def is_reached(self, vouched: int) -> bool:
        """Return whether the training went back that often, and `vouched` is no later step."""
        return vouched <= self._furthest and self._count >= self.most

    def note(self, vouched: int) -> None:
        """Note that the training went back while checkpoints up to `vouched` were vouched for."""
        is_further = vouched > self._furthest
        self._furthest, self._count = (
            (vouched, 1) if is_further else (self._furthest, self._count + 1)
        )


class Voucher(Protocol):
    """What vouches for checkpoints."""

    @property
    def vouched(self) -> int:
        """The step up to which it vouches for checkpoints; -1: for none yet."""
        ...


@dataclass(slots=True)
class VouchedStep:
    """The step up to which something vouches for checkpoints; written by the training thread."""

    vouched: int = -1


def preserving(policy: PreservationPolicy, voucher: Voucher) -> PreservationPolicy:
    """Return `policy`, which in addition keeps what `Vouched` does."""
    policies = policy.policies if type(policy) is AnyPreservationPolicy else (policy,)
    return AnyPreservationPolicy((*policies, Vouched(policy, voucher)))


class Vouched:
    """A policy that keeps what another one would keep if there were only vouched checkpoints.

    The newest of these is among them. The oldest other checkpoint is kept too: it is vouched for
    next.
    """

    def __init__(self, policy: PreservationPolicy, voucher: Voucher) -> None:
        self._policy, self._voucher = policy, voucher

    def should_preserve(
        self, checkpoints: Sequence[CheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        """Return True for what the policy keeps of the vouched ones, and the oldest other one."""
        limit = self._voucher.vouched
        vouched = [checkpoint for checkpoint in checkpoints if checkpoint.step <= limit]
        answers = [*kept(self._policy, vouched, context=context)]
        return [*answers, True, *[False] * len(checkpoints)][: len(checkpoints)]
