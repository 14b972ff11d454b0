"""What policies look at: frozen values, checked when they are made.

Times are aware datetimes, held in UTC, so that a difference of two is the time that passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

import msgspec
from msgspec.structs import force_setattr

from holdfast.policy import arguments


class CheckpointInfo(msgspec.Struct, frozen=True):
    """One checkpoint, as policies see it.

    Attributes:
        step: the training step whose result it holds.
        time: when it was taken.
        metrics: what `save` was told of it by name, or None; a copy, not to be changed.

    Raises:
        InvalidArgumentError: the step is negative or no integer, the time has no zone, or a metric
            is not a number. NaN is a number here.
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
    """What a save decision may depend on beside the checkpoints.

    Attributes:
        now: the present time.
        is_saving_in_progress: an earlier checkpoint is not yet durable, nor will it be within about
            a step.
        reached_preemption: somebody told the run that it will have to stop soon.
        save_cost_secs: the training time that one checkpoint costs, as measured on the last ones;
            None until it is known, where no policy has a budget, and for policies of one's own.

    Raises:
        InvalidArgumentError: `now` has no time zone.
    """

    now: datetime
    is_saving_in_progress: bool
    reached_preemption: bool
    save_cost_secs: float | None = None

    def __post_init__(self) -> None:
        force_setattr(self, "now", arguments.instant(type(self).__name__, "now", self.now))


class PreservationContext(msgspec.Struct, frozen=True):
    """What a decision to keep may depend on beside the checkpoints.

    Attributes:
        now: the present time.

    Raises:
        InvalidArgumentError: `now` has no time zone.
    """

    now: datetime

    def __post_init__(self) -> None:
        force_setattr(self, "now", arguments.instant(type(self).__name__, "now", self.now))
