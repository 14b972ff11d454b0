"""The multi-tier manager under Orbax's newer path."""

from holdfast.interop.orbax.experimental.emergency import (
    replicator_checkpoint_manager as replicator_checkpoint_manager,
)
