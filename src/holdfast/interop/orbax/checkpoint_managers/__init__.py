"""The policies under the names of `orbax.checkpoint.checkpoint_managers`."""

from holdfast.interop.orbax.checkpoint_managers import preservation_policy as preservation_policy
from holdfast.interop.orbax.checkpoint_managers import save_decision_policy as save_decision_policy

__all__ = ["preservation_policy", "save_decision_policy"]
