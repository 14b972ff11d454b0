"""The libraries, each used as its documentation says, on a state that tells its step."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

COUNT, ELEMENTS = 4, 8 << 20
"""Arrays of a state, of 32 MiB each: a save can be met while it writes."""
LAST = 3
"""The step whose save is under trial."""
IN_BUCKETS = ("Holdfast", "DCP, threads", "TensorStore")
"""Those that save to S3 here. Orbax and the others have no storage for it."""

Arrays = dict[str, np.ndarray[Any, Any]]


def state_of(step: int) -> Arrays:
    """Return the state of a step: random numbers of its own, as weights are for a compressor."""
    rng = np.random.default_rng(step)
    return {f"layer_{n}": rng.random(ELEMENTS, np.float32) for n in range(COUNT)}


def step_of(arrays: Mapping[str, Any]) -> int | None:
    """Return the step whose state this is, bit by bit; None: that of no step."""
    return next((step for step in range(1, LAST + 1) if _are_equal(arrays, state_of(step))), None)


def _are_equal(found: Mapping[str, Any], expected: Arrays) -> bool:
    return found.keys() == expected.keys() and all(
        np.array_equal(np.asarray(found[name]), expected[name]) for name in expected
    )


class Library(Protocol):
    """One library, open on one place."""

    def save(self, step: int, arrays: Arrays) -> None:
        """Save a step, in the background where the library can."""
        ...

    def wait(self) -> None:
        """Wait for the saves."""
        ...

    def finish(self) -> None:
        """Wait for the saves and close, as a program does at its end."""
        ...

    def restore(self) -> Arrays | None:
        """Return the newest state; None: there is none."""
        ...


class Holdfast:
    """Every step is saved, to RAM and to the place."""

    def __init__(self, place: str) -> None:
        import holdfast

        self._manager = holdfast.CheckpointManager(place)

    def save(self, step: int, arrays: Arrays) -> None:
        self._manager.save(step, arrays, force=True)

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def finish(self) -> None:
        self._manager.close()

    def restore(self) -> Arrays | None:
        if self._manager.latest_step() is None:
            return None
        return dict(self._manager.resume(state_of(0))[1])


class Orbax:
    """Its manager, asynchronous, as is its default."""

    def __init__(self, place: str) -> None:
        import orbax.checkpoint as ocp

        self._args = ocp.args
        self._manager = ocp.CheckpointManager(place, options=ocp.CheckpointManagerOptions())

    def save(self, step: int, arrays: Arrays) -> None:
        self._manager.save(step, args=self._args.StandardSave(arrays))

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def finish(self) -> None:
        self._manager.wait_until_finished()
        self._manager.close()

    def restore(self) -> Arrays | None:
        step = self._manager.latest_step()
        if step is None:
            return None
        return dict(self._manager.restore(step, args=self._args.StandardRestore(state_of(0))))


class TensorStore:
    """Zarr arrays in a folder, or a prefix, for each step; the newest is that of most steps."""

    def __init__(self, place: str) -> None:
        self._place = place.rstrip("/")
        self._writes: list[Any] = []

    def save(self, step: int, arrays: Arrays) -> None:
        import tensorstore as ts

        for name, array in arrays.items():
            target = self._opened(f"{step}/{name}", create=True, dtype=ts.float32, shape=[ELEMENTS])
            self._writes.append(target.write(array))

    def wait(self) -> None:
        for write in self._writes:
            write.result()
        self._writes = []

    def finish(self) -> None:
        self.wait()

    def restore(self) -> Arrays | None:
        import tensorstore as ts

        keys = ts.KvStore.open(self._base()).result().list().result()
        steps = {int(key.split(b"/")[0]) for key in keys}
        if not steps:
            return None
        names = state_of(0)
        return {n: self._opened(f"{max(steps)}/{n}", open=True).read().result() for n in names}

    def _base(self) -> dict[str, Any]:
        if "://" not in self._place:
            return {"driver": "file", "path": self._place + "/"}
        bucket, _, prefix = self._place.partition("://")[2].partition("/")
        return {
            "driver": "s3",
            "bucket": bucket,
            "path": prefix + "/",
            "endpoint": os.environ["AWS_ENDPOINT_URL"],
            "aws_region": os.environ["AWS_REGION"],
        }

    def _opened(self, key: str, **options: Any) -> Any:
        import tensorstore as ts

        base = self._base()
        store = base | {"path": f"{base['path']}{key}/"}
        return ts.open({"driver": "zarr3", "kvstore": store}, **options).result()


class Torch:
    """One of the systems of the rows, on tensors.

    Args:
        system: Opens it on a place.
    """

    def __init__(self, system: Any) -> None:
        self._system = system

    def save(self, step: int, arrays: Arrays) -> None:
        self._system.save_now(step, Tensors(arrays))

    def wait(self) -> None:
        self._system.wait()

    def finish(self) -> None:
        self._system.close()

    def restore(self) -> Arrays | None:
        into = Tensors(state_of(0))
        try:
            self._system.restore(into)
        except IndexError:
            return None  # There is no folder of a step.
        return into.arrays()


class Tensors:
    """A state of tensors as the systems of the rows take it."""

    def __init__(self, arrays: Arrays) -> None:
        import torch

        self._tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}

    def state_dicts(self) -> dict[str, Any]:
        return {"leaves": self._tensors}

    def load(self, state_dicts: dict[str, Any]) -> None:
        for name, tensor in self._tensors.items():
            tensor.copy_(state_dicts["leaves"][name])

    def state_dict(self) -> dict[str, Any]:
        return dict(self._tensors)

    def load_state_dict(self, found: dict[str, Any], **options: Any) -> None:
        self.load({"leaves": found})

    def arrays(self) -> Arrays:
        return {name: tensor.numpy() for name, tensor in self._tensors.items()}


class Moonclip:
    """Its manager with its defaults: asynchronous, with changes against earlier saves."""

    def __init__(self, place: str) -> None:
        from moonclip import CheckpointManager

        self._manager = CheckpointManager(place)

    def save(self, step: int, arrays: Arrays) -> None:
        self._manager.save(step=step, model=Tensors(arrays))

    def wait(self) -> None:
        self._manager.flush()

    def finish(self) -> None:
        self._manager.flush()

    def restore(self) -> Arrays | None:
        into = Tensors(state_of(0))
        if self._manager.resume(model=into) == 0:
            return None
        return into.arrays()


def _torch(name: str) -> Callable[[str], Torch]:
    def opened(place: str) -> Torch:
        from benchmarks.bucket_systems import DcpS3
        from benchmarks.torch_systems import TORCH_SYSTEMS

        is_bucket = "://" in place
        return Torch(DcpS3(place) if is_bucket else TORCH_SYSTEMS[name](Path(place)))

    return opened


LIBRARIES: dict[str, Callable[[str], Library]] = {
    "Holdfast": Holdfast,
    "Orbax": Orbax,
    "torch.save": _torch("torch.save"),
    "DCP, threads": _torch("dcp thread"),
    "DCP, process": _torch("dcp process"),
    "torch_checkpointing": _torch("torch_checkpointing"),
    "moonclip": Moonclip,
    "TensorStore": TensorStore,
}
