"""Warn if saves do not pass a metric by which the preservation policy ranks checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from holdfast.policy.preservation_policy import (
    AnyPreservationPolicy,
    BestN,
    PreservationPolicy,
)

log = logging.getLogger(__name__)


class MetricNames:
    """The metric names that `policy` needs. Only rank 0 warns. Owned by the training thread."""

    def __init__(self, policy: PreservationPolicy, rank: int = 0) -> None:
        members = policy.policies if isinstance(policy, AnyPreservationPolicy) else (policy,)
        names = [member.metric for member in members if isinstance(member, BestN)]
        self._unseen = set(names) if rank == 0 else set()

    def check(self, step: int, metrics: Mapping[str, float] | None) -> None:
        """Warn, once for each name, if a save does not pass a metric that the policy needs."""
        passed = metrics or {}
        missing = sorted(self._unseen - passed.keys())
        for name in missing:
            log.warning(
                "save step %d: BestN(metric=%r) ranks checkpoints by that metric, but metrics has "
                "%s; a checkpoint without it ranks last",
                step,
                name,
                ", ".join(map(repr, sorted(passed))) or "none",
            )
        self._unseen.difference_update(missing)
