"""The names of `orbax.checkpoint.experimental`."""

from holdfast.interop.orbax import v1 as v1
from holdfast.interop.orbax.experimental import emergency as emergency
