"""Which framework a program uses. None is imported that the program did not import."""

from __future__ import annotations

import importlib.util
import sys

from holdfast.adapt.contract import Framework
from holdfast.errors import InvalidArgumentError

NAMES = ("jax", "numpy")
INSTALL = "install it with: pip install 'holdfast-checkpoint[jax]'"


def find_framework(name: str | None = None) -> Framework:
    """Return the framework of that name; None: JAX where the program imported it, else NumPy.

    JAX's also holds states of NumPy arrays alone. NumPy's needs no framework installed, and refuses
    arrays of one by path.

    Raises:
        InvalidArgumentError: there is no framework of that name, or it is not installed.
    """
    if name is None:
        name = "jax" if sys.modules.get("jax") is not None else "numpy"
    if name == "numpy":
        from holdfast.adapt.numpy_state import NumpyFramework

        return NumpyFramework()
    if name != "jax":
        raise InvalidArgumentError(
            f"framework={name!r}: expected one of {', '.join(NAMES)}, or None to find it"
        )
    try:
        from holdfast.adapt.jax.state import JaxFramework
    except ImportError as error:
        hint = "" if _is_installed() else f"; {INSTALL}"
        raise InvalidArgumentError(
            f"framework='jax': JAX cannot be imported ({error}){hint}"
        ) from error
    return JaxFramework()


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec("jax") is not None
    except (ImportError, ValueError):
        return False
