"""The arguments of the P2P manager: `state`, and perhaps `data_iter`."""

from holdfast.interop.orbax.args import Composite as Composite

__all__ = ["Composite"]
