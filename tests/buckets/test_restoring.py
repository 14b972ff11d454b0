"""What a restore reads of a bucket: large ranges, each byte once, and nothing unwanted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast import CheckpointManager
from holdfast.engine.reading.spans import SPAN_SIZE_MAX_BYTES
from holdfast.format.digests import BLOCK_SIZE_BYTES
from holdfast.interop.orbax.orbax_export import export_orbax
from tests.buckets.fault_proxy import FaultProxy
from tests.hosts import Host

LARGE_BYTES = 5 * BLOCK_SIZE_BYTES
State = dict[str, np.ndarray]


@pytest.fixture
def saved(one_host: Host, proxy: FaultProxy, proxied_url: str) -> State:
    """A state of two arrays, one of them large, that is durable and not in RAM."""
    random = np.random.default_rng(0)
    state = {
        "large": random.integers(0, 255, LARGE_BYTES, np.uint8),
        "small": random.integers(0, 255, 1000, np.uint8),
    }
    with CheckpointManager(proxied_url, ram=None) as manager:
        manager.save(1, state, force=True)
    proxy.read.clear()
    return state


def images_read(proxy: FaultProxy) -> list[int]:
    return [size_bytes for path, size_bytes in proxy.read if "safetensors" in path]


def test_a_large_array_is_read_in_large_ranges_each_byte_once(
    saved: State, proxy: FaultProxy, proxied_url: str
) -> None:
    with holdfast.open_run(proxied_url) as run:
        assert run.directory == proxied_url
        found = run.restore(1)
    assert all(np.array_equal(found[name], saved[name]) for name in saved)
    read = images_read(proxy)
    assert sorted(read) == [LARGE_BYTES + 1000 - SPAN_SIZE_MAX_BYTES, SPAN_SIZE_MAX_BYTES]


def test_a_part_of_a_state_is_read_without_the_rest(
    saved: State, proxy: FaultProxy, proxied_url: str
) -> None:
    with holdfast.open_run(proxied_url) as run:
        found = run.restore(1, only=["small"])
    assert np.array_equal(found["small"], saved["small"])
    assert images_read(proxy) == [1000]


def test_of_a_large_range_with_a_bad_byte_only_that_block_is_read_again(
    saved: State, proxy: FaultProxy, proxied_url: str
) -> None:
    faults = iter(["wrong byte"])
    proxy.choose = lambda request: (
        next(faults, None) if "safetensors" in request.path and request.method == "GET" else None
    )
    with holdfast.open_run(proxied_url) as run:
        found = run.restore(1, only=["large"])
    assert np.array_equal(found["large"], saved["large"])
    assert sum(images_read(proxy)) == LARGE_BYTES + BLOCK_SIZE_BYTES


@pytest.mark.parametrize("count", [2_000, pytest.param(20_000, marks=pytest.mark.soak)])
def test_thousands_of_small_arrays_take_one_request_and_half_of_them_half_the_bytes(
    count: int, one_host: Host, proxy: FaultProxy, proxied_url: str
) -> None:
    values = np.random.default_rng(0).integers(0, 255, (count, 1_600), np.uint8)
    halves = {"model": values[: count // 2], "optimizer": values[count // 2 :]}
    state = {name: {f"a{i}": one for i, one in enumerate(half)} for name, half in halves.items()}
    with CheckpointManager(proxied_url, ram=None) as manager:
        manager.save(1, state, force=True)
    proxy.read.clear()
    with holdfast.open_run(proxied_url) as run:
        found = run.restore(1)
        # The images' headers are computed and not read.
        assert images_read(proxy) == [values.nbytes]
        proxy.read.clear()
        part = run.restore(1, only=["model"])
    assert images_read(proxy) == [values.nbytes // 2]
    for restored, names in ((found, halves), (part, ["model"])):
        assert [*restored] == [*names]
        for name in names:
            expected = [*halves[name]]
            assert all(np.array_equal(restored[name][f"a{i}"], a) for i, a in enumerate(expected))


def test_a_checkpoint_in_a_bucket_is_exported_to_orbax(
    saved: State, proxied_url: str, tmp_path: Path
) -> None:
    with holdfast.open_run(proxied_url) as run:
        export_orbax(run, 1, tmp_path / "orbax")
    assert (tmp_path / "orbax" / "1").is_dir()
