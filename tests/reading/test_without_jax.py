"""NumPy states need no framework; JAX's arrays need JAX to be chosen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import holdfast
from holdfast import errors
from holdfast.adapt.contract import Hold
from holdfast.adapt.detect import find_framework
from holdfast.adapt.jax.state import JaxFramework
from holdfast.adapt.numpy_state import NumpyFramework
from holdfast.format.layout import image_layout
from holdfast.format.records import ArraySpec
from tests.hosts import Host

SCRIPT = Path(__file__).with_name("without_jax.py")


def test_training_and_reading_work_where_jax_cannot_be_imported(
    one_host: Host, tmp_path: Path
) -> None:
    process = one_host.start(SCRIPT, tmp_path)
    output, errors_text = process.communicate(timeout=100)
    assert (process.returncode, output) == (0, "done\n"), errors_text


def test_importing_and_reading_import_no_framework(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "a", {"w": jnp.ones(3)})
    code = (
        "import sys, holdfast; holdfast.load(sys.argv[1]); holdfast.CheckpointManager; "
        "print(sorted({'jax', 'torch'} & {*sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a")],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert done.stdout == "[]\n"


def test_the_framework_is_the_one_named_or_the_one_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Tests of PyTorch may have run in this process.
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    assert isinstance(find_framework(), JaxFramework)
    assert isinstance(find_framework("jax"), JaxFramework)
    assert isinstance(find_framework("numpy"), NumpyFramework)
    with pytest.raises(errors.InvalidArgumentError, match="framework='keras': expected one of"):
        find_framework("keras")


@pytest.mark.parametrize("call", ["snapshot", "outline"])
def test_an_array_of_jax_is_refused_by_path_where_numpy_was_chosen(call: str) -> None:
    with pytest.raises(errors.UnsupportedLeafError, match=r"save a/0: .*framework='jax'"):
        getattr(NumpyFramework(), call)({"a": [jnp.ones(2)]})


def test_a_numpy_snapshot_borrows_its_arrays_until_it_is_secured() -> None:
    framework, array = NumpyFramework(), np.arange(6).reshape(2, 3).T
    snapshot = framework.snapshot({"w": array, "n": 1})
    assert framework.snapshot({"w": array, "n": 2}).outline is snapshot.outline
    assert framework.snapshot({"w": array[:2], "n": 2}).outline is not snapshot.outline
    assert snapshot.hold is Hold.BORROWED
    snapshot.copy_borrowed()
    assert snapshot.hold is Hold.HOST
    array[:] = 0
    (outline,) = snapshot.outline.arrays
    assert outline.placement.chunk_shape == (3, 2)
    spec = ArraySpec(
        path=("w",),
        shape=(3, 2),
        dtype="int64",
        chunk_shape=(3, 2),
        owners=((0, 1),),
        prng_impl=None,
        scalar=False,
    )
    (chunk,) = image_layout([spec], 0).chunks
    found = np.frombuffer(snapshot.chunk_bytes(chunk), np.int64)
    np.testing.assert_array_equal(found, [0, 3, 1, 4, 2, 5])
