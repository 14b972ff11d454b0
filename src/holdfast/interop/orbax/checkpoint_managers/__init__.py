"""The policies under the names of `orbax.checkpoint.checkpoint_managers`."""

from typing import TYPE_CHECKING

from holdfast.interop.orbax import missing_names
from holdfast.interop.orbax.checkpoint_managers import preservation_policy, save_decision_policy
from holdfast.interop.orbax.checkpoint_managers.preservation_policy import (
    AnyPreservationPolicy,
    BestN,
    CustomSteps,
    EveryNSeconds,
    EveryNSteps,
    EveryNStepsClosest,
    LatestDuration,
    LatestN,
    PreservationContext,
    PreservationPolicy,
    PreserveAll,
)
from holdfast.interop.orbax.checkpoint_managers.save_decision_policy import (
    AnySavePolicy,
    ContinuousCheckpointingPolicy,
    DecisionContext,
    FixedIntervalPolicy,
    InitialSavePolicy,
    PolicyCheckpointInfo,
    PreemptionCheckpointingPolicy,
    SaveDecisionPolicy,
    SpecificStepsPolicy,
)

if not TYPE_CHECKING:
    __getattr__ = missing_names.refusal("checkpoint_managers")

__all__ = [
    "AnyPreservationPolicy",
    "AnySavePolicy",
    "BestN",
    "ContinuousCheckpointingPolicy",
    "CustomSteps",
    "DecisionContext",
    "EveryNSeconds",
    "EveryNSteps",
    "EveryNStepsClosest",
    "FixedIntervalPolicy",
    "InitialSavePolicy",
    "LatestDuration",
    "LatestN",
    "PolicyCheckpointInfo",
    "PreemptionCheckpointingPolicy",
    "PreservationContext",
    "PreservationPolicy",
    "PreserveAll",
    "SaveDecisionPolicy",
    "SpecificStepsPolicy",
    "preservation_policy",
    "save_decision_policy",
]
