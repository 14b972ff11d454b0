"""The bytes of JAX states on the host, whole arrays and chunks of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.adapt.jax.state import JaxFramework
from holdfast.format.layout import Chunk


def chunk(start: tuple[int, ...], stop: tuple[int, ...], size_bytes: int) -> Chunk:
    return Chunk(
        ordinal=0,
        array_index=0,
        chunk_index=0,
        name="w",
        start=start,
        stop=stop,
        offset_bytes=0,
        size_bytes=size_bytes,
        first_block=0,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "complex64", "int8"])
@pytest.mark.parametrize(
    ("start", "stop"), [((0, 0), (4, 6)), ((1, 0), (3, 6)), ((0, 2), (4, 4)), ((3, 5), (4, 6))]
)
def test_a_chunk_has_its_bytes_also_where_it_is_a_part_of_the_array(
    dtype: str, start: tuple[int, int], stop: tuple[int, int]
) -> None:
    array = (jnp.arange(24).reshape(4, 6) % 5).astype(dtype)
    expected = np.asarray(array)[start[0] : stop[0], start[1] : stop[1]].tobytes()
    snapshot = JaxFramework().snapshot({"w": array})
    assert bytes(snapshot.chunk_bytes(chunk(start, stop, len(expected)))) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_donation_takes_no_memory_that_is_held_and_takes_it_once_it_is_let_go(dtype: str) -> None:
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    array = step(jnp.full(1024, 3, dtype))
    expected = np.full(1024, 4, dtype).tobytes()
    snapshot = JaxFramework().snapshot({"w": array})
    after = step(array)
    assert after.unsafe_buffer_pointer() != array.unsafe_buffer_pointer()
    assert bytes(snapshot.chunk_bytes(chunk((0,), (1024,), len(expected)))) == expected
    snapshot.release()
    where = array.unsafe_buffer_pointer()
    # JAX 0.11 alone does not release NumPy's views, which bfloat16 needs.
    is_free = dtype == "float32" or jax.__version_info__[:2] != (0, 11)
    assert (step(array).unsafe_buffer_pointer() == where) == is_free
