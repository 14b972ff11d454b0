"""The names of `orbax.checkpoint.v1.path.step`, which are those of the first interface."""

from typing import TYPE_CHECKING

from holdfast.interop.orbax import missing_names
from holdfast.interop.orbax.step import (
    NameFormat,
    composite_name_format,
    standard_name_format,
)

if not TYPE_CHECKING:
    __getattr__ = missing_names.refusal("v1.path.step")

__all__ = ["NameFormat", "composite_name_format", "standard_name_format"]
