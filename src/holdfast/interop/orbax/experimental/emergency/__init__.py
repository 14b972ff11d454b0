"""The names of `orbax.checkpoint.experimental.emergency`."""

from holdfast.interop.orbax.experimental.emergency import checkpoint_manager as checkpoint_manager
from holdfast.interop.orbax.experimental.emergency import (
    multi_tier_checkpointing as multi_tier_checkpointing,
)
from holdfast.interop.orbax.experimental.emergency import p2p as p2p
from holdfast.interop.orbax.experimental.emergency import (
    replicator_checkpoint_manager as replicator_checkpoint_manager,
)
