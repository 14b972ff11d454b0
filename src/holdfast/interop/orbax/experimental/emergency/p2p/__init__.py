"""The names of `orbax.checkpoint.experimental.emergency.p2p`."""

from holdfast.interop.orbax.experimental.emergency.p2p import args as args
from holdfast.interop.orbax.experimental.emergency.p2p import (
    checkpoint_manager as checkpoint_manager,
)
from holdfast.interop.orbax.experimental.emergency.p2p import options as options
