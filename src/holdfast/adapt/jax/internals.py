"""The parts of JAX in use that its versions name differently, or that have no public name.

Holdfast sets no upper bound on JAX's version. `check_internals` names what a version lacks before
anything is saved.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

OLDEST = (0, 6)
"""The oldest version of JAX with which Holdfast's tests pass."""


class DeviceLayout(NamedTuple):
    """The order and the tiling of an array's bytes in a device's memory."""

    major_to_minor: tuple[int, ...]
    tiling: tuple[Any, ...]


def device_layout(array: jax.Array) -> DeviceLayout | None:
    """Return the layout of an array; None if XLA reports none."""
    form: Any = array
    # Before JAX 0.7 the format is `array.layout`, and its layout `device_local_layout`.
    is_new = hasattr(form, "format")
    layout = form.format.layout if is_new else form.layout.device_local_layout
    if layout is None:
        return None
    tiling = layout.tiling if hasattr(layout, "tiling") else layout._tiling
    return DeviceLayout(tuple(layout.major_to_minor), tuple(tiling or ()))


def weakly_typed(array: jax.Array) -> jax.Array:
    """Return a weakly typed array of the same elements, in the same memory.

    JAX has no public function that makes one of given bytes.
    """
    from jax._src.array import ArrayImpl

    strong: Any = array
    weak: jax.Array = ArrayImpl(
        strong.aval.update(weak_type=True),
        strong.sharding,
        strong._arrays,
        committed=strong.committed,
        _skip_checks=True,
    )
    return weak


def key_impl_name(dtype: Any) -> str:
    """Return the name of the implementation of typed PRNG keys of a dtype."""
    # A ShapeDtypeStruct has no values to query; its dtype contains the name.
    return str(dtype._impl.name)


def coordination_client() -> Any:
    """Return the client of `jax.distributed`'s key-value service; None if it is not started."""
    # The client has no public name; other checkpointing libraries use this one as well.
    from jax._src import distributed

    return distributed.global_state.client


_CLIENT_METHODS = (
    "key_value_set",
    "key_value_try_get",
    "key_value_dir_get",
    "key_value_delete",
)


def _client_methods() -> None:
    try:
        library = importlib.import_module("jaxlib._jax")
    except ImportError:  # Its name before JAX 0.6.1.
        library = importlib.import_module("jaxlib.xla_extension")
    for name in _CLIENT_METHODS:
        getattr(library.DistributedRuntimeClient, name)


def _key_dtype() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0)).dtype


def _layout_attribute() -> object:
    from jax._src.array import ArrayImpl

    kind: Any = ArrayImpl
    return kind.format if hasattr(kind, "format") else kind.layout


def _weak_types() -> None:
    from jax._src.array import ArrayImpl

    kind: Any = ArrayImpl
    abstract: Any = jax.core.ShapedArray((), jax.numpy.float32)
    if not (hasattr(kind, "weak_type") and hasattr(kind, "_arrays")):
        raise AttributeError("ArrayImpl has no weak_type or no _arrays")
    abstract.update(weak_type=True)


def _tree_nodes() -> None:
    structure: Any = jax.tree_util.tree_structure([0])
    structure.node_data()
    structure.children()


_USES: tuple[tuple[str, Callable[[], object]], ...] = (
    ("jax._src.distributed.global_state.client", coordination_client),
    (
        f"jaxlib's DistributedRuntimeClient with {', '.join(_CLIENT_METHODS)}",
        _client_methods,
    ),
    ("the name in the dtype of typed PRNG keys", lambda: key_impl_name(_key_dtype())),
    ("jax.errors.JaxRuntimeError", lambda: jax.errors.JaxRuntimeError),
    ("jax.Array.format", _layout_attribute),
    ("jax.Array.weak_type and what sets it", _weak_types),
    (
        "jax.tree_util's PyTreeDef.node_data and children",
        _tree_nodes,
    ),
)


@functools.cache
def check_internals() -> None:
    """Check that this version of JAX has all that Holdfast uses of it.

    Raises:
        ImportError: it is too old, or lacks something; the message names the version and the part.
    """
    version = ".".join(map(str, OLDEST))
    if jax.__version_info__ < OLDEST:
        raise ImportError(f"expected JAX {version} or newer, found {jax.__version__}; update jax")
    for name, use in _USES:
        try:
            use()
        except (AttributeError, ImportError, TypeError) as error:
            raise ImportError(
                f"JAX {jax.__version__} lacks {name}, which Holdfast uses ({error}); install an "
                "older jax, or a newer Holdfast"
            ) from error
