"""The inputs of policies: frozen values, checked at construction.

Times are aware datetimes in UTC, so that the difference of two is the elapsed time.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

import msgspec
from msgspec.structs import force_setattr

from holdfast.policy import arguments


class CheckpointInfo(msgspec.Struct, frozen=True):
    """One checkpoint, as input to policies.

    Attributes:
        step: the training step whose result it contains.
        time: the time of the save.
        metrics: the metrics passed to `save`, by name, or None; a copy that must not be changed.

    Raises:
        InvalidArgumentError: the step is negative or not an integer, the time has no zone, or a
            metric is not a number. NaN is accepted.
    """

    step: int
    time: datetime
    metrics: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        force_setattr(self, "step", arguments.step_number(type(self).__name__, "step", self.step))
        force_setattr(self, "time", arguments.instant(type(self).__name__, "time", self.time))
        if self.metrics is not None:
            metrics = arguments.metric_values(type(self).__name__, "metrics", self.metrics)
            force_setattr(self, "metrics", metrics)


class SaveContext(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of a save decision besides the checkpoints.

    Attributes:
        now: the current time.
        is_saving_in_progress: an earlier checkpoint is not yet durable, and will not be within
            about a step.
        reached_preemption: the run was notified that it must stop soon.
        save_cost_secs: the training time that one checkpoint costs, measured on the last ones. None
            until it is known, if no policy has a budget, and for user-defined policies.
        advised_interval_secs: the interval that wastes least, by measured costs and failures,
            within the policy's budget. None until it is known, and where no policy asks for it.

    Raises:
        InvalidArgumentError: `now` has no time zone.
    """

    now: datetime
    is_saving_in_progress: bool
    reached_preemption: bool
    save_cost_secs: float | None = None
    advised_interval_secs: float | None = None

    def __post_init__(self) -> None:
        force_setattr(self, "now", arguments.instant(type(self).__name__, "now", self.now))


class PreservationContext(msgspec.Struct, frozen=True):
    """The inputs of a preservation decision besides the checkpoints.

    Attributes:
        now: the current time.

    Raises:
        InvalidArgumentError: `now` has no time zone.
    """

    now: datetime

    def __post_init__(self) -> None:
        force_setattr(self, "now", arguments.instant(type(self).__name__, "now", self.now))
